//! Pointers that C passes: arguments, and fields of option structs.
//!
//! Invariant: such a pointer is NULL, or points to what the header says, until the call returns. C promises it with the
//! call, and a Rust caller with [`In::new`] or [`Out::new`]. No function keeps one. So a function over handles, numbers
//! and these pointers has no unsafe code.

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::Fields;
use super::abi_struct::{AbiStruct, Plain};
use super::handle::Handle;
use crate::error::{Error, Result};
use crate::sys::bump::{self, Bump};
use crate::sys::try_vec;

/// `const T *` of the header.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

/// `T *` of the header, which the call writes.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

impl<T> Clone for In<T> {
    fn clone(&self) -> In<T> {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> Clone for Out<T> {
    fn clone(&self) -> Out<T> {
        *self
    }
}

impl<T> Copy for Out<T> {}

// SAFETY: any bytes are a valid raw pointer; C promises what it points to.
unsafe impl<T> Plain for In<T> {}

impl<T> In<T> {
    /// The argument of a call from Rust.
    ///
    /// # Safety
    /// `from` is NULL or points to what the header of the called function says, until the call returns.
    pub unsafe fn new(from: *const T) -> In<T> {
        In(from)
    }

    /// True for NULL.
    pub(super) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// An array of `count` values. NULL is allowed if `count` is 0.
    pub(super) fn array(&self, count: u64, argument: &'static str) -> Result<&[T]>
    where
        T: Copy,
    {
        let most = isize::MAX as u64 / size_of::<T>() as u64;
        match count {
            0 => Ok(&[]),
            _ if self.is_null() => Err(Error::invalid(argument, format!("is NULL, but has {count} entries"))),
            _ if count > most => {
                Err(Error::invalid(argument, format!("{count} entries exceed the address space")))
            }
            _ if !self.0.is_aligned() => {
                let reason = format!("address {:p} is not aligned to {} bytes", self.0, align_of::<T>());
                Err(Error::invalid(argument, reason))
            }
            // SAFETY: the invariant; not NULL, aligned, and the length is one that a slice can have.
            _ => Ok(unsafe { std::slice::from_raw_parts(self.0, count as usize) }),
        }
    }
}

impl<T: AbiStruct> In<T> {
    /// A copy of the struct.
    pub(super) fn read(self, argument: &'static str) -> Result<T> {
        self.read_optional(argument)?.ok_or_else(|| Error::invalid(argument, "is NULL"))
    }

    /// A copy of the struct; `None` for NULL.
    pub(super) fn read_optional(self, argument: &'static str) -> Result<Option<T>> {
        if self.is_null() {
            return Ok(None);
        }
        let bytes = self.0.cast::<u8>();
        // SAFETY: the caller's struct begins with struct_size and has that many readable bytes; a zeroed T is valid.
        unsafe {
            let size = checked_size::<T>(bytes, argument)?;
            let known = size.min(size_of::<T>());
            if (known..size).any(|at| bytes.add(at).read() != 0) {
                let reason = format!(
                    "struct_size is {size}, but {} has {known} bytes in version {}, and the bytes behind them are not 0; set struct_size to \
                     sizeof({}), or load a newer library",
                    T::NAME,
                    crate::VERSION,
                    T::NAME
                );
                return Err(Error::invalid(argument, reason));
            }
            let mut value = std::mem::zeroed::<T>();
            std::ptr::copy_nonoverlapping(bytes, (&raw mut value).cast(), known);
            Ok(Some(value))
        }
    }

    /// A copy of an array of structs. They lie `struct_size` bytes apart, and all have the same `struct_size`.
    pub(super) fn read_all(self, count: u64, argument: &'static str) -> Result<Vec<T>> {
        let count = self.checked_count(count, argument)?;
        let mut structs = try_vec::with_capacity("copying the caller's structs", count)?;
        self.read_each(count, argument, |value| structs.push(value))?;
        Ok(structs)
    }

    /// An array of structs, for the time of a call: the caller's own array if its structs are those of this version, else
    /// a copy in `bump`.
    pub(super) fn all_in<'a>(
        &'a self,
        bump: &'a Bump,
        count: u64,
        argument: &'static str,
    ) -> Result<&'a [T]> {
        let count = self.checked_count(count, argument)?;
        let first = self.0;
        // SAFETY: an aligned struct of this kind begins with its size; each is `size_of::<T>()` bytes behind the last.
        let is_ours =
            |index: usize| unsafe { first.add(index).cast::<u32>().read() } as usize == size_of::<T>();
        if count > 0 && first.is_aligned() && (0..count).all(is_ours) {
            // SAFETY: `count` structs without a gap, as just checked; any bytes are valid.
            return Ok(unsafe { std::slice::from_raw_parts(first, count) });
        }
        let mut structs = bump::with_capacity(bump, "copying the caller's structs", count)?;
        self.read_each(count, argument, |value| structs.push(value))?;
        Ok(structs.into_bump_slice())
    }

    fn checked_count(self, count: u64, argument: &'static str) -> Result<usize> {
        match u32::try_from(count) {
            Ok(1..) if self.is_null() => Err(Error::invalid(argument, "is NULL")),
            Ok(count) => Ok(count as usize),
            Err(_) => Err(Error::invalid("count", format!("is {count}, but the limit is 2^32 - 1"))),
        }
    }

    fn read_each(self, count: usize, argument: &'static str, mut push: impl FnMut(T)) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let at = |index: usize, error: Error| error.within(&format!("{argument}[{index}]"));
        // SAFETY: there is at least one struct.
        let apart = unsafe { checked_size::<T>(self.0.cast(), "") }.map_err(|error| at(0, error))?;
        for index in 0..count {
            // SAFETY: the structs of the array lie `apart` bytes apart, and each begins with its size.
            let (size, next) = unsafe {
                let next = self.0.byte_add(index * apart);
                (next.cast::<u32>().read_unaligned() as usize, next)
            };
            if size != apart {
                let reason = format!(
                    "is {size}, but that of {argument}[0] is {apart}, so the structs lie {apart} bytes apart; {} has {} bytes in version {}",
                    T::NAME,
                    size_of::<T>(),
                    crate::VERSION
                );
                return Err(Error::invalid(format!("{argument}[{index}].struct_size"), reason));
            }
            push(In(next).read("").map_err(|error| at(index, error))?);
        }
        Ok(())
    }
}

impl In<c_char> {
    /// A C string of UTF-8.
    pub(super) fn text(&self, argument: &'static str) -> Result<&str> {
        std::str::from_utf8(self.bytes(argument)?).map_err(|_| Error::invalid(argument, "is not valid UTF-8"))
    }

    /// A C string of any bytes.
    pub(super) fn path(&self, argument: &'static str) -> Result<&Path> {
        Ok(Path::new(OsStr::from_bytes(self.bytes(argument)?)))
    }

    fn bytes(&self, argument: &'static str) -> Result<&[u8]> {
        if self.is_null() {
            return Err(Error::invalid(argument, "is NULL"));
        }
        // SAFETY: the invariant: not NULL, so a C string.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }
}

impl In<c_void> {
    /// The payload of a commit.
    pub(super) fn payload(&self, bytes: u64) -> Result<&[u8]> {
        /// A bound before the payload is read. A commit itself accepts at most 1 MiB ([`crate::tier::MAX_PAYLOAD`]).
        const MOST_BYTES: u64 = 1 << 30;
        if self.is_null() && bytes > 0 {
            return Err(Error::invalid("payload", "is NULL, but payload_bytes is not 0"));
        }
        if bytes > MOST_BYTES {
            let reason = format!("is {bytes}, but the limit is {MOST_BYTES}");
            return Err(Error::invalid("payload_bytes", reason));
        }
        match bytes {
            0 => Ok(&[]),
            // SAFETY: the invariant; not NULL, as just checked.
            _ => Ok(unsafe { std::slice::from_raw_parts(self.0.cast(), bytes as usize) }),
        }
    }
}

impl<T> Out<T> {
    /// The argument of a call from Rust.
    ///
    /// # Safety
    /// `to` is NULL or points to what the header of the called function says, until the call returns.
    pub unsafe fn new(to: *mut T) -> Out<T> {
        Out(to)
    }

    /// True for NULL.
    pub(super) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Fails for NULL.
    pub(super) fn required(self, argument: &'static str) -> Result<()> {
        if self.is_null() { Err(Error::invalid(argument, "is NULL")) } else { Ok(()) }
    }

    /// Writes a value. NULL is an error.
    pub(super) fn put(self, value: T, argument: &'static str) -> Result<()> {
        self.required(argument)?;
        self.put_optional(value);
        Ok(())
    }

    /// Writes a value unless the pointer is NULL.
    pub(super) fn put_optional(self, value: T) {
        self.put_all([value]);
    }

    /// Writes all values to an array, which has room for them. NULL does nothing.
    pub(super) fn put_all(self, values: impl IntoIterator<Item = T>) {
        if !self.is_null() {
            for (at, value) in values.into_iter().enumerate() {
                // SAFETY: the invariant: there is room for every value. The caller's pointer may have any alignment.
                unsafe { self.0.add(at).write_unaligned(value) };
            }
        }
    }

    /// Writes the first `capacity` values to an array, and the number of all values to `count_out`.
    pub(super) fn put_array(
        self,
        values: &[T],
        capacity: u64,
        argument: &'static str,
        count_out: Out<u64>,
    ) -> Result<()>
    where
        T: Copy,
    {
        count_out.required("count_out")?;
        let room = usize::try_from(capacity).unwrap_or(usize::MAX);
        if room > 0 {
            self.required(argument)?;
        }
        self.put_all(values.iter().take(room).copied());
        count_out.put(values.len() as u64, "count_out")
    }
}

impl<T: AbiStruct> Out<T> {
    /// Rejects a struct that cannot be written, before any work is done. NULL is allowed.
    pub(super) fn check(self, argument: &'static str) -> Result<()> {
        if !self.is_null() {
            // SAFETY: the invariant: not NULL, so a struct of this kind.
            unsafe { checked_size::<T>(self.0.cast(), argument) }?;
        }
        Ok(())
    }

    /// Writes as many bytes as the caller's struct has, which is never NULL. Its `struct_size` is unchanged, and fields
    /// unknown to this library become zero.
    pub(super) fn write(self, value: &T, argument: &'static str) -> Result<()> {
        const SIZE_FIELD: usize = size_of::<u32>();
        self.required(argument)?;
        // SAFETY: the caller's struct begins with struct_size and has that many writable bytes.
        unsafe {
            let size = checked_size::<T>(self.0.cast(), argument)?;
            let known = size.min(size_of::<T>());
            let (from, to) = ((&raw const *value).cast::<u8>(), self.0.cast::<u8>());
            std::ptr::copy_nonoverlapping(from.add(SIZE_FIELD), to.add(SIZE_FIELD), known - SIZE_FIELD);
            to.add(known).write_bytes(0, size - known);
        }
        Ok(())
    }

    /// Writes structs one behind the other, as far apart as the first one's `struct_size` says. The caller set that of the
    /// first; the others get theirs here.
    pub(super) fn write_all(
        self,
        values: impl ExactSizeIterator<Item = T>,
        argument: &'static str,
    ) -> Result<()> {
        if values.len() == 0 {
            return Ok(());
        }
        self.required(argument)?;
        // SAFETY: there is at least one struct, which begins with its size.
        let apart = unsafe { checked_size::<T>(self.0.cast(), argument) }?;
        for (index, value) in values.enumerate() {
            // SAFETY: the structs lie `apart` bytes apart, and there is room for all of them.
            let to = unsafe {
                let to = self.0.byte_add(index * apart);
                to.cast::<u32>().write_unaligned(apart as u32);
                Out(to)
            };
            to.write(&value, argument)?;
        }
        Ok(())
    }
}

impl Out<c_void> {
    /// Writes bytes to memory that has room for them.
    pub(super) fn put_bytes(self, bytes: impl IntoIterator<Item = u8>, argument: &'static str) -> Result<()> {
        self.required(argument)?;
        Out(self.0.cast::<u8>()).put_all(bytes);
        Ok(())
    }
}

impl Out<c_char> {
    /// Writes a text and a NUL, truncated to `size` bytes. `needed_out` receives the bytes of the whole text with its NUL.
    /// Both may be NULL.
    pub(super) fn put_text(self, text: &str, size: u64, needed_out: Out<u64>) -> Result<()> {
        if let (false, Some(room)) = (self.is_null(), size.checked_sub(1)) {
            let bytes = prefix(text, usize::try_from(room).unwrap_or(usize::MAX)).bytes().chain([0]);
            self.put_all(bytes.map(|byte| byte as c_char));
        }
        needed_out.put_optional(text.len() as u64 + 1);
        Ok(())
    }
}

impl<T: Handle> Out<*mut T> {
    /// Makes an object and writes its handle. A NULL output fails before the object is made.
    pub(super) fn open(self, make: impl FnOnce() -> Result<T>) -> Result<()> {
        if self.is_null() {
            return Err(Error::invalid(format!("{}_out", T::NAME), "is NULL"));
        }
        self.put_optional(Box::into_raw(Box::new(make()?)));
        Ok(())
    }
}

/// The longest beginning of a text with at most so many bytes.
pub(super) fn prefix(text: &str, bytes: usize) -> &str {
    let end = (0..=text.len().min(bytes)).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// A larger `struct_size` is an uninitialised field, not a struct.
const SIZE_LIMIT: usize = 4096;

/// # Safety
/// A struct of this kind is at `bytes`.
unsafe fn checked_size<T: AbiStruct>(bytes: *const u8, argument: &'static str) -> Result<usize> {
    // SAFETY: the struct begins with a u32; the caller's pointer may have any alignment.
    let size = unsafe { bytes.cast::<u32>().read_unaligned() } as usize;
    match fault_of_size(T::NAME, T::FIRST_SIZE, T::FIELDS, size) {
        None => Ok(size),
        Some(fault) => Err(Error::invalid(
            argument,
            format!("struct_size is {size}, {fault}; initialise the struct first"),
        )),
    }
}

/// The fault of a struct's size, in words; `None` if there is none.
pub(super) fn fault_of_size(name: &str, first_size: usize, fields: Fields, size: usize) -> Option<String> {
    match size {
        _ if size < first_size => Some(format!("but {name} has at least {first_size} bytes")),
        _ if size > SIZE_LIMIT => Some(format!("but the limit is {SIZE_LIMIT}")),
        _ => {
            let inside = fields.iter().find(|(_, at, bytes)| (at + 1..at + bytes).contains(&size));
            inside.map(|(field, ..)| format!("which is in the middle of {name}.{field}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capi::abi_struct::abi_struct;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Known {
        struct_size: u32,
        field: u32,
    }

    abi_struct!(Known, 8; struct_size, field);

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Grown {
        struct_size: u32,
        field: u32,
        added: u64,
        last: u32,
        reserved: u32,
    }

    abi_struct!(Grown, 8; struct_size, field, added, last, reserved);

    #[test]
    fn a_size_is_the_end_of_a_field_or_beyond_all_of_them() {
        let sizes = 0_u32..32;
        let accepted: Vec<u32> = sizes
            .filter(|size| {
                let value = [Grown { struct_size: *size, field: 0, added: 0, last: 0, reserved: 0 }; 2];
                // SAFETY: two live structs, more than struct_size bytes, of which the second counts as an unknown tail.
                let (from, to) =
                    unsafe { (In::new(&raw const value[0]), Out::new((&raw const value[0]).cast_mut())) };
                let (input, output) = (from.read("value").map(drop), to.check("value"));
                assert_eq!(input.is_ok(), output.is_ok() && *size <= 24, "{size}: {input:?}, {output:?}");
                if (9..16).contains(size) {
                    let error = output.as_ref().unwrap_err().to_string();
                    assert!(error.contains("in the middle of Grown.added"), "{error}");
                }
                output.is_ok()
            })
            .collect();
        assert_eq!(accepted, [8, 16, 20, 24, 25, 26, 27, 28, 29, 30, 31]);
    }

    #[test]
    fn what_a_newer_caller_knows_beyond_this_version_comes_back_zero() {
        #[repr(C)]
        struct Newer(Known, [u32; 3]);
        let mut newer = Newer(Known { struct_size: 16, field: 0 }, [u32::MAX; 3]);
        let value = Known { struct_size: 8, field: 7 };
        // SAFETY: a live struct, larger than its struct_size.
        unsafe { Out::new((&raw mut newer).cast()) }.write(&value, "known").unwrap();
        assert_eq!(newer.0, Known { struct_size: 16, field: 7 });
        assert_eq!(newer.1, [0, 0, u32::MAX]);
    }
}
