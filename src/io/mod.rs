//! Asynchronous file I/O between files and memory: any address, offset and length. Every completion is checked.
//!
//! | module | contents |
//! |---|---|
//! | [`engine`] | the callers' interface: submit, wait, cancel, deadlines |
//! | `operation`, `expiry`, `watchdog` | state shared by callers and driver; deadlines; detection of a stopped process |
//! | [`options`], `counters`, `busy` | settings and requests; statistics |
//! | `driver` | the thread behind an engine: splits operations into pieces and keeps the queue full |
//! | `classify` | classifies each completion: done, retry or failed |
//! | [`plan`] | where operations are split, as pure arithmetic |
//! | [`profile`] | settings measured by `spillway tune` |
//! | `piece_size` | the piece size for each file system |
//! | `file`, `open_files` | open files: direct or buffered, and why; the files that an engine keeps open |
//! | [`turns`] | turns of processes on a device: one process at a time transfers to it |
//! | `object` | files of an object store: pieces as requests of the crate in stores/ |
//! | `backend` | the interface below: `uring`, `threads` (files and object stores); for tests `sim` of `ffi_tests/doubles`, with seeded faults |
//!
//! Only `uring` contains unsafe code.

mod backend;
mod busy;
mod classify;
pub mod counters;
mod driver;
mod expiry;
mod open_files;
mod operation;
mod piece_size;
mod threads;
mod uring;
mod watchdog;

pub mod engine;
pub mod file;
pub mod options;
pub mod plan;
pub mod profile;
pub mod turns;

pub mod object;

#[cfg(test)]
#[path = "../../ffi_tests/doubles/io/sim/mod.rs"]
pub mod sim;

#[cfg(test)]
mod tests;
