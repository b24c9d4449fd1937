//! Memory of the tier's own for heads and superblocks: page-aligned, and mapped until the system is done with it.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::error::Result;
use crate::pool::region::{Backing, Region};
use crate::sys::span::Span;

/// A region that retires with its owner; transfers under way keep it mapped.
#[derive(Debug)]
pub struct Scratch {
    region: Arc<Region>,
    bytes: usize,
}

impl Scratch {
    /// Zeroed memory.
    pub fn new(bytes: usize) -> Result<Scratch> {
        let backing = Backing { huge: bytes >= 2 << 20, lock: false, node: None };
        Ok(Scratch { region: Region::open(bytes.max(1), backing)?, bytes })
    }

    /// All of it.
    pub fn span(&self) -> Span {
        self.region.span().part(0, self.bytes)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.region.retire();
    }
}
