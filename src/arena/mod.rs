//! Arenas: parameters that several processes of one machine share.
//!
//! One process creates an arena with named regions; the others map it, by name or by descriptor, for reading only or
//! for reading and writing (SysX section 4, "Offloading"). Regions are found by offset, so each process may map them
//! at another address. Every region has a generation, the number of the step whose values it holds, and a sequence lock:
//! a reader gets the values of one whole step, or an error.
//!
//! | file | holds |
//! |---|---|
//! | `layout` | the format of the memory: header, regions, slots; pure |
//! | `name` | names of arenas in the directory of shared memory |
//! | `open` | creating and opening |
//! | `owner` | the owner's lock, and collecting what an owner left behind |
//! | `handle` | one process's access to an arena, and what it tells about it |
//! | `write` | the writer of a region |
//! | `read` | the readers of a region |
//! | `verdict` | results that processes post and wait for |
//! | `decision` | the word that gives every round one outcome; pure |
#![forbid(unsafe_code)]

mod decision;
mod handle;
mod layout;
mod name;
mod open;
mod owner;
mod read;
mod verdict;
mod write;

#[cfg(test)]
mod tests;

pub use handle::Arena;
pub use layout::RegionSpec;
pub use open::{Create, Open};
pub use owner::collect;
pub use read::RegionVersion;
pub use verdict::Verdict;
