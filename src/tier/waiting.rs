//! Timeouts of callers: the deadline, and the timeout error.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use crate::error::{Error, IoError, IoKind};

/// Deadline that lies `timeout` ahead; `None` without a timeout.
pub(super) fn moment(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Error of a caller whose timeout expired while the transfer is in flight.
pub(super) fn timed_out() -> Error {
    let detail = "the tier's transfer is still under way".to_string();
    IoError {
        kind: IoKind::Timeout,
        doing: "waiting",
        path: String::new(),
        offset: 0,
        bytes: 0,
        errno: 0,
        detail,
    }
    .into()
}
