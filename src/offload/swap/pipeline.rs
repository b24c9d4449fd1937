//! Decides when each subgroup is fetched, stepped and flushed, and which subgroups stay in host memory. A state machine
//! without a clock, files or threads.
//!
//! Invariants:
//! - A round steps every subgroup once. A slot holds one subgroup from the start of its fetch to the end of its flush.
//! - Rounds of [`Pipeline::begin`] alternate their direction. The last `cached` subgroups of a round stay in their slots
//!   and are the first of the next round. So `cached` subgroups of every round after the first need no fetch
//!   (MLP-Offload section 3.2), minus subgroups that were let go.
//! - Rounds of [`Pipeline::begin_beside`] step a subgroup once it has arrived. The last `cached` subgroups of the expected
//!   order stay, so the end of a round needs no transfer. In a constant order they are the same in every round, and as
//!   many need no fetch.
//! - A subgroup that has not arrived never takes the last free slot: any order of arrival reaches the end.
//! - Before the verdict of a speculative round no subgroup is stepped whose state is only in memory. So the state before
//!   the step can be read again.
//! - A subgroup that stays is not written in that round, unless [`Pipeline::flush_dirty`] requests it. A copy on the
//!   tier that is older than a cached subgroup is never read.
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
    /// No action is possible until a transfer ends, a subgroup arrives, or the verdict is given.
    Wait,
    /// The round is over.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotState {
    Free,
    Fetching(usize),
    /// Fetched or kept, and not yet stepped in this round. `dirty`: the tier's copy is older.
    Ready {
        subgroup: usize,
        dirty: bool,
    },
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
    slots: Vec<SlotState>,
    /// Subgroups that are not fetched yet in this round, in order.
    to_fetch: VecDeque<usize>,
    /// For each subgroup, whether it stays in memory after this round.
    stays: Vec<bool>,
    /// For each subgroup, whether it may be stepped.
    arrived: Vec<bool>,
    /// For each subgroup, whether it was stepped in this round.
    stepped: Vec<bool>,
    /// The round has no verdict yet.
    speculative: bool,
    backwards: bool,
    flushing_dirty: bool,
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
            let reason =
                format!("{slots} buffers are too few: {cached} cached subgroups need {}", cached + working);
            return Err(Error::invalid("slots", reason));
        }
        Ok(Pipeline {
            subgroups,
            cached,
            slots: vec![SlotState::Free; slots],
            to_fetch: VecDeque::new(),
            stays: vec![false; subgroups],
            arrived: vec![true; subgroups],
            stepped: vec![false; subgroups],
            speculative: false,
            backwards: true,
            flushing_dirty: false,
            stats: PipelineStats::default(),
        })
    }

    /// Counts over all rounds.
    pub fn stats(&self) -> PipelineStats {
        self.stats
    }

    /// The slot that caches a subgroup between rounds.
    pub fn cached_slot(&self, subgroup: usize) -> Option<usize> {
        self.slots
            .iter()
            .position(|slot| matches!(slot, SlotState::Kept { subgroup: kept, .. } if *kept == subgroup))
    }

    /// An empty slot.
    pub fn vacant(&self) -> Option<usize> {
        self.slots.iter().position(|slot| *slot == SlotState::Free)
    }

    /// True if a slot is empty.
    pub fn is_vacant(&self, slot: usize) -> bool {
        self.slots[slot] == SlotState::Free
    }

    /// True if a subgroup will stay in memory after this round.
    pub fn stays(&self, subgroup: usize) -> bool {
        self.stays[subgroup]
    }

    /// Removes the subgroup of a slot from the cache: a subgroup being stepped will be flushed instead of kept. Between
    /// rounds the slot becomes free at once, and the caller writes the subgroup.
    pub fn uncache(&mut self, slot: usize) {
        match self.slots[slot] {
            SlotState::Stepping(subgroup) => self.stays[subgroup] = false,
            SlotState::Kept { .. } => self.slots[slot] = SlotState::Free,
            _ => {}
        }
    }

    /// Marks a cached subgroup dirty: it was changed in memory.
    pub fn changed(&mut self, slot: usize) {
        if let SlotState::Kept { subgroup, .. } = self.slots[slot] {
            self.slots[slot] = SlotState::Kept { subgroup, dirty: true };
            self.flushing_dirty = false;
        }
    }

    /// Quarantines a slot (`stuck`: a transfer that was given up may still access it), or ends its quarantine. A clean
    /// cached subgroup in the slot is read again from the tier.
    pub fn quarantine(&mut self, slot: usize, stuck: bool) {
        self.slots[slot] = match (self.slots[slot], stuck) {
            (SlotState::Free | SlotState::Kept { dirty: false, .. }, true) => SlotState::Stuck,
            (SlotState::Stuck, false) => SlotState::Free,
            (other, _) => other,
        };
    }

    /// Begins a round in the opposite direction of the last. Errors: a round is in flight (`Busy`).
    pub fn begin(&mut self) -> Result<()> {
        if !self.idle() {
            return Err(in_progress());
        }
        self.backwards = !self.backwards;
        let order: Vec<usize> = match self.backwards {
            true => (0..self.subgroups).rev().collect(),
            false => (0..self.subgroups).collect(),
        };
        self.start(order);
        Ok(())
    }

    /// Begins a round whose subgroups are stepped as they arrive ([`Pipeline::arrive`]). `expected`: all subgroups, in the
    /// order in which they are expected. Writes of the last round may be in flight, if all have begun. Errors: a round is
    /// in flight (`Busy`).
    pub fn begin_beside(&mut self, expected: &[usize], speculative: bool) -> Result<()> {
        let left =
            |slot: &SlotState| matches!(slot, SlotState::Stepped(_) | SlotState::Flushing { keep: true, .. });
        if !self.is_stepped() || self.slots.iter().any(left) {
            return Err(in_progress());
        }
        self.start(expected.to_vec());
        self.arrived.fill(false);
        self.speculative = speculative;
        Ok(())
    }

    /// Starts a round, whose last subgroups stay in memory.
    fn start(&mut self, order: Vec<usize>) {
        self.flushing_dirty = false;
        self.speculative = false;
        self.arrived.fill(true);
        self.stepped.fill(false);
        let usable = self.slots.iter().filter(|slot| **slot != SlotState::Stuck).count();
        // With quarantined slots fewer subgroups stay, so that at least one slot is left for the others.
        let cached =
            if usable < self.slots.len() { self.cached.min(usable.saturating_sub(1)) } else { self.cached };
        let mut resident = vec![false; self.subgroups];
        for slot in &mut self.slots {
            if let SlotState::Kept { subgroup, dirty } = *slot {
                resident[subgroup] = true;
                *slot = SlotState::Ready { subgroup, dirty };
            }
        }
        self.stays.fill(false);
        order.iter().rev().take(cached).for_each(|subgroup| self.stays[*subgroup] = true);
        self.stats.rounds += 1;
        self.stats.hits += resident.iter().filter(|resident| **resident).count() as u64;
        self.to_fetch = order.into_iter().filter(|subgroup| !resident[*subgroup]).collect();
    }

    /// A subgroup may be stepped. It is fetched before all that have not arrived.
    pub fn arrive(&mut self, subgroup: usize) {
        self.arrived[subgroup] = true;
        if let Some(place) = self.to_fetch.iter().position(|waiting| *waiting == subgroup) {
            self.to_fetch.remove(place);
            let earlier = self.to_fetch.iter().take_while(|waiting| self.arrived[**waiting]).count();
            self.to_fetch.insert(earlier, subgroup);
        }
    }

    /// The verdict of a speculative round: its steps are final, and subgroups in memory may be stepped.
    pub fn keep(&mut self) {
        self.speculative = false;
    }

    /// The other verdict: all steps are taken back, and subgroups in memory may be stepped. The caller restores the
    /// states on the tier. Errors: a transfer is in flight (`Busy`).
    pub fn redo(&mut self) -> Result<()> {
        self.take_back(|_| true)
    }

    /// As [`Pipeline::redo`], but only the subgroups in `again` are fetched and passed to a step again. This step changes
    /// nothing ([`Pipeline::passed`]). The round ends with it.
    pub fn skip(&mut self, again: impl Fn(usize) -> bool) -> Result<()> {
        self.to_fetch.clear();
        self.take_back(again)?;
        for slot in &mut self.slots {
            if let SlotState::Ready { subgroup, dirty } = *slot {
                *slot = if dirty { SlotState::Kept { subgroup, dirty } } else { SlotState::Free };
            }
        }
        Ok(())
    }

    fn take_back(&mut self, again: impl Fn(usize) -> bool) -> Result<()> {
        self.no_transfers()?;
        self.speculative = false;
        for subgroup in (0..self.subgroups).rev() {
            if !std::mem::take(&mut self.stepped[subgroup]) {
                continue;
            }
            for slot in &mut self.slots {
                match *slot {
                    SlotState::Stepped(held) | SlotState::Kept { subgroup: held, .. } if held == subgroup => {
                        *slot = SlotState::Free;
                    }
                    _ => {}
                }
            }
            if again(subgroup) {
                self.to_fetch.push_front(subgroup);
            }
        }
        Ok(())
    }

    /// The step of a slot's subgroup ended without a change: the slot becomes free.
    pub fn passed(&mut self, slot: usize) {
        if let SlotState::Stepping(_) = self.slots[slot] {
            self.slots[slot] = SlotState::Free;
        }
    }

    /// True if every subgroup of the round was stepped; writes may be left to do.
    pub fn is_stepped(&self) -> bool {
        let before = |slot: &SlotState| {
            matches!(slot, SlotState::Fetching(_) | SlotState::Ready { .. } | SlotState::Stepping(_))
        };
        self.to_fetch.is_empty() && !self.slots.iter().any(before)
    }

    /// Requests that all dirty subgroups are written; they stay in memory. Runs like a round, until `Done`.
    pub fn flush_dirty(&mut self) -> Result<()> {
        if !self.idle() {
            return Err(in_progress());
        }
        self.flushing_dirty = true;
        Ok(())
    }

    /// Discards all subgroups in memory, so that the next round reads the tier. Errors: a transfer is in flight
    /// (`Busy`).
    pub fn forget(&mut self) -> Result<()> {
        self.no_transfers()?;
        self.slots
            .iter_mut()
            .filter(|slot| **slot != SlotState::Stuck)
            .for_each(|slot| *slot = SlotState::Free);
        self.to_fetch.clear();
        self.flushing_dirty = false;
        Ok(())
    }

    fn no_transfers(&self) -> Result<()> {
        match self
            .slots
            .iter()
            .any(|slot| matches!(slot, SlotState::Fetching(_) | SlotState::Flushing { .. }))
        {
            true => Err(Error::Busy("a transfer is in flight".to_string())),
            false => Ok(()),
        }
    }

    /// Returns the next action and marks it as started.
    pub fn next_action(&mut self) -> Action {
        // Writes first, since they free slots. Then reads, so that the disks work while the processors do.
        if let Some(action) = self.next_flush() {
            return action;
        }
        if let Some(slot) = self.vacant()
            && let Some(subgroup) = self.next_fetch()
        {
            self.slots[slot] = SlotState::Fetching(subgroup);
            return Action::Fetch { subgroup, slot };
        }
        // Among ready subgroups, one that leaves comes first, since its slot is needed.
        let ready = |leaving: bool| {
            self.slots.iter().position(|slot| match *slot {
                SlotState::Ready { subgroup, dirty } => {
                    let may = self.arrived[subgroup] && !(self.speculative && dirty);
                    may && self.stays[subgroup] != leaving
                }
                _ => false,
            })
        };
        if let Some(slot) = ready(true).or_else(|| ready(false))
            && let SlotState::Ready { subgroup, .. } = self.slots[slot]
        {
            self.slots[slot] = SlotState::Stepping(subgroup);
            return Action::Step { subgroup, slot };
        }
        if self.idle() { Action::Done } else { Action::Wait }
    }

    /// Takes the next subgroup to fetch: one that the last round still writes has to wait.
    fn next_fetch(&mut self) -> Option<usize> {
        let vacant = self.slots.iter().filter(|slot| **slot == SlotState::Free).count();
        let written = |subgroup: usize| {
            self.slots
                .iter()
                .any(|slot| matches!(slot, SlotState::Flushing { subgroup: held, .. } if *held == subgroup))
        };
        let may = |subgroup: &usize| (self.arrived[*subgroup] || vacant > 1) && !written(*subgroup);
        let place = self.to_fetch.iter().position(may)?;
        self.to_fetch.remove(place)
    }

    fn next_flush(&mut self) -> Option<Action> {
        let flushing_dirty = self.flushing_dirty;
        let (slot, subgroup, keep) = self.slots.iter().enumerate().find_map(|(index, slot)| match *slot {
            SlotState::Stepped(subgroup) => Some((index, subgroup, false)),
            SlotState::Kept { subgroup, dirty: true } if flushing_dirty => Some((index, subgroup, true)),
            _ => None,
        })?;
        self.slots[slot] = SlotState::Flushing { subgroup, keep };
        Some(Action::Flush { subgroup, slot, keep })
    }

    /// Marks a slot ready without a fetch: the subgroup's step fills it.
    pub fn mark_filled(&mut self, slot: usize) {
        if let SlotState::Fetching(subgroup) = self.slots[slot] {
            self.slots[slot] = SlotState::Ready { subgroup, dirty: false };
        }
    }

    /// The fetch into a slot ended; `succeeded`: without an error. After a failure the subgroup is queued for a fetch
    /// again. The caller retries it, or calls [`Pipeline::forget`].
    pub fn fetched(&mut self, slot: usize, succeeded: bool) {
        if let SlotState::Fetching(subgroup) = self.slots[slot] {
            self.slots[slot] = match succeeded {
                true => SlotState::Ready { subgroup, dirty: false },
                false => SlotState::Free,
            };
            if succeeded { self.stats.fetched += 1 } else { self.to_fetch.push_front(subgroup) }
        }
    }

    /// The step of a slot's subgroup ended.
    pub fn stepped(&mut self, slot: usize) {
        if let SlotState::Stepping(subgroup) = self.slots[slot] {
            self.stepped[subgroup] = true;
            self.slots[slot] = match self.stays[subgroup] {
                true => SlotState::Kept { subgroup, dirty: true },
                false => SlotState::Stepped(subgroup),
            };
        }
    }

    /// The flush of a slot ended; `succeeded`: without an error.
    pub fn flushed(&mut self, slot: usize, succeeded: bool) {
        if let SlotState::Flushing { subgroup, keep } = self.slots[slot] {
            self.slots[slot] = match (succeeded, keep) {
                (true, false) => SlotState::Free,
                (true, true) => SlotState::Kept { subgroup, dirty: false },
                (false, false) => SlotState::Stepped(subgroup),
                (false, true) => SlotState::Kept { subgroup, dirty: true },
            };
            self.stats.flushed += u64::from(succeeded);
        }
    }

    fn idle(&self) -> bool {
        let still = |slot: &SlotState| match *slot {
            SlotState::Free | SlotState::Stuck => true,
            SlotState::Kept { dirty, .. } => !(self.flushing_dirty && dirty),
            _ => false,
        };
        self.to_fetch.is_empty() && self.slots.iter().all(still)
    }
}

fn in_progress() -> Error {
    Error::Busy("a step is in progress".to_string())
}

#[cfg(test)]
mod tests;
