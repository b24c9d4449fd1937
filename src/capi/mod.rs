//! The C interface. Each function converts its arguments, calls one function of a layer above, and converts the result
//! back.
//!
//! The order of these modules is the order of `include/spillway.h`, which is generated from them. Run `SPILLWAY_BLESS=1
//! cargo test -p spillway-header` after a change.

mod guard;
mod record;
mod text;

pub mod status;

pub mod library;

pub mod threads;

pub mod tensor;

pub mod adam;

pub mod adagrad;

pub mod lion;

pub mod grad;

pub mod undo;

pub mod speculate;

pub mod spec_bucket;

pub mod spec_verdict;

pub mod plan;

pub mod policy;

pub mod pool;

pub mod io;

pub mod io_wait;

pub mod tier_options;

pub mod tier_steps;

pub mod tier;

pub mod tier_report;

pub mod swap_options;

pub mod swap;

pub mod gpu;

pub mod gpu_transfer;

pub mod spec_gpu;

pub mod interleave_open;

pub mod interleave;

pub mod deepspeed;

pub mod deepspeed_swap;
