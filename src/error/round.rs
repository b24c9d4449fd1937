//! Calls that the state of a round does not allow: of a speculation round, of the job of a stage, or of an update on a
//! tier.
#![forbid(unsafe_code)]

use std::fmt;

/// What has the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounds {
    /// A speculation round of buckets.
    Speculation,
    /// The job of a stage, which is a round of one bucket.
    Job,
    /// An update on a tier, a round of subgroups.
    Update,
}

/// A call that the present state does not allow; nothing changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundError {
    /// What has the state.
    pub of: Rounds,
    /// Why the call does not fit the state.
    pub kind: RoundKind,
}

/// Why a call does not fit the state of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RoundKind {
    /// No round was begun, or the last one ended without a bucket.
    NotBegun,
    /// A round is open already.
    Open,
    /// The last round already has its verdict, and no new round is open.
    Resolved,
    /// The last round has its verdict, and buckets of it are not final.
    Unfinished,
    /// The round cannot have its verdict yet.
    Unmeasured,
    /// A bucket was not submitted.
    Missing(u32),
    /// A bucket was submitted twice.
    Submitted(u32),
    /// The event that a bucket waits for can never happen.
    Event {
        /// Number of the bucket.
        bucket: u32,
        /// The reason.
        reason: &'static str,
    },
}

impl fmt::Display for RoundError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (round, a_round, begin) = match self.of {
            Rounds::Speculation => ("round", "a round", "begin"),
            Rounds::Job => ("job of the stage", "a job of the stage", "submit"),
            Rounds::Update => ("update", "an update", "begin"),
        };
        let part = |number: u32| match self.of {
            Rounds::Speculation => format!("bucket {number}"),
            Rounds::Job => "the job of the stage".to_string(),
            Rounds::Update => format!("subgroup {number}"),
        };
        match self.kind {
            RoundKind::NotBegun => write!(f, "no {round} is open; {begin} one first"),
            RoundKind::Open => {
                write!(
                    f,
                    "{a_round} is open already; give it its verdict and finish it, or roll the {round} back"
                )
            }
            RoundKind::Resolved => {
                write!(f, "the {round} has its verdict already; finish it, and {begin} the next one")
            }
            RoundKind::Unfinished => write!(f, "the previous {round} is not final yet; wait for it first"),
            RoundKind::Unmeasured => write!(
                f,
                "the gradients of the {round} are still being measured; wait for the local result first"
            ),
            RoundKind::Missing(number) => write!(f, "{} was not submitted; submit it first", part(number)),
            RoundKind::Submitted(number) => write!(f, "{} was submitted already", part(number)),
            RoundKind::Event { bucket, reason } => {
                write!(f, "{} will never be ready: {reason}; roll the {round} back", part(bucket))
            }
        }
    }
}
