//! Speculation, then validation: steps begin while gradients are still coming, and the norm of all of them decides later.
//!
//! A step needs the norm of the whole gradient, to clip it, and to know that it is finite. Waiting for that keeps the
//! processor idle during backward. Here each bucket steps as soon as its gradient is there, as if nothing had to be
//! clipped, and records what it takes to go back to the bit. The verdict then lets the steps stand, takes
//! them back, or takes them back and steps again with the clip factor in one pass (SuperOffload section 4.4).
//!
//! The norm only grows: once the running sum passes the limit the verdict is certain, and buckets that have not started
//! are measured only and step once. The result of every round has the bits of waiting for the norm and stepping then.
//!
//! | file | holds |
//! |---|---|
//! | `round` | the states of a round and of its buckets, and who may do what in which: pure |
//! | `clip` | the clip rule and the verdict |
//! | `bucket` | what each task does to a bucket's tensors |
//! | `device` | buckets that live on the GPU, and 16-bit copies that go there |
//! | `executor` | the thread that does the tasks |
//! | `engine` | the calls |
#![forbid(unsafe_code)]

mod bucket;
mod clip;
mod device;
mod engine;
mod executor;
mod round;

#[cfg(test)]
mod tests;

pub use bucket::{Bucket, Lender, Publish, Recording, Tensors, Undo};
pub use clip::{Clip, Verdict};
pub use device::{Publication, Published, Ready, Resident};
pub use engine::{Engine, Outcome, Stats};
pub use round::{Counts, Progress, Task};
