//! Options for opening a tier.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::bucket;
use super::directory::{self, Owner};
use super::superblock::{MAX_PATHS, block_bytes_fit};
use crate::error::{Error, Result};
use crate::io::object::is_address;
use crate::io::options::Options as IoOptions;

/// Whether an open creates a tier, resumes one, or does either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Create a new tier. A committed state on one of the paths is an error.
    Create,
    /// Resume from the last committed step. No committed state is an error.
    Resume,
    /// Resume if there is a committed state, else create a tier. Refused if an unlocked directory of another host holds
    /// the state of this rank.
    Auto,
}

/// Level of durability that a commit waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// No sync. The state survives a killed process; a machine crash may lose it.
    Process,
    /// The devices confirm that data and superblocks are durable.
    Data,
    /// As `Data`; directories are also synced, and superblocks are read back.
    Full,
}

/// Where a path keeps its files.
#[derive(Debug, Clone)]
pub enum Place {
    /// Below this directory, which must exist.
    Directory(PathBuf),
    /// In an object store: `s3://BUCKET/PREFIX`.
    Bucket(String),
    /// In memory of this process. The data is lost when the process ends.
    Memory,
    /// In a store in memory, for tests.
    #[cfg(test)]
    Store(crate::io::object::memory::Memory),
    /// On a simulated disk.
    #[cfg(any(test, feature = "sim"))]
    Simulated(crate::io::sim::Disk, crate::io::sim::Faults),
}

impl Place {
    /// The base directory, if the place is a directory.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Place::Directory(base) => Some(base),
            _ => None,
        }
    }

    /// Parses a path: an address such as `s3://BUCKET/PREFIX` or a directory.
    pub fn of(path: PathBuf) -> Place {
        match path.to_str() {
            Some(address) if is_address(address) => Place::Bucket(address.to_string()),
            _ => Place::Directory(path),
        }
    }

    /// Removes the files of an owner whose process has ended. A live owner is an error.
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
    /// Location of the files.
    pub place: Place,
    /// Upper limit of the data file, in bytes. `None`: no limit.
    pub limit: Option<u64>,
    /// Bytes of the data file that are allocated at the open.
    pub reserve: u64,
}

/// Settings of a tier.
#[derive(Debug, Clone)]
pub struct TierOptions {
    /// Owner of the tier: job, host and rank.
    pub owner: Owner,
    /// Number of ranks in the run.
    pub world: u32,
    /// The paths, at least one. Their order does not matter.
    pub paths: Vec<PathOptions>,
    /// Create, resume, or either.
    pub mode: Mode,
    /// Resume from this step: the last committed one or the one before it; any other is an error. `None`: the last one.
    /// The earlier step is intact only if nothing was written since the last commit. Opening at it discards the last
    /// commit.
    pub at_step: Option<u64>,
    /// Open without missing paths, and list the extents that are lost with them.
    pub degraded: bool,
    /// Level of durability that a commit waits for.
    pub durability: Durability,
    /// Bytes of a block, the unit of checksums. An existing tier keeps its own block size.
    pub block_bytes: u64,
    /// Settings of the I/O engine of each path. `stall` is the time after which a path counts as hung.
    pub io: IoOptions,
}

impl TierOptions {
    /// Default options for these directories and addresses.
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
