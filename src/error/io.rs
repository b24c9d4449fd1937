//! Failures of operations on files.
#![forbid(unsafe_code)]

use std::fmt;

/// Kind of a file operation's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoKind {
    /// The system reported an error.
    Failed,
    /// The device is full, or the quota is used up.
    NoSpace,
    /// The file ends before the end of the requested range.
    ShortFile,
    /// The caller's wait timed out; the operation is still in flight.
    Timeout,
    /// The operation exceeded its own deadline.
    Deadline,
    /// The operation was cancelled.
    Cancelled,
    /// The file or a directory of its path does not exist.
    NotFound,
    /// Earlier operations on the same device are stuck past their deadline, or no usable path is left for a commit.
    PathFailed,
}

/// A failed operation on a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoError {
    /// Kind of the failure.
    pub kind: IoKind,
    /// The operation: "reading", "writing", "opening", "closing", "removing", "syncing", "preallocating", "committing" or
    /// "waiting".
    pub doing: &'static str,
    /// The file, as the caller named it.
    pub path: String,
    /// Offset of the failed part in the file.
    pub offset: u64,
    /// Length of the failed part in bytes.
    pub bytes: u64,
    /// The errno, 0 if the system reported none.
    pub errno: i32,
    /// Further details; empty if there are none.
    pub detail: String,
}

impl fmt::Display for IoError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let IoError { doing, path, offset, bytes, errno, detail, .. } = self;
        match *doing {
            "waiting" => write!(out, "waiting")?,
            "committing" => write!(out, "committing to {path}")?,
            // The failure of a call that moves no bytes.
            "opening" | "syncing" => write!(out, "{doing} {path}")?,
            _ if *bytes == 0 && *offset == 0 => write!(out, "{doing} {path}")?,
            _ => write!(out, "{doing} {bytes} bytes at offset {offset} of {path}")?,
        }
        if *errno != 0 {
            let words = std::io::Error::from_raw_os_error(*errno).to_string();
            write!(out, ": {}", words.replace("os error", "errno"))?;
        }
        match detail.is_empty() {
            true => Ok(()),
            false => write!(out, ": {detail}"),
        }
    }
}

impl IoKind {
    /// The kind for an errno.
    pub fn of_errno(errno: i32) -> IoKind {
        use std::io::ErrorKind as Kind;
        match std::io::Error::from_raw_os_error(errno).kind() {
            Kind::StorageFull | Kind::QuotaExceeded => IoKind::NoSpace,
            Kind::NotFound => IoKind::NotFound,
            _ => IoKind::Failed,
        }
    }
}
