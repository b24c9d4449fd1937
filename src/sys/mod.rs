//! What the operating system is asked for: processors, threads, address space.

pub mod reserve;
pub mod threads;
