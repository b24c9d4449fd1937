//! The time limit of a call on a path, and the errors of a path that does not respond; the timeouts of callers.
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Doing, Error, IoError, IoKind, Result};
use crate::sys::time_limit::{self, Answer, NoAnswer};

/// Deadline that lies `timeout` ahead; `None` without a timeout.
pub(super) fn deadline_after(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Error of a caller whose timeout expired while the transfer is in flight.
pub(super) fn timed_out() -> Error {
    IoError::wait_timeout("the tier's transfer is still in flight")
}

/// Result of `work` on the files below `path`, or a `Deadline` error after `io_timeout`. A call that did not
/// return continues in its thread, and keeps the directory's lock until it returns.
pub(super) fn within_timeout<T: Send + 'static>(
    io_timeout: Option<Duration>,
    doing: Doing,
    path: &Path,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    answer(time_limit::run_within(io_timeout, path, work), io_timeout, doing, path)
}

/// The result of a call, or the error that says why there is none.
pub(super) fn answer<T>(
    found: Answer<Result<T>>,
    io_timeout: Option<Duration>,
    doing: Doing,
    path: &Path,
) -> Result<T> {
    let detail = match found.map_err(|error| Error::system("starting a thread", &error))? {
        Ok(result) => return result,
        Err(NoAnswer::TooLong) => format!(
            "the file system did not respond for {:.1} s; the call is still in flight and keeps the lock until it \
             returns",
            io_timeout.unwrap_or_default().as_secs_f64()
        ),
        Err(NoAnswer::EarlierCall) => format!("{EARLIER} and keeps the lock; try again after it returns"),
    };
    Err(no_response(IoKind::Deadline, doing, path, detail))
}

/// Why a path refuses a call.
pub(super) const EARLIER: &str =
    "an earlier call, to which the file system did not respond, is still in flight";

/// Error of a path that does not respond.
pub(super) fn no_response(kind: IoKind, doing: Doing, path: &Path, detail: String) -> Error {
    IoError::about(kind, doing, path.to_string_lossy()).because(detail).into()
}
