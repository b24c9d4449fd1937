//! Which subgroup is fetched, stepped and flushed when, and which stay in host memory: a state machine without a clock,
//! a file or a thread.
//!
//! Invariants:
//! - A round steps every subgroup once. A slot holds one subgroup from the start of its fetch to the end of its flush.
//! - Rounds alternate their direction, and the last `cached` subgroups of a round stay in their slots: they are the
//!   first of the next. So exactly `cached` subgroups of a round, the first excepted, need no fetch (MLP-Offload 3.2),
//!   but for those that were let go.
//! - What stays is not written in that round, unless [`Pipeline::settle`] asks for it: a copy on the tier that is older
//!   than a cached subgroup is never read.
//! - A slot that a transfer may still reach after it was given up is not used before that transfer is over.
//! - A failed fetch frees its slot; a failed flush keeps the only copy in its slot, to be flushed again.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::error::{Error, Result};

/// What to do next.
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
        /// It stays in the slot afterwards.
        keep: bool,
    },
    /// Nothing can start before a transfer ends.
    Wait,
    /// The round is over.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    Fetching(usize),
    /// Fetched or kept, not stepped in this round.
    Ready(usize),
    Stepping(usize),
    /// Stepped, to be written.
    Stepped(usize),
    /// Being written; afterwards it stays, if `keep`.
    Flushing {
        subgroup: usize,
        keep: bool,
    },
    /// Stays in memory; `dirty`: the tier's copy is older.
    Kept {
        subgroup: usize,
        dirty: bool,
    },
    /// A transfer that was given up may still reach it.
    Stuck,
}

/// Counts over all rounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PipelineStats {
    /// Rounds begun.
    pub rounds: u64,
    /// Subgroups that were in a slot when their round began.
    pub hits: u64,
    /// Subgroups read.
    pub fetched: u64,
    /// Subgroups written.
    pub flushed: u64,
}

/// The state of all slots and of the round under way.
#[derive(Debug)]
pub struct Pipeline {
    subgroups: usize,
    cached: usize,
    slots: Vec<Slot>,
    /// Not yet fetched in this round, in order.
    to_fetch: VecDeque<usize>,
    /// For each subgroup, whether it stays in memory after this round.
    stays: Vec<bool>,
    backwards: bool,
    settling: bool,
    stats: PipelineStats,
}

/// Slots that a pipeline needs besides the cached ones: one fetching, one stepping, one flushing.
pub const LEAST_WORKING: usize = 3;

impl Pipeline {
    /// A pipeline of `slots` buffers, `cached` of which keep their subgroup from round to round.
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

    /// Counts so far.
    pub fn stats(&self) -> PipelineStats {
        self.stats
    }

    /// The slot in which a subgroup stays, between rounds.
    pub fn kept(&self, subgroup: usize) -> Option<usize> {
        self.slots
            .iter()
            .position(|slot| matches!(slot, Slot::Kept { subgroup: kept, .. } if *kept == subgroup))
    }

    /// A slot that holds nothing.
    pub fn vacant(&self) -> Option<usize> {
        self.slots.iter().position(|slot| *slot == Slot::Free)
    }

    /// True if a slot holds nothing.
    pub fn is_vacant(&self, slot: usize) -> bool {
        self.slots[slot] == Slot::Free
    }

    /// True if a subgroup is to stay in memory after this round.
    pub fn stays(&self, subgroup: usize) -> bool {
        self.stays[subgroup]
    }

    /// A subgroup that is being stepped, or that stays in a slot, does not stay after all. Between rounds the caller writes it.
    pub fn let_go(&mut self, slot: usize) {
        match self.slots[slot] {
            Slot::Stepping(subgroup) => self.stays[subgroup] = false,
            Slot::Kept { .. } => self.slots[slot] = Slot::Free,
            _ => {}
        }
    }

    /// What stays in a slot was changed there: the tier's copy is older.
    pub fn changed(&mut self, slot: usize) {
        if let Slot::Kept { subgroup, .. } = self.slots[slot] {
            self.slots[slot] = Slot::Kept { subgroup, dirty: true };
            self.settling = false;
        }
    }

    /// Whether a transfer that was given up may still reach a slot. What is kept there and on the tier as well is read again.
    pub fn set_aside(&mut self, slot: usize, stuck: bool) {
        self.slots[slot] = match (self.slots[slot], stuck) {
            (Slot::Free | Slot::Kept { dirty: false, .. }, true) => Slot::Stuck,
            (Slot::Stuck, false) => Slot::Free,
            (other, _) => other,
        };
    }

    /// Begins a round in the direction opposite to the last.
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
        // With fewer slots fewer stay, so that the others have one to pass through.
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

    /// Asks that everything newer than the tier be written; it stays in memory. Runs like a round, to `Done`.
    pub fn settle(&mut self) -> Result<()> {
        if !self.idle() {
            return Err(Error::Busy("a round is under way".to_string()));
        }
        self.settling = true;
        Ok(())
    }

    /// Forgets what is in memory, so that the next round reads the tier.
    pub fn forget(&mut self) -> Result<()> {
        if self.slots.iter().any(|slot| matches!(slot, Slot::Fetching(_) | Slot::Flushing { .. })) {
            return Err(Error::Busy("a transfer is under way".to_string()));
        }
        self.slots.iter_mut().filter(|slot| **slot != Slot::Stuck).for_each(|slot| *slot = Slot::Free);
        self.to_fetch.clear();
        self.settling = false;
        Ok(())
    }

    /// What to do next.
    pub fn next_action(&mut self) -> Action {
        // Writing first: it frees the slot. Then reading, so that the disks work while the processors do.
        if let Some(action) = self.next_flush() {
            return action;
        }
        if let Some(slot) = self.vacant()
            && let Some(subgroup) = self.to_fetch.pop_front()
        {
            self.slots[slot] = Slot::Fetching(subgroup);
            return Action::Fetch { subgroup, slot };
        }
        // Of those that are ready, one that leaves: its slot is needed.
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

    /// The slot is ready without a fetch: whoever steps its subgroup fills it.
    pub fn handed_over(&mut self, slot: usize) {
        if let Slot::Fetching(subgroup) = self.slots[slot] {
            self.slots[slot] = Slot::Ready(subgroup);
        }
    }

    /// The fetch into a slot ended. After a failure the round cannot end: the caller forgets, or begins it again.
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

    /// The flush of a slot ended.
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
