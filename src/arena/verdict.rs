//! Results that the processes of one machine post, and that each of them waits for.
//!
//! Every process has a slot with two results, of an odd and of an even round: a process posts round n + 1 while others
//! still read round n. It posts round n + 2 only after its wait for round n + 1 has returned. All processes have
//! posted round n + 1 by then, so all have read round n.
//!
//! Invariants:
//! - A process holds the lock of its slot from its join until it ends or closes the arena. A slot that has joined, has
//!   not posted, and is not locked belongs to a process that ended.
//! - The sum adds the slots in their order, so every process gets the same bits.
#![forbid(unsafe_code)]

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use super::handle::{Arena, PROCESS_LOCKS};
use super::read::Deadline;
use crate::error::{ArenaKind, Error, Result};
use crate::kernel::squares;
use crate::optim::StepStats;
use crate::sys::process;

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
    /// It has a later round already.
    Later(u64),
}

impl Arena {
    /// Takes the slot `process` for this handle. A process joins before the others wait for it, so that its death is
    /// noticed. Joining again does nothing. Errors: another handle has the slot (`Busy`).
    pub fn join(&self, process: u32) -> Result<()> {
        self.check_slot(process)?;
        let slot = self.layout.slot(process);
        if !self.take_lock(PROCESS_LOCKS + u64::from(process))? {
            let holder = self.mapping.load64(slot.joined(), Ordering::Relaxed);
            return Err(Error::Busy(format!("{}: process {holder} has joined as {process}", self.title)));
        }
        self.mapping.store64(slot.joined(), process::id().into(), Ordering::SeqCst);
        self.joined[process as usize].store(true, Ordering::Release);
        Ok(())
    }

    /// Posts the result of this process for `round`, from 1 on. `failed`: a stage of the process failed. Errors: the
    /// handle has not joined; the round was posted before.
    pub fn post(&self, process: u32, round: u64, stats: StepStats, failed: bool) -> Result<()> {
        self.check_slot(process)?;
        if !self.joined[process as usize].load(Ordering::Acquire) {
            return Err(Error::invalid("process", format!("{process} has not joined; join first")));
        }
        let [posted, flags, sum] = self.layout.slot(process).posted(round);
        let before = self.mapping.load64(posted, Ordering::Acquire);
        if round == 0 || before >= round {
            let reason = format!("is {round}, but rounds are counted from 1, and {before} was posted");
            return Err(Error::invalid("round", reason));
        }
        let word = u64::from(stats.nonfinite) * NONFINITE + u64::from(failed) * FAILED;
        self.mapping.store64(posted, 0, Ordering::SeqCst);
        self.mapping.store64(flags, word, Ordering::SeqCst);
        self.mapping.store64(sum, stats.sum_squares.to_bits(), Ordering::SeqCst);
        self.mapping.store64(posted, round, Ordering::SeqCst);
        self.mapping.ring(self.layout.verdict_bell());
        Ok(())
    }

    /// Waits until all processes have posted `round`. Errors: a process ended before it posted; a timeout.
    pub fn wait_verdict(&self, round: u64, timeout: Option<Duration>) -> Result<Verdict> {
        self.check_process()?;
        if round == 0 || self.layout.processes == 0 {
            return Err(Error::invalid("round", "is 0, or the arena was created for no processes"));
        }
        let deadline = Deadline::after(timeout);
        loop {
            let bell = self.mapping.load32(self.layout.verdict_bell(), Ordering::Acquire);
            let Some(missing) = (0..self.layout.processes).find(|process| !self.has_posted(*process, round))
            else {
                return self.total(round);
            };
            self.check_lives(missing, round)?;
            let left = deadline.slice(|| format!("process {missing} has not posted round {round}"))?;
            self.mapping.wait(self.layout.verdict_bell(), bell, left);
        }
    }

    fn total(&self, round: u64) -> Result<Verdict> {
        let mut total = Verdict::default();
        let (mut sum, mut nonfinite) = (0.0, false);
        for process in 0..self.layout.processes {
            match self.posted(process, round) {
                Posted::Yes(flags, squares) => {
                    sum = squares::add(sum, squares);
                    nonfinite |= flags & NONFINITE != 0;
                    total.failed += u32::from(flags & FAILED != 0);
                }
                Posted::Later(later) => return Err(self.overtaken(process, round, later)),
                Posted::No => return Err(self.overtaken(process, round, round)),
            }
        }
        let finite = !nonfinite && sum.is_finite();
        total.stats = StepStats { nonfinite: !finite, sum_squares: if finite { sum } else { f64::NAN } };
        Ok(total)
    }

    fn overtaken(&self, process: u32, round: u64, later: u64) -> Error {
        let detail =
            format!("process {process} replaced its result by round {later}; every process waits each round");
        self.error(ArenaKind::Changed, &format!(", verdict of round {round}"), detail)
    }

    fn has_posted(&self, process: u32, round: u64) -> bool {
        !matches!(self.posted(process, round), Posted::No)
    }

    fn posted(&self, process: u32, round: u64) -> Posted {
        let [posted, flags, sum] = self.layout.slot(process).posted(round);
        let seen = self.mapping.load64(posted, Ordering::SeqCst);
        let result = (
            self.mapping.load64(flags, Ordering::SeqCst),
            f64::from_bits(self.mapping.load64(sum, Ordering::SeqCst)),
        );
        fence(Ordering::SeqCst);
        match (seen.cmp(&round), self.mapping.load64(posted, Ordering::SeqCst) == seen) {
            (std::cmp::Ordering::Equal, true) => Posted::Yes(result.0, result.1),
            (std::cmp::Ordering::Greater, _) => Posted::Later(seen),
            _ => Posted::No,
        }
    }

    /// Fails if the process of a slot joined, and ended before it posted.
    fn check_lives(&self, process: u32, round: u64) -> Result<()> {
        let joined = self.mapping.load64(self.layout.slot(process).joined(), Ordering::SeqCst);
        let here = self.joined[process as usize].load(Ordering::Acquire);
        if joined == 0 || here || self.is_locked(PROCESS_LOCKS + u64::from(process))? {
            return Ok(());
        }
        if self.has_posted(process, round) {
            return Ok(());
        }
        let detail =
            format!("process {joined}, which joined as {process}, ended before it posted; roll back");
        Err(self.error(ArenaKind::PeerEnded, &format!(", verdict of round {round}"), detail))
    }

    fn check_slot(&self, process: u32) -> Result<()> {
        self.check_process()?;
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
