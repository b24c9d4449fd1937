//! Errors that several modules of a tier report alike.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;

use crate::error::{Doing, Error, IoError, Result, TierError, TierKind};
use crate::sys::private_files;

/// Error of a directory that a live process holds.
pub(super) fn locked(path: &Path, message: &str) -> Error {
    TierError::at(TierKind::Locked, path.to_string_lossy(), message)
}

/// Error of a system call on a directory or a lock. A file that belongs to another user is `Foreign`.
pub(super) fn failed(doing: Doing, path: &Path, error: io::Error, detail: &str) -> Error {
    if private_files::is_refusal(&error) {
        return TierError::at(TierKind::Foreign, path.to_string_lossy(), error.to_string());
    }
    let errno = error.raw_os_error().unwrap_or(match error.kind() {
        io::ErrorKind::NotFound => libc::ENOENT,
        _ => 0,
    });
    let detail = if errno == 0 { error.to_string() } else { detail.to_string() };
    IoError::of_errno(errno, doing, path.to_string_lossy()).because(detail).into()
}

/// Error of a tier that another process claimed.
pub(super) fn fenced(path: &str, other: &str) -> Error {
    let message = format!(
        "{other} claimed it while this process had it open; nothing was committed; close this tier, end one of the two \
         processes, and open the tier again"
    );
    TierError::at(TierKind::Fenced, path, message)
}

/// The outcome of a check of the owner before a removal: only another owner prevents it. An error of the device is that
/// of the calls which follow, and a damaged record does not keep the files.
pub(super) fn unless_fenced(checked: Result<()>) -> Result<()> {
    checked.or_else(|error| if error.is_fenced() { Err(error) } else { Ok(()) })
}

/// The error of a path, with the reason why its data could not be moved to another path.
pub(super) fn with_reason(error: &Error, reason: &Error) -> Error {
    error.clone().context(format_args!("the data on this path could not be moved to another: {reason}"))
}
