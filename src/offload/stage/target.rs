//! The region of an arena that receives the 16-bit copies of a stage.
//!
//! Invariants:
//! - A stage claims the region from its submission to the end of its job. No other writer comes between, and the verdict
//!   finds the generation as the submission found it.
//! - The region is in a write whenever a task may change the copies: readers of all processes see the copies of one
//!   whole step.
//! - A step that is kept ends the write with the new generation. A step that is rolled back ends it with the earlier
//!   one, whose copies are restored. A task that fails or panics in between leaves the region torn.
//! - A torn region is claimed only if the copies cover all of it.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::arena::Arena;
use crate::error::{Error, Result};
use crate::offload::speculate::{Bucket, Publish, Recording, Task};
use crate::optim::StepStats;
use crate::optim::lent::LentCopy;

/// A region, and the generation that a kept step gives it.
#[derive(Debug)]
pub struct Target {
    arena: Arc<Arena>,
    region: u32,
    generation: u64,
    /// The copies cover the whole region.
    covered: bool,
}

impl Target {
    /// Checks the region. Errors: the arena is mapped for reading only; a part of a copy is outside the region.
    pub fn new(
        arena: &Arc<Arena>,
        region: u32,
        generation: u64,
        mut copies: Vec<LentCopy>,
    ) -> Result<Target> {
        let found = arena.region(region)?;
        if !arena.info()?.writable {
            return Err(Error::invalid("target.arena", "is mapped for reading only"));
        }
        for LentCopy { index, address, bytes } in &copies {
            if !found.span.covers(*address, *bytes) {
                let reason = format!("is not inside region {:?} of the target", found.name);
                return Err(Error::invalid(format!("tensors[{index}].param_copy"), reason));
            }
        }
        copies.sort_unstable_by_key(|copy| (copy.address, copy.bytes));
        let mut end = found.span.address();
        for LentCopy { address, bytes, .. } in copies {
            if address > end {
                break;
            }
            end = end.max(address + bytes);
        }
        let covered = end == found.span.address() + found.span.len();
        Ok(Target { arena: Arc::clone(arena), region, generation, covered })
    }

    /// Reserves the region. Errors: another writer or stage has it (`Busy`); it has this generation already; it is torn, and
    /// the copies cover only a part of it.
    pub fn reserve(self) -> Result<ReservedRegion> {
        let Target { arena, region, generation, covered } = self;
        let torn = arena.reserve(region, generation).map_err(|error| error.within("target."))?;
        let reserved = ReservedRegion { arena, region, state: Held::Reserved };
        match torn && !covered {
            true => {
                Err(reserved.arena.torn_error(region, "the copies of the stage cover only a part of it")?)
            }
            false => Ok(reserved),
        }
    }
}

/// How much of a reserved region may have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// Nothing.
    Reserved,
    /// It is in a write.
    InWrite,
    /// The reservation is over.
    Over,
}

/// A region that a stage has reserved.
#[derive(Debug)]
pub struct ReservedRegion {
    arena: Arc<Arena>,
    region: u32,
    state: Held,
}

impl ReservedRegion {
    fn begin(&mut self) -> Result<()> {
        if self.state == Held::Reserved {
            self.arena.write_reserved(self.region)?;
            self.state = Held::InWrite;
        }
        Ok(())
    }

    /// Ends the reservation. `kept`: the region gets its new generation. Otherwise its bytes are as before.
    fn end(&mut self, kept: bool) -> Result<()> {
        match (std::mem::replace(&mut self.state, Held::Over), kept) {
            (Held::Over, _) => Ok(()),
            (Held::Reserved, _) => self.arena.unreserve(self.region),
            (Held::InWrite, true) => self.arena.reserved_end(self.region),
            (Held::InWrite, false) => self.arena.reserved_abort(self.region, true),
        }
    }
}

impl Drop for ReservedRegion {
    fn drop(&mut self) {
        // An error means that this is a forked child, which has no part in its parent's write.
        let _ = match self.state {
            Held::InWrite => self.arena.reserved_abort(self.region, false),
            Held::Reserved | Held::Over => self.end(false),
        };
    }
}

/// A bucket whose copies lie in a region.
pub struct Published {
    work: Box<dyn Bucket>,
    publish: Publish,
    region: ReservedRegion,
}

impl Published {
    /// Wraps `work`.
    pub fn new(work: Box<dyn Bucket>, publish: Publish, region: ReservedRegion) -> Published {
        Published { work, publish, region }
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
        if writes {
            self.region.begin()?;
        }
        let seen = self.work.run(task, recording)?;
        match task {
            Task::Measure | Task::Pass | Task::Speculate => {}
            Task::Rollback => self.region.end(false)?,
            Task::Commit | Task::Redo(_) | Task::Step(_) => self.region.end(true)?,
        }
        Ok(seen)
    }

    fn speculates(&self) -> bool {
        self.work.speculates()
    }
}
