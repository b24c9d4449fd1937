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
        let bytes = self.region.span().len();
        self.floats_and_words(bytes).map(|(floats, _)| floats)
    }

    /// The same; from byte `cut`, a multiple of 4, on as words of 16 bits.
    pub fn floats_and_words(&mut self, cut: usize) -> Result<(&mut [f32], &mut [u16])> {
        let span = self.region.span();
        if self.region.leased(span) {
            return Err(Error::Busy("a transfer uses the buffer".to_string()));
        }
        if !cut.is_multiple_of(size_of::<f32>()) || cut > span.len() {
            return Err(Error::invalid("cut", format!("{cut} of {} bytes", span.len())));
        }
        let (floats, words) = (span.part(0, cut), span.part(cut, span.len() - cut));
        // SAFETY: mapped and page-aligned for as long as the region lives, and cut apart at a multiple of 4; any bits are
        // an f32 or a u16. Nobody else uses it: no transfer has it, as just checked, and none can get it from `span`
        // while `self` is borrowed.
        Ok(unsafe {
            (
                std::slice::from_raw_parts_mut(floats.as_ptr().cast(), floats.len() / size_of::<f32>()),
                std::slice::from_raw_parts_mut(words.as_ptr().cast(), words.len() / size_of::<u16>()),
            )
        })
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
        assert!(matches!(buffer.floats(), Err(Error::Busy(_))));
        drop(lease);
        assert!(buffer.floats().unwrap().iter().all(|x| *x == 2.0) && buffer.span().len() >= 10_000);
    }
}
