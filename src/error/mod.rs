//! The error type of the crate; `capi::base` converts it to an `spw_status` and a message.
//!
//! | file | content |
//! |---|---|
//! | `mod.rs` | [`Error`], which every function of the crate returns |
//! | `io.rs` | operations on files |
//! | `tier.rs` | stored state |
//! | `round.rs` | speculation rounds, jobs of stages, updates on a tier |
//! | `gpu.rs` | the GPU and its driver |
//! | `arena.rs` | arenas of shared memory |
//! | `convert.rs` | constructors and conversions to [`Error`] |
#![forbid(unsafe_code)]

mod arena;
mod convert;
mod gpu;
mod io;
mod round;
mod tier;

use std::borrow::Cow;
use std::fmt;

pub use arena::{ArenaError, ArenaKind};
pub use gpu::{GpuError, GpuKind};
pub use io::{Doing, IoError, IoKind};
pub use round::{RoundError, RoundKind, Rounds};
pub use tier::{TierError, TierKind};

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
    #[error("Adam optimizer id {0} does not exist (never created, or destroyed)")]
    UnknownId(i32),
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
    /// There is no object with the requested number.
    #[error("{0}")]
    NotFound(String),
    /// An operation on a file failed.
    #[error("{0}")]
    Io(Box<IoError>),
    /// The state stored on a tier is damaged, or is not the requested one.
    #[error("{0}")]
    Tier(Box<TierError>),
    /// A call that the present state of a round does not allow; nothing changed.
    #[error("{0}")]
    Round(RoundError),
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

    /// True if a device or a server did not do what was asked: the path may be left out. False if this process lacks
    /// memory or descriptors, or if its own threads failed: then nothing is known about the path.
    pub fn is_of_a_path(&self) -> bool {
        const OWN: [i32; 5] = [libc::ENOMEM, libc::EMFILE, libc::ENFILE, libc::EFAULT, libc::ENOBUFS];
        matches!(self, Error::Io(error) if !OWN.contains(&error.errno))
    }

    /// True if another process claimed the tier. This process may not write to any of its paths.
    pub fn is_fenced(&self) -> bool {
        self.tier_kind() == Some(TierKind::Fenced)
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

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
