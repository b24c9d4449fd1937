//! Directories of a tier: one per path, job, host and rank, each with a lock that a live process holds.
//!
//! Invariants:
//! - A process writes only to directories whose lock it holds, and whose owner's record it wrote (see `ownership`). The
//!   lock is released when the last operation on a file of the directory has ended, even after the tier was closed (see
//!   [`Directory`] and `storage`).
//! - The base directory of a path must exist. If its disk is not mounted, the open fails; it never creates a directory
//!   on the file system below the mount point. Owner and mode of the base directory are the caller's choice, and it may
//!   be world-writable.
//! - The directories below it, and their files, belong to the effective user, and no other user may change them.
//!   Symbolic links are not followed (see `sys::private_files`). New directories have mode 0700, files 0600.
//! - A removal deletes the superblocks first, so a partial removal leaves no valid state. During the removal the
//!   directory holds a file named `removing`. The next process that claims the directory completes the removal.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::extent::check_name;
use super::failures::{failed, fenced, locked};
use super::owned_lock::{LOCK, LockStep, OwnedLock, PendingLock};
use crate::error::{Doing, Error, Result, TierError, TierKind};
use crate::sys::file::Identity;
use crate::sys::fork_closed;
use crate::sys::lock::{FileLock, LockAttempt};
use crate::sys::private_files::OpenFlags;
use crate::sys::private_files::{GivenDirectory, PrivateDirectory};

/// File names of the two superblock copies.
pub(super) const SUPERBLOCKS: [&str; 2] = ["superblock.0", "superblock.1"];
/// File name of the data.
pub(super) const DATA: &str = "data";
/// Files of a directory, superblocks first: the order of removal.
pub const FILES: [&str; 3] = [SUPERBLOCKS[0], SUPERBLOCKS[1], DATA];
const REMOVING: &str = "removing";
/// Transient errors, which do not prove that a file is gone.
const PASSING: [i32; 5] = [libc::EINTR, libc::EAGAIN, libc::ENOMEM, libc::EIO, libc::ETIMEDOUT];

/// Owner of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Name of the job.
    pub job: String,
    /// Name of the host.
    pub host: String,
    /// Rank in the job.
    pub rank: u32,
}

/// A directory whose lock this process holds.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    base: GivenDirectory,
    /// The directories of job, host and rank, with their names.
    below: Vec<(String, PrivateDirectory)>,
    lock: OwnedLock,
}

/// Result of a part of a claim.
#[derive(Debug)]
pub enum ClaimStep {
    /// The claim has ended. `None`: the directory does not exist.
    Done(Option<Directory>),
    /// Go on after this time, in which another owner may show that it lives.
    Wait(Box<PendingClaim>, Duration),
}

/// A claim that waits.
#[derive(Debug)]
pub struct PendingClaim {
    path: PathBuf,
    base: GivenDirectory,
    below: Vec<(String, PrivateDirectory)>,
    lock: PendingLock,
}

impl Owner {
    /// Checks that the job and host names are valid directory names.
    pub fn check(&self) -> Result<()> {
        for (argument, name) in [("options.job", &self.job), ("options.host", &self.host)] {
            check_name(argument, name)?;
            if name.contains('/') || name.starts_with('.') || name.chars().any(char::is_control) {
                return Err(Error::invalid(argument, format!("{name:?} is not a valid name of a directory")));
            }
        }
        Ok(())
    }

    /// Path of the owner's directory below `base`.
    pub fn below(&self, base: &Path) -> PathBuf {
        self.names().iter().fold(base.to_path_buf(), |path, name| path.join(name))
    }

    fn names(&self) -> [String; 3] {
        [self.job.clone(), self.host.clone(), format!("rank-{}", self.rank)]
    }
}

impl Directory {
    /// Claims the directory of `owner` below `base` and locks it. `None` if it does not exist and `make` is false.
    /// Errors: `Locked` if another process holds it, `Foreign` if another user owns a part of it. The call may wait for
    /// the lease of an owner on another machine.
    pub fn claim(base: &Path, owner: &Owner, make: bool) -> Result<Option<Directory>> {
        let mut step = Directory::begin_claim(base, owner, make)?;
        loop {
            match step {
                ClaimStep::Done(claimed) => return Ok(claimed),
                ClaimStep::Wait(pending, time) => {
                    std::thread::sleep(time);
                    step = pending.resume()?;
                }
            }
        }
    }

    /// The first part of [`Directory::claim`], which does not wait for another owner.
    pub fn begin_claim(base: &Path, owner: &Owner, make: bool) -> Result<ClaimStep> {
        let path = owner.below(base);
        let given = match GivenDirectory::open(base) {
            Err(error) if !is_absence(&error) => return Err(failed(Doing::Opening, base, error, "")),
            Err(error) if error.raw_os_error() == Some(libc::ENOTDIR) => {
                let message = "it, or a part of its path, is not a directory";
                return Err(TierError::at(TierKind::Foreign, base.to_string_lossy(), message));
            }
            Err(_) if make => {
                return Err(failed(
                    Doing::Opening,
                    base,
                    io::ErrorKind::NotFound.into(),
                    "create it, or check that its file system is mounted",
                ));
            }
            Err(_) => return Ok(ClaimStep::Done(None)),
            Ok(given) => given,
        };
        let below = match enter(&given, base, owner, make)? {
            Some(below) => below,
            None => return Ok(ClaimStep::Done(None)),
        };
        let rank = below.last().map_or(&*given, |(_, rank)| rank);
        let lock = acquire(rank, &path)?;
        PendingClaim { path, base: given, below, lock }.resume()
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of a file in the directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn rank(&self) -> &PrivateDirectory {
        self.below.last().map_or(&self.base, |(_, rank)| rank)
    }

    /// Opens a file of the directory.
    pub fn open(&self, name: &str, want: OpenFlags) -> io::Result<fs::File> {
        self.rank().open(name, want)
    }

    /// Length of a file in bytes; `None` if it does not exist.
    pub fn len(&self, name: &str) -> Result<Option<u64>> {
        let found = self.rank().entry(name);
        let found = found.map_err(|error| failed(Doing::Opening, &self.file(name), error, ""))?;
        Ok(found.map(|found| found.len))
    }

    /// Syncs the directory and the directories above it, up to the base directory.
    pub fn sync(&self) -> Result<()> {
        let mut path = self.path.as_path();
        for directory in self.below.iter().rev().map(|(_, one)| one).chain([&*self.base]) {
            directory.sync().map_err(|error| failed(Doing::Syncing, path, error, ""))?;
            path = path.parent().unwrap_or(path);
        }
        Ok(())
    }

    /// Fails with `Fenced` if another process took the lock, and with `PathMissing` if the name of the directory, of the lock or of one of these
    /// open files now stands for something else. Data written there would be lost with the process. Transient errors
    /// are ignored; the next read or write reports them.
    pub fn check(&self, files: &[(&str, Identity)]) -> Result<()> {
        if !self.lock.lock().is_held() {
            return Err(fenced(&self.path.to_string_lossy(), "another process"));
        }
        if let Some(message) = self.lost_name() {
            return gone(self.path.clone(), &message);
        }
        for (name, identity) in files.iter().chain([&(LOCK, self.lock.identity())]) {
            match self.rank().entry(name) {
                Ok(Some(found)) if found.identity != *identity || !found.regular => {
                    return gone(self.file(name), "the file was replaced");
                }
                Ok(Some(found)) if !found.own => {
                    return gone(self.file(name), "the owner of the file was changed");
                }
                Ok(Some(found)) if found.shared => {
                    return gone(self.file(name), "a hard link to the file was created");
                }
                Ok(None) => return gone(self.file(name), "the file was removed or renamed"),
                Err(error) if !is_passing(&error) => {
                    return gone(self.file(name), &format!("the file became unreachable ({error})"));
                }
                Ok(Some(_)) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// Fails with `Fenced` if another process claimed the directory since.
    pub fn check_owner(&self) -> Result<()> {
        self.lock.check_owner(&self.path)
    }

    /// True if the owner holds a lease, because the file system is not of this machine alone.
    pub fn is_leased(&self) -> bool {
        self.lock.is_leased()
    }

    /// True if no other process may own the directory by now. Without a lease the system's lock says so.
    pub fn lease_is_valid(&self) -> bool {
        self.lock.lease_is_valid()
    }

    /// Fails with `Fenced` if another process may own the directory by now. Reads the
    /// record only if the lease has to be renewed.
    pub fn check_lease(&self) -> Result<()> {
        self.lock.check_lease(&self.path)
    }

    /// Which of the directories lost its name, and how. Transient errors are ignored.
    fn lost_name(&self) -> Option<String> {
        let lost = |name: &str, found: io::Result<Option<bool>>| match found {
            Ok(Some(true)) => None,
            Ok(Some(false)) => Some(format!("the directory {name:?} was replaced")),
            Ok(None) => Some(format!("the directory {name:?} was removed or renamed")),
            Err(error) if is_absence(&error) => {
                Some(format!("the directory {name:?} was removed or renamed ({error})"))
            }
            Err(error) if is_passing(&error) => None,
            Err(error) => Some(format!("the directory {name:?} became unreachable ({error})")),
        };
        let base = lost(&self.base.name().to_string_lossy(), self.base.has_its_name().map(Some));
        let above = [&*self.base].into_iter().chain(self.below.iter().map(|(_, directory)| directory));
        let mut below = above.zip(&self.below).filter_map(|(above, (name, directory))| {
            // The next open refuses a directory that was replaced by a link.
            let found = above
                .entry(name)
                .and_then(|found| found.map(|found| Ok(found.identity == directory.identity()?)).transpose());
            lost(name, found)
        });
        base.or_else(|| below.next())
    }

    /// Fails with `PathMissing` if one of these files, which exist, has another name than that of the tier now.
    pub fn check_removal(&self, files: &[(&str, Identity)]) -> Result<()> {
        for (name, identity) in files {
            let found = self.rank().entry(name).ok().flatten();
            if found.is_none_or(|found| found.identity != *identity) {
                return Err(self.left(&format!("the file {name:?} was renamed")));
            }
        }
        Ok(())
    }

    /// Removes the files, the directory, and the parent directories that become empty.
    pub fn remove(self) -> Result<()> {
        if !self.lock.lock().is_own() {
            return Err(inherited(&self.path.to_string_lossy()));
        }
        if let Some(message) = self.lost_name() {
            // A directory that was removed with its files is no error.
            return if self.is_empty() { Ok(()) } else { Err(self.left(&message)) };
        }
        self.check(&[])?;
        // The marker is optional: a full file system may refuse it. `collect` removes what an interrupted removal
        // leaves.
        let _ = self.rank().open(REMOVING, OpenFlags { write: true, make: true, ..OpenFlags::default() });
        self.remove_files()?;
        self.remove_file(LOCK)?;
        for (at, (name, _)) in self.below.iter().enumerate().rev() {
            let above = if at == 0 { &*self.base } else { &self.below[at - 1].1 };
            // A directory that is not empty stays.
            if above.remove_directory(name).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn left(&self, message: &str) -> Error {
        let message = format!("{message} while the tier was open; its files remain, and nothing was removed");
        TierError::at(TierKind::PathMissing, self.path.to_string_lossy(), message)
    }

    fn is_empty(&self) -> bool {
        FILES.iter().chain([&LOCK]).all(|name| matches!(self.rank().entry(name), Ok(None)))
    }

    fn finish_removal(&self) -> Result<()> {
        let found = self.rank().entry(REMOVING);
        match found.map_err(|error| failed(Doing::Opening, &self.file(REMOVING), error, ""))? {
            Some(_) => self.remove_files(),
            None => Ok(()),
        }
    }

    fn remove_files(&self) -> Result<()> {
        FILES.iter().chain([&REMOVING]).try_for_each(|name| self.remove_file(name))
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.rank().remove_file(name).map_err(|error| failed(Doing::Removing, &self.file(name), error, ""))
    }
}

impl PendingClaim {
    /// Goes on with the claim.
    pub fn resume(self) -> Result<ClaimStep> {
        let PendingClaim { path, base, below, lock } = self;
        match lock.resume(&path)? {
            LockStep::Owned(lock) => {
                let directory = Directory { path, base, below, lock };
                directory.finish_removal()?;
                Ok(ClaimStep::Done(Some(directory)))
            }
            LockStep::Wait(lock, time) => {
                Ok(ClaimStep::Wait(Box::new(PendingClaim { path, base, below, lock: *lock }), time))
            }
        }
    }
}

/// Error for a removal in a forked child, which removes nothing.
pub(super) fn inherited(path: &str) -> Error {
    Error::Unsupported(format!("{path} is in use by the parent of this process; nothing was removed"))
}

fn gone(path: PathBuf, message: &str) -> Result<()> {
    let message = format!("{message} while the tier was open; data that was written there since is lost");
    Err(TierError::at(TierKind::PathMissing, path.to_string_lossy(), message))
}

fn is_passing(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|errno| PASSING.contains(&errno))
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

/// Opens the directories of job, host and rank. `None` if one does not exist and `make` is false.
pub(super) fn enter(
    given: &PrivateDirectory,
    base: &Path,
    owner: &Owner,
    make: bool,
) -> Result<Option<Vec<(String, PrivateDirectory)>>> {
    let (mut below, mut path) = (Vec::<(String, PrivateDirectory)>::new(), base.to_path_buf());
    for name in owner.names() {
        path.push(&name);
        let above = below.last().map_or(given, |(_, above)| above);
        match above.enter(&name, make) {
            Ok(found) => below.push((name, found)),
            Err(error) if !make && is_absence(&error) => return Ok(None),
            Err(error) => return Err(failed(Doing::Opening, &path, error, "")),
        }
    }
    Ok(Some(below))
}

fn acquire(rank: &PrivateDirectory, path: &Path) -> Result<PendingLock> {
    let file = path.join(LOCK);
    let failed = |doing: Doing, error: io::Error| failed(doing, &file, error, "");
    loop {
        let refused =
            |error| fork_closed::limit_reached(&error).unwrap_or_else(|| failed(Doing::Opening, error));
        match FileLock::attempt(rank, LOCK).map_err(refused)? {
            LockAttempt::Acquired(lock) => {
                // If another process removed the directory meanwhile, the locked file no longer has a name: try again.
                if !lock.is_named(rank, LOCK).map_err(|error| failed(Doing::Opening, error))? {
                    continue;
                }
                return PendingLock::new(lock, rank, path);
            }
            LockAttempt::HeldByUs => {
                let message = "this process has the tier open, or closed it with a transfer still in flight";
                return Err(locked(path, message));
            }
            LockAttempt::HeldByOther(message) => return Err(locked(path, message.trim())),
        }
    }
}
