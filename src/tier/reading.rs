//! The files of a path that are read without a claim.
//!
//! Invariants:
//! - Nothing is created, written, locked or removed. Both handles of a file are open for reading only, so that the system
//!   refuses every write.
//! - A directory whose lock a process holds is refused. A process of another machine is not detected if its lock does not
//!   reach this machine. Blocks that it overwrites no longer match their checksums.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::directory::{Owner, enter, is_absence};
use super::storage::{FilePair, LOCK, SUPERBLOCKS, Storage, failed, locked};
use crate::error::{Doing, Error, Result};
use crate::io::file::File;
use crate::sys::file::{self, Access};
use crate::sys::lock::FileLock;
use crate::sys::private_files::{GivenDirectory, OpenFlags, PrivateDirectory};

/// A directory of job, host and rank, open for reading.
#[derive(Debug)]
pub(super) struct ReadStorage {
    path: PathBuf,
    rank: PrivateDirectory,
    direct: bool,
}

/// The directory of `owner` below `base`; `None` if it does not exist, or holds no superblock. `direct`: bypass the page
/// cache. Errors: `Locked` if a process has it open.
pub(super) fn open(base: &Path, owner: &Owner, direct: bool) -> Result<Option<ReadStorage>> {
    let path = owner.below(base);
    let given = match GivenDirectory::open(base) {
        Err(error) if is_absence(&error) => return Ok(None),
        given => given.map_err(|error| failed(Doing::Opening, base, error, ""))?,
    };
    let Some((_, rank)) = enter(&given, base, owner, false)?.and_then(|mut below| below.pop()) else {
        return Ok(None);
    };
    let holder = FileLock::holder(&rank, LOCK);
    if let Some(holder) = holder.map_err(|error| failed(Doing::Opening, &path.join(LOCK), error, ""))? {
        return Err(locked(&path, &format!("{holder}; a tier is read after its program has closed it")));
    }
    let storage = ReadStorage { path, rank, direct };
    let found = [storage.len(SUPERBLOCKS[0])?, storage.len(SUPERBLOCKS[1])?];
    Ok(found.iter().any(Option::is_some).then_some(storage))
}

impl Storage for ReadStorage {
    fn name(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }

    fn open(&self, name: &str) -> Result<FilePair> {
        // A copy of the superblock that is lost reads as blank: the other one tells what was committed.
        let lost = SUPERBLOCKS.contains(&name) && self.len(name)?.is_none();
        let want = |direct| OpenFlags { read: true, direct, ..OpenFlags::default() };
        let open = |direct| match lost {
            true => file::in_memory(),
            false => self.rank.open(name, want(direct)),
        };
        let direct = self.direct && !lost;
        let reader = Arc::new(File::open_with(&self.path.join(name), Access::Read, direct, open)?);
        Ok(FilePair { writer: Arc::clone(&reader), reader })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        let found = self.rank.entry(file);
        let found = found.map_err(|error| failed(Doing::Opening, &self.path.join(file), error, ""))?;
        Ok(found.map(|found| found.len))
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn remove(self: Arc<Self>) -> Result<()> {
        Err(only_read())
    }
}

/// The error of a change of a tier that was opened for reading.
pub(super) fn only_read() -> Error {
    Error::Unsupported(
        "the tier was opened for reading; open it with another mode to change or remove it".to_string(),
    )
}
