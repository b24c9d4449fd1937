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

/// The operation on a file that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// A call that finds, opens or creates a file, or asks for its properties.
    Opening,
    /// A transfer to memory.
    Reading,
    /// A read of the record of a directory's owner.
    ReadingOwner,
    /// A transfer from memory.
    Writing,
    /// A close.
    Closing,
    /// A removal.
    Removing,
    /// Making written data durable.
    Syncing,
    /// A reservation of space.
    Preallocating,
    /// A commit of a tier.
    Committing,
    /// A wait for an operation in flight.
    Waiting,
}

impl fmt::Display for Doing {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Doing::Opening => "opening",
            Doing::Reading => "reading",
            Doing::ReadingOwner => "reading the owner of",
            Doing::Writing => "writing",
            Doing::Closing => "closing",
            Doing::Removing => "removing",
            Doing::Syncing => "syncing",
            Doing::Preallocating => "preallocating",
            Doing::Committing => "committing to",
            Doing::Waiting => "waiting",
        })
    }
}

/// A failed operation on a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoError {
    /// Kind of the failure.
    pub kind: IoKind,
    /// The operation.
    pub doing: Doing,
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
        match doing {
            Doing::Waiting => write!(out, "{doing}")?,
            // The failure of a call that moves no bytes.
            Doing::Opening | Doing::Syncing => write!(out, "{doing} {path}")?,
            _ if *bytes == 0 && *offset == 0 => write!(out, "{doing} {path}")?,
            _ => write!(out, "{doing} {bytes} bytes at offset {offset} of {path}")?,
        }
        if *errno != 0 {
            let words = std::io::Error::from_raw_os_error(*errno).to_string();
            write!(out, ": {}", words.replace("os error", "errno"))?;
        }
        if detail.is_empty() { Ok(()) } else { write!(out, ": {detail}") }
    }
}

impl IoError {
    /// A failure of this kind on a whole file.
    pub fn about(kind: IoKind, doing: Doing, path: impl Into<String>) -> IoError {
        IoError { kind, doing, path: path.into(), offset: 0, bytes: 0, errno: 0, detail: String::new() }
    }

    /// The failure with which a system call ended. `errno` is 0 if the system reported none.
    pub fn of_errno(errno: i32, doing: Doing, path: impl Into<String>) -> IoError {
        IoError { errno, ..IoError::about(IoKind::of_errno(errno), doing, path) }
    }

    /// The failure of a call of the standard library. Without an errno the error's text is the detail.
    pub fn of(error: &std::io::Error, doing: Doing, path: impl Into<String>) -> IoError {
        match error.raw_os_error() {
            Some(errno) => IoError::of_errno(errno, doing, path),
            None if error.kind() == std::io::ErrorKind::NotFound => {
                IoError::of_errno(libc::ENOENT, doing, path)
            }
            None => IoError::of_errno(0, doing, path).because(error.to_string()),
        }
    }

    /// The failure of the part of `bytes` bytes at `offset`.
    pub fn at(self, offset: u64, bytes: u64) -> IoError {
        IoError { offset, bytes, ..self }
    }

    /// The failure with further details.
    pub fn because(self, detail: impl Into<String>) -> IoError {
        IoError { detail: detail.into(), ..self }
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
