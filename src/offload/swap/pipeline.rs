//! Decides when each subgroup is fetched, stepped and flushed, and which subgroups stay in host memory. A state machine
//! without a clock, files or threads.
//!
//! Invariants:
//! - A round steps every subgroup once. A slot holds one subgroup from the start of its fetch to the end of its flush.
//! - Rounds alternate their direction. The last `cached` subgroups of a round stay in their slots and are the first
//!   of the next round. So `cached` subgroups of every round after the first need no fetch (MLP-Offload section 3.2),
//!   minus subgroups that were let go.
//! - A subgroup that stays is not written in that round, unless [`Pipeline::settle`] requests it. A copy on the tier
//!   that is older than a cached subgroup is never read.
//! - A slot is quarantined while a transfer that was given up may still access it.
//! - A failed fetch frees its slot. A failed flush leaves the only copy in its slot, to be flushed again.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::error::{Error, Result};

/// The next action of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Start reading the subgroup into the slot.
    Fetch {
        /// Index of the subgroup.
        subgroup: usize,
        /// Index of the slot.
        slot: usize,
    },
    /// Update the subgroup in the slot.
    Step {
        /// Index of the subgroup.
        subgroup: usize,
        /// Index of the slot.
        slot: usize,
    },
    /// Start writing the slot's subgroup.
    Flush {
        /// Index of the subgroup.
        subgroup: usize,
        /// Index of the slot.
        slot: usize,
        /// True if the subgroup stays in the slot afterwards.
        keep: bool,
    },
    /// No action is possible until a transfer ends.
    Wait,
    /// The round is over.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    Fetching(usize),
    /// Fetched or kept, and not yet stepped in this round.
    Ready(usize),
    Stepping(usize),
    /// Stepped; must be written.
    Stepped(usize),
    /// Being written. With `keep` the subgroup stays afterwards.
    Flushing {
        subgroup: usize,
        keep: bool,
    },
    /// Cached in memory. `dirty`: the tier's copy is older.
    Kept {
        subgroup: usize,
        dirty: bool,
    },
    /// Quarantined: a transfer that was given up may still access the slot.
    Stuck,
}

/// Counts over all rounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PipelineStats {
    /// Rounds begun.
    pub rounds: u64,
    /// Subgroups found in a slot when their round began.
    pub hits: u64,
    /// Subgroups read.
    pub fetched: u64,
    /// Subgroups written.
    pub flushed: u64,
}

/// The state of all slots and of the current round.
#[derive(Debug)]
pub struct Pipeline {
    subgroups: usize,
    cached: usize,
    slots: Vec<Slot>,
    /// Subgroups that are not fetched yet in this round, in order.
    to_fetch: VecDeque<usize>,
    /// For each subgroup, whether it stays in memory after this round.
    stays: Vec<bool>,
    backwards: bool,
    settling: bool,
    stats: PipelineStats,
}

/// Slots that a pipeline needs besides the cached ones: one each for fetching, stepping and flushing.
pub const LEAST_WORKING: usize = 3;

impl Pipeline {
    /// A pipeline of `slots` buffers, of which `cached` keep their subgroup from round to round. Errors: too few slots.
    pub fn new(subgroups: usize, slots: usize, cached: usize) -> Result<Pipeline> {
        let cached = cached.min(subgroups);
        let working = (subgroups - cached).min(LEAST_WORKING);
        if slots < cached + working {
            let reason = format!("{slots} buffers; {cached} cached subgroups need {}", cached + working);
            return Err(Error::invalid("slots", reason));
        }
        Ok(Pipeline {
            subgroups,
            cached,
            slots: vec![Slot::Free; slots],
            to_fetch: VecDeque::new(),
            stays: vec![false; subgroups],
            backwards: true,
            settling: false,
            stats: PipelineStats::default(),
        })
    }

    /// Counts over all rounds.
    pub fn stats(&self) -> PipelineStats {
        self.stats
    }

    /// The slot that caches a subgroup between rounds.
    pub fn kept(&self, subgroup: usize) -> Option<usize> {
        self.slots
            .iter()
            .position(|slot| matches!(slot, Slot::Kept { subgroup: kept, .. } if *kept == subgroup))
    }

    /// An empty slot.
    pub fn vacant(&self) -> Option<usize> {
        self.slots.iter().position(|slot| *slot == Slot::Free)
    }

    /// True if a slot is empty.
    pub fn is_vacant(&self, slot: usize) -> bool {
        self.slots[slot] == Slot::Free
    }

    /// True if a subgroup will stay in memory after this round.
    pub fn stays(&self, subgroup: usize) -> bool {
        self.stays[subgroup]
    }

    /// Removes the subgroup of a slot from the cache: a subgroup being stepped will be flushed instead of kept. Between
    /// rounds the slot becomes free at once, and the caller writes the subgroup.
    pub fn let_go(&mut self, slot: usize) {
        match self.slots[slot] {
            Slot::Stepping(subgroup) => self.stays[subgroup] = false,
            Slot::Kept { .. } => self.slots[slot] = Slot::Free,
            _ => {}
        }
    }

    /// Marks a cached subgroup dirty: it was changed in memory.
    pub fn changed(&mut self, slot: usize) {
        if let Slot::Kept { subgroup, .. } = self.slots[slot] {
            self.slots[slot] = Slot::Kept { subgroup, dirty: true };
            self.settling = false;
        }
    }

    /// Quarantines a slot (`stuck`: a transfer that was given up may still access it), or ends its quarantine. A clean
    /// cached subgroup in the slot is read again from the tier.
    pub fn set_aside(&mut self, slot: usize, stuck: bool) {
        self.slots[slot] = match (self.slots[slot], stuck) {
            (Slot::Free | Slot::Kept { dirty: false, .. }, true) => Slot::Stuck,
            (Slot::Stuck, false) => Slot::Free,
            (other, _) => other,
        };
    }

    /// Begins a round in the opposite direction of the last. Errors: a round is in flight (`Busy`).
    pub fn begin(&mut self) -> Result<()> {
        if !self.idle() {
            return Err(Error::Busy("a round is under way".to_string()));
        }
        self.settling = false;
        self.backwards = !self.backwards;
        let order: Vec<usize> = match self.backwards {
            true => (0..self.subgroups).rev().collect(),
            false => (0..self.subgroups).collect(),
        };
        let usable = self.slots.iter().filter(|slot| **slot != Slot::Stuck).count();
        // With quarantined slots fewer subgroups stay, so that at least one slot is left for the others.
        let cached =
            if usable < self.slots.len() { self.cached.min(usable.saturating_sub(1)) } else { self.cached };
        for (place, subgroup) in order.iter().enumerate() {
            self.stays[*subgroup] = place >= self.subgroups - cached;
        }
        let mut resident = vec![false; self.subgroups];
        for slot in &mut self.slots {
            if let Slot::Kept { subgroup, .. } = *slot {
                resident[subgroup] = true;
                *slot = Slot::Ready(subgroup);
            }
        }
        self.stats.rounds += 1;
        self.stats.hits += resident.iter().filter(|resident| **resident).count() as u64;
        self.to_fetch = order.into_iter().filter(|subgroup| !resident[*subgroup]).collect();
        Ok(())
    }

    /// Requests that all dirty subgroups are written; they stay in memory. Runs like a round, until `Done`.
    pub fn settle(&mut self) -> Result<()> {
        if !self.idle() {
            return Err(Error::Busy("a round is under way".to_string()));
        }
        self.settling = true;
        Ok(())
    }

    /// Discards all subgroups in memory, so that the next round reads the tier. Errors: a transfer is in flight
    /// (`Busy`).
    pub fn forget(&mut self) -> Result<()> {
        if self.slots.iter().any(|slot| matches!(slot, Slot::Fetching(_) | Slot::Flushing { .. })) {
            return Err(Error::Busy("a transfer is under way".to_string()));
        }
        self.slots.iter_mut().filter(|slot| **slot != Slot::Stuck).for_each(|slot| *slot = Slot::Free);
        self.to_fetch.clear();
        self.settling = false;
        Ok(())
    }

    /// Returns the next action and marks it as started.
    pub fn next_action(&mut self) -> Action {
        // Writes first, since they free slots. Then reads, so that the disks work while the processors do.
        if let Some(action) = self.next_flush() {
            return action;
        }
        if let Some(slot) = self.vacant()
            && let Some(subgroup) = self.to_fetch.pop_front()
        {
            self.slots[slot] = Slot::Fetching(subgroup);
            return Action::Fetch { subgroup, slot };
        }
        // Among ready subgroups, one that leaves comes first, since its slot is needed.
        let ready = |leaving: bool| {
            self.slots
                .iter()
                .position(|slot| matches!(slot, Slot::Ready(subgroup) if self.stays[*subgroup] != leaving))
        };
        if let Some(slot) = ready(true).or_else(|| ready(false))
            && let Slot::Ready(subgroup) = self.slots[slot]
        {
            self.slots[slot] = Slot::Stepping(subgroup);
            return Action::Step { subgroup, slot };
        }
        match self.idle() {
            true => Action::Done,
            false => Action::Wait,
        }
    }

    fn next_flush(&mut self) -> Option<Action> {
        let settling = self.settling;
        let (slot, subgroup, keep) = self.slots.iter().enumerate().find_map(|(index, slot)| match *slot {
            Slot::Stepped(subgroup) => Some((index, subgroup, false)),
            Slot::Kept { subgroup, dirty: true } if settling => Some((index, subgroup, true)),
            _ => None,
        })?;
        self.slots[slot] = Slot::Flushing { subgroup, keep };
        Some(Action::Flush { subgroup, slot, keep })
    }

    /// Marks a slot ready without a fetch: the subgroup's step fills it.
    pub fn handed_over(&mut self, slot: usize) {
        if let Slot::Fetching(subgroup) = self.slots[slot] {
            self.slots[slot] = Slot::Ready(subgroup);
        }
    }

    /// The fetch into a slot ended; `well`: successfully. After a failure the subgroup is queued for a fetch again. The
    /// caller retries it, or calls [`Pipeline::forget`].
    pub fn fetched(&mut self, slot: usize, well: bool) {
        if let Slot::Fetching(subgroup) = self.slots[slot] {
            self.slots[slot] = match well {
                true => Slot::Ready(subgroup),
                false => Slot::Free,
            };
            match well {
                true => self.stats.fetched += 1,
                false => self.to_fetch.push_front(subgroup),
            }
        }
    }

    /// The step of a slot's subgroup ended.
    pub fn stepped(&mut self, slot: usize) {
        if let Slot::Stepping(subgroup) = self.slots[slot] {
            self.slots[slot] = match self.stays[subgroup] {
                true => Slot::Kept { subgroup, dirty: true },
                false => Slot::Stepped(subgroup),
            };
        }
    }

    /// The flush of a slot ended; `well`: successfully.
    pub fn flushed(&mut self, slot: usize, well: bool) {
        if let Slot::Flushing { subgroup, keep } = self.slots[slot] {
            self.slots[slot] = match (well, keep) {
                (true, false) => Slot::Free,
                (true, true) => Slot::Kept { subgroup, dirty: false },
                (false, false) => Slot::Stepped(subgroup),
                (false, true) => Slot::Kept { subgroup, dirty: true },
            };
            self.stats.flushed += u64::from(well);
        }
    }

    fn idle(&self) -> bool {
        let still = |slot: &Slot| match *slot {
            Slot::Free | Slot::Stuck => true,
            Slot::Kept { dirty, .. } => !(self.settling && dirty),
            _ => false,
        };
        self.to_fetch.is_empty() && self.slots.iter().all(still)
    }
}

#[cfg(test)]
mod tests;
