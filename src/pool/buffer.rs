//! Pinned memory used alternately by file transfers and computations.
//!
//! Invariants:
//! - Slices are lent only while no transfer of the engine holds a lease on the memory.
//! - A stuck transfer keeps its lease, so memory that it may still write to is never lent.

use std::sync::Arc;

use super::region::{Backing, Region};
use super::transfer_buffer::TransferBuffer;
use crate::error::{Error, Result};
use crate::sys::memory::{BASE_PAGE, HUGE_PAGE, available_bytes};
use crate::sys::span::Span;
use crate::sys::try_vec;

/// Whole pages of a region, exclusively owned.
#[derive(Debug)]
pub struct Buffer {
    owner: Arc<Owner>,
    part: Span,
}

/// The region of some buffers, which retires with the last of them.
#[derive(Debug)]
struct Owner(Arc<Region>);

/// Most bytes of a region that several buffers share. It bounds the memory that one refused lock leaves unlocked.
const SHARED: usize = 1 << 30;

impl Buffer {
    /// Takes one buffer of `bytes` bytes, rounded up to whole pages.
    pub fn open(bytes: usize, backing: Backing) -> Result<Buffer> {
        let owner = Arc::new(Owner(Region::open(bytes.max(1), backing)?));
        let part = owner.0.span();
        Ok(Buffer { owner, part })
    }

    /// Takes `count` buffers of `bytes` each, rounded up to base pages. The buffers are adjacent, so huge pages round
    /// up only their sum, and huge pages are used only if the rounding adds at most 1/64.
    pub fn open_many(count: usize, bytes: usize, backing: Backing) -> Result<Vec<Buffer>> {
        let too_large = || Error::invalid("bytes", "exceeds the address space");
        let bytes = bytes.max(1).checked_next_multiple_of(BASE_PAGE).ok_or_else(too_large)?;
        let wanted = bytes.checked_mul(count).ok_or_else(too_large)?;
        if let Some(available) = available_bytes().filter(|available| wanted as u64 > *available) {
            let reason =
                format!("{wanted} bytes of buffers exceed the {available} bytes of available memory");
            return Err(Error::System { what: "allocating pinned memory", reason });
        }
        let together = (SHARED / bytes).max(1);
        let mut buffers = try_vec::with_capacity("listing buffers", count)?;
        while buffers.len() < count {
            let here = together.min(count - buffers.len());
            let all = here.checked_mul(bytes).ok_or_else(too_large)?;
            let added = all.checked_next_multiple_of(HUGE_PAGE).ok_or_else(too_large)? - all;
            let backing = Backing { huge: backing.huge && added <= all / 64, ..backing };
            let owner = Arc::new(Owner(Region::open(all, backing)?));
            buffers.extend((0..here).map(|number| Buffer {
                part: owner.0.span().part(number * bytes, bytes),
                owner: Arc::clone(&owner),
            }));
        }
        Ok(buffers)
    }

    /// Address and length of the memory.
    pub fn span(&self) -> Span {
        self.part
    }

    /// The `len` bytes that begin `from` bytes into the memory, for a transfer.
    pub fn transfer(&self, from: usize, len: usize) -> TransferBuffer {
        let start = self.part.address() - self.owner.0.span().address();
        assert!(from + len <= self.part.len(), "part {from}+{len} of a buffer of {}", self.part.len());
        TransferBuffer::pinned(&self.owner.0, start + from, len)
    }

    /// The memory as f32 values with its present contents; `Busy` while a transfer uses it.
    pub fn floats(&mut self) -> Result<&mut [f32]> {
        let span = self.unused()?;
        // SAFETY: mapped and page-aligned for as long as the region lives; any bits are a valid f32. Access is
        // exclusive: no other buffer has this part, no transfer uses it, as just checked, and none can get it from
        // `span` while `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(span.as_ptr().cast(), span.len() / size_of::<f32>()) })
    }

    /// The memory as 16-bit words, the lower half of each 32-bit value first; `Busy` while a transfer uses it.
    pub fn words(&mut self) -> Result<&mut [u16]> {
        let span = self.unused()?;
        // SAFETY: as in `floats`; any bits are a valid u16.
        Ok(unsafe { std::slice::from_raw_parts_mut(span.as_ptr().cast(), span.len() / size_of::<u16>()) })
    }

    /// True while a transfer may access the memory, including abandoned transfers.
    pub fn in_transfer(&self) -> bool {
        self.owner.0.leased(self.part)
    }

    fn unused(&self) -> Result<Span> {
        match self.in_transfer() {
            true => Err(Error::Busy("a transfer still uses the buffer".to_string())),
            false => Ok(self.part),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.retire();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::region;

    #[test]
    fn memory_under_transfer_is_not_lent() {
        let mut buffer = Buffer::open(10_000, Backing { lock: false, ..Backing::default() }).unwrap();
        buffer.floats().unwrap().fill(2.0);
        let lease = buffer.transfer(4096, 10).lease();
        assert!(
            matches!(buffer.floats(), Err(Error::Busy(_))) && matches!(buffer.words(), Err(Error::Busy(_)))
        );
        drop(lease);
        assert!(buffer.floats().unwrap().iter().all(|x| *x == 2.0) && buffer.span().len() >= 10_000);
        assert_eq!(buffer.words().unwrap()[..4], [0, 0x4000, 0, 0x4000]);
    }

    #[test]
    fn memory_that_begins_outside_and_ends_in_a_buffer_keeps_the_buffer() {
        let mut buffer = Buffer::open(10_000, Backing { lock: false, ..Backing::default() }).unwrap();
        let before = buffer.span().as_ptr().wrapping_sub(4096);
        // SAFETY: the bytes of the span are never used, only its address and length.
        let across = unsafe { Span::new(before, 4096 + 1) }.unwrap();
        let lease = TransferBuffer::at_address(across).lease();
        assert!(lease.region().is_none() && matches!(buffer.floats(), Err(Error::Busy(_))));
        drop(lease);
        assert!(buffer.floats().is_ok());
    }

    #[test]
    fn buffers_side_by_side_are_lent_each_by_itself_and_found_until_the_last_is_gone() {
        let backing = Backing { lock: false, ..Backing::default() };
        let mut buffers = Buffer::open_many(5, 10_000, backing).unwrap();
        for (number, buffer) in buffers.iter_mut().enumerate() {
            buffer.floats().unwrap().fill(number as f32);
        }
        let lease = buffers[1].transfer(0, 12_288).lease();
        assert!(buffers[1].floats().is_err() && !buffers[0].in_transfer() && !buffers[2].in_transfer());
        drop(lease);
        for (number, buffer) in buffers.iter_mut().enumerate() {
            assert!(buffer.span().len() == 12_288 && buffer.span().address().is_multiple_of(BASE_PAGE));
            assert!(buffer.floats().unwrap().iter().all(|x| *x == number as f32));
        }
        let last = buffers.pop().unwrap();
        drop(buffers);
        assert!(region::find(last.span().address(), 1).is_some());
    }

    #[test]
    fn huge_pages_add_little_to_what_was_asked_for() {
        for (count, bytes) in [(74, (3 << 20) + 4096), (3, (3 << 20) + 4096), (2, (40 << 20) + 4096), (1, 1)]
        {
            let buffers =
                Buffer::open_many(count, bytes, Backing { lock: false, ..Backing::default() }).unwrap();
            let mut regions: Vec<&Region> = buffers.iter().map(|buffer| &*buffer.owner.0).collect();
            regions.dedup_by_key(|region| region.id());
            let taken: usize = regions.iter().map(|region| region.span().len()).sum();
            let requested = count * bytes.next_multiple_of(BASE_PAGE);
            assert!(taken <= requested + requested / 64, "{count} of {bytes} bytes took {taken}");
        }
    }
}
