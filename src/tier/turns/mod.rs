//! Turns: one process of the node uses a path at a time (MLP-Offload section 3.2).
//!
//! | file | holds |
//! |---|---|
//! | [`queue`] | the queue of the processes that wait for a path, in files that they share |
//! | `gate` | the transfers of this process that wait for its turn on a path |
//! | [`arbiter`] | requests turns when transfers need them, and opens the gates of paths with a turn |
#![forbid(unsafe_code)]

pub mod arbiter;
pub(in crate::tier) mod gate;
pub mod queue;
