//! What moves when: optimizer steps beside the work that feeds them.
#![forbid(unsafe_code)]

pub mod interleave;
pub mod speculate;
