//! The one error type of the crate; `capi::status` turns it into an `spw_status` and a message.
#![forbid(unsafe_code)]

use std::borrow::Cow;

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
}

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
