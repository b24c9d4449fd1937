//! Extensible structs that C passes by pointer. They begin with `struct_size`.
//!
//! A caller compiled with an older header passes a shorter struct: the missing fields count as zero. A caller compiled
//! with a newer header passes a longer struct: the call fails if a field unknown to this library is not zero. In an
//! output struct, fields unknown to this library become zero.

use crate::error::{Error, Result};
use crate::sys::room;

/// A larger `struct_size` is an uninitialised field, not a struct.
const SIZE_LIMIT: usize = 4096;

/// A `#[repr(C)]` struct whose first field is `struct_size: u32`.
///
/// # Safety
/// All bytes zero, and any bytes a C caller can write, are valid values; there is no padding.
pub unsafe trait Record: Copy {
    /// Size in the first release with this struct. A smaller `struct_size` is an error.
    const FIRST_SIZE: usize;
    /// The struct's name in C.
    const NAME: &'static str;
}

/// Copies an input struct.
///
/// # Safety
/// `from` is NULL or points to `struct_size` readable bytes.
pub unsafe fn read<T: Record>(from: *const T, argument: &'static str) -> Result<T> {
    // SAFETY: the caller meets the callee's requirements.
    unsafe { read_optional(from, argument) }?.ok_or_else(|| Error::invalid(argument, "is NULL"))
}

/// Copies an input struct; `None` for NULL.
///
/// # Safety
/// As [`read`].
pub unsafe fn read_optional<T: Record>(from: *const T, argument: &'static str) -> Result<Option<T>> {
    if from.is_null() {
        return Ok(None);
    }
    let bytes = from.cast::<u8>();
    // SAFETY: the caller's struct begins with struct_size and has that many readable bytes; a zeroed T is valid.
    unsafe {
        let size = checked_size::<T>(bytes, argument)?;
        let known = size.min(size_of::<T>());
        if (known..size).any(|at| bytes.add(at).read() != 0) {
            let reason = format!("{} sets fields that version {} does not know", T::NAME, crate::VERSION);
            return Err(Error::invalid(argument, reason));
        }
        let mut value = std::mem::zeroed::<T>();
        std::ptr::copy_nonoverlapping(bytes, (&raw mut value).cast(), known);
        Ok(Some(value))
    }
}

/// Distance in bytes between the structs of an array: the `struct_size` of the first.
///
/// # Safety
/// `first` points to a struct of this kind.
pub unsafe fn stride<T: Record>(first: *const T, argument: &'static str) -> Result<usize> {
    // SAFETY: the caller meets the callee's requirements.
    unsafe { checked_size::<T>(first.cast(), argument) }
}

/// Copies an array of input structs. They lie `struct_size` bytes apart, and all have the same `struct_size`.
///
/// # Safety
/// `first` points to `count` structs of this kind.
pub unsafe fn read_all<T: Record>(first: *const T, count: usize, argument: &'static str) -> Result<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if first.is_null() {
        return Err(Error::invalid(argument, "is NULL"));
    }
    // SAFETY: there is at least one struct.
    let apart = unsafe { stride(first, argument) }?;
    let mut structs = room::for_count("copying the caller's structs", count)?;
    for index in 0..count {
        // SAFETY: the structs of the array lie `apart` bytes apart.
        let (size, next) = unsafe {
            let at = first.byte_add(index * apart);
            (stride(at, argument)?, at)
        };
        if size != apart {
            let reason = format!("struct_size is {size}, of the first {apart}");
            return Err(Error::invalid(format!("{argument}[{index}]"), reason));
        }
        // SAFETY: a struct of this kind, as above.
        structs.push(unsafe { read(next, argument) }?);
    }
    Ok(structs)
}

/// Copies an output struct: as many bytes as the caller's struct has. Its `struct_size` is unchanged, and fields
/// unknown to this library become zero.
///
/// # Safety
/// `to` points to `struct_size` writable bytes.
pub unsafe fn write<T: Record>(value: &T, to: *mut T, argument: &'static str) -> Result<()> {
    if to.is_null() {
        return Err(Error::invalid(argument, "is NULL"));
    }
    const SIZE_FIELD: usize = size_of::<u32>();
    // SAFETY: the caller's struct begins with struct_size and has that many writable bytes.
    unsafe {
        let size = checked_size::<T>(to.cast(), argument)?;
        let known = size.min(size_of::<T>());
        let (from, to) = ((&raw const *value).cast::<u8>(), to.cast::<u8>());
        std::ptr::copy_nonoverlapping(from.add(SIZE_FIELD), to.add(SIZE_FIELD), known - SIZE_FIELD);
        to.add(known).write_bytes(0, size - known);
    }
    Ok(())
}

/// Rejects an output struct that cannot be written, before any work is done. NULL is allowed.
///
/// # Safety
/// `to` is NULL or points to a struct of this kind.
pub unsafe fn check_output<T: Record>(to: *const T, argument: &'static str) -> Result<()> {
    if !to.is_null() {
        // SAFETY: the caller meets the callee's requirements.
        unsafe { checked_size::<T>(to.cast(), argument) }?;
    }
    Ok(())
}

unsafe fn checked_size<T: Record>(bytes: *const u8, argument: &'static str) -> Result<usize> {
    // SAFETY: the struct begins with a u32; the caller's pointer may have any alignment.
    let size = unsafe { bytes.cast::<u32>().read_unaligned() } as usize;
    match size {
        _ if size < T::FIRST_SIZE => Err(Error::invalid(
            argument,
            format!("struct_size is {size}, {} has at least {} bytes", T::NAME, T::FIRST_SIZE),
        )),
        _ if size > SIZE_LIMIT => {
            Err(Error::invalid(argument, format!("struct_size is {size}, over {SIZE_LIMIT}")))
        }
        _ => Ok(size),
    }
}

/// Fills a caller's struct of `struct_size` bytes with `value`. Fields unknown to this library become zero.
///
/// # Safety
/// `to` is NULL or points to `struct_size` writable bytes.
pub unsafe fn init<T: Record>(
    value: &T,
    to: *mut T,
    struct_size: usize,
    argument: &'static str,
) -> Result<()> {
    if to.is_null() {
        return Err(Error::invalid(argument, "is NULL"));
    }
    if !(T::FIRST_SIZE..=SIZE_LIMIT).contains(&struct_size) {
        let reason = format!("is {struct_size}, {} has at least {} bytes", T::NAME, T::FIRST_SIZE);
        return Err(Error::invalid("struct_size", reason));
    }
    // SAFETY: the caller's struct has struct_size bytes, which is at least its first size.
    unsafe {
        to.cast::<u32>().write_unaligned(struct_size as u32);
        write(value, to, argument)
    }
}

/// Rejects a reserved field that is set.
pub fn zero(argument: &'static str, value: u32) -> Result<()> {
    match value {
        0 => Ok(()),
        _ => Err(Error::invalid(argument, "is not 0")),
    }
}

/// Reads a field that must be 0 or 1.
pub fn flag(argument: &'static str, value: u32) -> Result<bool> {
    match value {
        0 | 1 => Ok(value == 1),
        _ => Err(Error::invalid(argument, format!("{value} is neither 0 nor 1"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Known {
        struct_size: u32,
        field: u32,
    }

    // SAFETY: integers without padding.
    unsafe impl Record for Known {
        const FIRST_SIZE: usize = 8;
        const NAME: &'static str = "known";
    }

    #[test]
    fn what_a_newer_caller_knows_beyond_this_version_comes_back_zero() {
        #[repr(C)]
        struct Newer(Known, [u32; 3]);
        let mut newer = Newer(Known { struct_size: 16, field: 0 }, [u32::MAX; 3]);
        let value = Known { struct_size: 8, field: 7 };
        // SAFETY: a live struct, larger than its struct_size.
        unsafe { write(&value, (&raw mut newer).cast(), "known") }.unwrap();
        assert_eq!(newer.0, Known { struct_size: 16, field: 7 });
        assert_eq!(newer.1, [0, 0, u32::MAX]);
    }
}
