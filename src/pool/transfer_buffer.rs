//! The memory of a transfer, as its request owns it.
//!
//! Invariants:
//! - A transfer buffer in pinned memory keeps the memory mapped. A lease from it also prevents the reuse of the memory.
//! - This holds, too, for the pinned part of a caller's memory that begins or ends in other memory.
//! - Memory of a caller stays valid by the promise of [`Span::new`]. Only there an address is looked up.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::region::{self, Lease, Region};
use crate::sys::span::Span;

/// Bytes that a transfer reads or writes.
#[derive(Debug, Clone)]
pub struct TransferBuffer {
    span: Span,
    /// The region that contains all of the bytes.
    region: Option<Arc<Region>>,
    /// Without such a region: the regions that contain some of the bytes.
    touched: Vec<Arc<Region>>,
}

impl TransferBuffer {
    /// No bytes.
    pub fn empty() -> TransferBuffer {
        TransferBuffer { span: Span::empty(), region: None, touched: Vec::new() }
    }

    /// The `len` bytes that begin `from` bytes into a region.
    pub fn pinned(region: &Arc<Region>, from: usize, len: usize) -> TransferBuffer {
        let span = region.span().part(from, len);
        TransferBuffer { span, region: Some(Arc::clone(region)), touched: Vec::new() }
    }

    /// Memory that a caller names by its address. If the caller took it from a pool of this library, it is treated as
    /// pinned memory.
    pub fn at_address(span: Span) -> TransferBuffer {
        match region::find(span.address(), span.len()) {
            Some(region) => TransferBuffer { span, region: Some(region), touched: Vec::new() },
            None => {
                TransferBuffer { span, region: None, touched: region::touching(span.address(), span.len()) }
            }
        }
    }

    /// The `len` bytes that begin `from` bytes into the buffer.
    pub fn part(&self, from: usize, len: usize) -> TransferBuffer {
        TransferBuffer { span: self.span.part(from, len), ..self.clone() }
    }

    /// The bytes.
    pub fn span(&self) -> Span {
        self.span
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.span.is_empty()
    }

    /// The region that contains the bytes, for pinned memory.
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.region.as_ref()
    }

    /// Prevents the reuse of the pinned bytes until the lease is dropped.
    pub fn lease(&self) -> Lease {
        Lease::of(self.span, self.region.as_ref(), &self.touched)
    }
}

impl From<Span> for TransferBuffer {
    /// See [`TransferBuffer::at_address`].
    fn from(span: Span) -> TransferBuffer {
        TransferBuffer::at_address(span)
    }
}
