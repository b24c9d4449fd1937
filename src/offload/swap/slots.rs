//! The host memory of a tiered update: slots that hold one subgroup each, and masters lent to slots that are stepped. A
//! master is a buffer for the full f32 param of one subgroup.
//!
//! | usual master | arrays in a slot, each page-aligned | bytes per parameter |
//! |---|---|---|
//! | full | exp_avg, exp_avg_sq, param | 12, 8 with bf16 moments, or 6.13 with 8-bit ones |
//! | split | exp_avg, exp_avg_sq, low halves of param, table | 10, 6 with bf16 moments, or 4.13 with 8-bit ones |
//! | low | exp_avg, exp_avg_sq, low bits of param | as split |
//!
//! Invariants, for the split master:
//! - In a slot with a master, param is in the master, which is then newer than low halves and table.
//! - A slot without a master has low halves and table; if its state came from the tier whole, it has no param.
//! - A master is taken from a slot only when its param was split or is not needed any more, and no transfer accesses
//!   it.
//! - With fewer masters than slots, cached subgroups leave enough masters for the subgroups in motion.
#![forbid(unsafe_code)]

use crate::dtype::{Floats, as_words, bf16};

use super::budget::{Budget, MASTERS_IN_MOTION};
use super::encoding::{self, Encoding, Master, Moments, STREAMS};
use super::master;
use super::moment::{MomentMut, SubgroupState};
use crate::error::{Error, Result};
use crate::kernel::Moment;
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::memory::BASE_PAGE;
use crate::sys::span::Span;

#[derive(Debug)]
struct MemorySlot {
    memory: Buffer,
    master: Option<usize>,
    /// For a slot without a master: how param came from the tier.
    fetched: Master,
}

#[derive(Debug)]
pub(super) struct Slots {
    usual: Encoding,
    slots: Vec<MemorySlot>,
    masters: Vec<Buffer>,
    /// Masters that no slot has.
    spare: Vec<usize>,
}

impl Slots {
    /// Allocates the memory.
    pub(super) fn open(budget: &Budget, usual: Encoding, backing: Backing) -> Result<Slots> {
        let memory = Buffer::open_many(budget.buffers, budget.buffer_bytes as usize, backing)?;
        let masters = Buffer::open_many(budget.masters, budget.master_bytes as usize, backing)?;
        let empty = |memory| MemorySlot { memory, master: None, fetched: Master::Full };
        Ok(Slots {
            usual,
            slots: memory.into_iter().map(empty).collect(),
            spare: (0..masters.len()).collect(),
            masters,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// True while a transfer may access a slot's memory, including a transfer that was given up.
    pub(super) fn in_transfer(&self, slot: usize) -> bool {
        let MemorySlot { memory, master, .. } = &self.slots[slot];
        memory.in_transfer() || master.is_some_and(|master| self.masters[master].in_transfer())
    }

    /// True if a slot has memory for the full param, or needs none.
    pub(super) fn has_master(&self, slot: usize) -> bool {
        self.usual.master != Master::Split || self.slots[slot].master.is_some()
    }

    /// Lends a master to a slot, unless it has one. False if no master is free.
    pub(super) fn lend(&mut self, slot: usize) -> bool {
        if !self.has_master(slot) {
            self.slots[slot].master = self.spare.pop();
        }
        self.has_master(slot)
    }

    /// Takes the master back from a slot; its contents are discarded.
    pub(super) fn take_back(&mut self, slot: usize) {
        self.spare.extend(self.slots[slot].master.take());
    }

    /// Records how the param is stored that is read into a slot.
    pub(super) fn set_fetched(&mut self, slot: usize, master: Master) {
        self.slots[slot].fetched = master;
    }

    /// How the param of a slot without a master came.
    pub(super) fn fetched(&self, slot: usize) -> Master {
        self.slots[slot].fetched
    }

    /// The memory of each stream of a state with a master of this kind. That of a full param is empty if the slot has no
    /// master.
    pub(super) fn buffers(&self, slot: usize, as_stored: Master, elements: usize) -> Vec<TransferBuffer> {
        let MemorySlot { memory, master, .. } = &self.slots[slot];
        let stride = self.stride(elements);
        let part = |stream: usize, bytes: usize| memory.transfer(stream * stride, bytes);
        let moment = self.moment_bytes(elements);
        let (exp_avg, exp_avg_sq) = (part(0, moment), part(1, moment));
        match (as_stored, self.usual.master, master) {
            (Master::Split, ..) => {
                let low = part(2, 2 * elements);
                let table = memory.transfer(self.table_start(elements), table_len(elements));
                vec![exp_avg, exp_avg_sq, low, table]
            }
            (Master::Low, ..) => vec![part(2, 2 * elements), exp_avg, exp_avg_sq],
            (Master::Full, Master::Split, Some(master)) => {
                vec![self.masters[*master].transfer(0, 4 * elements), exp_avg, exp_avg_sq]
            }
            (Master::Full, Master::Split, None) => vec![TransferBuffer::empty(), exp_avg, exp_avg_sq],
            (Master::Full, ..) => vec![part(2, 4 * elements), exp_avg, exp_avg_sq],
        }
    }

    /// The state in a slot. The slot must have room for the full param (see [`Slots::has_master`]).
    pub(super) fn state(&mut self, slot: usize, elements: usize) -> Result<SubgroupState<'_>> {
        let (moments, stride) = (self.usual.moments, self.stride(elements));
        let MemorySlot { memory, master, .. } = &mut self.slots[slot];
        let ([exp_avg, exp_avg_sq], rest) = arrays(memory, moments, stride, elements)?;
        if self.usual.master == Master::Low {
            let low = &mut as_words(rest)[..elements];
            return Ok(SubgroupState { param: &mut [], low, exp_avg, exp_avg_sq });
        }
        let param = match master {
            Some(master) => self.masters[*master].floats()?,
            None => rest,
        };
        Ok(SubgroupState { param: &mut param[..elements], low: &mut [], exp_avg, exp_avg_sq })
    }

    /// Copies param and moments to the caller's f32 arrays; an empty span skips its array. The slot has the full param if
    /// its span is not empty.
    pub(super) fn load(&mut self, slot: usize, elements: usize, to: &[Span; STREAMS]) -> Result<()> {
        if !to[0].is_empty() {
            let (is_low, state) = (self.usual.master == Master::Low, self.state(slot, elements)?);
            match is_low {
                true => encoding::load_low(state.low, to[0]),
                false => encoding::load(Floats::F32(state.param), to[0]),
            }
        }
        self.each_moment(slot, elements, to, |held, to| held.load(to))
    }

    /// Copies the caller's f32 arrays to param and moments, see [`Slots::load`].
    pub(super) fn store(&mut self, slot: usize, elements: usize, from: &[Span; STREAMS]) -> Result<()> {
        if !from[0].is_empty() {
            let mut state = self.state(slot, elements)?;
            from[0].with_bytes(|from| state.store_param(from));
        }
        self.each_moment(slot, elements, from, |held, from| from.with_bytes(|from| held.store(from)))
    }

    /// Calls `work` with each moment of the state and the caller's array, unless that is empty.
    fn each_moment(
        &mut self,
        slot: usize,
        elements: usize,
        theirs: &[Span; STREAMS],
        work: impl Fn(MomentMut<'_>, Span) -> Result<()>,
    ) -> Result<()> {
        let (moments, stride) = (self.usual.moments, self.stride(elements));
        let (held, _) = arrays(&mut self.slots[slot].memory, moments, stride, elements)?;
        held.into_iter()
            .zip(&theirs[1..])
            .filter(|pair| !pair.1.is_empty())
            .try_for_each(|(held, to)| work(held, *to))
    }

    /// Rebuilds param in a slot's master from low halves, table and `copy`. Errors: `copy` belongs to another state.
    pub(super) fn join(&mut self, slot: usize, elements: usize, copy: &[bf16]) -> Result<()> {
        let (low, table, param) = self.halves(slot, elements)?;
        let outcome = encoding::join(copy, low, table, param);
        if outcome.is_err() {
            self.take_back(slot);
        }
        outcome
    }

    /// Checks that `copy` belongs to the param in a slot's master.
    pub(super) fn check_copy(&mut self, slot: usize, elements: usize, copy: &[bf16]) -> Result<()> {
        let (_, _, param) = self.halves(slot, elements)?;
        if master::is_copy(copy, param) { Ok(()) } else { Err(encoding::wrong_weights()) }
    }

    /// Prepares a slot to cache its state, which may split its param. False if the state would keep a master that
    /// subgroups in motion need.
    pub(super) fn keep(&mut self, slot: usize, elements: usize) -> Result<bool> {
        let enough = self.masters.len() == self.slots.len() || self.spare.len() >= MASTERS_IN_MOTION;
        if self.slots[slot].master.is_none() || enough {
            return Ok(true);
        }
        let split = self.split(slot, elements)?;
        if split {
            self.take_back(slot);
        }
        Ok(split)
    }

    /// Prepares a slot's state for a write, and returns how param is written. The slot keeps its master only if its state
    /// stays, or cannot be split.
    pub(super) fn pack(&mut self, slot: usize, elements: usize, stays: bool) -> Result<Master> {
        if self.usual.master != Master::Split {
            return Ok(self.usual.master);
        }
        if self.slots[slot].master.is_some() && !self.split(slot, elements)? {
            return Ok(Master::Full);
        }
        if !stays {
            self.take_back(slot);
        }
        Ok(Master::Split)
    }

    /// Fills low halves and table from param. False if param cannot be split.
    fn split(&mut self, slot: usize, elements: usize) -> Result<bool> {
        let (low, table, param) = self.halves(slot, elements)?;
        let split = encoding::split(param, low, table);
        if split {
            self.set_fetched(slot, Master::Split);
        }
        Ok(split)
    }

    /// Low halves, table and param of a slot that has a master.
    fn halves(&mut self, slot: usize, elements: usize) -> Result<(&mut [u16], &mut [u16], &mut [f32])> {
        let (stride, table) = (self.stride(elements), self.table_start(elements));
        let MemorySlot { memory, master, .. } = &mut self.slots[slot];
        let master =
            master.ok_or_else(|| Error::Busy("the slot has no buffer for master weights".to_string()))?;
        let (low, table) = memory.words()?.split_at_mut(table / 2);
        // Two strides of bytes are as many 16-bit words as one.
        let low = &mut low[stride..][..elements];
        let table = &mut table[..table_len(elements) / 2];
        Ok((low, table, &mut self.masters[master].floats()?[..elements]))
    }

    /// Bytes of one moment. The budget's plan found that they fit.
    fn moment_bytes(&self, elements: usize) -> usize {
        self.usual.moments.bytes(elements as u64).unwrap_or(u64::MAX) as usize
    }

    /// Bytes from the start of a slot's first moment to that of its second, and from there to what follows.
    fn stride(&self, elements: usize) -> usize {
        self.moment_bytes(elements).next_multiple_of(BASE_PAGE)
    }

    /// Byte offset of the table in a slot.
    fn table_start(&self, elements: usize) -> usize {
        2 * self.stride(elements) + (2 * elements).next_multiple_of(BASE_PAGE)
    }
}

/// The moments in a slot's memory, `stride` bytes apart, and what follows them.
fn arrays(
    memory: &mut Buffer,
    moments: Moments,
    stride: usize,
    elements: usize,
) -> Result<([MomentMut<'_>; 2], &mut [f32])> {
    let (exp_avg, rest) = memory.floats()?.split_at_mut(stride / 4);
    let (exp_avg_sq, rest) = rest.split_at_mut(stride / 4);
    let exp_avg = MomentMut::within(exp_avg, Moment::First, moments, elements);
    let exp_avg_sq = MomentMut::within(exp_avg_sq, Moment::Second, moments, elements);
    Ok(([exp_avg, exp_avg_sq], rest))
}

fn table_len(elements: usize) -> usize {
    encoding::table_bytes(elements as u64) as usize
}
