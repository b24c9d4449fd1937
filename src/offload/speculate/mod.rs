//! Speculation, then validation: buckets step while backward still produces gradients; the global norm validates later.
//!
//! A step needs the norm of the whole gradient, to clip it and to detect infinities and NaNs. Waiting for the norm
//! keeps the CPU idle during backward. Here each bucket steps as soon as its gradient is complete, without clipping,
//! and records what an exact (bitwise) rollback needs. The verdict then commits the steps, rolls them back, or rolls
//! them back and repeats them with the clip factor in one pass (SuperOffload section 4.4).
//!
//! The sum of squares never decreases as buckets are added. Once it passes the limit, the verdict is certain: buckets
//! that have not started are only measured, and step once after the verdict. After an Inf or NaN, buckets that have not
//! started are neither measured nor stepped. The result is bit-identical to one step after the norm is known.
//!
//! | file | holds |
//! |---|---|
//! | `round` | the state machine of a round and of its buckets; pure |
//! | `clip` | the clip rule and the verdict |
//! | `bucket` | what each task does to the tensors of a bucket |
//! | `device` | buckets in GPU memory, and uploads of 16-bit copies to the GPU |
//! | `executor` | the thread that runs the tasks |
//! | `engine` | the public calls |
//!
//! An event that never happens has no deadline: the caller's timeout ends its wait, and an abort ends the round. A file
//! descriptor is watched in `sys/event.rs`, a CUDA event in `gpu/watch.rs`.
#![forbid(unsafe_code)]

mod bucket;
mod clip;
mod device;
mod engine;
mod executor;
mod round;

#[cfg(test)]
mod tests;

pub use bucket::{Bucket, Publish, Recording, Tensors, Undo};
pub use clip::{Clip, Verdict};
pub use device::{Publication, Published, Resident};
pub use engine::{Engine, Outcome};
pub use round::{Progress, Task};
