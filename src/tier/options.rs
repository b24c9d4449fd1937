//! What a tier is opened with.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::bucket;
use super::directory::{self, Owner};
use super::superblock::{MAX_PATHS, block_bytes_fit};
use crate::error::{Error, Result};
use crate::io::object::is_address;
use crate::io::options::Options as IoOptions;

/// What to do with what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Make a new tier; a committed state on one of the paths is an error.
    Create,
    /// Go on at the last committed step; none is an error.
    Resume,
    /// Go on if there is a committed state, else make a new tier; refused if the rank's state lies in a directory of another
    /// host, which nobody holds.
    Auto,
}

/// What a commit waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Nothing: a killed process loses nothing, a machine that stops may.
    Process,
    /// The devices' word that data and superblocks are durable.
    Data,
    /// The same, and the superblocks are read back, and the directories synced.
    Full,
}

/// Where a path keeps its files.
#[derive(Debug, Clone)]
pub enum Place {
    /// Below this directory, which exists.
    Directory(PathBuf),
    /// In an object store: `s3://BUCKET/PREFIX`.
    Bucket(String),
    /// In memory of this process. What lies there is lost with it.
    Memory,
    /// In a store in memory, for tests.
    #[cfg(test)]
    Store(crate::io::object::memory::Memory),
    /// On a simulated disk.
    #[cfg(any(test, feature = "sim"))]
    Simulated(crate::io::sim::Disk, crate::io::sim::Faults),
}

impl Place {
    /// The directory, of one that is below it.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Place::Directory(base) => Some(base),
            _ => None,
        }
    }

    /// The place that a path means: a directory, or an address of an object store.
    pub fn of(path: PathBuf) -> Place {
        match path.to_str() {
            Some(address) if is_address(address) => Place::Bucket(address.to_string()),
            _ => Place::Directory(path),
        }
    }

    /// Removes what a dead owner left there; a live one is refused.
    pub fn collect(&self, owner: &Owner) -> Result<()> {
        match self {
            Place::Directory(base) => directory::collect(base, owner),
            Place::Bucket(address) => bucket::collect(address, owner),
            _ => Err(Error::invalid("directory", "is no place that outlives a process")),
        }
    }
}

/// One path.
#[derive(Debug, Clone)]
pub struct PathOptions {
    /// Where.
    pub place: Place,
    /// Most bytes of its data file.
    pub limit: Option<u64>,
    /// Bytes that its data file has from the start.
    pub reserve: u64,
}

/// Settings of a tier.
#[derive(Debug, Clone)]
pub struct TierOptions {
    /// Whose it is.
    pub owner: Owner,
    /// Ranks of the run.
    pub world: u32,
    /// At least one; the order does not matter.
    pub paths: Vec<PathOptions>,
    /// What to do with what is there.
    pub mode: Mode,
    /// Go on at this step, which is the last committed one or the one before it; any other is an error. `None`: the last.
    /// The one before it is whole as long as nothing was written since the last commit, and takes its place.
    pub at_step: Option<u64>,
    /// Open without paths that are missing, and say what is lost with them.
    pub degraded: bool,
    /// What a commit waits for.
    pub durability: Durability,
    /// Bytes of a block, which has one checksum. A tier that exists keeps its own.
    pub block_bytes: u64,
    /// Settings of each path's engine. Its `stall` decides when a path counts as hung.
    pub io: IoOptions,
}

impl TierOptions {
    /// Defaults, for these directories and addresses.
    pub fn new(owner: Owner, directories: impl IntoIterator<Item = PathBuf>) -> TierOptions {
        let path = |directory| PathOptions { place: Place::of(directory), limit: None, reserve: 0 };
        TierOptions {
            owner,
            world: 1,
            paths: directories.into_iter().map(path).collect(),
            mode: Mode::Auto,
            at_step: None,
            degraded: false,
            durability: Durability::Data,
            block_bytes: 1 << 20,
            io: IoOptions {
                preallocate: false,
                stall: Some(Duration::from_secs(60)),
                ..IoOptions::default()
            },
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        self.owner.check()?;
        if self.paths.is_empty() || self.paths.len() > MAX_PATHS {
            return Err(Error::invalid(
                "options.paths",
                format!("1 to {MAX_PATHS} are needed, not {}", self.paths.len()),
            ));
        }
        if !block_bytes_fit(self.block_bytes) {
            let reason = format!("{} is no multiple of 4096 up to 2^30", self.block_bytes);
            return Err(Error::invalid("options.block_bytes", reason));
        }
        if self.at_step.is_some() && self.mode == Mode::Create {
            return Err(Error::invalid("options.at_step", "a tier that is made has no step"));
        }
        if self.world == 0 || self.owner.rank >= self.world {
            let reason = format!("rank {} of {}", self.owner.rank, self.world);
            return Err(Error::invalid("options.rank", reason));
        }
        Ok(())
    }
}
