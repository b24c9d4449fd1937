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

/// Gives an open round the outcome of `next`; a round that has one keeps it. `exchange` replaces the word in memory if it
/// has the first value, and returns the word's value otherwise. Returns true if the word was replaced.
pub fn give_outcome(
    mut seen: Decision,
    round: u32,
    next: impl Fn(Decision) -> Decision,
    exchange: impl Fn(u64, u64) -> Result<(), u64>,
) -> bool {
    while seen.outcome(round) == Outcome::Open {
        match exchange(seen.word(), next(seen).word()) {
            Ok(()) => return true,
            Err(other) => seen = Decision::of(other),
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    type Attempt = fn(Decision) -> Decision;

    /// Another process changes the word between the look at it and each attempt to replace it.
    #[test]
    fn the_first_outcome_of_a_round_stays_in_every_interleaving() {
        let decide: Attempt = |_| Decision::decide(5);
        let abort: Attempt = |seen| seen.abort(5);
        let rivals: [Attempt; 6] =
            [|seen| seen, decide, abort, |seen| seen.abort(4), |seen| seen.abort(7), |_| Decision::decide(7)];
        for (mine, own) in [(decide, Outcome::Decided), (abort, Outcome::Aborted)] {
            for first in rivals {
                for second in rivals {
                    let start = Decision { settled: 3, decided: 2 };
                    let (word, steps) = (Cell::new(start.word()), Cell::new([Some(first), Some(second)]));
                    let rival_found = Cell::new(Outcome::Open);
                    let exchange = |seen: u64, value: u64| {
                        let [next, later] = steps.get();
                        steps.set([later, None]);
                        let now = Decision::of(word.get());
                        if let Some(step) = next.filter(|_| now.outcome(5) == Outcome::Open) {
                            word.set(step(now).word());
                        }
                        rival_found.set(Decision::of(word.get()).outcome(5));
                        if word.get() != seen {
                            return Err(word.get());
                        }
                        word.set(value);
                        Ok(())
                    };
                    let replaced = give_outcome(start, 5, mine, exchange);
                    let found = Decision::of(word.get()).outcome(5);
                    match rival_found.get() {
                        Outcome::Open => assert!(replaced && found == own),
                        rival => assert!(!replaced && found == rival),
                    }
                }
            }
        }
    }
}
