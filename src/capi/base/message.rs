//! The messages of failed calls, by number.

use std::ffi::c_char;
use std::sync::Arc;

use super::failure::{self, Failure};
use crate::capi::prelude::*;

/// Writes the message of one failed call. Any thread may ask for it. A failing call stores the number of its failure in
/// errno; pass that number as `error`. Any other call may change errno. So a runtime that moves tasks from thread to thread
/// reads errno together with the status: by `status, err := C.spw_f()` in Go, captureCallState("errno") in Java, or
/// SetLastError in C#. `error` 0 is the last failed call of this thread.
///
/// The messages of the last 1024 failed calls of the process are kept. The number of an older call, or of no failed call, is
/// SPW_ERR_NOT_FOUND.
#[unsafe(no_mangle)]
pub extern "C" fn spw_error_text(
    error: i32,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| text_out.put_text(&found(error)?.1.message, size, needed_out))
}

/// The failed call with this number in errno; of this thread for 0.
pub(in crate::capi) fn found(error: i32) -> Result<Arc<(u64, Failure)>> {
    failure::find(error).ok_or_else(|| {
        Error::NotFound(match error {
            0 => "no call of this thread has failed".to_string(),
            _ => format!(
                "no failed call has left {error} in errno, or 1024 calls failed after it; read errno directly after the call"
            ),
        })
    })
}
