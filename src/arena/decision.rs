//! The decision word of an arena: which rounds of verdicts have an outcome. Pure.
//!
//! ```text
//! bits 63..32   settled: every round up to this one has an outcome
//! bits 31..0    decided: the last round that all processes posted before one of them left it
//! ```
//!
//! Invariants:
//! - `settled` only grows, by one compare-and-swap per step: each round gets one outcome, which never changes.
//! - A round that was decided had the posts of all processes. As long as a process has not posted a later round,
//!   `decided` does not pass its last posted round: it can learn the outcome of that round at any time.
#![forbid(unsafe_code)]

/// The value of the word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Every round up to this one has an outcome.
    pub settled: u32,
    /// The last decided round; 0 for none.
    pub decided: u32,
}

/// What became of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It has no outcome yet.
    Open,
    /// All processes posted it: their results are its verdict.
    Decided,
    /// A process left it before.
    Aborted,
    /// A later round was decided: this one's outcome is no longer known.
    Forgotten,
}

impl Decision {
    /// From the word in memory.
    pub fn of(word: u64) -> Decision {
        Decision { settled: (word >> 32) as u32, decided: word as u32 }
    }

    /// The word in memory.
    pub fn word(self) -> u64 {
        u64::from(self.settled) << 32 | u64::from(self.decided)
    }

    /// What became of a round.
    pub fn outcome(self, round: u32) -> Outcome {
        match self.decided.cmp(&round) {
            std::cmp::Ordering::Equal => Outcome::Decided,
            std::cmp::Ordering::Greater => Outcome::Forgotten,
            std::cmp::Ordering::Less if self.settled >= round => Outcome::Aborted,
            std::cmp::Ordering::Less => Outcome::Open,
        }
    }

    /// The next value, in which an open round is decided.
    pub fn decide(round: u32) -> Decision {
        Decision { settled: round, decided: round }
    }

    /// The next value, in which an open round is aborted.
    pub fn abort(self, round: u32) -> Decision {
        Decision { settled: round, ..self }
    }
}
