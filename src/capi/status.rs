//! Statuses and the message that goes with them.
#![allow(non_camel_case_types)]

use std::cell::RefCell;
use std::ffi::c_char;

use crate::error::Error;

/// Outcome of a call. Values are never renumbered or reused; newer libraries may add some, so treat an unknown
/// value as a failure.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum spw_status {
    /// The call did what it says.
    SPW_OK = 0,
    /// An argument broke the contract written at the function; the message names the argument and why.
    SPW_ERR_INVALID_ARGUMENT = 1,
    /// This build or machine cannot do it.
    SPW_ERR_UNSUPPORTED = 2,
    /// The optimizer id was never created, or was destroyed.
    SPW_ERR_UNKNOWN_ID = 3,
    /// A bug inside spillway was caught. Spans of the call may be partly stepped.
    SPW_ERR_INTERNAL = 9,
    /// The system refused; the message has its words.
    SPW_ERR_SYSTEM = 11,
}

thread_local! {
    // Ends with a NUL once it holds a message.
    static MESSAGE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The status of an error.
pub(super) fn of(error: &Error) -> spw_status {
    match error {
        Error::InvalidArgument { .. } => spw_status::SPW_ERR_INVALID_ARGUMENT,
        Error::Unsupported(_) => spw_status::SPW_ERR_UNSUPPORTED,
        Error::UnknownId { .. } => spw_status::SPW_ERR_UNKNOWN_ID,
        Error::System { .. } => spw_status::SPW_ERR_SYSTEM,
    }
}

/// Keeps the message of a failed call for this thread, and passes the status on.
pub(super) fn record(status: spw_status, message: &str) -> spw_status {
    let text = message.bytes().filter(|byte| *byte != 0).chain([0]).collect();
    // A thread that is already tearing down its locals loses the message, not the status.
    let _ = MESSAGE.try_with(|slot| slot.replace(text));
    status
}

#[cfg(test)]
pub(super) fn last_message() -> String {
    MESSAGE.with_borrow(|text| String::from_utf8_lossy(text).trim_end_matches('\0').to_string())
}

/// The name of a status, "SPW_ERR_UNKNOWN" for a value that this version does not define.
#[unsafe(no_mangle)]
pub extern "C" fn spw_status_name(status: i32) -> *const c_char {
    let name = match status {
        0 => c"SPW_OK",
        1 => c"SPW_ERR_INVALID_ARGUMENT",
        2 => c"SPW_ERR_UNSUPPORTED",
        3 => c"SPW_ERR_UNKNOWN_ID",
        9 => c"SPW_ERR_INTERNAL",
        11 => c"SPW_ERR_SYSTEM",
        _ => c"SPW_ERR_UNKNOWN",
    };
    name.as_ptr()
}

/// What went wrong in the last call of this thread that failed: which argument, and why. Never NULL; empty if none
/// failed. Good until the next failing call of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn spw_last_error() -> *const c_char {
    let message = MESSAGE.try_with(|slot| slot.borrow().first().map(|byte| std::ptr::from_ref(byte).cast()));
    message.ok().flatten().unwrap_or(c"".as_ptr())
}
