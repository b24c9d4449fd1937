//! A range of memory that the kernel and other threads may read and write behind Rust's back.
//!
//! The promise is made once, at [`Span::new`]; layers above pass spans on without any unsafe code. A span of a mapping of
//! this library needs no promise: the mapping is pinned while the span is used, and a span that outlived it is a panic.

use std::ptr::NonNull;

use super::life::{Life, Pin};

/// Address and length of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    start: NonNull<u8>,
    len: usize,
    /// The mapping that the bytes are a part of; `None` for bytes that were promised to outlive the span.
    life: Option<Life>,
}

// SAFETY: a span is an address; whoever made it promised that the bytes may be used from any thread.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// The `len` bytes at `start`; `None` for a null start with a length.
    ///
    /// # Safety
    /// The bytes are readable and writable (readable alone, if the span is only written to a file), from any thread,
    /// and nobody else uses them, until the last use of this span or of a part of it.
    pub unsafe fn new(start: *mut u8, len: usize) -> Option<Span> {
        match NonNull::new(start) {
            Some(start) => Some(Span { start, len, life: None }),
            None => (len == 0).then_some(Span { start: NonNull::dangling(), len, life: None }),
        }
    }

    /// The same bytes, which are used only while this mapping is there.
    pub(super) fn of(self, life: Life) -> Span {
        Span { life: Some(life), ..self }
    }

    /// False once the mapping has ended that the bytes were a part of.
    pub fn is_mapped(self) -> bool {
        self.life.is_none_or(|life| life.pin().is_some())
    }

    /// Keeps the bytes mapped; `None` in the outer option if they no longer are.
    pub(super) fn pin(self) -> Option<Option<Pin>> {
        match self.life {
            None => Some(None),
            Some(life) => life.pin().map(Some),
        }
    }

    /// As [`Span::pin`]. To use memory that is gone is a bug.
    fn pinned(self) -> Option<Pin> {
        self.pin().unwrap_or_else(|| panic!("{} bytes at {:#x} are unmapped", self.len, self.address()))
    }

    /// A span of nothing.
    pub fn empty() -> Span {
        Span { start: NonNull::dangling(), len: 0, life: None }
    }

    /// Address of the first byte.
    pub fn address(self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Pointer to the first byte.
    pub fn as_ptr(self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// True if there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The `len` bytes that begin `from` bytes into the span.
    pub fn part(self, from: usize, len: usize) -> Span {
        assert!(from <= self.len && len <= self.len - from, "part {from}+{len} of a span of {}", self.len);
        // SAFETY: within the span, as just checked.
        Span { start: unsafe { self.start.add(from) }, len, ..self }
    }

    /// True if `address..address + len` lies inside.
    pub fn covers(self, address: usize, len: usize) -> bool {
        let Some(from) = address.checked_sub(self.address()) else { return false };
        from <= self.len && len <= self.len - from
    }

    /// Copies these bytes over those of `to`, which has the same length.
    pub fn copy_to(self, to: Span) {
        assert_eq!(self.len, to.len, "copy between spans of different lengths");
        let _pins = (self.pinned(), to.pinned());
        // SAFETY: both ranges are good by the promise of `new`, or pinned; `copy` allows overlap.
        unsafe { std::ptr::copy(self.as_ptr(), to.as_ptr(), self.len) }
    }

    /// Copies `bytes` over the first bytes of the span.
    pub fn write(self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "{} bytes into a span of {}", bytes.len(), self.len);
        let _pin = self.pinned();
        // SAFETY: the span has room, as just checked, and is good by the promise of `new`, or pinned; `bytes` cannot be part of it, since it is borrowed.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.as_ptr(), bytes.len()) }
    }

    /// What `look` makes of the bytes. Like any use of a span, only while nobody else writes to them.
    pub fn with_bytes<R>(self, look: impl FnOnce(&[u8]) -> R) -> R {
        let _pin = self.pinned();
        // SAFETY: good by the promise of `new`, or pinned until `look` has returned.
        look(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) })
    }

    /// A copy of the bytes.
    pub fn to_vec(self) -> Vec<u8> {
        self.with_bytes(<[u8]>::to_vec)
    }
}

/// The bytes of numbers.
pub fn bytes_of(numbers: &[f32]) -> &[u8] {
    // SAFETY: borrowed memory, every byte of which is initialized and a valid u8; a u8 needs no alignment.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_copies_stay_inside() {
        let mut bytes: Vec<u8> = (0..16).collect();
        // SAFETY: `bytes` outlives the span and is not used beside it.
        let span = unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) }.unwrap();
        span.part(0, 4).copy_to(span.part(2, 4));
        assert_eq!(span.part(0, 7).to_vec(), [0, 1, 0, 1, 2, 3, 6]);
        assert!(span.covers(span.address() + 4, 12) && !span.covers(span.address() + 4, 13));
        assert!(!span.covers(span.address() - 1, 2) && !span.covers(usize::MAX, 2));
        assert!(std::panic::catch_unwind(|| span.part(10, 7)).is_err());
    }
}
