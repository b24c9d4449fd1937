//! Timeouts of callers: the deadline, and the timeout error.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use crate::error::{Error, IoError};

/// Deadline that lies `timeout` ahead; `None` without a timeout.
pub(super) fn deadline_after(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Error of a caller whose timeout expired while the transfer is in flight.
pub(super) fn timed_out() -> Error {
    IoError::wait_timeout("the tier's transfer is still in flight")
}
