//! The virtual tier: named extents over several paths, that survive a crash at any moment.
//!
//! | module | what it is |
//! |---|---|
//! | [`store`] | what callers see: define, write, read, wait, roll back |
//! | [`options`] | settings |
//! | `jobs`, `transfer` | reads and writes under way: judged, moved elsewhere, checked |
//! | `commit`, `recover` | the order of writes and syncs that makes a step durable, and the way back |
//! | [`copies`] | which commits the superblocks name, and which of them an open goes on from |
//! | `relocate` | contents moved from path to path |
//! | `export` | the committed state as plain files, and back |
//! | [`inspect`] | checking every block, the state of paths, the end of a tier |
//! | [`superblock`], [`layout`], `wire` | bytes on disk |
//! | [`extent`], `contents`, `sums` | streams, blocks, chunks, what an extent holds, and checksums of blocks |
//! | `place`, [`space`], `state` | who has which place, and when it is free again |
//! | `gate` | transfers that wait for the turn on a path |
//! | `health`, `waiting` | how a path is doing; until when a caller waits |
//! | [`turn`] | one process of the node on a path at a time |
//! | `path`, `medium`, [`directory`] | files, and the lock on them |
//! | [`bucket`], `claim` | the same in an object store |
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
