//! EXPERIMENTAL: plans and predictions. This header is not part of spillway.h, and its ABI is not frozen: functions and
//! structs may change with any release.
//!
//! The functions are pure computations. They measure nothing and keep nothing.
//!
//!     spw_plan_shape shape = SPW_PLAN_SHAPE_INIT;
//!     shape.count = 24;
//!     shape.size = 100000000;
//!     spw_plan_options options = SPW_PLAN_OPTIONS_INIT;
//!     uint32_t placements[24];
//!     spw_plan_result result = SPW_PLAN_RESULT_INIT;
//!     spw_plan_interleave(&rates, &shape, &options, placements, &result);

pub mod interleave;

pub mod pipeline;

pub mod pipeline_report;

pub use {interleave::*, pipeline::*, pipeline_report::*};
