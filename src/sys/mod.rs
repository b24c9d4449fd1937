//! What the operating system is asked for: processors and threads.

pub mod threads;
