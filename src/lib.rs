//! Spillway: the CPU half of optimizer offload, for training large models on few GPUs.
//!
//! The product is the C interface in [`capi`] (header `include/spillway.h`). The Rust modules below it are layers: a
//! module uses only modules of lower layers (`ffi_tests/rust/tidy.rs` checks this):
//!
//! | layer | modules |
//! |---|---|
//! | L0 | [`error`], [`environment`], [`dtype`], [`log`], [`stats`], [`trace`], [`checksum`]: no dependency inside the crate |
//! | L1 | [`sys`]: threads, processors, memory and files; [`kernel`]: one optimizer body, one file per instruction set |
//! | L2 | [`optim`]: optimizers over slices, split over threads; [`pool`]: pinned memory |
//! | L3 | [`io`]: files to and from memory, through io_uring or threads; [`gpu`]: the GPU, through its driver; [`arena`]: memory that processes share |
//! | L4 | [`tier`]: crash-safe storage of named extents over several paths |
//! | L5 | [`offload`]: schedules: swapping, speculation, stages and the interleaved update |
//! | L6 | [`capi`]: the C interface: convert arguments, call one function, convert the result |
//!
//! [`kernel`] and [`dtype`] come from the separate crate in kernels/, so a change of this crate does not recompile
//! them.

pub mod checksum;
pub mod environment;
pub mod error;
pub mod log;
pub mod stats;
pub mod trace;

pub mod sys;

pub use spillway_kernels as kernel;
pub use spillway_kernels::dtype;

pub mod optim;
pub mod pool;

pub mod arena;
pub mod gpu;
pub mod io;

pub mod tier;

pub mod offload;

pub mod capi;

/// Version of this release, as `spw_version` returns it.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
