//! Storage tier: named extents spread over several paths. A crash at any moment keeps the last committed step.
//!
//! | module | content |
//! |---|---|
//! | [`store`] | public API: define, write, read, wait, roll back |
//! | [`options`] | settings |
//! | `jobs`, `transfer` | reads and writes in flight: error handling, retry on another path, checksum checks |
//! | `commit`, `recover` | the order of writes and syncs that makes a step durable; opening after a crash |
//! | [`copies`] | which commits the superblocks name, and which of them an open resumes from |
//! | `relocate` | moving contents between paths |
//! | `export` | export of the committed state as plain files, and import |
//! | [`inspect`] | verification of every block, path reports, close and destroy |
//! | [`superblock`], [`layout`], `wire` | on-disk formats |
//! | [`extent`], `contents`, `sums` | streams, blocks, chunks; the contents of an extent; block checksums |
//! | `place`, [`space`], `state` | allocation of space, free space, state of an open tier |
//! | `gate` | transfers that wait for this process's turn on a path |
//! | `health`, `waiting` | health of a path; timeouts of callers |
//! | [`turn`] | turns: one process of the node uses a path at a time |
//! | `path`, `medium`, [`directory`] | files of a path, and the lock on its directory |
//! | [`bucket`], `claim` | files of a path in an object store, and the lock on its prefix |
#![forbid(unsafe_code)]

mod claim;
mod commit;
mod contents;
mod export;
mod gate;
mod health;
mod jobs;
mod medium;
mod path;
mod place;
mod recover;
mod relocate;
mod scratch;
mod state;
mod sums;
mod transfer;
mod waiting;
mod wire;

pub mod bucket;
pub mod copies;
pub mod directory;
pub mod extent;
pub mod inspect;
pub mod layout;
pub mod options;
pub mod space;
pub mod store;
pub mod superblock;
pub mod turn;

pub use commit::MAX_PAYLOAD;
pub use health::Health;
pub use place::Placement;
pub use store::Tier;

#[cfg(test)]
mod tests;
