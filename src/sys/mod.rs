//! Operating system services: processors, threads, memory, files and events.

pub mod answer;
mod crew;
pub mod event;
pub mod file;
pub mod host;
pub mod lent;
mod life;
pub mod lock;
pub mod memory;
pub mod own;
mod parents;
pub mod process;
pub mod profile;
pub mod reserve;
pub mod room;
pub mod span;
pub mod threads;
pub mod usage;
