//! Operating system services: processors, threads, memory, files and events.

pub mod arena;
pub mod bell;
pub mod event;
pub mod file;
mod fork_closed;
pub mod host;
pub mod lock;
mod mapping_table;
pub mod memory;
mod openmp;
pub mod per_process;
pub mod private_files;
pub mod process;
pub mod profile;
pub mod reserve;
pub mod shared_slice;
pub mod small_file;
pub mod span;
mod spin;
mod team;
pub mod threads;
pub mod time_limit;
pub mod try_vec;
pub mod usage;
