//! Waiting for operations of an I/O engine, and details of their failures.
#![allow(non_camel_case_types)]

use std::ffi::c_char;

use super::guard::guard;
use super::io::{open, spw_io, timeout};
use super::library::out;
use super::record::{self, Record};
use super::status::{self, spw_status};
use crate::error::{Error, Result};

/// Waits for one operation for up to `timeout_ms` milliseconds (0: poll; negative: without limit). It returns the
/// operation's status and writes its byte count to `bytes_out` (may be NULL). After the call the handle is invalid,
/// with two exceptions:
///
/// - SPW_ERR_TIMEOUT: the operation stays in flight, and the handle stays valid.
/// - SPW_ERR_DEADLINE: the handle is valid for `spw_io_holds_memory`.
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

/// Waits for all operations, as `spw_io_wait`, and invalidates their handles. `completed_out` (may be NULL) receives
/// the number of operations; without any the call returns at once. If operations failed, the status is that of the
/// first, and the message counts the others.
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

/// Waits for the `count` operations in `handles`, as `spw_io_wait`, independently of other operations, and invalidates
/// their handles. If operations failed, the status is that of the first in `handles`, and the message counts the
/// others. After SPW_ERR_TIMEOUT all handles stay valid.
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
        // SAFETY: the caller meets the callee's requirements.
        unsafe { open(io)?.wait_many(read_handles(handles, count)?, timeout(timeout_ms)) }
    })
}

/// Requests cancellation of an operation. Wait for the operation as usual. It ends as SPW_ERR_CANCELLED or with its
/// normal result, after the system has released its memory. Requests that the device already has are not cancelled.
///
/// # Safety
/// `io` is an open engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_cancel(io: *mut spw_io, handle: u64) -> spw_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { open(io) }?.cancel(handle))
}

/// Writes 1 if the system may still use the memory of an operation after SPW_ERR_DEADLINE, else 0. Memory of spw_pool
/// and spw_pinned needs no check: the library quarantines it when it is freed.
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

/// Details of a failed file operation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_io_failure {
    /// `sizeof(spw_io_failure)`
    pub struct_size: u32,
    /// The system's errno; 0 if the system reported none.
    pub system_errno: i32,
    /// Offset in the file of the part that failed, in bytes.
    pub offset: u64,
    /// Bytes of that part.
    pub bytes: u64,
    /// The file, as the caller named it. Valid until the next failing call of this thread.
    pub path: *const c_char,
}

// SAFETY: integers and a pointer without padding; a null pointer is valid.
unsafe impl Record for spw_io_failure {
    const FIRST_SIZE: usize = 32;
    const NAME: &'static str = "spw_io_failure";
}

/// Reads the details of this thread's last failed call, whose message spw_last_error() returns. If that call was no
/// file operation, `path` is NULL and the other fields are 0. Set `failure->struct_size` first.
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
        // SAFETY: the caller meets the callee's requirements.
        unsafe { record::write(&found.unwrap_or(nothing), failure, "failure") }
    })
}

unsafe fn read_handles<'a>(handles: *const u64, count: u64) -> Result<&'a [u64]> {
    const MOST: u64 = isize::MAX as u64 / size_of::<u64>() as u64;
    match count {
        0 => Ok(&[]),
        _ if handles.is_null() => Err(Error::invalid("handles", format!("is NULL, with {count} handles"))),
        _ if count > MOST => Err(Error::invalid("count", format!("{count} passes the address space"))),
        // SAFETY: not NULL, and valid by the caller's promise; the length is one that a slice can have.
        _ => Ok(unsafe { std::slice::from_raw_parts(handles, count as usize) }),
    }
}

unsafe fn give(to: *mut u64, value: u64) {
    if !to.is_null() {
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { to.write(value) };
    }
}
