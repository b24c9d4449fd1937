//! What the operating system is asked for: processors, threads, memory and files.

pub mod file;
pub mod lent;
pub mod memory;
pub mod reserve;
pub mod span;
pub mod threads;
