//! Arrays that several of this library's threads use in turn: lent by the caller, or mapped here.
//!
//! Invariants:
//! - At any time an array has any number of readers or one writer. Who comes at the wrong time gets an error at once:
//!   the order of turns is somebody else's duty, and a clash shows that it was broken.
//! - No lock is held, so that a fork finds nothing locked.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};

use super::life::Pin;
use super::memory::Mapping;
use super::span::Span;
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::error::{Error, Result};

/// Users of an array that is being written.
const WRITTEN: i32 = -1;

/// An array of floats that is read and written in turns.
#[derive(Debug)]
pub struct Lent {
    start: NonNull<u8>,
    dtype: Dtype,
    len: usize,
    users: AtomicI32,
    /// Memory that was mapped for it; unmapped with it.
    _own: Option<Mapping>,
    /// Keeps the mapping of a span that it lies in.
    _pin: Option<Pin>,
}

// SAFETY: whoever made it promised that the elements may be used from any thread; guards keep turns apart.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Lent {
    /// The caller's `len` elements at `start`; `None` where they cannot lie.
    ///
    /// # Safety
    /// The elements stay readable and writable until the value is dropped. While a guard of it is held nobody else
    /// writes them, nor reads them if it is a [`Writing`].
    pub unsafe fn new(start: *mut u8, dtype: Dtype, len: usize) -> Option<Lent> {
        let fits = len.checked_mul(dtype.size()).is_some_and(|bytes| isize::try_from(bytes).is_ok());
        let start = match NonNull::new(start) {
            Some(start) => start,
            None if len == 0 => NonNull::<f32>::dangling().cast(),
            None => return None,
        };
        let aligned = start.as_ptr().addr().is_multiple_of(dtype.size());
        (fits && aligned).then(|| Lent {
            start,
            dtype,
            len,
            users: AtomicI32::new(0),
            _own: None,
            _pin: None,
        })
    }

    /// A span as an array, as many elements as fit; `None` where it is not aligned to them, or no longer mapped.
    pub fn over(span: Span, dtype: Dtype) -> Option<Lent> {
        let pin = span.pin()?;
        // The address of no bytes says nothing.
        let start = if span.is_empty() { std::ptr::null_mut() } else { span.as_ptr() };
        // SAFETY: the span's bytes may be used from any thread until its last use, and by nobody else, by the promise of
        // Span::new, or are pinned by this array; guards keep the users of this array apart.
        let lent = unsafe { Lent::new(start, dtype, span.len() / dtype.size()) };
        lent.map(|lent| Lent { _pin: pin, ..lent })
    }

    /// Zeros of our own; their memory comes when they are first touched.
    pub fn zeroed(dtype: Dtype, len: usize) -> Result<Lent> {
        let bytes =
            len.checked_mul(dtype.size()).ok_or_else(|| Error::invalid("len", "passes the address space"))?;
        let mapping = Mapping::untouched(bytes).map_err(|error| Error::system("mapping a buffer", &error))?;
        // SAFETY: the mapping has at least these bytes, page-aligned, and lives as long as the value.
        let lent = unsafe { Lent::new(mapping.span().as_ptr(), dtype, len) };
        let lent = lent.ok_or_else(|| Error::invalid("len", "passes the address space"))?;
        Ok(Lent { _own: Some(mapping), ..lent })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// A turn of reading beside other readers.
    pub fn read(&self) -> Result<Reading<'_>> {
        let free = |users: i32| (users >= 0).then(|| users + 1);
        match self.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, free) {
            Ok(_) => Ok(Reading(self)),
            Err(_) => Err(clash("read while it is written")),
        }
    }

    /// A turn of writing, alone.
    pub fn write(&self) -> Result<Writing<'_>> {
        match self.users.compare_exchange(0, WRITTEN, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(Writing(self)),
            Err(_) => Err(clash("written while it is in use")),
        }
    }
}

fn clash(how: &str) -> Error {
    Error::Busy(format!("an array of the interleaved update would be {how}"))
}

/// A turn of reading.
#[derive(Debug)]
pub struct Reading<'a>(&'a Lent);

impl Reading<'_> {
    /// The elements.
    pub fn floats(&self) -> Floats<'_> {
        let Lent { start, dtype, len, .. } = *self.0;
        // SAFETY: len elements, aligned and live by the promise of `new`; nobody writes while this guard is held.
        unsafe {
            match dtype {
                Dtype::F32 => Floats::F32(std::slice::from_raw_parts(start.as_ptr().cast(), len)),
                Dtype::F16 => Floats::F16(std::slice::from_raw_parts(start.as_ptr().cast(), len)),
                Dtype::Bf16 => Floats::Bf16(std::slice::from_raw_parts(start.as_ptr().cast(), len)),
            }
        }
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

/// A turn of writing.
#[derive(Debug)]
pub struct Writing<'a>(&'a Lent);

impl Writing<'_> {
    /// The elements.
    pub fn floats(&mut self) -> FloatsMut<'_> {
        let Lent { start, dtype, len, .. } = *self.0;
        // SAFETY: len elements, aligned and live by the promise of `new`; this guard is the only one, borrowed mutably.
        unsafe {
            match dtype {
                Dtype::F32 => FloatsMut::F32(std::slice::from_raw_parts_mut(start.as_ptr().cast(), len)),
                Dtype::F16 => FloatsMut::F16(std::slice::from_raw_parts_mut(start.as_ptr().cast(), len)),
                Dtype::Bf16 => FloatsMut::Bf16(std::slice::from_raw_parts_mut(start.as_ptr().cast(), len)),
            }
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.users.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_share_and_a_writer_is_alone() {
        let lent = Lent::zeroed(Dtype::F32, 3).unwrap();
        {
            let first = lent.read().unwrap();
            let second = lent.read().unwrap();
            assert_eq!((first.floats().len(), second.floats().len()), (3, 3));
            assert!(lent.write().is_err());
        }
        {
            let mut writing = lent.write().unwrap();
            let FloatsMut::F32(floats) = writing.floats() else { panic!("made of f32") };
            floats[1] = 2.0;
            assert!(lent.read().is_err() && lent.write().is_err());
        }
        let reading = lent.read().unwrap();
        assert!(matches!(reading.floats(), Floats::F32([0.0, 2.0, 0.0])));
    }

    #[test]
    fn elements_that_cannot_lie_there_are_refused() {
        let mut bytes = [0_u8; 16];
        let start = bytes.as_mut_ptr();
        // SAFETY: 16 bytes that live to the end of the test and that nobody else uses.
        unsafe {
            assert!(Lent::new(std::ptr::null_mut(), Dtype::F32, 1).is_none());
            assert!(Lent::new(std::ptr::null_mut(), Dtype::F32, 0).is_some());
            assert!(Lent::new(start, Dtype::F32, usize::MAX / 2).is_none());
            let odd = start.wrapping_add(usize::from(start.addr() % 2 == 0));
            assert!(Lent::new(odd, Dtype::F16, 1).is_none());
        }
        assert!(Lent::over(Span::empty(), Dtype::F32).is_some_and(|none| none.is_empty()));
        assert!(Lent::zeroed(Dtype::F32, usize::MAX).is_err());
        assert!(Lent::zeroed(Dtype::Bf16, 0).unwrap().is_empty());
    }
}
