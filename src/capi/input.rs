//! Inputs that C passes by address: strings, arrays, bytes; and times.

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};

/// Bounds the payload of a commit before it is read. A commit itself accepts at most 1 MiB
/// ([`crate::tier::MAX_PAYLOAD`]).
const MOST_PAYLOAD_BYTES: u64 = 1 << 30;

/// A C string of UTF-8.
///
/// # Safety
/// `start` is NULL or a C string that no code changes during `'a`.
pub unsafe fn text<'a>(start: *const c_char, argument: &'static str) -> Result<&'a str> {
    // SAFETY: the caller meets the callee's requirements.
    let bytes = unsafe { c_string(start, argument) }?;
    std::str::from_utf8(bytes).map_err(|_| Error::invalid(argument, "is not valid UTF-8"))
}

/// A path as a C string of any bytes.
///
/// # Safety
/// `start` is NULL or a C string.
pub unsafe fn path(start: *const c_char, argument: &'static str) -> Result<PathBuf> {
    // SAFETY: the caller meets the callee's requirements.
    let bytes = unsafe { c_string(start, argument) }?;
    Ok(PathBuf::from(OsStr::from_bytes(bytes)))
}

unsafe fn c_string<'a>(start: *const c_char, argument: &'static str) -> Result<&'a [u8]> {
    if start.is_null() {
        return Err(Error::invalid(argument, "is NULL"));
    }
    // SAFETY: not NULL, and a C string by the caller's promise.
    Ok(unsafe { CStr::from_ptr(start) }.to_bytes())
}

/// An array of `count` values. NULL is allowed if `count` is 0.
///
/// # Safety
/// `start` is NULL or points to `count` values that no code changes during `'a`.
pub unsafe fn array<'a, T: Copy>(start: *const T, count: u64, argument: &'static str) -> Result<&'a [T]> {
    let most = isize::MAX as u64 / size_of::<T>() as u64;
    match count {
        0 => Ok(&[]),
        _ if start.is_null() => Err(Error::invalid(argument, format!("is NULL, but has {count} entries"))),
        _ if count > most => {
            Err(Error::invalid(argument, format!("{count} entries exceed the address space")))
        }
        // SAFETY: not NULL, and valid by the caller's promise; the length is one that a slice can have.
        _ => Ok(unsafe { std::slice::from_raw_parts(start, count as usize) }),
    }
}

/// The payload of a commit.
///
/// # Safety
/// `start` is NULL or points to `bytes` bytes that no code changes during `'a`.
pub unsafe fn payload<'a>(start: *const c_void, bytes: u64) -> Result<&'a [u8]> {
    if start.is_null() && bytes > 0 {
        return Err(Error::invalid("payload", "is NULL, but payload_bytes is not 0"));
    }
    if bytes > MOST_PAYLOAD_BYTES {
        return Err(Error::invalid(
            "payload_bytes",
            format!("is {bytes}, but the limit is {MOST_PAYLOAD_BYTES}"),
        ));
    }
    // SAFETY: the caller meets the callee's requirements.
    unsafe { array(start.cast(), bytes, "payload") }
}

/// `None`, which waits without limit, if negative.
pub fn timeout(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}
