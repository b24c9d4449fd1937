//! Storage tier: named extents spread over several paths. A crash at any moment keeps the last committed step.
//!
//! | module | content |
//! |---|---|
//! | [`store`] | public API: define, write, read, wait, roll back |
//! | [`options`] | settings |
//! | `jobs`, `transfer` | reads and writes in flight: error handling, retry on another path, checksum checks |
//! | `commit` | the order of writes and syncs that makes a step durable |
//! | [`recover`] | opening after a crash: which commits the superblocks name, and which of them an open resumes from |
//! | `relocate` | moving contents between paths |
//! | `export` | export of the committed state as plain files, and import |
//! | [`inspect`] | verification of every block, path reports, close and destroy |
//! | [`format`] | on-disk formats |
//! | [`extent`], `contents`, `checksums` | streams, blocks, chunks; the contents of an extent; block checksums |
//! | `allocation`, [`space`], `state` | allocation of space, free space, state of an open tier |
//! | `snapshot` | the contents of all extents at one moment |
//! | `health` | health of a path |
//! | [`claim`] | the right of one tiered update to step the states |
//! | [`turns`] | turns: one process of the node uses a path at a time |
//! | `volume` | one path: storage, engine, superblocks, gate |
//! | `storage`, [`directory`] | files of a path and the calls on them; directories |
//! | `ownership` | the lock file: the owner's record and its lease; proof that a process has ended |
//! | `bucket` | files of a path in an object store, and the lock on its prefix |
//!
//! `bucket` belongs to the feature `s3`; unit tests always have it, with a store in memory.
#![forbid(unsafe_code)]

mod allocation;
mod checksums;
pub mod claim;
mod commit;
mod contents;
mod export;
mod health;
mod jobs;
mod ownership;
mod relocate;
mod snapshot;
mod state;
mod storage;
mod transfer;
mod volume;

pub mod directory;
pub mod extent;
pub mod format;
pub mod inspect;
pub mod options;
pub mod recover;
pub mod space;
pub mod store;
pub mod turns;

pub use allocation::ExtentPlacement;
pub use commit::MAX_PAYLOAD;
pub use health::Health;
pub use store::Tier;

#[cfg(any(test, feature = "s3"))]
pub mod bucket;

#[cfg(test)]
mod tests;
