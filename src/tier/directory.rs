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

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, fs, io};

use super::extent::check_name;
use super::ownership::{LockStep, OwnedLock, PendingLock, owner_has_ended};
use super::storage::{
    FILES, FilePair, LOCK, NamedFile, SUPERBLOCKS, Storage, failed, fenced, in_flight, inherited, locked,
    unless_fenced, within_timeout,
};
use crate::error::{Doing, Error, Result, TierError, TierKind};
use crate::io::file::File;
use crate::sys::file::{Access, Identity};
use crate::sys::fork_closed;
use crate::sys::lock::{FileLock, LockAttempt};
use crate::sys::private_files::{GivenDirectory, OpenFlags, PrivateDirectory};

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

impl fmt::Display for Owner {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} on {}, rank {}", self.job, self.host, self.rank)
    }
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
enum ClaimStep {
    /// The claim has ended. `None`: the directory does not exist.
    Done(Option<Directory>),
    /// Continue after this time, in which another owner may show that it lives.
    Wait(Box<PendingClaim>, Duration),
}

/// A claim that waits.
#[derive(Debug)]
struct PendingClaim {
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

/// Takes the directory of `owner` below `base` and locks it. `None` if it does not exist and `make` is false. Errors:
/// `Locked` if another process holds it, `Foreign` if another user owns a part of it. `io_timeout` bounds each part of
/// the claim, but not the wait for the lease of an owner on another machine.
pub fn acquire(
    io_timeout: Option<Duration>,
    base: &Path,
    owner: &Owner,
    make: bool,
) -> Result<Option<Directory>> {
    let path = owner.below(base);
    let (base, owner) = (base.to_path_buf(), owner.clone());
    let begin = move || Directory::begin_claim(&base, &owner, make);
    let mut step = within_timeout(io_timeout, Doing::Opening, &path, begin)?;
    loop {
        match step {
            ClaimStep::Done(claimed) => return Ok(claimed),
            ClaimStep::Wait(pending, time) => {
                std::thread::sleep(time);
                step = within_timeout(io_timeout, Doing::Opening, &path, move || pending.resume())?;
            }
        }
    }
}

/// Removes the directory of an owner whose process has ended. Fails for a live owner, and for a directory of another
/// user. `io_timeout` bounds each part of the removal, but not the wait for another owner's lease.
pub fn collect(io_timeout: Option<Duration>, base: &Path, owner: &Owner) -> Result<()> {
    owner.check()?;
    let path = owner.below(base);
    match acquire(io_timeout, base, owner, false)? {
        Some(directory) => within_timeout(io_timeout, Doing::Removing, &path, move || directory.remove()),
        None => Err(failed(Doing::Opening, &path, io::ErrorKind::NotFound.into(), "")),
    }
}

impl Directory {
    /// The first part of [`claim`], which does not wait for another owner.
    fn begin_claim(base: &Path, owner: &Owner, make: bool) -> Result<ClaimStep> {
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
        let lock = acquire_lock(rank, &path)?;
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

    /// Syncs the directory and the directories above it, up to the base directory.
    pub fn sync(&self) -> Result<()> {
        let mut path = self.path.as_path();
        for directory in self.below.iter().rev().map(|(_, one)| one).chain([&*self.base]) {
            directory.sync().map_err(|error| failed(Doing::Syncing, path, error, ""))?;
            path = path.parent().unwrap_or(path);
        }
        Ok(())
    }

    /// Fails with `Fenced` if another process took the lock, and with `PathMissing` if the name of the directory, of the
    /// lock or of one of these open files now stands for something else. Data written there would be lost with the
    /// process. Transient errors are ignored; the next read or write reports them.
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
    /// Continues with the claim.
    fn resume(self) -> Result<ClaimStep> {
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

fn gone(path: PathBuf, message: &str) -> Result<()> {
    let message = format!("{message} while the tier was open; data that was written there since is lost");
    Err(TierError::at(TierKind::PathMissing, path.to_string_lossy(), message))
}

fn is_passing(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|errno| PASSING.contains(&errno))
}

pub(super) fn is_absence(error: &io::Error) -> bool {
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

/// How long an open waits for the lock of a process that has ended: a server may release it a moment later.
const LATE_RELEASE: Duration = Duration::from_secs(1);

fn acquire_lock(rank: &PrivateDirectory, path: &Path) -> Result<PendingLock> {
    let (file, began) = (path.join(LOCK), Instant::now());
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
                let message = "this process has the tier open, or closed it with a transfer still in flight; call \
                               close() of what has it open, such as the object that an earlier run of the same \
                               code made";
                return Err(locked(path, message));
            }
            LockAttempt::HeldByOther(text) if owner_has_ended(&text) && began.elapsed() < LATE_RELEASE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            LockAttempt::HeldByOther(text) => {
                return Err(locked(path, text.lines().next().unwrap_or_default().trim()));
            }
        }
    }
}

/// A directory of a mounted file system.
#[derive(Debug)]
pub struct DirStorage {
    directory: Arc<Directory>,
    direct: bool,
    io_timeout: Option<Duration>,
}

impl DirStorage {
    /// Storage in this directory. `direct`: bypass the page cache. `io_timeout`: longest time to wait for the owner's
    /// record, which is read without a call of `PathFiles`.
    pub fn new(directory: Directory, direct: bool, io_timeout: Option<Duration>) -> DirStorage {
        DirStorage { directory: Arc::new(directory), direct, io_timeout }
    }

    fn bounded(&self, work: fn(&Directory) -> Result<()>) -> Result<()> {
        let directory = Arc::clone(&self.directory);
        within_timeout(self.io_timeout, Doing::ReadingOwner, self.directory.path(), move || work(&directory))
    }

    fn open_for(&self, name: &str, path: &Path, access: Access) -> Result<Arc<File>> {
        let write = access != Access::Read;
        let want = |direct| OpenFlags { read: !write, write, make: write, direct };
        let rank = self.directory.rank();
        let file = File::open_with(path, access, self.direct, |direct| rank.open(name, want(direct)))?;
        Ok(Arc::new(file.keep_alive(Arc::clone(&self.directory) as _)))
    }
}

impl Storage for DirStorage {
    fn name(&self) -> String {
        self.directory.path().to_string_lossy().into_owned()
    }

    fn key(&self) -> PathBuf {
        self.directory.path().to_path_buf()
    }

    fn open(&self, file: &str) -> Result<FilePair> {
        let path = self.directory.file(file);
        let writer = self.open_for(file, &path, Access::Write { mode: 0o600 })?;
        Ok(FilePair { reader: self.open_for(file, &path, Access::Read)?, writer })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        let found = self.directory.rank().entry(file);
        let failed = |error| failed(Doing::Opening, &self.directory.file(file), error, "");
        Ok(found.map_err(failed)?.map(|found| found.len))
    }

    fn check(&self, files: &[NamedFile]) -> Result<()> {
        let files: Vec<_> = files.iter().map(|(name, file)| (*name, file.identity())).collect();
        self.directory.check(&files)
    }

    fn check_owner(&self) -> Result<()> {
        if !self.directory.lock.is_leased() {
            // The page is in the cache of this machine since the open. No server is asked.
            return self.directory.lock.check_owner();
        }
        self.bounded(|directory| directory.lock.check_owner())
    }

    fn check_lease(&self) -> Result<()> {
        match self.directory.lock.lease_is_valid() {
            true => Ok(()),
            false => self.bounded(|directory| {
                // What it says of a lost name is more exact.
                if !directory.lock.lock().has_a_name() {
                    directory.check(&[])?;
                }
                directory.lock.check_lease()
            }),
        }
    }

    fn check_removal(&self, files: &[NamedFile]) -> Result<()> {
        // The caller bounds a removal and its checks.
        unless_fenced(self.directory.lock.check_owner())?;
        let named = files.iter().filter(|(_, file)| file.has_a_name());
        let files: Vec<_> = named.map(|(name, file)| (*name, file.identity())).collect();
        self.directory.check_removal(&files)
    }

    fn finishes_removal(&self) -> bool {
        true
    }

    fn sync(&self) -> Result<()> {
        self.directory.sync()
    }

    fn remove(self: Arc<Self>) -> Result<()> {
        let name = self.name();
        let only = Arc::into_inner(self).and_then(|storage| Arc::into_inner(storage.directory));
        only.ok_or_else(|| in_flight(&name))?.remove()
    }
}

/// Fails with `Foreign` if an unlocked directory of another host holds the state of this rank. A new tier would
/// otherwise silently ignore that state.
pub(super) fn check_moved<'a>(
    bases: impl Iterator<Item = &'a Path>,
    owner: &Owner,
    io_timeout: Option<Duration>,
) -> Result<()> {
    let mut found = Vec::new();
    for base in bases {
        let (path, base, owner) = (owner.below(base), base.to_path_buf(), owner.clone());
        found
            .extend(within_timeout(io_timeout, Doing::Opening, &path, move || Ok(elsewhere(&base, &owner)))?);
    }
    let Some(path) = found.first() else { return Ok(()) };
    let message = format!(
        "it has the state of this rank of job {:?} under another host name than {:?}; set that host name, or \
         remove the state with collect",
        owner.job, owner.host
    );
    Err(TierError::at(TierKind::Foreign, path.to_string_lossy(), message))
}

/// Unlocked directories below `base` with state of the same job and rank under another host name. Directories of other
/// users are skipped.
fn elsewhere(base: &Path, owner: &Owner) -> Vec<PathBuf> {
    let hosts = fs::read_dir(base.join(&owner.job)).into_iter().flatten().filter_map(|entry| entry.ok());
    let names = hosts.filter_map(|entry| entry.file_name().into_string().ok());
    let Ok(given) = GivenDirectory::open(base) else { return Vec::new() };
    let holds_state = |owner: &Owner| {
        let Ok(Some(below)) = enter(&given, base, owner, false) else { return false };
        let Some((_, rank)) = below.last() else { return false };
        let written =
            |file: &&str| rank.entry(file).is_ok_and(|found| found.is_some_and(|found| found.len > 0));
        SUPERBLOCKS.iter().any(written)
            && matches!(FileLock::attempt(rank, LOCK), Ok(LockAttempt::Acquired(_)))
    };
    names
        .filter(|host| *host != owner.host)
        .map(|host| Owner { host, ..owner.clone() })
        .filter(holds_state)
        .map(|owner| owner.below(base))
        .collect()
}
