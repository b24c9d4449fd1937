//! A range of memory that the kernel and other threads may read and write outside Rust's borrow rules.
//!
//! The caller promises validity once, at [`Span::new`]; the layers above pass spans on without unsafe code. A span of
//! this library's own mapping needs no promise: each use pins the mapping, and use of a span after its mapping ended
//! panics.

use std::ptr::NonNull;

use super::mapping_table::{MappingId, Pin};

/// Address and length of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    start: NonNull<u8>,
    len: usize,
    /// The mapping that contains the bytes; `None` for memory that was promised to outlive the span.
    mapping: Option<MappingId>,
}

// SAFETY: a span is an address; its creator promised that the bytes may be used from any thread.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// The `len` bytes at `start`; `None` for a null start with a length.
    ///
    /// # Safety
    /// Until the last use of this span or of a part of it, the bytes are readable and writable from any thread, and no
    /// other code uses them. A span that is only written to a file needs readable bytes alone.
    pub unsafe fn new(start: *mut u8, len: usize) -> Option<Span> {
        match NonNull::new(start) {
            Some(start) => Some(Span { start, len, mapping: None }),
            None => (len == 0).then_some(Span { start: NonNull::dangling(), len, mapping: None }),
        }
    }

    /// The same bytes, tied to a mapping: they are used only while the mapping exists.
    pub(super) fn of(self, mapping: MappingId) -> Span {
        Span { mapping: Some(mapping), ..self }
    }

    /// False if the mapping that contains the bytes has ended.
    pub fn is_mapped(self) -> bool {
        self.mapping.is_none_or(|mapping| mapping.pin().is_some())
    }

    /// Keeps the bytes mapped. The outer option is `None` if they are no longer mapped; the inner one if they need no
    /// pin.
    pub(super) fn pin(self) -> Option<Option<Pin>> {
        match self.mapping {
            None => Some(None),
            Some(mapping) => mapping.pin().map(Some),
        }
    }

    /// Like [`Span::pin`], but panics if the bytes are unmapped, which is a bug.
    fn pinned(self) -> Option<Pin> {
        self.pin().unwrap_or_else(|| panic!("{} bytes at {:#x} are unmapped", self.len, self.address()))
    }

    /// An empty span.
    pub fn empty() -> Span {
        Span { start: NonNull::dangling(), len: 0, mapping: None }
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

    /// True if `address..address + len` lies inside the span.
    pub fn covers(self, address: usize, len: usize) -> bool {
        let Some(from) = address.checked_sub(self.address()) else { return false };
        from <= self.len && len <= self.len - from
    }

    /// Copies these bytes to `to`, which must have the same length.
    pub fn copy_to(self, to: Span) {
        assert_eq!(self.len, to.len, "copy between spans of different lengths");
        let _pins = (self.pinned(), to.pinned());
        // SAFETY: both ranges are valid by the promise of `new`, or pinned; `copy` allows overlap.
        unsafe { std::ptr::copy(self.as_ptr(), to.as_ptr(), self.len) }
    }

    /// Copies `bytes` to the start of the span.
    pub fn write(self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "{} bytes into a span of {}", bytes.len(), self.len);
        let _pin = self.pinned();
        // SAFETY: the span is large enough, as just checked, and valid by the promise of `new`, or pinned. `bytes`
        // cannot be part of it, since it is borrowed.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.as_ptr(), bytes.len()) }
    }

    /// Calls `read` with the bytes and returns its result. No other code may write to the bytes during the call.
    pub fn with_bytes<R>(self, read: impl FnOnce(&[u8]) -> R) -> R {
        let _pin = self.pinned();
        // SAFETY: valid by the promise of `new`, or pinned until `read` has returned.
        read(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) })
    }

    /// A copy of the bytes.
    pub fn to_vec(self) -> Vec<u8> {
        self.with_bytes(<[u8]>::to_vec)
    }
}

/// The bytes of a float slice.
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
