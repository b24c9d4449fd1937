//! Overlap: optimizer steps that run beside backward, and beside the transfers of their states.
#![forbid(unsafe_code)]

pub mod interleave;
pub mod speculate;
pub mod stage;
pub mod swap;
pub mod window;
