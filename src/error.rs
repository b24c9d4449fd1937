//! The one error type of the crate; `capi::status` turns it into an `spw_status` and a message.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::fmt;

/// What went wrong, with enough words for a person to act on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument broke the contract written at the function.
    #[error("{argument}: {reason}")]
    InvalidArgument {
        /// The argument's name as the header spells it, `tensors[3].param` for a field.
        argument: Cow<'static, str>,
        /// Why it was refused.
        reason: String,
    },
    /// This build or machine cannot do it.
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
    /// The operating system refused.
    #[error("{what}: {reason}")]
    System {
        /// What was being done.
        what: &'static str,
        /// The system's words.
        reason: String,
    },
    /// What was given at open is used up; nothing changed.
    #[error("{0}")]
    LimitReached(String),
    /// The object is still in use; nothing changed.
    #[error("{0}")]
    Busy(String),
    /// Input or output on a file failed.
    #[error("{0}")]
    Io(Box<IoError>),
    /// What is stored on a tier is not what it should be.
    #[error("{0}")]
    Tier(Box<TierError>),
    /// A call that does not fit the state of its round of speculation; nothing changed.
    #[error("{0}")]
    Round(#[from] RoundError),
    /// The time given to a wait is over; what it waited for goes on.
    #[error("{0}")]
    Timeout(String),
    /// A bug inside spillway was caught; what was being written may be written in part.
    #[error("a bug inside spillway: {0}")]
    Internal(String),
    /// The GPU or its driver failed.
    #[error("{0}")]
    Gpu(Box<GpuError>),
}

/// How the GPU or its driver failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuKind {
    /// No driver library, or one that sees no device.
    NoDevice,
    /// The library is a toolkit's stub.
    DriverStub,
    /// The driver is older than the kernels need, or does not fit its kernel module.
    DriverTooOld,
    /// The driver could not compile the kernels.
    Jit,
    /// Device memory, or memory to register, is used up.
    OutOfMemory,
    /// An earlier error ended the context.
    Lost,
    /// CUDA was used before this process was forked.
    Forked,
    /// Any other refusal.
    Refused,
}

/// A failed call to the GPU's driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{doing}: {detail}")]
pub struct GpuError {
    /// How it failed.
    pub kind: GpuKind,
    /// What was being done.
    pub doing: String,
    /// The driver's name of the error, and what is known beside it.
    pub detail: String,
}

/// What is wrong with what is stored on a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierKind {
    /// Stored bytes do not match their checksum.
    Corrupt,
    /// Not written by this library, or by a version that this one does not read.
    Format,
    /// Whole, but of another run, rank or size than the one that was asked for.
    Foreign,
    /// A live process holds it.
    Locked,
    /// A path that holds a part is not there.
    PathMissing,
    /// The extent had a part on a path that is not there.
    Lost,
    /// There is no committed state.
    NoState,
    /// There is one, but not of the step that was asked for.
    NoStep,
}

/// What is wrong on a tier, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierError {
    /// What.
    pub kind: TierKind,
    /// File or directory.
    pub path: String,
    /// Name of the extent; empty if none is meant.
    pub extent: String,
    /// Block of the extent, and where it begins in the file.
    pub block: Option<(u64, u64)>,
    /// The rest, in words.
    pub detail: String,
}

impl fmt::Display for TierError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TierError { kind, path, extent, block, detail } = self;
        let what = match kind {
            TierKind::Corrupt => "stored bytes do not match their checksum",
            TierKind::Format => "not a tier that this version reads",
            TierKind::Foreign => "belongs to something else",
            TierKind::Locked => "in use by a live process",
            TierKind::PathMissing => "a path of the tier is missing",
            TierKind::Lost => "lost with a missing path",
            TierKind::NoState => "no committed state",
            TierKind::NoStep => "not there to be opened",
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

/// How a call did not fit the state of a round.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoundError {
    /// Nothing was begun yet.
    #[error("no round was begun")]
    NotBegun,
    /// One is open already.
    #[error("a round is open already; resolve or abort it first")]
    Open,
    /// It has its verdict.
    #[error("the round has its verdict already; begin the next one")]
    Resolved,
    /// A bucket is not there.
    #[error("bucket {0} was not submitted in this round")]
    Missing(u32),
    /// A bucket came twice.
    #[error("bucket {0} was submitted already in this round")]
    Submitted(u32),
    /// The event that a bucket waits for can never come.
    #[error("bucket {bucket} will never be ready: {reason}")]
    Event {
        /// Which bucket.
        bucket: u32,
        /// Why.
        reason: &'static str,
    },
}

/// How an operation on a file failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoKind {
    /// The system reported an error.
    Failed,
    /// No space on the device, or the quota is used up.
    NoSpace,
    /// The file ends before the bytes asked for.
    ShortFile,
    /// The caller's wait is over; the operation goes on.
    Timeout,
    /// The operation's own deadline passed.
    Deadline,
    /// The operation was cancelled.
    Cancelled,
    /// The file or a directory of its path does not exist.
    NotFound,
    /// Earlier operations on the same device are stuck past their deadline.
    PathFailed,
}

/// A failed operation on a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoError {
    /// How it failed.
    pub kind: IoKind,
    /// "reading", "writing", "opening", "syncing", "preallocating", "waiting".
    pub doing: &'static str,
    /// The file, as the caller named it.
    pub path: String,
    /// Where the failing part begins in the file.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
    /// The system's number, 0 if the system reported none.
    pub errno: i32,
    /// What else is known; empty if nothing.
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
    /// The kind that an errno means.
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

    /// The system's refusal of `what`.
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

    /// How an operation on a file failed, if that is what this is.
    pub fn io_kind(&self) -> Option<IoKind> {
        match self {
            Error::Io(error) => Some(error.kind),
            _ => None,
        }
    }

    /// True if there is no room: the device is full, the quota is used up, or the process may not make the file larger
    /// (RLIMIT_FSIZE). The device itself works.
    pub fn is_full(&self) -> bool {
        matches!(self, Error::Io(error) if error.kind == IoKind::NoSpace || error.errno == libc::EFBIG)
    }

    /// What is wrong with a tier, if that is what this is.
    pub fn tier_kind(&self) -> Option<TierKind> {
        match self {
            Error::Tier(error) => Some(error.kind),
            _ => None,
        }
    }
}

impl TierError {
    /// Trouble with a whole file or directory.
    pub fn at(kind: TierKind, path: impl Into<String>, detail: impl Into<String>) -> Error {
        let (path, detail) = (path.into(), detail.into());
        TierError { kind, path, extent: String::new(), block: None, detail }.into()
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

impl From<GpuError> for Error {
    fn from(error: GpuError) -> Self {
        Error::Gpu(Box::new(error))
    }
}

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
