//! Files to and from memory: any address, offset and length, asynchronous, every completion checked.
//!
//! | module | what it is |
//! |---|---|
//! | [`engine`], `waiting` | what callers see: submit, wait, cancel, deadlines |
//! | `operation`, `expiry`, `progress` | what callers and driver share; deadlines, and time in which the process stood still |
//! | [`options`], `counters`, `busy` | settings and requests in, statistics out |
//! | `driver` | the thread behind an engine: cuts operations into pieces, keeps the queue full |
//! | `verdict` | what a completion means for its piece |
//! | [`plan`] | where the cuts are, as pure arithmetic |
//! | [`profile`] | settings that `spillway tune` found, as engines read them |
//! | `blocks` | bytes of a piece, by file system |
//! | [`file`] | open files: direct or buffered, and why |
//! | [`object`] | files kept as objects of an S3-compatible store |
//! | `backend` | the interface below: `uring`, `threads` (for files and for stores), `sim` (seeded faults, for tests) |
//!
//! Only `uring` has unsafe code.

mod backend;
mod blocks;
mod busy;
pub mod counters;
mod driver;
mod expiry;
mod open_files;
mod operation;
mod progress;
mod threads;
mod uring;
mod verdict;
mod waiting;

pub mod engine;
pub mod file;
pub mod object;
pub mod options;
pub mod plan;
pub mod profile;

#[cfg(any(test, feature = "sim"))]
pub mod sim;

#[cfg(test)]
mod tests;
