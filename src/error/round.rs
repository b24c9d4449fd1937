//! Calls that the state of a speculation round, or of the job of a stage, does not allow.
#![forbid(unsafe_code)]

use std::borrow::Cow;

/// Why a call does not fit the state of a speculation round.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoundError {
    /// No round was begun, or the last one ended without a bucket.
    #[error("no round is open; begin one first")]
    NotBegun,
    /// A round is open already.
    #[error("a round is open already; resolve or abort it first")]
    Open,
    /// The last round already has its verdict, and no new round is open.
    #[error("the round is resolved already; begin the next one")]
    Resolved,
    /// The last round has its verdict, and buckets of it are not final.
    #[error("buckets of the previous round are not final yet; wait for them first")]
    Unfinished,
    /// The round cannot have its verdict yet.
    #[error("the gradients of this round are still being measured; wait for the local result first")]
    Unmeasured,
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

impl RoundError {
    /// The text for an update on a tier, whose buckets are subgroups. It has none of the other errors.
    pub(super) fn of_update(&self) -> Cow<'static, str> {
        match self {
            RoundError::NotBegun => "no update is in progress; begin one first".into(),
            RoundError::Open => {
                "an update is in progress; give it its verdict and finish it, or roll the update back".into()
            }
            RoundError::Resolved => "the update has its verdict already; finish it".into(),
            RoundError::Missing(subgroup) => {
                format!("subgroup {subgroup} was not submitted in this update; submit it first").into()
            }
            RoundError::Submitted(subgroup) => {
                format!("subgroup {subgroup} was submitted already in this update").into()
            }
            other => other.to_string().into(),
        }
    }

    /// The text for the job of a stage, whose round has one bucket.
    pub(super) fn of_job(&self) -> Cow<'static, str> {
        match self {
            RoundError::NotBegun => "the stage has no open job; submit one first".into(),
            RoundError::Open => "the stage has an open job; commit it or roll it back first".into(),
            RoundError::Resolved => {
                "the job of the stage has its verdict already; submit the next one".into()
            }
            RoundError::Unfinished => "the previous job of the stage is not over; finish it first".into(),
            RoundError::Unmeasured => {
                "the job of the stage has not stepped its tensors; wait for it first".into()
            }
            RoundError::Missing(_) => "the job of the stage is not submitted yet; submit it first".into(),
            RoundError::Submitted(_) => {
                "the job of the stage is submitted already; commit it or roll it back first".into()
            }
            RoundError::Event { reason, .. } => {
                format!("the job of the stage will never be ready: {reason}; roll it back").into()
            }
        }
    }
}
