//! Files to and from memory: any address, offset and length, asynchronous, every completion checked.
//!
//! | module | what it is |
//! |---|---|
//! | [`engine`], `waiting` | what callers see: submit, wait, cancel, deadlines |
//! | [`options`], `counters`, `busy` | settings and requests in, statistics out |
//! | `driver` | the thread behind an engine: cuts operations into pieces, keeps the queue full, judges completions |
//! | [`plan`] | where the cuts are, as pure arithmetic |
//! | [`file`] | open files: direct or buffered, and why |
//! | `backend` | the interface below: `uring`, `threads` (pread and pwrite), `sim` (seeded faults, for tests) |
//!
//! Only `uring` has unsafe code.

mod backend;
mod busy;
pub mod counters;
mod driver;
mod open_files;
mod operation;
mod threads;
mod uring;
mod waiting;

pub mod engine;
pub mod file;
pub mod options;
pub mod plan;

#[cfg(any(test, feature = "sim"))]
pub mod sim;

#[cfg(test)]
mod tests;
