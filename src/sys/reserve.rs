//! Reserves address space whose pages are allocated when they are first written.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::{Error, Result};

/// The largest base page size of the supported processors, and a multiple of the smaller ones.
const PAGE: usize = 64 << 10;

/// Zeroed bytes; only touched pages take memory.
#[derive(Debug)]
pub struct Reserve {
    start: NonNull<u8>,
    bytes: usize,
}

impl Reserve {
    /// Reserves `bytes` bytes; 0 is allowed.
    pub fn new(bytes: usize) -> Result<Self> {
        let Some(length) = NonZeroUsize::new(bytes) else {
            return Ok(Reserve { start: NonNull::dangling(), bytes: 0 });
        };
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let start =
            unsafe { mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags) }
                .map_err(|errno| Error::System {
                    what: "reserving address space",
                    reason: errno.desc().to_string(),
                })?;
        // SAFETY: the range was just mapped. Huge pages would allocate memory that is never written. Without the advice
        // the reserve still works.
        let _ = unsafe { madvise(start, bytes, MmapAdvise::MADV_NOHUGEPAGE) };
        Ok(Reserve { start: start.cast(), bytes })
    }

    /// All bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: this value owns the mapping, which is readable, writable, and lives as long as self.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
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
            // SAFETY: the range belongs to this mapping. If the advice fails, the pages stay allocated.
            let _ = unsafe { madvise(self.start.add(start).cast(), end - start, MmapAdvise::MADV_DONTNEED) };
        }
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: this value owns the mapping, and no borrow of it remains.
            let _ = unsafe { munmap(self.start.cast(), self.bytes) };
        }
    }
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Reserve {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl Sync for Reserve {}

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
