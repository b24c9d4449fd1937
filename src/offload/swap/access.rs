//! One subgroup's state, read and written between updates.
//!
//! Invariants:
//! - A subgroup that stays in memory is read and changed there: what lies on the tier may be older.
//! - Any other is written to the tier at once, whole, as a new generation: a commit makes it count, a rollback forgets it.
#![forbid(unsafe_code)]

use super::{Direction, STREAMS, Swap, spans_of};
use crate::error::{Error, Result};
use crate::sys::span::Span;

impl Swap {
    /// Copies a subgroup's state into the caller's memory, one span for each stream; an empty one leaves its stream out.
    pub fn read(&mut self, subgroup: usize, to: [Span; STREAMS]) -> Result<()> {
        let (elements, extent) = self.lent(subgroup, "to", &to)?;
        match self.pipeline.kept(subgroup) {
            Some(slot) => {
                let held = spans_of(self.buffers[slot].span(), elements);
                held.iter().zip(to).filter(|(_, to)| !to.is_empty()).for_each(|(held, to)| held.copy_to(to));
                Ok(())
            }
            None => self.fetch(extent, &to),
        }
    }

    /// Gives a subgroup another state, from one span of the caller's memory for each stream; an empty one leaves its
    /// stream as it is.
    pub fn write(&mut self, subgroup: usize, from: [Span; STREAMS]) -> Result<()> {
        let (elements, extent) = self.lent(subgroup, "from", &from)?;
        let kept = self.pipeline.kept(subgroup);
        let slot = kept.or_else(|| self.pipeline.vacant());
        let slot = slot.ok_or_else(|| Error::Busy("all buffers are in use".to_string()))?;
        let held = spans_of(self.buffers[slot].span(), elements);
        if kept.is_none() {
            self.fetch(
                extent,
                &std::array::from_fn(|n| if from[n].is_empty() { held[n] } else { Span::empty() }),
            )?;
        }
        from.iter()
            .zip(held)
            .filter(|(from, _)| !from.is_empty())
            .for_each(|(from, held)| from.copy_to(held));
        if kept.is_some() {
            self.pipeline.changed(slot);
            return Ok(());
        }
        let outcome = self.start(Direction::Flush, subgroup, slot).and_then(|()| self.collect_all());
        self.note(outcome)
    }

    /// Elements and extent of a subgroup that the caller lends these spans for.
    fn lent(&self, subgroup: usize, argument: &'static str, spans: &[Span; STREAMS]) -> Result<(usize, u32)> {
        self.ready()?;
        let (elements, extent) = *self.subgroups.get(subgroup).ok_or_else(|| self.unknown(subgroup))?;
        match spans.iter().all(|span| span.is_empty() || span.len() == elements * 4) {
            true => Ok((elements, extent)),
            false => {
                let reason = format!("does not have {elements} elements for subgroup {subgroup}");
                Err(Error::invalid(argument, reason))
            }
        }
    }

    /// Reads streams from the tier.
    fn fetch(&self, extent: u32, to: &[Span; STREAMS]) -> Result<()> {
        if to.iter().all(|span| span.is_empty()) {
            return Ok(());
        }
        let ticket = self.tier.read(extent, to, false)?;
        self.tier.wait(ticket, None).map(drop)
    }

    fn collect_all(&mut self) -> Result<()> {
        while !self.traffic.idle() {
            self.collect(true)?;
        }
        Ok(())
    }
}
