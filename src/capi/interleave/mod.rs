//! EXPERIMENTAL: the interleaved update (Deep Optimizer States). This header is not part of spillway.h, and its ABI is not
//! frozen: functions and structs may change with any release.
//!
//! CPU and GPU step different subgroups at the same time, while states move between host and device memory.
//!
//!     spw_interleave_options options = SPW_INTERLEAVE_OPTIONS_INIT;
//!     options.backend = SPW_INTERLEAVE_BACKEND_CUDA;
//!     options.grad_dtype = options.copy_dtype = SPW_DTYPE_BF16;
//!     options.gpu = gpu;
//!     spw_interleave *interleave;
//!     spw_interleave_open(&options, subgroups, count, &interleave);
//!     spw_interleave_set_plan(interleave, placements, count);
//!
//!     for (uint64_t i = 0; i < count; i++)
//!         spw_interleave_grad_ready(interleave, i, stream);
//!     spw_interleave_begin(interleave, &adam, 1, stream);
//!     for (uint64_t i = 0; i < count; i++)
//!         spw_interleave_stream_wait_params(interleave, i, stream);
//!
//!     spw_interleave_drain(interleave);
//!     spw_interleave_close(interleave);
//!
//! A complete example is examples_c/interleave.c.

pub mod plan;

pub mod subgroups;

pub mod update;

pub use {plan::*, subgroups::*, update::*};
