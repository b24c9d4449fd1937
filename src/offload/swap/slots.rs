//! The host memory of a tiered update: slots that hold one subgroup each, and masters lent to slots that are stepped. A
//! master is a buffer for the full f32 param of one subgroup.
//!
//! | usual encoding | arrays in a slot, each page-aligned | bytes per parameter |
//! |---|---|---|
//! | full | exp_avg, exp_avg_sq, param | 12 |
//! | split | exp_avg, exp_avg_sq, low halves of param, table | 10 |
//!
//! Invariants, for the split master:
//! - In a slot with a master, param is in the master, which is then newer than low halves and table.
//! - A slot without a master has low halves and table; if its state came from the tier whole, it has no param.
//! - A master is taken from a slot only when its param was split or is not needed any more, and no transfer accesses
//!   it.
//! - With fewer masters than slots, cached subgroups leave enough masters for the subgroups in motion.
#![forbid(unsafe_code)]

use crate::dtype::bf16;

use super::budget::{Budget, MASTERS_IN_MOTION};
use super::encoding::{self, Encoding, SubgroupState};
use super::master;
use crate::error::{Error, Result};
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::memory::BASE_PAGE;

#[derive(Debug)]
struct MemorySlot {
    memory: Buffer,
    master: Option<usize>,
    /// For a slot without a master: the encoding in which the state came from the tier.
    fetched_encoding: Encoding,
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
        let empty = |memory| MemorySlot { memory, master: None, fetched_encoding: Encoding::Full };
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

    /// True if a slot has memory for the full param.
    pub(super) fn has_master(&self, slot: usize) -> bool {
        self.usual == Encoding::Full || self.slots[slot].master.is_some()
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

    /// Records the encoding of the state that is read into a slot.
    pub(super) fn set_fetched_encoding(&mut self, slot: usize, encoding: Encoding) {
        self.slots[slot].fetched_encoding = encoding;
    }

    /// The encoding in which the state of a slot without a master came.
    pub(super) fn fetched_encoding(&self, slot: usize) -> Encoding {
        self.slots[slot].fetched_encoding
    }

    /// The memory of each stream of an encoding. That of a whole param is empty if the slot has no master.
    pub(super) fn buffers(&self, slot: usize, encoding: Encoding, elements: usize) -> Vec<TransferBuffer> {
        let MemorySlot { memory, master, .. } = &self.slots[slot];
        let part = |stream: usize, bytes: usize| memory.transfer(stream * stride(elements), bytes);
        let (exp_avg, exp_avg_sq) = (part(0, 4 * elements), part(1, 4 * elements));
        match (encoding, self.usual, master) {
            (Encoding::SplitMaster, ..) => {
                let low = part(2, 2 * elements);
                let table = memory.transfer(table_start(elements), table_len(elements));
                vec![exp_avg, exp_avg_sq, low, table]
            }
            (Encoding::Full, Encoding::Full, _) => vec![part(2, 4 * elements), exp_avg, exp_avg_sq],
            (Encoding::Full, Encoding::SplitMaster, Some(master)) => {
                vec![self.masters[*master].transfer(0, 4 * elements), exp_avg, exp_avg_sq]
            }
            (Encoding::Full, Encoding::SplitMaster, None) => {
                vec![TransferBuffer::empty(), exp_avg, exp_avg_sq]
            }
        }
    }

    /// The state in a slot. The slot must have room for the full param (see [`Slots::has_master`]).
    pub(super) fn state(&mut self, slot: usize, elements: usize) -> Result<SubgroupState<'_>> {
        let MemorySlot { memory, master, .. } = &mut self.slots[slot];
        let stride = stride(elements) / 4;
        let (exp_avg, rest) = memory.floats()?.split_at_mut(stride);
        let (exp_avg_sq, rest) = rest.split_at_mut(stride);
        let param = match master {
            Some(master) => self.masters[*master].floats()?,
            None => rest,
        };
        Ok(SubgroupState {
            param: &mut param[..elements],
            exp_avg: &mut exp_avg[..elements],
            exp_avg_sq: &mut exp_avg_sq[..elements],
        })
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
        match master::is_copy(copy, param) {
            true => Ok(()),
            false => Err(encoding::wrong_weights()),
        }
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

    /// Prepares a slot's state for a write, and returns the encoding to write. The slot keeps its master only if its
    /// state stays, or cannot be split.
    pub(super) fn store(&mut self, slot: usize, elements: usize, stays: bool) -> Result<Encoding> {
        let whole = self.usual == Encoding::Full
            || self.slots[slot].master.is_some() && !self.split(slot, elements)?;
        if whole {
            return Ok(Encoding::Full);
        }
        if !stays {
            self.take_back(slot);
        }
        Ok(Encoding::SplitMaster)
    }

    /// Fills low halves and table from param. False if param cannot be split.
    fn split(&mut self, slot: usize, elements: usize) -> Result<bool> {
        let (low, table, param) = self.halves(slot, elements)?;
        let split = encoding::split(param, low, table);
        if split {
            self.set_fetched_encoding(slot, Encoding::SplitMaster);
        }
        Ok(split)
    }

    /// Low halves, table and param of a slot that has a master.
    fn halves(&mut self, slot: usize, elements: usize) -> Result<(&mut [u16], &mut [u16], &mut [f32])> {
        let MemorySlot { memory, master, .. } = &mut self.slots[slot];
        let master =
            master.ok_or_else(|| Error::Busy("the slot has no buffer for master weights".to_string()))?;
        let (low, table) = memory.words()?.split_at_mut(table_start(elements) / 2);
        let low = &mut low[stride(elements)..][..elements];
        let table = &mut table[..table_len(elements) / 2];
        Ok((low, table, &mut self.masters[master].floats()?[..elements]))
    }
}

/// Bytes from the start of one stream to the start of the next.
fn stride(elements: usize) -> usize {
    (4 * elements).next_multiple_of(BASE_PAGE)
}

/// Byte offset of the table in a slot.
fn table_start(elements: usize) -> usize {
    2 * stride(elements) + (2 * elements).next_multiple_of(BASE_PAGE)
}

fn table_len(elements: usize) -> usize {
    encoding::table_bytes(elements as u64) as usize
}
