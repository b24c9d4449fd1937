//! What a kernel refuses before it touches anything.

/// Why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Spans that do not fit each other.
    #[error("{argument}: {reason}")]
    Argument {
        /// The span's name as the C header spells it.
        argument: &'static str,
        /// Why it was refused.
        reason: String,
    },
    /// This processor cannot, or no kernel was written for these element types.
    #[error("{0}")]
    Unsupported(String),
}

impl Error {
    /// An [`Error::Argument`].
    pub(crate) fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        Error::Argument { argument, reason: reason.into() }
    }
}

/// Result with [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;
