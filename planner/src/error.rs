//! Errors of the planners. The library maps each to the error of its own with the same text.
#![forbid(unsafe_code)]

use std::borrow::Cow;

/// An error, with a message that tells the user what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument violates the contract of the function.
    #[error("{argument}: {reason}")]
    InvalidArgument {
        /// The argument's name, for a field e.g. `units[3].forward`.
        argument: Cow<'static, str>,
        /// Why it was refused.
        reason: String,
    },
    /// The given places have no room for what they are to hold.
    #[error("{0}")]
    NoRoom(String),
    /// The plan needs more memory than there is.
    #[error("{what}: {reason}")]
    OutOfMemory {
        /// What was planned.
        what: &'static str,
        /// The memory that was asked for.
        reason: String,
    },
    /// A defect of the planner.
    #[error("{0}")]
    Internal(String),
}

impl Error {
    /// An [`Error::InvalidArgument`].
    pub fn invalid(argument: impl Into<Cow<'static, str>>, reason: impl Into<String>) -> Self {
        Error::InvalidArgument { argument: argument.into(), reason: reason.into() }
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
}

/// Result with [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;
