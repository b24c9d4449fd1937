//! Errors of the kernels. A kernel checks its arguments before it writes to memory.

use std::fmt;

/// Reason why a kernel call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The spans of one call do not match in length or element type.
    Argument {
        /// Name of the span, as the C header spells it.
        argument: &'static str,
        /// Why the span was refused.
        reason: String,
    },
    /// The processor lacks the instruction set, or no kernel exists for these element types or this kernel name.
    Unsupported(String),
}

impl Error {
    /// Creates an [`Error::Argument`].
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
