//! Reserves address space whose pages are allocated when they are first written.

use std::ops::Range;

use super::memory::Mapping;
use crate::error::{Error, Result};

/// The largest base page size of the supported processors, and a multiple of the smaller ones.
const PAGE: usize = 64 << 10;

/// Zeroed bytes; only touched pages take memory.
#[derive(Debug)]
pub struct Reserve {
    mapping: Mapping,
    bytes: usize,
}

impl Reserve {
    /// Reserves `bytes` bytes; 0 is allowed.
    pub fn new(bytes: usize) -> Result<Self> {
        let mapped = Mapping::sparse(bytes);
        let mapping = mapped.map_err(|error| Error::system("reserving address space", &error))?;
        Ok(Reserve { mapping, bytes })
    }

    /// All bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: this value owns the mapping, which is readable, writable, and lives as long as self.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.span().as_ptr(), self.bytes) }
    }

    /// Returns all pages to the system; the bytes read as zero again.
    pub fn release(&mut self) {
        self.release_range(0..self.bytes);
    }

    /// Returns the pages that lie completely in `range` to the system; their bytes read as zero again.
    pub fn release_range(&mut self, range: Range<usize>) {
        let start = range.start.next_multiple_of(PAGE);
        // The last page belongs to the mapping even if the bytes end inside it.
        let end = if range.end >= self.bytes { self.bytes } else { range.end / PAGE * PAGE };
        if start < end {
            let range = self.mapping.span().as_ptr().wrapping_add(start);
            // SAFETY: the range belongs to this mapping, and no borrow of it exists. If the advice fails, the pages stay
            // allocated.
            let _ = unsafe { libc::madvise(range.cast(), end - start, libc::MADV_DONTNEED) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_more_than_the_machine_has_can_be_reserved_and_used_in_part() {
        let mut reserve = Reserve::new(1 << 42).unwrap();
        reserve.bytes_mut()[1 << 41] = 7;
        reserve.release();
        assert_eq!(reserve.bytes_mut()[1 << 41], 0);
        for (at, kept) in [(PAGE - 1, 1), (PAGE, 0), (3 * PAGE - 1, 0), (3 * PAGE, 1)] {
            reserve.bytes_mut()[at] = 1;
            reserve.release_range(1..3 * PAGE + 1);
            assert_eq!(reserve.bytes_mut()[at], kept, "{at}");
        }
        assert!(Reserve::new(0).unwrap().bytes_mut().is_empty());
    }
}
