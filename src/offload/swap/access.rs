//! One subgroup's state, read and written between updates.
//!
//! Invariants:
//! - A subgroup that stays in memory is read and changed there: what lies on the tier may be older.
//! - Any other is written to the tier at once, whole, as a new generation: a commit makes it count, a rollback forgets it.
//! - A param that is stored split is never handed out or written again without the copy it is made of.
#![forbid(unsafe_code)]

use crate::dtype::bf16;

use super::Swap;
use super::form::{self, Form, STREAMS};
use crate::error::{Error, Result};
use crate::sys::span::Span;

impl Swap {
    /// Copies a subgroup's state into the caller's memory, one span for each stream; an empty one leaves its stream out.
    /// `copy` are the 16-bit weights, which param is made of if it is stored split.
    pub fn read(&mut self, subgroup: usize, copy: Option<&[bf16]>, to: [Span; STREAMS]) -> Result<()> {
        let elements = self.lent(subgroup, "to", &to)?;
        let (extent, form, _) = self.extents.newest(&self.tier, subgroup)?;
        let slot = match (self.pipeline.kept(subgroup), form) {
            (Some(slot), _) => slot,
            (None, Form::Whole) => return self.copy_in(extent, &to),
            (None, Form::Split) if copy.is_none() && !to[0].is_empty() => {
                return Err(Error::invalid("param", "is stored split: its 16-bit copy is needed to read it"));
            }
            (None, Form::Split) => {
                let slot = self.vacant()?;
                self.copy_in(extent, &form::spans(Form::Split, self.buffers[slot].span(), elements))?;
                if let Some(copy) = copy.filter(|_| !to[0].is_empty()) {
                    form::join(&mut self.buffers[slot], elements, copy)?;
                }
                slot
            }
        };
        let held = form::spans(Form::Whole, self.buffers[slot].span(), elements);
        held.iter().zip(to).filter(|(_, to)| !to.is_empty()).for_each(|(held, to)| held.copy_to(to));
        Ok(())
    }

    /// Gives a subgroup another state, from one span of the caller's memory for each stream; an empty one leaves its
    /// stream as it is, but param has to be given where it is stored split.
    pub fn write(&mut self, subgroup: usize, from: [Span; STREAMS]) -> Result<()> {
        let elements = self.lent(subgroup, "from", &from)?;
        let kept = self.pipeline.kept(subgroup);
        let slot = kept.map_or_else(|| self.vacant(), Ok)?;
        let held = form::spans(Form::Whole, self.buffers[slot].span(), elements);
        if kept.is_none() {
            self.fetch_rest(subgroup, &from, &held)?;
        }
        from.iter()
            .zip(&held)
            .filter(|(from, _)| !from.is_empty())
            .for_each(|(from, held)| from.copy_to(*held));
        if kept.is_some() {
            self.pipeline.changed(slot);
            return Ok(());
        }
        self.lanes.begin(&self.tier);
        let outcome = self.flush(subgroup, slot, false).and_then(|()| self.collect_all());
        self.note(outcome)
    }

    /// Reads what the caller does not give.
    fn fetch_rest(&self, subgroup: usize, from: &[Span; STREAMS], held: &[Span]) -> Result<()> {
        let (extent, form, _) = self.extents.newest(&self.tier, subgroup)?;
        let rest = |stream: usize| if from[stream].is_empty() { held[stream] } else { Span::empty() };
        match form {
            Form::Whole => self.copy_in(extent, &[rest(0), rest(1), rest(2)]),
            Form::Split if from[0].is_empty() && !held[0].is_empty() => {
                Err(Error::invalid("param", "is stored split: it is needed too"))
            }
            Form::Split => self.copy_in(extent, &[rest(1), rest(2), Span::empty(), Span::empty()]),
        }
    }

    /// Elements of a subgroup that the caller lends these spans for.
    fn lent(&self, subgroup: usize, argument: &'static str, spans: &[Span; STREAMS]) -> Result<usize> {
        self.ready()?;
        let elements = self.elements(subgroup)?;
        match spans.iter().all(|span| span.is_empty() || span.len() == elements * 4) {
            true => Ok(elements),
            false => {
                let reason = format!("does not have {elements} elements for subgroup {subgroup}");
                Err(Error::invalid(argument, reason))
            }
        }
    }

    fn vacant(&mut self) -> Result<usize> {
        self.set_stuck_aside();
        self.pipeline.vacant().ok_or_else(|| Error::Busy("all buffers are in use".to_string()))
    }

    /// Reads streams from the tier.
    fn copy_in(&self, extent: u32, to: &[Span]) -> Result<()> {
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
