//! Calls that the state of a speculation round does not allow.
#![forbid(unsafe_code)]

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
