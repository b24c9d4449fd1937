//! Outputs: values, arrays and texts that a call writes to the caller's memory.

use std::borrow::Cow;
use std::ffi::c_char;

use crate::error::{Error, Result};

/// An output that must not be NULL.
pub fn required<T>(to: *mut T, argument: impl Into<Cow<'static, str>>) -> Result<*mut T> {
    match to.is_null() {
        true => Err(Error::invalid(argument, "is NULL")),
        false => Ok(to),
    }
}

/// Writes a value. NULL is an error.
///
/// # Safety
/// `to` is NULL or valid for a write.
pub unsafe fn write<T>(value: T, to: *mut T, argument: &'static str) -> Result<()> {
    let to = required(to, argument)?;
    // SAFETY: not NULL, and valid by the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes a value unless `to` is NULL.
///
/// # Safety
/// `to` is NULL or valid for a write.
pub unsafe fn write_optional<T>(value: T, to: *mut T) {
    if !to.is_null() {
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { to.write(value) };
    }
}

/// Writes the first `capacity` values to an array, and the number of all values to `count_out`.
///
/// # Safety
/// `to` has room for `capacity` values, or is NULL. `count_out` is NULL or valid for a write.
pub unsafe fn write_array<T: Copy>(
    values: &[T],
    to: *mut T,
    capacity: u64,
    argument: &'static str,
    count_out: *mut u64,
) -> Result<()> {
    let count_out = required(count_out, "count_out")?;
    let room = usize::try_from(capacity).unwrap_or(usize::MAX);
    if room > 0 {
        required(to, argument)?;
    }
    for (at, value) in values.iter().take(room).enumerate() {
        // SAFETY: the array has room for `capacity` values, and `at` is less.
        unsafe { to.add(at).write(*value) };
    }
    // SAFETY: not NULL, and valid by the caller's promise.
    unsafe { count_out.write(values.len() as u64) };
    Ok(())
}

/// Writes a text and a NUL, truncated to `size` bytes, unless `to` is NULL. `needed_out` receives the bytes of the
/// whole text with its NUL, unless it is NULL.
///
/// # Safety
/// `to` has room for `size` bytes, or is NULL. `needed_out` is NULL or valid for a write.
pub unsafe fn write_text(text: &str, to: *mut c_char, size: usize, needed_out: *mut u64) {
    if let (false, Some(room)) = (to.is_null(), size.checked_sub(1)) {
        let len = (0..=text.len().min(room)).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        // SAFETY: the text with its NUL fits into `size` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, len);
            to.add(len).write(0);
        }
    }
    // SAFETY: the caller meets the callee's requirements.
    unsafe { write_optional(text.len() as u64 + 1, needed_out) };
}
