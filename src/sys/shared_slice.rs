//! Arrays that several threads of this library use in turn: memory of the caller, or memory mapped here.
//!
//! Invariants:
//! - At any time an array has any number of readers or one writer. A conflicting access fails at once with
//!   [`Error::Busy`]: other modules order the accesses, so a conflict is a bug in that order.
//! - No lock is held across a fork.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};

use super::mapping_table::Pin;
use super::memory::Mapping;
use super::span::Span;
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::error::{Error, Result};

/// Value of `users` for an array with a writer.
const WRITTEN: i32 = -1;

/// An array of floats with run-time checks for shared reads and exclusive writes.
#[derive(Debug)]
pub struct SharedSlice {
    start: NonNull<u8>,
    dtype: Dtype,
    len: usize,
    users: AtomicI32,
    /// The mapping of an array that was allocated here; unmapped with the array.
    _own: Option<Mapping>,
    /// Keeps the mapping mapped if the array lies in a span.
    _pin: Option<Pin>,
}

// SAFETY: the creator promised that the elements may be used from any thread; the guards separate readers and writers.
unsafe impl Send for SharedSlice {}
// SAFETY: as above.
unsafe impl Sync for SharedSlice {}

impl SharedSlice {
    /// Wraps the caller's `len` elements at `start`; `None` if `start` is NULL or misaligned, or the size overflows.
    ///
    /// # Safety
    /// The elements stay readable and writable until the value is dropped. While a guard exists no other code writes
    /// the elements. While a [`WriteGuard`] exists no other code reads them either.
    pub unsafe fn new(start: *mut u8, dtype: Dtype, len: usize) -> Option<SharedSlice> {
        let fits = len.checked_mul(dtype.size()).is_some_and(|bytes| isize::try_from(bytes).is_ok());
        let start = match NonNull::new(start) {
            Some(start) => start,
            None if len == 0 => NonNull::<f32>::dangling().cast(),
            None => return None,
        };
        let aligned = start.as_ptr().addr().is_multiple_of(dtype.size());
        (fits && aligned).then(|| SharedSlice {
            start,
            dtype,
            len,
            users: AtomicI32::new(0),
            _own: None,
            _pin: None,
        })
    }

    /// Wraps a span as an array of as many elements as fit; `None` if the span is misaligned or no longer mapped.
    pub fn from_span(span: Span, dtype: Dtype) -> Option<SharedSlice> {
        let pin = span.pin()?;
        // The address of an empty span may be misaligned, and is not used.
        let start = if span.is_empty() { std::ptr::null_mut() } else { span.as_ptr() };
        // SAFETY: the span's bytes may be used from any thread until its last use, and by no other code, by the promise
        // of Span::new, or this array pins them. Guards separate the users of this array.
        let slice = unsafe { SharedSlice::new(start, dtype, span.len() / dtype.size()) };
        slice.map(|slice| SharedSlice { _pin: pin, ..slice })
    }

    /// Allocates zeros. The system provides the pages when they are first touched.
    pub fn zeroed(dtype: Dtype, len: usize) -> Result<SharedSlice> {
        let bytes = len
            .checked_mul(dtype.size())
            .ok_or_else(|| Error::invalid("len", "exceeds the address space"))?;
        let mapping = Mapping::untouched(bytes).map_err(|error| Error::system("mapping a buffer", &error))?;
        // SAFETY: the mapping has at least these bytes, is page-aligned, and lives as long as the value.
        let slice = unsafe { SharedSlice::new(mapping.span().as_ptr(), dtype, len) };
        let slice = slice.ok_or_else(|| Error::invalid("len", "exceeds the address space"))?;
        Ok(SharedSlice { _own: Some(mapping), ..slice })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Begins a read; other reads may run concurrently. [`Error::Busy`] if the array is being written.
    pub fn read(&self) -> Result<ReadGuard<'_>> {
        let free = |users: i32| (users >= 0).then(|| users + 1);
        match self.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, free) {
            Ok(_) => Ok(ReadGuard(self)),
            Err(_) => Err(conflict("read while it is written")),
        }
    }

    /// Begins an exclusive write. [`Error::Busy`] if the array is being read or written.
    pub fn write(&self) -> Result<WriteGuard<'_>> {
        match self.users.compare_exchange(0, WRITTEN, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(WriteGuard(self)),
            Err(_) => Err(conflict("written while it is in use")),
        }
    }
}

fn conflict(how: &str) -> Error {
    Error::Busy(format!("an array of the interleaved update would be {how}"))
}

/// Guard of a read.
#[derive(Debug)]
pub struct ReadGuard<'a>(&'a SharedSlice);

impl ReadGuard<'_> {
    /// The elements.
    pub fn floats(&self) -> Floats<'_> {
        let SharedSlice { start, dtype, len, .. } = *self.0;
        // SAFETY: len elements, aligned and live by the promise of `new`; no code writes them while this guard is held.
        unsafe { Floats::from_raw(start.as_ptr().cast(), dtype, len) }
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

/// Guard of a write.
#[derive(Debug)]
pub struct WriteGuard<'a>(&'a SharedSlice);

impl WriteGuard<'_> {
    /// The elements.
    pub fn floats(&mut self) -> FloatsMut<'_> {
        let SharedSlice { start, dtype, len, .. } = *self.0;
        // SAFETY: len elements, aligned and live by the promise of `new`; this guard is the only one, borrowed mutably.
        unsafe { FloatsMut::from_raw(start.as_ptr().cast(), dtype, len) }
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        self.0.users.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_share_and_a_writer_is_alone() {
        let slice = SharedSlice::zeroed(Dtype::F32, 3).unwrap();
        {
            let first = slice.read().unwrap();
            let second = slice.read().unwrap();
            assert_eq!((first.floats().len(), second.floats().len()), (3, 3));
            assert!(slice.write().is_err());
        }
        {
            let mut guard = slice.write().unwrap();
            let FloatsMut::F32(floats) = guard.floats() else { panic!("made of f32") };
            floats[1] = 2.0;
            assert!(slice.read().is_err() && slice.write().is_err());
        }
        let guard = slice.read().unwrap();
        assert!(matches!(guard.floats(), Floats::F32([0.0, 2.0, 0.0])));
    }

    #[test]
    fn elements_that_cannot_lie_there_are_refused() {
        let mut bytes = [0_u8; 16];
        let start = bytes.as_mut_ptr();
        // SAFETY: 16 bytes that live to the end of the test and that no other code uses.
        unsafe {
            assert!(SharedSlice::new(std::ptr::null_mut(), Dtype::F32, 1).is_none());
            assert!(SharedSlice::new(std::ptr::null_mut(), Dtype::F32, 0).is_some());
            assert!(SharedSlice::new(start, Dtype::F32, usize::MAX / 2).is_none());
            let odd = start.wrapping_add(usize::from(start.addr() % 2 == 0));
            assert!(SharedSlice::new(odd, Dtype::F16, 1).is_none());
        }
        assert!(SharedSlice::from_span(Span::empty(), Dtype::F32).is_some_and(|none| none.is_empty()));
        assert!(SharedSlice::zeroed(Dtype::F32, usize::MAX).is_err());
        assert!(SharedSlice::zeroed(Dtype::Bf16, 0).unwrap().is_empty());
    }
}
