//! Waiting for operations of an I/O engine, and details of their failures.

use std::ffi::c_char;

use crate::capi::base::message;
use crate::capi::io::engine::spw_io;
use crate::capi::prelude::*;

/// As the `count` of a wait: all operations of the engine.
pub const SPW_IO_ALL: u64 = u64::MAX;

/// Waits for the `count` operations in `handles` for up to `timeout_ms` milliseconds (0: poll; negative: without
/// limit), independently of other operations. `bytes_out` (may be NULL) receives the byte count of each. If operations
/// failed, the status is that of the first in `handles`, and the message counts the others. `count` may be 0.
///
/// A `count` of SPW_IO_ALL waits for all operations of the engine; `handles` and `bytes_out` are then NULL. Without any the
/// call returns at once. Handles of other threads end too, also those that these threads wait for at that moment: their
/// calls return SPW_ERR_INVALID_ARGUMENT.
///
/// After the call the handles are invalid. SPW_ERR_TIMEOUT is the exception: all operations stay in flight, and their
/// handles stay valid. After SPW_ERR_DEADLINE the system may still use the memory of the operation, until `stuck` of `spw_io_stats` is 0.
/// The library keeps memory of spw_pinned_alloc until then, also if it is freed.
#[unsafe(no_mangle)]
pub extern "C" fn spw_io_wait(
    io: Option<&spw_io>,
    handles: In<u64>,
    count: u64,
    timeout_ms: i64,
    bytes_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let engine = &handle::get(io)?.0;
        if count == SPW_IO_ALL {
            if !handles.is_null() || !bytes_out.is_null() {
                return Err(Error::invalid("handles", "must be NULL, bytes_out too, with SPW_IO_ALL"));
            }
            return engine.wait_all(timeout(timeout_ms)).map(drop);
        }
        match handles.array(count, "handles")? {
            [one] => bytes_out.put_optional(engine.wait(*one, timeout(timeout_ms))?),
            many => bytes_out.put_all(engine.wait_many(many, timeout(timeout_ms))?),
        }
        Ok(())
    })
}

c_struct! { first 24;
/// Details of a failed file operation.
pub struct spw_io_failure {
    /// The system's errno; 0 if the system reported none.
    pub system_errno: i32,
    /// Offset in the file of the part that failed, in bytes.
    pub offset: u64,
    /// Bytes of that part.
    pub bytes: u64,
}
}

/// Reads the details of a failed call and the path of its file, as the caller named it. `error` is a number as for
/// `spw_error_text`; 0 is the last failed call of this thread. If that call was no file operation, the path is empty
/// and the fields are 0.
#[unsafe(no_mangle)]
pub extern "C" fn spw_get_io_failure(
    error: i32,
    failure_out: Out<spw_io_failure>,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let call = message::found(error)?;
        let (system_errno, offset, bytes, path) = match &call.1.io {
            Some(error) => (error.errno, error.offset, error.bytes, error.path.as_str()),
            None => (0, 0, 0, ""),
        };
        failure_out.write(&report!(spw_io_failure with { system_errno, offset, bytes }), "failure_out")?;
        text_out.put_text(&path.replace('\0', ""), size, needed_out)
    })
}
