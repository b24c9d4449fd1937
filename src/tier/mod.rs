//! Storage tier: named extents spread over several paths. A crash at any moment keeps the last committed step.
//!
//! | module | content |
//! |---|---|
//! | [`store`] | public API: define, write, read, wait, roll back |
//! | [`options`] | settings |
//! | `jobs`, `transfer` | reads and writes in flight: error handling, retry on another path, checksum checks |
//! | `commit`, `recover`, `opening` | the order of writes and syncs that makes a step durable; opening after a crash |
//! | [`superblock_set`] | which commits the superblocks name, and which of them an open resumes from |
//! | `relocate` | moving contents between paths |
//! | `export` | export of the committed state as plain files, and import |
//! | [`inspect`] | verification of every block, path reports, close and destroy |
//! | [`superblock`], [`layout`], `wire` | on-disk formats |
//! | [`extent`], `contents`, `checksums` | streams, blocks, chunks; the contents of an extent; block checksums |
//! | `allocation`, [`space`], `state` | allocation of space, free space, state of an open tier |
//! | `scratch` | page-aligned memory for headers and superblocks |
//! | `path_check` | the check of all paths at the begin of a commit |
//! | `snapshot` | the contents of all extents at one moment |
//! | `data_length` | data files that were truncated while the tier was open |
//! | `health`, `failures` | health of a path; errors that modules report alike |
//! | [`claim`] | the right of one tiered update to step the states |
//! | [`turns`] | turns: one process of the node uses a path at a time |
//! | `path`, `path_claim`, `storage`, [`directory`] | files of a path, and the lock on its directory |
//! | `ownership`, `owned_lock`, `holder` | the owner's record and its lease; the lock file; proof that a process has ended |
//! | `path_files`, `time_limits` | calls on a path that are no transfers, and their time limit; timeouts of callers |
//! | [`scan`] | directories of ended runs and other hosts: list and remove them |
//! | `bucket`, `prefix_lock` | files of a path in an object store, and the lock on its prefix |
//!
//! `bucket` and `prefix_lock` belong to the feature `s3`; unit tests always have them, with a store in memory.
#![forbid(unsafe_code)]

mod allocation;
mod checksums;
pub mod claim;
mod commit;
mod contents;
mod data_length;
mod export;
mod failures;
mod health;
mod holder;
mod jobs;
mod opening;
mod owned_lock;
mod ownership;
mod path;
mod path_check;
mod path_claim;
mod path_files;
mod recover;
mod relocate;
mod scratch;
mod snapshot;
mod state;
mod storage;
mod time_limits;
mod transfer;
mod wire;

pub mod directory;
pub mod extent;
pub mod inspect;
pub mod layout;
pub mod options;
pub mod scan;
pub mod space;
pub mod store;
pub mod superblock;
pub mod superblock_set;
pub mod turns;

pub use allocation::ExtentPlacement;
pub use commit::MAX_PAYLOAD;
pub use health::Health;
pub use store::Tier;

#[cfg(any(test, feature = "s3"))]
pub mod bucket;
#[cfg(any(test, feature = "s3"))]
mod prefix_lock;

#[cfg(test)]
mod tests;
