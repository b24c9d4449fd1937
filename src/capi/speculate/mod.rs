//! Speculation, then validation (SuperOffload section 4.4): buckets are stepped before the norm of the whole gradient
//! is known; the verdict keeps the steps, rolls them back, or repeats them with the clipped gradient.
//!
//! The result is bit-identical to one step after the norm is known, for every arrival order of the gradients. A round
//! is:
//!
//!     spw_spec_options options = SPW_SPEC_OPTIONS_INIT;
//!     options.buckets = buckets;
//!     options.undo_mode = SPW_UNDO_MODE_DELTA;
//!     spw_spec *spec;
//!     spw_spec_open(&options, &spec);
//!
//!     spw_spec_begin_adam(spec, &adam, max_norm);
//!     for (uint32_t bucket = 0; bucket < buckets; bucket++)
//!         spw_spec_submit(spec, bucket, &tensors[bucket], 1, NULL);
//!
//!     spw_step_stats stats = SPW_STEP_STATS_INIT;
//!     spw_spec_local_result(spec, -1, &stats);
//!     spw_spec_outcome outcome = SPW_SPEC_OUTCOME_INIT;
//!     spw_spec_resolve(spec, &stats, &outcome);
//!     spw_spec_finish(spec, -1);
//!
//!     spw_spec_close(spec);
//!
//! With several ranks, add up `stats` over all ranks before `spw_spec_resolve`. A complete example is
//! examples_c/speculate.c.

pub(in crate::capi) mod rule;

pub mod engine;

pub mod bucket;

pub mod verdict;

pub use {bucket::*, engine::*, verdict::*};
