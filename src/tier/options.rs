//! Options for opening a tier.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use spillway_stores::is_address;

use super::bucket;
use super::directory::{self, Owner};
use super::format::{MAX_PATHS, block_bytes_fit};
use super::storage::failed;
use crate::error::{Doing, Error, Result};
use crate::io::options::{Options as IoOptions, TurnOptions};

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
    /// Read the last committed step, or that of `at_step`, of any number of ranks. Nothing is created, written or locked.
    Read,
}

impl Mode {
    /// True if an open without a committed state is an error.
    pub(super) fn needs_state(self) -> bool {
        matches!(self, Mode::Resume | Mode::Read)
    }
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
pub enum PathLocation {
    /// Below this directory, which must exist.
    Directory(PathBuf),
    /// In an object store: `s3://BUCKET/PREFIX`.
    Bucket(String),
    /// In memory of this process, of this NUMA node while it has some. The data is lost when the process ends.
    Memory(Option<u32>),
    /// In a store in memory, for tests.
    #[cfg(test)]
    Store(spillway_stores::memory::MemoryStore),
    /// On a simulated disk.
    #[cfg(test)]
    Simulated(crate::io::sim::Disk, crate::io::sim::Faults),
}

impl PathLocation {
    /// The base directory, if the place is a directory.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            PathLocation::Directory(base) => Some(base),
            _ => None,
        }
    }

    /// Parses a path: an address such as `s3://BUCKET/PREFIX` or a directory.
    pub fn of(path: PathBuf) -> PathLocation {
        match path.to_str() {
            Some(address) if is_address(address) => PathLocation::Bucket(address.to_string()),
            _ => PathLocation::Directory(path),
        }
    }

    /// Removes the files of an owner whose process has ended. A live owner is an error.
    pub fn collect(&self, owner: &Owner) -> Result<()> {
        match self {
            PathLocation::Directory(base) => directory::collect(TierOptions::IO_TIMEOUT, base, owner),
            PathLocation::Bucket(address) => bucket::collect(address, owner),
            _ => Err(Error::invalid(
                "directory",
                "must be a directory or an object store; memory ends with its process",
            )),
        }
    }
}

/// Room for the names of job, host, rank and file below a directory.
const LONGEST_BELOW: usize = 1024;

/// The absolute form of a directory's path. Links are not resolved.
pub(super) fn absolute(directory: &Path) -> Result<PathBuf> {
    if directory.as_os_str().is_empty() {
        return Err(Error::invalid("directory", "is empty"));
    }
    let absolute =
        std::path::absolute(directory).map_err(|error| failed(Doing::Opening, directory, error, ""))?;
    if directory.is_absolute() {
        return Ok(absolute);
    }
    // Only the relative name works if the process cannot search the directories above, or if the whole name is too long.
    let above = std::env::current_dir().and_then(std::fs::metadata);
    let usable = above.is_ok() && absolute.as_os_str().len() + LONGEST_BELOW < libc::PATH_MAX as usize;
    Ok(if usable { absolute } else { directory.to_path_buf() })
}

/// One path.
#[derive(Debug, Clone)]
pub struct PathOptions {
    /// Location of the files.
    pub location: PathLocation,
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
    /// A commit beside writes keeps the state of the commit before until the next commit begins, as with several ranks.
    pub keep_before: bool,
    /// The paths, at least one. Their order does not matter.
    pub paths: Vec<PathOptions>,
    /// Create, resume, or either.
    pub mode: Mode,
    /// Resume from this step: the last committed one or the one before it; any other is an error. `None`: the last one.
    /// The earlier step is intact only if nothing was written since the last commit. Opening at it discards the last
    /// commit.
    pub at_step: Option<u64>,
    /// With `at_step`: the tag of the commit to resume from, as [`Steps`](super::recover::Steps) has it. It tells two commits of one step
    /// apart. 0: the last commit of this step.
    pub at_tag: u64,
    /// Open without missing paths, and list the extents that are lost with them.
    pub degraded: bool,
    /// The open writes its superblock before it returns. If false, the first put or commit writes it, unless the open
    /// creates the tier or goes back to an earlier step. The superblock of that earlier step stays until then.
    pub write_at_open: bool,
    /// Level of durability that a commit waits for.
    pub durability: Durability,
    /// Bytes of a block, the unit of checksums. An existing tier keeps its own block size.
    pub block_bytes: u64,
    /// Settings of the I/O engine of each path. `io_timeout` is the time after which a path counts as hung.
    pub io: IoOptions,
}

impl TierOptions {
    /// Default time after which a path counts as hung.
    pub const IO_TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));

    /// Default options for these directories and addresses.
    pub fn new(owner: Owner, directories: impl IntoIterator<Item = PathBuf>) -> TierOptions {
        let path = |directory| PathOptions { location: PathLocation::of(directory), limit: None, reserve: 0 };
        TierOptions {
            owner,
            world: 1,
            keep_before: false,
            paths: directories.into_iter().map(path).collect(),
            mode: Mode::Auto,
            at_step: None,
            at_tag: 0,
            degraded: false,
            write_at_open: true,
            durability: Durability::Data,
            block_bytes: 1 << 20,
            io: IoOptions { io_timeout: TierOptions::IO_TIMEOUT, ..IoOptions::default() },
        }
    }

    /// The same options with absolute directories. A later change of the working directory then changes no path, and the
    /// superblocks name a path alike from every working directory.
    pub(super) fn absolute(mut self) -> Result<TierOptions> {
        for path in &mut self.paths {
            if let PathLocation::Directory(base) = &mut path.location {
                *base = absolute(base)?;
            }
        }
        Ok(self)
    }

    /// Settings of the engine of an export or an import, for files beside the paths. They take no turns: a close, which lets
    /// the transfers of the paths begin, does not know them.
    pub(super) fn beside(&self) -> IoOptions {
        IoOptions { preallocate: false, turns: TurnOptions::NONE, ..self.io }
    }

    /// True if another tier may have to resume at the commit before the last one with this tier.
    pub(super) fn keeps_before(&self) -> bool {
        self.keep_before || self.world > 1
    }

    pub(super) fn check(&self) -> Result<()> {
        self.owner.check()?;
        if self.paths.is_empty() || self.paths.len() > MAX_PATHS {
            return Err(Error::invalid(
                "options.paths",
                format!("must have 1 to {MAX_PATHS} entries, not {}", self.paths.len()),
            ));
        }
        if !block_bytes_fit(self.block_bytes) {
            let reason = format!("{} is not a multiple of 4096 of at most 2^30", self.block_bytes);
            return Err(Error::invalid("options.block_bytes", reason));
        }
        if self.at_step.is_some() && self.mode == Mode::Create {
            return Err(Error::invalid("options.at_step", "must not be set when a tier is created"));
        }
        if self.at_tag != 0 && self.at_step.is_none() {
            return Err(Error::invalid("options.at_tag", "is set, but no step is given"));
        }
        if self.mode != Mode::Read {
            return self.check_rank();
        }
        match self.paths.iter().all(|path| matches!(path.location, PathLocation::Directory(_))) {
            true => Ok(()),
            false => Err(Error::Unsupported("a tier is opened for reading in directories only".to_string())),
        }
    }

    fn check_rank(&self) -> Result<()> {
        if self.world == 0 || self.owner.rank >= self.world {
            let reason = format!("is {}, but the number of ranks is {}", self.owner.rank, self.world);
            return Err(Error::invalid("options.rank", reason));
        }
        Ok(())
    }
}

#[cfg(all(test, not(feature = "s3")))]
mod tests {
    use super::*;
    use crate::tier::Tier;

    #[test]
    fn a_build_without_object_stores_names_the_feature_and_no_secret() {
        let owner = Owner { job: "run".to_string(), host: "node".to_string(), rank: 0 };
        let address = PathBuf::from("s3://key:hunter2@b/a");
        let opened = Tier::open(TierOptions::new(owner.clone(), [address.clone()])).err();
        for error in [opened, PathLocation::of(address).collect(&owner).err()] {
            let message = error.as_ref().map(Error::to_string).unwrap_or_default();
            assert!(matches!(error, Some(Error::Unsupported(_))), "{message}");
            assert!(message.contains("feature s3") && !message.contains("hunter2"), "{message}");
        }
    }
}
