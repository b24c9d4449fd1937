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

pub mod job;

pub use job::*;
