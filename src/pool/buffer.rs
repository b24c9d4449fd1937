//! Pinned memory that a file transfer and a computation use in turn.
//!
//! Invariants:
//! - Slices are lent only while no transfer of the engine's holds a lease on the memory.
//! - A transfer that is stuck keeps its lease, so that memory it may still write to is never lent.

use std::sync::Arc;

use super::region::{Backing, Region};
use crate::error::{Error, Result};
use crate::sys::span::Span;

/// A region of its own, exclusively owned.
#[derive(Debug)]
pub struct Buffer {
    region: Arc<Region>,
}

impl Buffer {
    /// Takes `bytes`, rounded up to whole pages.
    pub fn open(bytes: usize, backing: Backing) -> Result<Buffer> {
        Ok(Buffer { region: Region::open(bytes.max(1), backing)? })
    }

    /// The memory, for transfers.
    pub fn span(&self) -> Span {
        self.region.span()
    }

    /// The memory as numbers, whatever it last held; an error while a transfer uses it.
    pub fn floats(&mut self) -> Result<&mut [f32]> {
        let span = self.unused()?;
        // SAFETY: mapped and page-aligned for as long as the region lives; any bits are an f32. Nobody else uses it: no
        // transfer has it, as just checked, and none can get it from `span` while `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(span.as_ptr().cast(), span.len() / size_of::<f32>()) })
    }

    /// The same memory as words of 16 bits, the lower half of a number before its upper.
    pub fn words(&mut self) -> Result<&mut [u16]> {
        let span = self.unused()?;
        // SAFETY: as in `floats`; any bits are a u16.
        Ok(unsafe { std::slice::from_raw_parts_mut(span.as_ptr().cast(), span.len() / size_of::<u16>()) })
    }

    /// True while a transfer may reach the memory, one that was given up included.
    pub fn in_transfer(&self) -> bool {
        self.region.leased(self.region.span())
    }

    fn unused(&self) -> Result<Span> {
        let span = self.region.span();
        match self.in_transfer() {
            true => Err(Error::Busy("a transfer uses the buffer".to_string())),
            false => Ok(span),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.region.retire();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::region::Lease;

    #[test]
    fn memory_under_transfer_is_not_lent() {
        let mut buffer = Buffer::open(10_000, Backing { lock: false, ..Backing::default() }).unwrap();
        buffer.floats().unwrap().fill(2.0);
        let lease = Lease::take(buffer.span().part(4096, 10)).unwrap();
        assert!(
            matches!(buffer.floats(), Err(Error::Busy(_))) && matches!(buffer.words(), Err(Error::Busy(_)))
        );
        drop(lease);
        assert!(buffer.floats().unwrap().iter().all(|x| *x == 2.0) && buffer.span().len() >= 10_000);
        assert_eq!(buffer.words().unwrap()[..4], [0, 0x4000, 0, 0x4000]);
    }
}
