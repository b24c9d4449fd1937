//! Reading and writing the state of one subgroup between updates.
//!
//! Invariants:
//! - A cached subgroup is read and changed in memory: the tier's copy may be older.
//! - Any other subgroup is written to the tier at once and completely, as a new generation. A commit makes the
//!   generation count; a rollback discards it.
//! - A split param is never returned without its 16-bit copy, whether the subgroup is cached or not.
#![forbid(unsafe_code)]

use crate::dtype::bf16;

use super::Swap;
use super::encoding::{self, Master, STREAMS};
use crate::error::{Error, Result};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;

impl Swap {
    /// Copies a subgroup's state into the caller's memory. `to` holds one span of f32 for each of param, exp_avg and
    /// exp_avg_sq, whatever their encoding; an empty span skips its array. `copy` holds the 16-bit weights; it is needed to read a split param.
    pub fn read(&mut self, subgroup: usize, copy: Option<&[bf16]>, to: [Span; STREAMS]) -> Result<()> {
        let elements = self.check_spans(subgroup, "to", &to)?;
        let needs_copy = self.layout.usual.master == Master::Split && !to[0].is_empty();
        let copy = needs_copy.then(|| copy.ok_or_else(encoding::missing_weights)).transpose()?;
        let kept = self.pipeline.cached_slot(subgroup);
        let slot = kept.map_or_else(|| self.vacant(), Ok)?;
        if kept.is_none() {
            self.fetch_parts(subgroup, slot, to.map(|to| !to.is_empty()))?;
        }
        let whole = self.slots.has_master(slot);
        match copy {
            Some(copy) if whole => self.slots.check_copy(slot, elements, copy)?,
            Some(copy) => {
                self.lend_master(slot)?;
                self.slots.join(slot, elements, copy)?;
            }
            None => {}
        }
        self.slots.load(slot, elements, &to)?;
        if kept.is_none() || !whole {
            self.slots.take_back(slot);
        }
        Ok(())
    }

    /// Replaces a subgroup's state. `from` holds one span of f32 for each of param, exp_avg and exp_avg_sq; an empty
    /// span leaves its array unchanged.
    pub fn write(&mut self, subgroup: usize, from: [Span; STREAMS]) -> Result<()> {
        let elements = self.check_spans(subgroup, "from", &from)?;
        self.claim.change()?;
        let kept = self.pipeline.cached_slot(subgroup);
        let slot = kept.map_or_else(|| self.vacant(), Ok)?;
        if !from[0].is_empty() || elements == 0 {
            self.lend_master(slot)?;
        }
        if kept.is_none() {
            self.fetch_parts(subgroup, slot, from.map(|from| from.is_empty()))?;
        }
        self.slots.store(slot, elements, &from)?;
        if kept.is_some() {
            if self.slots.keep(slot, elements)? {
                self.pipeline.changed(slot);
                return Ok(());
            }
            self.pipeline.uncache(slot);
        }
        let outcome = self.flush(subgroup, slot, false).and_then(|()| self.collect_all());
        self.traffic.end_part();
        self.note(outcome)
    }

    /// Reads the wanted ones of param, exp_avg and exp_avg_sq into a slot. After a failure the system may still access
    /// the memory, so that it is never the caller's.
    fn fetch_parts(&mut self, subgroup: usize, slot: usize, wanted: [bool; STREAMS]) -> Result<()> {
        let (extent, master, _) = self.extents.newest(&self.tier, subgroup)?;
        let elements = self.extents.elements(subgroup);
        if master == Master::Full && wanted[0] {
            self.lend_master(slot)?;
        }
        let mut buffers = self.slots.buffers(slot, master, elements);
        // A split param is read as it is stored: low halves and table.
        let is_wanted = |stream: usize| match (master, stream) {
            (Master::Full | Master::Low, stream) => wanted[stream],
            (Master::Split, 0 | 1) => wanted[stream + 1],
            (Master::Split, _) => wanted[0] && elements > 0,
        };
        for (stream, buffer) in buffers.iter_mut().enumerate() {
            if !is_wanted(stream) {
                *buffer = TransferBuffer::empty();
            }
        }
        if buffers.iter().all(TransferBuffer::is_empty) {
            return Ok(());
        }
        let ticket = self.tier.read(extent, &buffers)?;
        self.tier.wait(ticket, None).map(drop)
    }

    /// Checks the lengths of the caller's spans, and returns the number of elements of the subgroup.
    fn check_spans(&self, subgroup: usize, argument: &'static str, spans: &[Span; STREAMS]) -> Result<usize> {
        self.ready()?;
        let elements = self.layout.elements(subgroup)?;
        match spans.iter().all(|span| span.is_empty() || span.len() == elements * 4) {
            true => Ok(elements),
            false => {
                let reason = format!("must have {elements} elements for subgroup {subgroup}");
                Err(Error::invalid(argument, reason))
            }
        }
    }

    fn vacant(&mut self) -> Result<usize> {
        self.refresh_slots();
        self.pipeline.vacant().ok_or_else(|| Error::Busy("all buffers are in use".to_string()))
    }

    fn collect_all(&mut self) -> Result<()> {
        while !self.traffic.idle() {
            self.collect(true)?;
        }
        Ok(())
    }
}
