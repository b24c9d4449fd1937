//! Extensible structs that C passes by pointer. They begin with `struct_size`.
//!
//! A caller compiled with an older header passes a shorter struct: the missing fields count as zero. Such a struct ends
//! with a field, because every field that a header adds begins where the struct of the header before ended. A
//! `struct_size` in the middle of a field is an error. A caller compiled
//! with a newer header passes a longer struct: the call fails if a field unknown to this library is not zero. In an
//! output struct, fields unknown to this library become zero.

use crate::error::{Error, Result};
use crate::sys::bump::{self, Bump};
use crate::sys::try_vec;

/// A larger `struct_size` is an uninitialised field, not a struct.
const SIZE_LIMIT: usize = 4096;

/// A `#[repr(C)]` struct whose first field is `struct_size: u32`. Only [`c_struct`] implements it.
///
/// # Safety
/// All bytes zero, and any bytes a C caller can write, are valid values; there is no padding.
pub unsafe trait AbiStruct: Copy {
    /// Size in the first release with this struct. A smaller `struct_size` is an error.
    const FIRST_SIZE: usize;
    /// The struct's name in C.
    const NAME: &'static str;
    /// Name, offset and size of each field.
    const FIELDS: &'static [(&'static str, usize, usize)];
}

/// A field type of an [`AbiStruct`].
///
/// # Safety
/// Any bytes are a valid value.
pub unsafe trait Plain: Copy {}

// SAFETY: any bytes are a valid number.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}
// SAFETY: any bytes are a valid raw pointer, which is not necessarily one that may be followed.
unsafe impl<T> Plain for *const T {}
// SAFETY: as above.
unsafe impl<T> Plain for *mut T {}

/// Size of the field that `_field` selects. Its type is [`Plain`].
pub const fn plain_size<T, F: Plain>(_field: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Implements [`AbiStruct`]: `abi_struct!(name, first size: field, field, ...)`. The build fails if a field is missing
/// from the list, if the struct has padding, or if a field is neither a number nor a pointer.
macro_rules! abi_struct {
    ($name:ident, $first:literal: $($field:ident),* $(,)?) => {
        const _: () = {
            let sum = 0 $(+ $crate::capi::abi_struct::plain_size(|value: &$name| &value.$field))*;
            assert!(sum == size_of::<$name>(), "padding, or a field that the list lacks");
            assert!($first <= size_of::<$name>() && std::mem::offset_of!($name, struct_size) == 0);
            let ends = false $(|| std::mem::offset_of!($name, $field)
                + $crate::capi::abi_struct::plain_size(|value: &$name| &value.$field) == $first)*;
            assert!(ends, "the first size is in the middle of a field");
        };
        // SAFETY: every field takes any bytes, and the sizes of the fields add up to the size of the struct.
        unsafe impl $crate::capi::abi_struct::AbiStruct for $name {
            const FIRST_SIZE: usize = $first;
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [(&'static str, usize, usize)] = &[$((
                stringify!($field),
                std::mem::offset_of!($name, $field),
                $crate::capi::abi_struct::plain_size(|value: &$name| &value.$field),
            )),*];
        }
    };
}
pub(in crate::capi) use abi_struct;

/// Declares a struct of the header and implements [`AbiStruct`] for it: `c_struct! { first BYTES;`, then the struct. BYTES
/// is its size in the first release. The tool that writes the headers reads the struct inside the braces.
macro_rules! c_struct {
    (first $first:literal; $(#[$about:meta])* pub struct $name:ident {
        $($(#[$field_about:meta])* pub $field:ident: $type:ty),* $(,)?
    }) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            $($(#[$field_about])* pub $field: $type,)*
        }
        $crate::capi::abi_struct::abi_struct!($name, $first: $($field),*);
    };
}
pub(in crate::capi) use c_struct;

/// Copies an input struct.
///
/// # Safety
/// `from` is NULL or points to `struct_size` readable bytes.
pub unsafe fn read<T: AbiStruct>(from: *const T, argument: &'static str) -> Result<T> {
    // SAFETY: the caller meets the callee's requirements.
    unsafe { read_optional(from, argument) }?.ok_or_else(|| Error::invalid(argument, "is NULL"))
}

/// Copies an input struct; `None` for NULL.
///
/// # Safety
/// As [`read`].
pub unsafe fn read_optional<T: AbiStruct>(from: *const T, argument: &'static str) -> Result<Option<T>> {
    if from.is_null() {
        return Ok(None);
    }
    let bytes = from.cast::<u8>();
    // SAFETY: the caller's struct begins with struct_size and has that many readable bytes; a zeroed T is valid.
    unsafe {
        let size = checked_size::<T>(bytes, argument)?;
        let known = size.min(size_of::<T>());
        if (known..size).any(|at| bytes.add(at).read() != 0) {
            let reason = format!(
                "{} sets fields that version {} does not know; leave them 0, or load a newer library",
                T::NAME,
                crate::VERSION
            );
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
pub unsafe fn stride<T: AbiStruct>(first: *const T, argument: &'static str) -> Result<usize> {
    // SAFETY: the caller meets the callee's requirements.
    unsafe { checked_size::<T>(first.cast(), argument) }
}

/// Copies an array of input structs. They lie `struct_size` bytes apart, and all have the same `struct_size`.
///
/// # Safety
/// `first` points to `count` structs of this kind.
pub unsafe fn read_all<T: AbiStruct>(first: *const T, count: u64, argument: &'static str) -> Result<Vec<T>> {
    let count = checked_count(first, count, argument)?;
    let mut structs = try_vec::with_capacity("copying the caller's structs", count)?;
    // SAFETY: the caller meets the callee's requirements.
    unsafe { read_each(first, count, argument, |value| structs.push(value)) }?;
    Ok(structs)
}

/// An array of input structs, for the time of a call: the caller's own array if its structs are those of this version,
/// else a copy in `bump`.
///
/// # Safety
/// As [`read_all`]. No code writes the array while `bump` is borrowed.
pub unsafe fn all_in<'a, T: AbiStruct>(
    bump: &'a Bump,
    first: *const T,
    count: u64,
    argument: &'static str,
) -> Result<&'a [T]> {
    let count = checked_count(first, count, argument)?;
    // SAFETY: an aligned struct of this kind begins with its size; each is `size_of::<T>()` bytes behind the last.
    let is_ours = |index: usize| unsafe { first.add(index).cast::<u32>().read() } as usize == size_of::<T>();
    if count > 0 && first.is_aligned() && (0..count).all(is_ours) {
        // SAFETY: `count` structs without a gap, as just checked; any bytes are valid.
        return Ok(unsafe { std::slice::from_raw_parts(first, count) });
    }
    let mut structs = bump::with_capacity(bump, "copying the caller's structs", count)?;
    // SAFETY: the caller meets the callee's requirements.
    unsafe { read_each(first, count, argument, |value| structs.push(value)) }?;
    Ok(structs.into_bump_slice())
}

fn checked_count<T>(first: *const T, count: u64, argument: &'static str) -> Result<usize> {
    match u32::try_from(count) {
        Ok(1..) if first.is_null() => Err(Error::invalid(argument, "is NULL")),
        Ok(count) => Ok(count as usize),
        Err(_) => Err(Error::invalid("count", format!("is {count}, but the limit is 2^32 - 1"))),
    }
}

unsafe fn read_each<T: AbiStruct>(
    first: *const T,
    count: usize,
    argument: &'static str,
    mut push: impl FnMut(T),
) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let at = |index: usize, error: Error| error.without(argument).within(&format!("{argument}[{index}]"));
    // SAFETY: there is at least one struct.
    let apart = unsafe { stride(first, argument) }.map_err(|error| at(0, error))?;
    for index in 0..count {
        // SAFETY: the structs of the array lie `apart` bytes apart.
        let (size, next) = unsafe {
            let next = first.byte_add(index * apart);
            (stride(next, argument).map_err(|error| at(index, error))?, next)
        };
        if size != apart {
            let reason = format!("is {size}, but that of the first entry is {apart}");
            return Err(Error::invalid(format!("{argument}[{index}].struct_size"), reason));
        }
        // SAFETY: a struct of this kind, as above.
        push(unsafe { read(next, argument) }.map_err(|error| at(index, error))?);
    }
    Ok(())
}

/// Copies an output struct: as many bytes as the caller's struct has. Its `struct_size` is unchanged, and fields
/// unknown to this library become zero.
///
/// # Safety
/// `to` points to `struct_size` writable bytes.
pub unsafe fn write<T: AbiStruct>(value: &T, to: *mut T, argument: &'static str) -> Result<()> {
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
pub unsafe fn check_output<T: AbiStruct>(to: *const T, argument: &'static str) -> Result<()> {
    if !to.is_null() {
        // SAFETY: the caller meets the callee's requirements.
        unsafe { checked_size::<T>(to.cast(), argument) }?;
    }
    Ok(())
}

/// Reads a flag word: an error for bits above `known`.
pub fn flags(argument: &'static str, value: u32, known: u32) -> Result<u32> {
    match value & !known {
        0 => Ok(value),
        _ => Err(Error::invalid(argument, format!("{value:#x} has unknown bits"))),
    }
}

unsafe fn checked_size<T: AbiStruct>(bytes: *const u8, argument: &'static str) -> Result<usize> {
    // SAFETY: the struct begins with a u32; the caller's pointer may have any alignment.
    let size = unsafe { bytes.cast::<u32>().read_unaligned() } as usize;
    match size {
        _ if size < T::FIRST_SIZE => Err(Error::invalid(
            argument,
            format!(
                "struct_size is {size}, but {} has at least {} bytes; initialise the struct first",
                T::NAME,
                T::FIRST_SIZE
            ),
        )),
        _ if size > SIZE_LIMIT => Err(Error::invalid(
            argument,
            format!("struct_size is {size}, but the limit is {SIZE_LIMIT}; initialise the struct first"),
        )),
        _ => match T::FIELDS.iter().find(|(_, at, bytes)| (at + 1..at + bytes).contains(&size)) {
            None => Ok(size),
            Some((field, ..)) => Err(Error::invalid(
                argument,
                format!(
                    "struct_size is {size}, which is in the middle of {}.{field}; initialise the struct first",
                    T::NAME
                ),
            )),
        },
    }
}

/// Rejects a reserved field that is set.
pub fn zero(argument: &'static str, value: u32) -> Result<()> {
    match value {
        0 => Ok(()),
        _ => Err(Error::invalid(argument, "must be 0")),
    }
}

/// Reads a field that must be 0 or 1.
pub fn flag(argument: &'static str, value: u32) -> Result<bool> {
    match value {
        0 | 1 => Ok(value == 1),
        _ => Err(Error::invalid(argument, format!("is {value}, but must be 0 or 1"))),
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

    abi_struct!(Known, 8: struct_size, field);

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Grown {
        struct_size: u32,
        field: u32,
        added: u64,
        last: u32,
        reserved: u32,
    }

    abi_struct!(Grown, 8: struct_size, field, added, last, reserved);

    #[test]
    fn a_size_is_the_end_of_a_field_or_beyond_all_of_them() {
        let sizes = 0_u32..32;
        let accepted: Vec<u32> = sizes
            .filter(|size| {
                let value = [Grown { struct_size: *size, field: 0, added: 0, last: 0, reserved: 0 }; 2];
                // SAFETY: two live structs, more than struct_size bytes, of which the second counts as an unknown tail.
                let (input, output) = unsafe {
                    (
                        read(&raw const value[0], "value").map(|_| ()),
                        check_output(&raw const value[0], "value"),
                    )
                };
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
        unsafe { write(&value, (&raw mut newer).cast(), "known") }.unwrap();
        assert_eq!(newer.0, Known { struct_size: 16, field: 7 });
        assert_eq!(newer.1, [0, 0, u32::MAX]);
    }
}
