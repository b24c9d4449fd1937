//! The tiered update (MLP-Offload sections 3.2 and 3.4): optimizer state on a tier, stepped through few buffers of host
//! memory.
#![forbid(unsafe_code)]

pub mod budget;
pub mod master;
pub mod pipeline;
