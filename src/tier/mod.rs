//! Storage tier: named extents spread over several paths. A crash at any moment keeps the last committed step.
//!
//! | module | content |
//! |---|---|
//! | [`store`] | the open tier: extents, paths, snapshots, close |
//! | `jobs` | reads and writes from the call to the outcome; retries on other paths |
//! | `moves` | extents that go to other paths |
//! | [`verify`] | everything stored, read and compared |
//! | `claim`, `update_claim` | who may commit and roll back while a tiered update changes states |
//! | `commit` | the order of writes and syncs that makes a step durable |
//! | [`recover`] | opening after a crash: which commits the superblocks name, and which of them an open resumes from |
//! | [`export`], [`import`] | the committed state as plain files, and back |
//! | `lanes`, `stored` | how moves, exports and imports take parts from one end to the other; the ends that are extents |
//! | `manifest` | what an export says about itself |
//! | [`select`] | which extents an export or import takes |
//! | [`inspect`] | tiers below directories, and what their superblocks say, without a claim |
//! | [`snapshot`] | an export that a thread writes while the tier is used |
//! | [`options`] | settings |
//! | `catalog`, [`paths`] | the state of an open tier, without I/O and locks: versions and commits; health and space of paths |
//! | `blocks` | transfers, checksums and headers of blocks |
//! | [`extent`], [`format`] | streams, blocks and chunks; the formats on disk |
//! | `volume` | one path: storage, engine, superblocks |
//! | `storage`, [`directory`], `bucket` | the files of a path, and the calls on them; directories; object stores |
//! | `reading` | a directory that is read without a claim |
//! | `ownership` | the lock file of a directory: the owner's record and its lease; proof that a process has ended |
//!
//! `bucket` belongs to the feature `s3`; unit tests always have it, with a store in memory.
#![forbid(unsafe_code)]

mod blocks;
mod catalog;
mod claim;
pub mod commit;
mod jobs;
mod lanes;
mod manifest;
mod moves;
mod ownership;
mod reading;
mod storage;
mod stored;
mod update_claim;
mod volume;

pub mod directory;
pub mod export;
pub mod extent;
pub mod format;
pub mod import;
pub mod inspect;
pub mod options;
pub mod paths;
pub mod recover;
pub mod select;
pub mod snapshot;
pub mod store;
pub mod verify;

pub use commit::MAX_PAYLOAD;
pub use paths::{ExtentPlacement, Health};
pub use store::{PathReport, Pin, Tier};
pub use update_claim::UpdateClaim;

pub mod bucket;

#[cfg(test)]
#[path = "../../ffi_tests/doubles/tier/sim_storage.rs"]
mod sim_storage;
#[cfg(test)]
mod tests;
