//! What moves when: updates whose state is not in host memory.
#![forbid(unsafe_code)]

pub mod swap;
