//! Waiting for operations of an I/O engine, and details of their failures.
#![allow(non_camel_case_types)]

use std::ffi::c_char;

use crate::capi::abi_struct::{self, c_struct};
use crate::capi::base::status::{self, spw_status};
use crate::capi::guard::guard;
use crate::capi::handle::{self};
use crate::capi::input::{self, timeout};
use crate::capi::io::engine::spw_io;
use crate::capi::output::{self};

/// Waits for the `count` operations in `handles` for up to `timeout_ms` milliseconds (0: poll; negative: without
/// limit), independently of other operations. `bytes_out` (may be NULL) receives the byte count of each. If operations
/// failed, the status is that of the first in `handles`, and the message counts the others. `count` may be 0.
///
/// After the call the handles are invalid, with two exceptions:
///
/// - SPW_ERR_TIMEOUT: all operations stay in flight, and their handles stay valid.
/// - SPW_ERR_DEADLINE: the handle is valid for `spw_io_holds_memory`.
///
/// # Safety
/// `handles` points to `count` numbers, or is NULL with 0. `bytes_out` is NULL or has room for `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_wait(
    io: Option<&spw_io>,
    handles: *const u64,
    count: u64,
    timeout_ms: i64,
    bytes_out: *mut u64,
) -> spw_status {
    guard(|| {
        let engine = &handle::get(io)?.0;
        // SAFETY: the caller meets the callee's requirements.
        let handles = unsafe { input::array(handles, count, "handles") }?;
        let write = |index: usize, bytes: u64| {
            if !bytes_out.is_null() {
                // SAFETY: there is room for each of the handles.
                unsafe { bytes_out.add(index).write(bytes) };
            }
        };
        match handles {
            [one] => write(0, engine.wait(*one, timeout(timeout_ms))?),
            many => {
                let bytes = engine.wait_many(many, timeout(timeout_ms))?;
                bytes.into_iter().enumerate().for_each(|(index, bytes)| write(index, bytes));
            }
        }
        Ok(())
    })
}

/// Waits for all operations for up to `timeout_ms` milliseconds, as `spw_io_wait`, and invalidates their handles.
/// `completed_out` (may be NULL) receives the number of operations; without any the call returns at once. If operations
/// failed, the status is that of the first, and the message counts the others.
///
/// # Safety
/// `completed_out` is NULL or points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_wait_all(
    io: Option<&spw_io>,
    timeout_ms: i64,
    completed_out: *mut u64,
) -> spw_status {
    guard(|| {
        let completed = handle::get(io)?.0.wait_all(timeout(timeout_ms))?;
        // SAFETY: the caller meets the callee's requirements.
        unsafe { output::write_optional(completed, completed_out) };
        Ok(())
    })
}

/// Requests cancellation of an operation. Wait for the operation as usual. It ends as SPW_ERR_CANCELLED or with its
/// normal result, after the system has released its memory. Requests that the device already has are not cancelled.
#[unsafe(no_mangle)]
pub extern "C" fn spw_io_cancel(io: Option<&spw_io>, handle: u64) -> spw_status {
    guard(|| handle::get(io)?.0.cancel(handle))
}

/// Writes 1 if the system may still use the memory of an operation after SPW_ERR_DEADLINE, else 0. Memory of
/// spw_pinned_alloc needs no check: the library quarantines it when it is freed.
///
/// # Safety
/// `holds_out` points to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_holds_memory(
    io: Option<&spw_io>,
    handle: u64,
    holds_out: *mut u32,
) -> spw_status {
    guard(|| {
        let holds = handle::get(io)?.0.holds_memory(handle)?.into();
        // SAFETY: the caller meets the callee's requirements.
        unsafe { output::write(holds, holds_out, "holds_out") }
    })
}

c_struct! { first 32;
/// Details of a failed file operation.
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
}

/// Reads the details of this thread's last failed call, whose message spw_last_error() returns. If that call was no
/// file operation, `path` is NULL and the other fields are 0.
///
/// # Safety
/// `failure_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_get_io_failure(failure_out: *mut spw_io_failure) -> spw_status {
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
        unsafe { abi_struct::write(&found.unwrap_or(nothing), failure_out, "failure_out") }
    })
}
