//! Waiting for operations of an I/O engine, and how they failed.
#![allow(non_camel_case_types)]

use std::ffi::c_char;

use super::guard::guard;
use super::io::{open, spw_io, timeout};
use super::library::out;
use super::record::{self, Record};
use super::status::{self, spw_status};
use crate::error::{Error, Result};

/// Waits for one operation, at the longest `timeout_ms` milliseconds (0: only looks; negative: for ever), and gives its
/// status and byte count (`bytes_out` may be NULL). The handle is then done with, except after SPW_ERR_TIMEOUT, which
/// leaves the operation under way, and after SPW_ERR_DEADLINE, when `spw_io_holds_memory` still answers.
///
/// # Safety
/// `io` is an open engine, `bytes_out` is NULL or points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_wait(
    io: *mut spw_io,
    handle: u64,
    timeout_ms: i64,
    bytes_out: *mut u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise; NULL is not written to.
        unsafe {
            let bytes = open(io)?.wait(handle, timeout(timeout_ms))?;
            give(bytes_out, bytes);
        }
        Ok(())
    })
}

/// Waits for all operations, as `spw_io_wait`, and is done with their handles. `completed_out` (may be NULL) receives
/// how many there were; 0, at once, if none. If any failed it is the first error, with the number of the others.
///
/// # Safety
/// `io` is an open engine, `completed_out` is NULL or points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_wait_all(
    io: *mut spw_io,
    timeout_ms: i64,
    completed_out: *mut u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise; NULL is not written to.
        unsafe {
            let completed = open(io)?.wait_all(timeout(timeout_ms))?;
            give(completed_out, completed);
        }
        Ok(())
    })
}

/// Waits for the `count` operations whose handles stand at `handles`, as `spw_io_wait`, whatever else is under way, and is
/// done with their handles. If any failed it is the error of the first of them, with the number of the others. After
/// SPW_ERR_TIMEOUT all of them are as before.
///
/// # Safety
/// `io` is an open engine, `handles` points to `count` integers (or is NULL, with 0).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_wait_many(
    io: *mut spw_io,
    handles: *const u64,
    count: u64,
    timeout_ms: i64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise is the callee's.
        unsafe { open(io)?.wait_many(read_handles(handles, count)?, timeout(timeout_ms)) }
    })
}

/// Asks that an operation end early. Wait for it as before: it is SPW_ERR_CANCELLED, or ends as it would have, once the
/// system has given its memory back. What the device already has is not taken back.
///
/// # Safety
/// `io` is an open engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_cancel(io: *mut spw_io, handle: u64) -> spw_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { open(io) }?.cancel(handle))
}

/// Whether the system may still use the memory of an operation, which it may after SPW_ERR_DEADLINE: 1 or 0. Memory of
/// spw_pool and spw_pinned need not be asked about: freed, it is kept out of use until then.
///
/// # Safety
/// `io` is an open engine, `holds_out` points to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_holds_memory(
    io: *mut spw_io,
    handle: u64,
    holds_out: *mut u32,
) -> spw_status {
    guard(|| {
        let holds_out = out(holds_out, "holds_out")?;
        // SAFETY: the caller's promise; the pointer was checked.
        unsafe { holds_out.write(open(io)?.holds_memory(handle)?.into()) };
        Ok(())
    })
}

/// How an operation on a file failed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_io_failure {
    /// `sizeof(spw_io_failure)`
    pub struct_size: u32,
    /// The system's number, 0 if the system reported none.
    pub system_errno: i32,
    /// Where the part that failed begins in the file.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
    /// The file, as the caller named it. Good until the next failing call of this thread.
    pub path: *const c_char,
}

// SAFETY: integers and a pointer without padding; a null pointer is valid.
unsafe impl Record for spw_io_failure {
    const FIRST_SIZE: usize = 32;
    const NAME: &'static str = "spw_io_failure";
}

/// Tells of the last failing call of this thread what spw_last_error() has in words. If that was no operation on a file,
/// `path` is NULL and the rest is 0. Set `failure->struct_size` first.
///
/// # Safety
/// `failure` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_last_failure(failure: *mut spw_io_failure) -> spw_status {
    guard(|| {
        let nothing =
            spw_io_failure { struct_size: 0, system_errno: 0, offset: 0, bytes: 0, path: std::ptr::null() };
        let found = status::last_io_error(|error, path| spw_io_failure {
            system_errno: error.errno,
            offset: error.offset,
            bytes: error.bytes,
            path: path.as_ptr(),
            ..nothing
        });
        // SAFETY: the caller's promise is the callee's.
        unsafe { record::write(&found.unwrap_or(nothing), failure, "failure") }
    })
}

unsafe fn read_handles<'a>(handles: *const u64, count: u64) -> Result<&'a [u64]> {
    const MOST: u64 = isize::MAX as u64 / size_of::<u64>() as u64;
    match count {
        0 => Ok(&[]),
        _ if handles.is_null() => Err(Error::invalid("handles", format!("is NULL, with {count} handles"))),
        _ if count > MOST => Err(Error::invalid("count", format!("{count} passes the address space"))),
        // SAFETY: not NULL, and the caller's promise; the length is one that a slice can have.
        _ => Ok(unsafe { std::slice::from_raw_parts(handles, count as usize) }),
    }
}

unsafe fn give(to: *mut u64, value: u64) {
    if !to.is_null() {
        // SAFETY: not NULL, and the caller's promise.
        unsafe { to.write(value) };
    }
}
