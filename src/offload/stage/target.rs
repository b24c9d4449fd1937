//! The region of an arena that receives the 16-bit copies of a stage.
//!
//! Invariants:
//! - The region is in a write whenever a task may change the copies: readers of all processes see the copies of one
//!   whole step.
//! - A step that is kept ends the write with the new generation. A step that is rolled back ends it with the earlier
//!   one, whose copies are restored. A task that fails or panics in between leaves the region torn.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::arena::Arena;
use crate::error::{Error, Result};
use crate::offload::speculate::{Bucket, Publish, Recording, Task};
use crate::optim::StepStats;
use crate::sys::span::Span;

/// A region, and the generation that a kept step gives it.
#[derive(Debug, Clone)]
pub struct Target {
    arena: Arc<Arena>,
    region: u32,
    generation: u64,
}

impl Target {
    /// Checks the region. Errors: the arena is mapped for reading only; the region has this generation already; a part of
    /// `copies` (address and length of each 16-bit copy) is outside the region.
    pub fn new(
        arena: &Arc<Arena>,
        region: u32,
        generation: u64,
        copies: impl Iterator<Item = (usize, usize)>,
    ) -> Result<Target> {
        let found = arena.region(region)?;
        if !arena.info()?.writable {
            return Err(Error::invalid("target.arena", "is mapped for reading only"));
        }
        if generation <= found.generation {
            let reason =
                format!("is {generation}, but region {:?} has {} already", found.name, found.generation);
            return Err(Error::invalid("target.generation", reason));
        }
        let inside = |span: Span, (start, bytes): (usize, usize)| span.covers(start, bytes);
        for (index, copy) in copies.enumerate() {
            if !inside(found.span, copy) {
                let reason = format!("is not inside region {:?} of the target", found.name);
                return Err(Error::invalid(format!("tensors[{index}].param_copy"), reason));
            }
        }
        Ok(Target { arena: Arc::clone(arena), region, generation })
    }
}

/// A bucket whose copies lie in a region.
pub struct Published {
    work: Box<dyn Bucket>,
    publish: Publish,
    target: Target,
    in_write: bool,
}

impl Published {
    /// Wraps `work`.
    pub fn new(work: Box<dyn Bucket>, publish: Publish, target: Target) -> Published {
        Published { work, publish, target, in_write: false }
    }

    fn end(&mut self, how: impl FnOnce(&Arena, u32) -> Result<()>) -> Result<()> {
        match std::mem::take(&mut self.in_write) {
            true => how(&self.target.arena, self.target.region),
            false => Ok(()),
        }
    }
}

impl Bucket for Published {
    fn run(&mut self, task: Task, recording: &mut Recording) -> Result<StepStats> {
        let at_once = self.publish != Publish::Final;
        let writes = match task {
            Task::Measure | Task::Pass => false,
            Task::Speculate | Task::Rollback => at_once,
            Task::Commit => !at_once,
            Task::Redo(_) | Task::Step(_) => true,
        };
        if writes && !self.in_write {
            self.target.arena.write_begin(self.target.region, self.target.generation)?;
            self.in_write = true;
        }
        let seen = self.work.run(task, recording)?;
        match task {
            Task::Measure | Task::Pass | Task::Speculate => {}
            Task::Rollback => self.end(|arena, region| arena.write_abort(region, true))?,
            Task::Commit | Task::Redo(_) | Task::Step(_) => self.end(Arena::write_end)?,
        }
        Ok(seen)
    }

    fn speculates(&self) -> bool {
        self.work.speculates()
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        // An error means that this is a forked child, which has no part in its parent's write.
        let _ = self.end(|arena, region| arena.write_abort(region, false));
    }
}
