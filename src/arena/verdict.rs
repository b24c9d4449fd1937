//! Results that the processes of one machine post, and the verdict that each of them waits for.
//!
//! The decision word gives every round one outcome for all processes: decided by the first process that sees the posts of
//! all, or aborted by a process that leaves the round before that.
//!
//! Invariants:
//! - A process posts a round after its last posted round has an outcome. Every process has a slot with two results; a
//!   post never replaces the result of the last decided round. A process that posted a decided round, and no later one,
//!   finds the results of all processes.
//! - A process holds the lock of its slot from its join until it ends or closes the arena. A slot that has joined, has
//!   not posted, and is not locked belongs to a process that ended.
//! - A process that joined gets the error `PeerEnded` only for a round that is aborted.
//! - The sum adds the slots in their order, so every process gets the same bits.
#![forbid(unsafe_code)]

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use super::decision::{self, Decision, Outcome};
use super::handle::{Arena, PROCESS_LOCKS};
use super::read::Deadline;
use crate::error::{ArenaKind, Error, Result};
use crate::kernel::squares;
use crate::optim::StepStats;
use crate::sys::fork;

const NONFINITE: u64 = 1;
const FAILED: u64 = 2;

/// The results of all processes together.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Verdict {
    /// Statistics of all gradients.
    pub stats: StepStats,
    /// Number of processes that failed.
    pub failed: u32,
}

/// State of a slot for a round.
enum Posted {
    No,
    Yes(u64, f64),
    /// It has a later round, and not this one.
    Later(u64),
}

impl Arena {
    /// Takes the slot `process` for this handle. A process joins before the others wait for it, so that its death is
    /// noticed. An open round that an earlier process posted in this slot is aborted. Joining again does nothing. Errors:
    /// another handle has the slot (`Busy`).
    pub fn join(&self, process: u32) -> Result<()> {
        self.check_slot(process)?;
        let slot = self.layout.slot(process);
        if !self.take_lock(PROCESS_LOCKS + u64::from(process))? {
            let holder = self.mapping.load64(slot.joined(), Ordering::Relaxed);
            return Err(Error::Busy(format!("{}: process {holder} has joined as {process}", self.title)));
        }
        self.mapping.store64(slot.joined(), fork::id().into(), Ordering::SeqCst);
        if !self.joined[process as usize].swap(true, Ordering::AcqRel) {
            let last = self.rounds_of(process).into_iter().max().unwrap_or(0);
            self.leave(process, last as u32);
        }
        Ok(())
    }

    /// Posts the result of this process for `round`, from 1 on. `failed`: a stage of the process failed. Errors: the
    /// handle has not joined; the round was posted before; the last posted round has no outcome.
    pub fn post(&self, process: u32, round: u64, stats: StepStats, failed: bool) -> Result<()> {
        self.check_joined(process)?;
        let round = self.numbered(round)?;
        let _one_at_a_time = self.posting.lock();
        let (decision, rounds) = (self.decision(), self.rounds_of(process));
        let before = rounds[0].max(rounds[1]);
        if before >= u64::from(round) {
            return Err(Error::invalid(
                "round",
                format!("is {round}, but this process has posted {before}; post each round once"),
            ));
        }
        if before > u64::from(decision.settled) {
            let reason = format!("is {round}, but round {before} is open; wait for its verdict, or abort it");
            return Err(Error::invalid("round", reason));
        }
        let kept = |round: u64| round == u64::from(decision.decided);
        let free = if kept(rounds[0]) || !kept(rounds[1]) && rounds[1] < rounds[0] { 1 } else { 0 };
        let [posted, flags, sum] = self.layout.slot(process).results()[free];
        let word = u64::from(stats.nonfinite) * NONFINITE + u64::from(failed) * FAILED;
        self.mapping.store64(posted, 0, Ordering::SeqCst);
        self.mapping.store64(flags, word, Ordering::SeqCst);
        self.mapping.store64(sum, stats.sum_squares.to_bits(), Ordering::SeqCst);
        self.mapping.store64(posted, round.into(), Ordering::SeqCst);
        // Of the processes that post last, at least one sees the posts of all.
        if self.missing(round).is_none() {
            self.settle_round(round, |_| Decision::decide(round));
        }
        self.mapping.ring(self.layout.verdict_bell());
        Ok(())
    }

    /// Waits for the outcome of `round`, and returns the verdict of a round that is decided. Errors: the round is aborted
    /// (`PeerEnded`), by this call if a process ended before it posted and this handle has joined; a timeout, after which
    /// the round is open still. A handle that has not joined waits on for a process that ended: its number may get a new
    /// process, which posts.
    pub fn wait_verdict(&self, round: u64, timeout: Option<Duration>) -> Result<Verdict> {
        let round = self.numbered(round)?;
        let deadline = Deadline::after(timeout);
        loop {
            let bell = self.mapping.load32(self.layout.verdict_bell(), Ordering::Acquire);
            if let Some(verdict) = self.outcome(round)? {
                return verdict.ok_or_else(|| self.aborted(round));
            }
            let (missing, mut ended) = (self.missing(round), false);
            match missing {
                // The process that posted last ended before it decided.
                None if self.takes_part() => {
                    self.settle_round(round, |_| Decision::decide(round));
                    continue;
                }
                Some(process) => {
                    ended = self.has_ended(process, round)?;
                    if ended && self.takes_part() {
                        self.settle_round(round, |seen| seen.abort(round));
                        continue;
                    }
                }
                None => {}
            }
            let left = deadline.slice(|| match missing {
                Some(process) if ended => {
                    format!("{} ended before it posted round {round}, which is open", self.titled(process))
                }
                Some(process) => format!("process {process} has not posted round {round}"),
                None => format!("round {round} has no outcome"),
            })?;
            self.mapping.wait(self.layout.verdict_bell(), bell, left);
        }
    }

    /// Leaves `round`, posted or not: aborts it for all processes, unless it is decided already. Returns the verdict of a
    /// decided round, which this process follows as all others do; `None` for an aborted one. Open rounds below `round` are
    /// aborted too.
    pub fn abort_round(&self, process: u32, round: u64) -> Result<Option<Verdict>> {
        self.check_joined(process)?;
        let round = self.numbered(round)?;
        self.leave(process, round);
        self.outcome(round)?.ok_or_else(|| Error::Internal("a round without outcome".to_string()))
    }

    fn leave(&self, process: u32, round: u32) {
        if self.decision().outcome(round) == Outcome::Open {
            self.mapping.store64(self.layout.slot(process).left(), round.into(), Ordering::SeqCst);
            self.settle_round(round, |seen| seen.abort(round));
        }
    }

    /// Gives a round its outcome, unless it has one.
    fn settle_round(&self, round: u32, next: impl Fn(Decision) -> Decision) {
        let exchange = |seen, value| self.mapping.exchange64(self.layout.decision(), seen, value);
        if decision::give_outcome(self.decision(), round, next, exchange) {
            self.mapping.ring(self.layout.verdict_bell());
        }
    }

    /// `None` for an open round, else its verdict, which an aborted round lacks.
    fn outcome(&self, round: u32) -> Result<Option<Option<Verdict>>> {
        Ok(match self.decision().outcome(round) {
            Outcome::Open => None,
            Outcome::Decided => Some(Some(self.total(round)?)),
            Outcome::Aborted => Some(None),
            Outcome::Forgotten => return Err(self.forgotten(round, "a later round was decided")),
        })
    }

    fn total(&self, round: u32) -> Result<Verdict> {
        let mut total = Verdict::default();
        let (mut sum, mut nonfinite) = (0.0, false);
        for process in 0..self.layout.processes {
            let Posted::Yes(flags, squares) = self.posted(process, round) else {
                return Err(self.forgotten(round, &format!("process {process} replaced its result")));
            };
            sum = squares::add(sum, squares);
            nonfinite |= flags & NONFINITE != 0;
            total.failed += u32::from(flags & FAILED != 0);
        }
        let finite = !nonfinite && sum.is_finite();
        total.stats = StepStats { nonfinite: !finite, sum_squares: if finite { sum } else { f64::NAN } };
        Ok(total)
    }

    /// The first process that has not posted the round.
    fn missing(&self, round: u32) -> Option<u32> {
        (0..self.layout.processes).find(|process| !matches!(self.posted(*process, round), Posted::Yes(..)))
    }

    fn posted(&self, process: u32, round: u32) -> Posted {
        let mut last = 0;
        for [posted, flags, sum] in self.layout.slot(process).results() {
            let seen = self.mapping.load64(posted, Ordering::SeqCst);
            let result = (
                self.mapping.load64(flags, Ordering::SeqCst),
                f64::from_bits(self.mapping.load64(sum, Ordering::SeqCst)),
            );
            fence(Ordering::SeqCst);
            if seen == u64::from(round) && self.mapping.load64(posted, Ordering::SeqCst) == seen {
                return Posted::Yes(result.0, result.1);
            }
            last = seen.max(last);
        }
        if last > u64::from(round) { Posted::Later(last) } else { Posted::No }
    }

    /// The rounds of the two results of a slot.
    fn rounds_of(&self, process: u32) -> [u64; 2] {
        self.layout.slot(process).results().map(|[posted, ..]| self.mapping.load64(posted, Ordering::SeqCst))
    }

    fn decision(&self) -> Decision {
        Decision::of(self.mapping.load64(self.layout.decision(), Ordering::SeqCst))
    }

    /// True if this handle has joined: its process follows the verdicts.
    fn takes_part(&self) -> bool {
        self.joined.iter().any(|joined| joined.load(Ordering::Acquire))
    }

    /// True if the process of a slot joined, and ended before it posted. Errors: it lives and has posted a later round,
    /// so the round will never be decided.
    fn has_ended(&self, process: u32, round: u32) -> Result<bool> {
        let joined = self.mapping.load64(self.layout.slot(process).joined(), Ordering::SeqCst);
        let here = self.joined[process as usize].load(Ordering::Acquire);
        let lives = joined == 0 || here || self.is_locked(PROCESS_LOCKS + u64::from(process))?;
        match self.posted(process, round) {
            Posted::Yes(..) => Ok(false),
            Posted::Later(later) if lives && self.decision().outcome(round) == Outcome::Open => {
                Err(self.forgotten(round, &format!("process {process} went on to round {later}")))
            }
            _ => Ok(!lives),
        }
    }

    fn aborted(&self, round: u32) -> Error {
        let left = |process: u32| self.mapping.load64(self.layout.slot(process).left(), Ordering::SeqCst);
        let find = |is: &dyn Fn(u32) -> bool| (0..self.layout.processes).find(|process| is(*process));
        let detail = if let Some(process) = find(&|process| left(process) == u64::from(round)) {
            format!("{} left the round; roll back", self.titled(process))
        } else if let Some(process) = find(&|process| matches!(self.has_ended(process, round), Ok(true))) {
            format!("{} ended before it posted; roll back", self.titled(process))
        } else if let Some(process) = find(&|process| left(process) > u64::from(round)) {
            let (later, title) = (left(process), self.titled(process));
            format!("{title} left round {later}, which aborts the open rounds before it too; roll back")
        } else {
            "the round was aborted before all processes had posted; roll back".to_string()
        };
        self.error(ArenaKind::PeerEnded, &format!(", verdict of round {round}"), detail)
    }

    /// A process, as messages name it.
    fn titled(&self, process: u32) -> String {
        let id = self.mapping.load64(self.layout.slot(process).joined(), Ordering::SeqCst);
        format!("process {id}, which joined as {process},")
    }

    fn forgotten(&self, round: u32, why: &str) -> Error {
        let detail = format!("{why}; every process waits for the verdict of each round");
        self.error(ArenaKind::Forgotten, &format!(", verdict of round {round}"), detail)
    }

    /// A round as the decision word counts it.
    fn numbered(&self, round: u64) -> Result<u32> {
        if self.layout.processes == 0 {
            return Err(Error::invalid("round", "is of no use: the arena was created for no processes"));
        }
        u32::try_from(round).ok().filter(|round| *round > 0).ok_or_else(|| {
            Error::invalid("round", format!("is {round}, but rounds are counted from 1 to {}", u32::MAX))
        })
    }

    fn check_joined(&self, process: u32) -> Result<()> {
        self.check_slot(process)?;
        match self.joined[process as usize].load(Ordering::Acquire) {
            true => Ok(()),
            false => Err(Error::invalid("process", format!("{process} has not joined; join first"))),
        }
    }

    fn check_slot(&self, process: u32) -> Result<()> {
        self.check_writable()?;
        let count = self.layout.processes;
        match process < count {
            true => Ok(()),
            false => {
                let reason = format!("is {process}, but the arena was created for {count} processes");
                Err(Error::invalid("process", reason))
            }
        }
    }
}
