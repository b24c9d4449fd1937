//! EXPERIMENTAL: stages, asynchronous optimizer jobs of a pipeline. This header is not part of spillway.h, and its ABI
//! is not frozen: functions and structs may change with any release.
//!
//! An `spw_stage` is the optimizer of one stage of a pipeline; the docs call it a stage optimizer. It steps its tensors
//! as soon as their gradients are complete, before all gradients are validated. The verdict over all stages and
//! processes comes later: it keeps every step, or rolls every step back to the bit (SysX sections 3.2 and 4). Stages
//! share the processors of the thread pool: their running threads never exceed it.
//!
//!     spw_stage_options options = SPW_STAGE_OPTIONS_INIT;
//!     spw_stage *stage;
//!     spw_stage_open(&options, &stage);
//!
//!     spw_stage_submit_adam(stage, &adam, tensors, 1, NULL, NULL);
//!     spw_step_stats stats = SPW_STEP_STATS_INIT;
//!     if (spw_stage_wait(stage, -1, &stats) == SPW_OK && !stats.nonfinite)
//!         spw_stage_commit(stage);
//!     else
//!         spw_stage_rollback(stage);
//!     spw_stage_finish(stage, -1);
//!
//!     spw_stage_close(stage);
//!
//! With several stages, wait for all before the first commit. With several processes, post the sum in an arena
//! (`spw_arena_post`), and wait for the verdict of all. Before a rollback without a verdict, as after a timeout, call
//! `spw_arena_abort_round`, and follow its answer. docs/arenas.md explains stages.

use crate::capi::arena::open::spw_arena;
use crate::capi::optim::adam::spw_adam_options;
use crate::capi::optim::table::StepOptions;
use crate::capi::optim::tensor::{self, spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::capi::speculate::bucket::{parse_event, spw_spec_event};
use crate::capi::speculate::engine::{EXACT, undo_of};
use crate::capi::speculate::rule::lent;
use crate::kernel::AdamRule;
use crate::offload::speculate::{Publish, Tensors, Undo, Verdict};
use crate::offload::stage::{Options, Stage, Target, cores};
use crate::optim::check;
use crate::optim::lent::Lent;

c_struct! { first 24;
/// Options of a stage.
pub struct spw_stage_options {
    /// A stage with a higher number gets free processors first. A running step is not interrupted.
    pub priority: i32,
    /// Most threads of a step; 0: all of the pool.
    pub cores: u32,
    /// An exact `spw_undo_mode`: SPW_UNDO_MODE_DELTA (initially), or SPW_UNDO_MODE_SHADOW, where every tensor has shadow spans.
    pub undo_mode: u32,
    /// An `spw_spec_publish`, other than SPW_SPEC_PUBLISH_SPECULATIVE. SPW_SPEC_PUBLISH_FINAL: the 16-bit copies are
    /// written after the verdict, and until then readers of the region use the earlier ones. SPW_SPEC_PUBLISH_STAGED:
    /// they are written by the step, in one pass; readers wait from the step to the verdict. Its rollback writes the copies
    /// of the restored parameters, in the earlier generation: a region that held other bytes, as in generation 0, does not
    /// get them back.
    pub publish: u32,
    /// 0
    pub reserved: u32,
}
}

c_struct! { first 24;
/// The region of an arena that holds the 16-bit copies (param_copy) of a job's tensors.
pub struct spw_stage_target {
    /// Index of the region. Every param_copy of the job lies inside it.
    pub region: u32,
    /// Arena, mapped for writing. The handle may be closed after the call.
    pub arena: *const spw_arena,
    /// Generation that the region gets if the step is kept: above the present one.
    pub generation: u64,
}
}

c_struct! { first 24;
/// The processors that the stages of this process share.
pub struct spw_stage_cores {
    /// Threads of the pool.
    pub threads: u32,
    /// Threads that stages have now.
    pub in_use: u32,
    /// Stages that could run and wait for a thread.
    pub waiting: u32,
    /// Threads that worked on stages at one time, counted at work: the most so far.
    pub peak_threads: u32,
    /// 0
    pub reserved: u32,
}
}

/// A stage. It has one thread, which sleeps until its job may run, and then works with the thread pool.
pub struct spw_stage {
    stage: Stage,
    undo: Undo,
    opener: OpeningProcess,
}

handle!(spw_stage, "stage", opener, "the stage");

/// Creates a stage.
#[unsafe(no_mangle)]
pub extern "C" fn spw_stage_open(
    options: In<spw_stage_options>,
    stage_out: Out<*mut spw_stage>,
) -> spw_status {
    guard(|| {
        let raw = options.read("options")?;
        abi_struct::zero("options.reserved", raw.reserved)?;
        let undo = undo_of(raw.undo_mode, &EXACT)?;
        let publish = match raw.publish {
            0 => Publish::Final,
            1 => Publish::Staged,
            other => {
                let reason =
                    format!("is {other}, but must be SPW_SPEC_PUBLISH_FINAL or SPW_SPEC_PUBLISH_STAGED");
                return Err(Error::invalid("options.publish", reason));
            }
        };
        let options = Options { priority: raw.priority, cores: raw.cores as usize, publish };
        let opener = OpeningProcess::current();
        stage_out.open(|| Ok(spw_stage { stage: Stage::open(options)?, undo, opener }))
    })
}

/// Submits a job, and returns at once: one Adam step of `tensors` with `options`, with `options.grad_scale` (1 / loss
/// scale) on the gradient, a check, and a record for an exact rollback, in one pass. The step starts when `event` has
/// happened, or at once if `event` is NULL. `target` (may be NULL) is the region of the 16-bit copies.
///
/// Kept: the spans of the tensors, until `spw_stage_finish` has returned; no other stage may use them. Until then the
/// stage also has the region of `target`: no other stage and no `spw_arena_write_begin` gets it.
///
/// - SPW_ERR_ROUND_OPEN: a job has no verdict.
/// - SPW_ERR_BUSY: the previous job is not over, or another stage or writer has the region.
/// - SPW_ERR_ARENA_TORN: an earlier writer of the region ended in the middle of a write, and the copies of the tensors
///   cover only a part of the region. Write the whole region first.
///
/// # Safety
/// As `spw_spec_submit`. `target` is NULL or points to a struct of `struct_size` bytes with an open arena.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_stage_submit_adam(
    stage: Option<&spw_stage>,
    options: In<spw_adam_options>,
    tensors: In<spw_tensor>,
    count: u64,
    event: In<spw_spec_event>,
    target: In<spw_stage_target>,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let stage = handle::get(stage)?;
            let options = options.read("options")?;
            let tensors = lent::<spw_adam_options>(options.rule()?, tensors, count)?;
            let target = parse_target(target, &tensors)?;
            let work = Tensors::new(tensors, stage.undo, stage.stage.publish())?;
            let event = parse_event(event)?;
            stage.stage.begin(options.grad_scale)?;
            stage.stage.submit(Box::new(work), event, target).inspect_err(|_| drop(stage.stage.rollback()))
        }
    })
}

/// Waits until the tensors are stepped, for up to `timeout_ms` milliseconds (0: polls; negative: without limit). Writes
/// the local result: the finiteness and the sum of squares of the scaled gradients. If the job failed, the call returns
/// its error: roll every stage back then.
#[unsafe(no_mangle)]
pub extern "C" fn spw_stage_wait(
    stage: Option<&spw_stage>,
    timeout_ms: i64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    let wait = || handle::get(stage)?.stage.wait(timeout(timeout_ms));
    guard(|| tensor::wait_stats(wait, stats_out))
}

/// Keeps the step: the verdict of all stages and processes is good. Returns at once; `spw_stage_finish` waits for the
/// 16-bit copies. SPW_ERR_BUSY before the tensors are stepped.
#[unsafe(no_mangle)]
pub extern "C" fn spw_stage_commit(stage: Option<&spw_stage>) -> spw_status {
    guard(|| handle::get(stage)?.stage.resolve(Verdict::Commit))
}

/// Rolls the step back and repeats it with the gradient factor `grad_scale`, rounded to f32. This clips the gradients.
/// Otherwise as `spw_stage_commit`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_stage_redo(stage: Option<&spw_stage>, grad_scale: f64) -> spw_status {
    guard(|| {
        let grad_scale = check::finite("grad_scale", grad_scale)?;
        handle::get(stage)?.stage.resolve(Verdict::Redo(grad_scale))
    })
}

/// Rolls the job back, whatever its state: a step that is done or running is rolled back to the bit, one that has not
/// begun never begins. Returns at once; `spw_stage_finish` waits. Without an open job it does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_stage_rollback(stage: Option<&spw_stage>) -> spw_status {
    guard(|| handle::get(stage)?.stage.rollback())
}

/// Waits until the job is over, for up to `timeout_ms` milliseconds (negative: without limit). After it all spans, and
/// the word of the event, belong to the caller again. If the job fails, also during the wait, the call needs no verdict, and
/// returns the error of the job.
#[unsafe(no_mangle)]
pub extern "C" fn spw_stage_finish(stage: Option<&spw_stage>, timeout_ms: i64) -> spw_status {
    guard(|| handle::get(stage)?.stage.finish(timeout(timeout_ms)))
}

/// Writes the state of the job, an `spw_spec_state`. If the job failed, the call returns its error.
#[unsafe(no_mangle)]
pub extern "C" fn spw_stage_get_state(stage: Option<&spw_stage>, state_out: Out<u32>) -> spw_status {
    guard(|| {
        let state = handle::get(stage)?.stage.progress()?;
        state_out.put(state as u32, "state_out")
    })
}

/// Writes how the stages of this process use the processors.
#[unsafe(no_mangle)]
pub extern "C" fn spw_stage_get_cores(cores_out: Out<spw_stage_cores>) -> spw_status {
    guard(|| {
        let found = cores()?;
        let values = report!(spw_stage_cores from found {
            in_use, waiting, peak_threads
        } with {
            threads: found.all as u32, reserved: 0
        });
        cores_out.write(&values, "cores_out")
    })
}

/// Closes the stage. It first rolls back a job without a verdict, and completes a job with one. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_stage_close(stage: Option<Box<spw_stage>>) -> spw_status {
    guard(|| handle::end(stage))
}

/// # Safety
/// `target` is NULL or points to a struct of `struct_size` bytes with an open arena.
unsafe fn parse_target(target: In<spw_stage_target>, tensors: &Lent<AdamRule>) -> Result<Option<Target>> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        let Some(raw) = target.read_optional("target")? else { return Ok(None) };
        let arena = &handle::get(raw.arena.as_ref()).map_err(|error| error.within("target."))?.0;
        Target::new(arena, raw.region, raw.generation, tensors.copies()?).map(Some)
    }
}
