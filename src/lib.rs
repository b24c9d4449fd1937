//! Spillway: the CPU half of optimizer offload, for training large models on few GPUs.
//!
//! The C face in [`capi`] (header `include/spillway.h`) is the product; the Rust modules below it are layers, and a
//! module uses only layers above its own in this list (`ffi_tests/tidy.rs` checks it):
//!
//! | layer | modules |
//! |---|---|
//! | L0 | [`error`], [`dtype`], [`log`], [`stats`], [`trace`], [`checksum`], [`plan`]: no dependency inside the crate |
//! | L1 | [`sys`]: threads, processors, memory and files; [`kernel`]: one optimizer body, one file per instruction set |
//! | L2 | [`optim`]: Adam, Adagrad, Lion over slices, split over threads; [`pool`]: pinned memory |
//! | L3 | [`io`]: files to and from memory, through io_uring or threads; [`gpu`]: the GPU, through its driver |
//! | L4 | [`tier`]: named extents over several paths, that survive a crash |
//! | L5 | [`offload`]: what moves when |
//! | L6 | [`capi`]: convert, call one function, convert back |
//!
//! [`kernel`] and [`dtype`] are the crate in kernels/: whatever changes around it, it is compiled once.

pub mod checksum;
pub mod error;
pub mod log;
pub mod plan;
pub mod stats;
pub mod trace;

pub mod sys;

pub use spillway_kernels as kernel;
pub use spillway_kernels::dtype;

pub mod optim;
pub mod pool;

pub mod gpu;
pub mod io;

pub mod tier;

pub mod offload;

pub mod capi;

/// Version of this release, as `spw_version` gives it.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
