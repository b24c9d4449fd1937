//! The error type of the crate; `capi::base` converts it to an `spw_status` and a message.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::fmt;

/// An error, with a message that tells the user what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument violates the contract of the function.
    #[error("{argument}: {reason}")]
    InvalidArgument {
        /// The argument's name as in the C header, for a field e.g. `tensors[3].param`.
        argument: Cow<'static, str>,
        /// Why it was refused.
        reason: String,
    },
    /// This build or machine does not support the operation.
    #[error("{0}")]
    Unsupported(String),
    /// A DeepSpeed-style optimizer id that was never created, or was destroyed.
    #[error("{optimizer} optimizer id {id} does not exist (never created, or destroyed)")]
    UnknownId {
        /// "Adam", "Adagrad" or "Lion".
        optimizer: &'static str,
        /// The id as given.
        id: i32,
    },
    /// A system call failed.
    #[error("{what}: {reason}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The system's error text.
        reason: String,
    },
    /// A limit that was set at open is reached, or a commit would exceed what an open accepts; nothing changed.
    #[error("{0}")]
    LimitReached(String),
    /// The object is still in use; nothing changed.
    #[error("{0}")]
    Busy(String),
    /// An operation on a file failed.
    #[error("{0}")]
    Io(Box<IoError>),
    /// The state stored on a tier is damaged, or is not the requested one.
    #[error("{0}")]
    Tier(Box<TierError>),
    /// A call that the present state of its speculation round does not allow; nothing changed.
    #[error("{0}")]
    Round(#[from] RoundError),
    /// A wait timed out; the operation is still in flight.
    #[error("{0}")]
    Timeout(String),
    /// A bug inside spillway was caught. Memory or files that were being written may be partly written.
    #[error("internal error in spillway, please report it: {0}")]
    Internal(String),
    /// The GPU or its driver failed.
    #[error("{0}")]
    Gpu(Box<GpuError>),
    /// An arena of shared memory cannot be used as requested.
    #[error("{0}")]
    Arena(Box<ArenaError>),
}

/// Kind of an arena failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArenaKind {
    /// A writer of the region ended in the middle of a write.
    Torn,
    /// The region was written while it was read.
    Changed,
    /// A process that the call depends on has ended, or has left the round.
    PeerEnded,
    /// The memory is not an arena, or not one of a format that this version reads.
    Format,
    /// The memory belongs to another user, or is no regular file with one name.
    Foreign,
    /// An arena of this name exists.
    Exists,
    /// There is no arena of this name.
    Missing,
}

/// An arena failure and its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaError {
    /// Kind of the failure.
    pub kind: ArenaKind,
    /// The arena, and the region or the process.
    pub what: String,
    /// Why, and what to do.
    pub detail: String,
}

impl fmt::Display for ArenaError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self.kind {
            ArenaKind::Torn => "its writer ended in the middle of a write",
            ArenaKind::Changed => "written while it was read",
            ArenaKind::PeerEnded => "a process has ended or left",
            ArenaKind::Format => "not an arena that this version reads",
            ArenaKind::Foreign => "not a regular file of this user alone",
            ArenaKind::Exists => "exists already",
            ArenaKind::Missing => "does not exist",
        };
        write!(out, "{}: {words}: {}", self.what, self.detail)
    }
}

/// Kind of a GPU or driver failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuKind {
    /// There is no driver library, or the driver reports no device.
    NoDevice,
    /// The library is a CUDA toolkit's stub.
    DriverStub,
    /// The driver is older than the kernels need, or does not match its kernel module.
    DriverTooOld,
    /// The driver could not compile the kernels.
    Jit,
    /// Device memory, or memory that can be registered, is used up.
    OutOfMemory,
    /// An earlier error destroyed the context.
    Lost,
    /// CUDA was used before this process was forked.
    Forked,
    /// Any other error.
    Refused,
}

/// A failed call to the GPU's driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{doing}: {detail}")]
pub struct GpuError {
    /// Kind of the failure.
    pub kind: GpuKind,
    /// The operation that failed.
    pub doing: String,
    /// The driver's name of the error, and further facts.
    pub detail: String,
}

/// Kind of a tier failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierKind {
    /// Stored bytes do not match their checksum.
    Corrupt,
    /// The files are no tier, have a format version that this library does not read, or lost their superblocks.
    Format,
    /// The tier belongs to another run, rank, host or number of ranks, or its paths differ after separate opens. Or a
    /// file or directory belongs to another user, is a link, or has a second name. Or an extent has other streams. Or a
    /// tier exists where one would be created.
    Foreign,
    /// A live process holds the tier.
    Locked,
    /// A path that stores a part of the tier is missing, or its files were moved or replaced.
    PathMissing,
    /// A part of the extent was stored on a path that is missing.
    Lost,
    /// There is no committed state.
    NoState,
    /// There is a committed state, but not of the requested step.
    NoStep,
}

/// A tier failure and its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierError {
    /// Kind of the failure.
    pub kind: TierKind,
    /// The file or directory.
    pub path: String,
    /// Name of the extent; empty if the failure concerns no extent.
    pub extent: String,
    /// Number of the block in the extent, and the offset of the block in the file.
    pub block: Option<(u64, u64)>,
    /// Further details.
    pub detail: String,
}

impl fmt::Display for TierError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TierError { kind, path, extent, block, detail } = self;
        let what = match kind {
            TierKind::Corrupt => "stored bytes do not match their checksum",
            TierKind::Format => "not a tier, or not of a format that this version reads",
            TierKind::Foreign => "does not match the request",
            TierKind::Locked => "in use by a live process",
            TierKind::PathMissing => "a path of the tier is missing",
            TierKind::Lost => "lost: stored on a path that is missing",
            TierKind::NoState => "no committed state",
            TierKind::NoStep => "the requested step is not available",
        };
        write!(out, "{path}: {what}")?;
        if !extent.is_empty() {
            write!(out, ": extent {extent:?}")?;
        }
        if let Some((block, offset)) = block {
            write!(out, ", block {block} at offset {offset}")?;
        }
        match detail.is_empty() {
            true => Ok(()),
            false => write!(out, ": {detail}"),
        }
    }
}

/// Why a call does not fit the state of a speculation round.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoundError {
    /// No round was begun, or the last one ended without a bucket.
    #[error("no round or job is open; begin or submit one first")]
    NotBegun,
    /// A round is open already.
    #[error("a round is open already; resolve or abort it first")]
    Open,
    /// The last round already has its verdict, and no new round is open.
    #[error("the round is resolved already; begin the next one")]
    Resolved,
    /// A bucket was not submitted.
    #[error("bucket {0} was not submitted in this round")]
    Missing(u32),
    /// A bucket was submitted twice.
    #[error("bucket {0} was submitted already in this round")]
    Submitted(u32),
    /// The event that a bucket waits for can never happen.
    #[error("bucket {bucket} will never be ready: {reason}")]
    Event {
        /// Number of the bucket.
        bucket: u32,
        /// The reason.
        reason: &'static str,
    },
}

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
    /// The operation: "reading", "writing", "opening", "syncing", "preallocating" or "waiting".
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
            "opening" | "syncing" => write!(out, "{doing} {path}")?,
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

impl Error {
    /// An [`Error::InvalidArgument`].
    pub fn invalid(argument: impl Into<Cow<'static, str>>, reason: impl Into<String>) -> Self {
        Error::InvalidArgument { argument: argument.into(), reason: reason.into() }
    }

    /// An [`Error::System`]: the operation `what` failed with the system's `error`.
    pub fn system(what: &'static str, error: &std::io::Error) -> Self {
        Error::System { what, reason: error.to_string().replace("os error", "errno") }
    }

    /// The same error with `prefix` before the argument's name; other kinds are unchanged.
    pub fn within(self, prefix: &str) -> Self {
        match self {
            Error::InvalidArgument { argument, reason } => {
                Error::InvalidArgument { argument: format!("{prefix}{argument}").into(), reason }
            }
            other => other,
        }
    }

    /// The same error without `prefix` before the argument's name.
    pub fn without(self, prefix: &str) -> Self {
        match self {
            Error::InvalidArgument { argument, reason } => {
                let argument = argument.strip_prefix(prefix).map(str::to_string).map_or(argument, Cow::from);
                Error::InvalidArgument { argument, reason }
            }
            other => other,
        }
    }

    /// The same error with `more` appended to its detail; kinds without a detail are unchanged.
    pub fn context(mut self, more: impl fmt::Display) -> Self {
        let detail = match &mut self {
            Error::Io(error) => &mut error.detail,
            Error::Tier(error) => &mut error.detail,
            Error::Gpu(error) => &mut error.detail,
            _ => return self,
        };
        let separator = if detail.is_empty() { "" } else { "; " };
        *detail = format!("{detail}{separator}{more}");
        self
    }

    /// The kind of a file operation's failure; `None` for other errors.
    pub fn io_kind(&self) -> Option<IoKind> {
        match self {
            Error::Io(error) => Some(error.kind),
            _ => None,
        }
    }

    /// True if there is no room: the device is full, the quota is used up, or the file may not grow (RLIMIT_FSIZE). The
    /// device itself works.
    pub fn is_full(&self) -> bool {
        matches!(self, Error::Io(error) if error.kind == IoKind::NoSpace || error.errno == libc::EFBIG)
    }

    /// The kind of an arena failure; `None` for other errors.
    pub fn arena_kind(&self) -> Option<ArenaKind> {
        if let Error::Arena(error) = self { Some(error.kind) } else { None }
    }

    /// The kind of a tier failure; `None` for other errors.
    pub fn tier_kind(&self) -> Option<TierKind> {
        match self {
            Error::Tier(error) => Some(error.kind),
            _ => None,
        }
    }
}

impl IoError {
    /// A caller's wait timed out; `detail` names the operations that are still in flight.
    pub fn wait_timeout(detail: impl Into<String>) -> Error {
        IoError {
            kind: IoKind::Timeout,
            doing: "waiting",
            path: String::new(),
            offset: 0,
            bytes: 0,
            errno: 0,
            detail: detail.into(),
        }
        .into()
    }
}

impl TierError {
    /// An error about a whole file or directory.
    pub fn at(kind: TierKind, path: impl Into<String>, detail: impl Into<String>) -> Error {
        let (path, detail) = (path.into(), detail.into());
        TierError { kind, path, extent: String::new(), block: None, detail }.into()
    }

    /// An error about block number `block` of an extent, which is stored at `offset` of the file `path`, and does not
    /// match its checksum.
    pub fn corrupt_block(path: &str, extent: &str, (block, offset): (u32, u64), detail: String) -> Error {
        let (path, extent) = (path.to_string(), extent.to_string());
        let block = Some((block.into(), offset));
        TierError { kind: TierKind::Corrupt, path, extent, block, detail }.into()
    }
}

impl From<spillway_kernels::Error> for Error {
    fn from(error: spillway_kernels::Error) -> Self {
        match error {
            spillway_kernels::Error::Argument { argument, reason } => Error::invalid(argument, reason),
            spillway_kernels::Error::Unsupported(what) => Error::Unsupported(what),
        }
    }
}

impl From<TierError> for Error {
    fn from(error: TierError) -> Self {
        Error::Tier(Box::new(error))
    }
}

impl From<IoError> for Error {
    fn from(error: IoError) -> Self {
        Error::Io(Box::new(error))
    }
}

impl ArenaError {
    /// An error of this kind.
    pub fn of(kind: ArenaKind, what: impl Into<String>, detail: impl Into<String>) -> Error {
        Error::Arena(Box::new(ArenaError { kind, what: what.into(), detail: detail.into() }))
    }
}

impl From<GpuError> for Error {
    fn from(error: GpuError) -> Self {
        Error::Gpu(Box::new(error))
    }
}

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
