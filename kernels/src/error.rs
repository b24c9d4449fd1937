//! What a kernel refuses before it touches anything.

use std::fmt;

/// Why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Spans that do not fit each other.
    Argument {
        /// The span's name as the C header spells it.
        argument: &'static str,
        /// Why it was refused.
        reason: String,
    },
    /// This processor cannot, or no kernel was written for these element types.
    Unsupported(String),
}

impl Error {
    /// An [`Error::Argument`].
    pub(crate) fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        Error::Argument { argument, reason: reason.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Argument { argument, reason } => write!(f, "{argument}: {reason}"),
            Error::Unsupported(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

/// Result with [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;
