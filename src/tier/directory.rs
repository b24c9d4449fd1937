//! Directories of a tier: one per path, job, host and rank, each with a lock that a live process holds.
//!
//! Invariants:
//! - A process writes only to directories whose lock it holds. The lock is released when the last operation on a file
//!   of the directory has ended, even after the tier was closed (see [`Directory`] and `storage`).
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
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::extent::check_name;
use crate::error::{Error, IoError, IoKind, Result, TierError, TierKind};
use crate::sys::file::Identity;
use crate::sys::host;
use crate::sys::lock::{FileLock, LockAttempt};
use crate::sys::private_files::OpenFlags;
use crate::sys::private_files::{self, PrivateDirectory};

/// Files of a directory, superblocks first: the order of removal.
pub const FILES: [&str; 3] = ["superblock.0", "superblock.1", "data"];
const LOCK: &str = "lock";
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
    /// Absolute form of `path`, independent of the working directory.
    place: PathBuf,
    base: PrivateDirectory,
    /// The directories of job, host and rank, with their names.
    below: Vec<(String, PrivateDirectory)>,
    lock: FileLock,
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
    /// Errors: `Locked` if another process holds it, `Foreign` if another user owns a part of it.
    pub fn claim(base: &Path, owner: &Owner, make: bool) -> Result<Option<Directory>> {
        let path = owner.below(base);
        let given = match PrivateDirectory::open_given(base) {
            Err(error) if !is_absence(&error) => return Err(failed("opening", base, error, "")),
            Err(error) if error.raw_os_error() == Some(libc::ENOTDIR) => {
                let message = "it, or a part of its path, is not a directory";
                return Err(TierError::at(TierKind::Foreign, base.to_string_lossy(), message));
            }
            Err(_) if make => {
                return Err(failed(
                    "opening",
                    base,
                    io::ErrorKind::NotFound.into(),
                    "create it, or check that its file system is mounted",
                ));
            }
            Err(_) => return Ok(None),
            Ok(given) => given,
        };
        let below = match enter(&given, base, owner, make)? {
            Some(below) => below,
            None => return Ok(None),
        };
        let place = std::path::absolute(&path).map_err(|error| failed("opening", &path, error, ""))?;
        let rank = below.last().map_or(&given, |(_, rank)| rank);
        let lock = acquire(rank, &path)?;
        let directory = Directory { path, place, base: given, below, lock };
        directory.finish_removal()?;
        Ok(Some(directory))
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
        let found = found.map_err(|error| failed("opening", &self.file(name), error, ""))?;
        Ok(found.map(|found| found.len))
    }

    /// Syncs the directory and the directories above it, up to the base directory.
    pub fn sync(&self) -> Result<()> {
        let mut path = self.path.as_path();
        for directory in self.below.iter().rev().map(|(_, one)| one).chain([&self.base]) {
            directory.sync().map_err(|error| failed("syncing", path, error, ""))?;
            path = path.parent().unwrap_or(path);
        }
        Ok(())
    }

    /// Fails with `PathMissing` if the lock was lost, or if the name of the directory, of the lock or of one of these
    /// open files now stands for something else. Data written there would be lost with the process. Transient errors
    /// are ignored; the next read or write reports them.
    pub fn check(&self, files: &[(&str, Identity)]) -> Result<()> {
        let gone = |path: PathBuf, message: &str| {
            let message =
                format!("{message} while the tier was open; data that was written there since is lost");
            Err(TierError::at(TierKind::PathMissing, path.to_string_lossy(), message))
        };
        let is_passing =
            |error: &io::Error| error.raw_os_error().is_some_and(|errno| PASSING.contains(&errno));
        if !self.lock.is_held() {
            return gone(self.file(LOCK), "another process took the lock");
        }
        match (fs::symlink_metadata(&self.place), self.rank().identity()) {
            (Ok(found), Ok(own)) if (found.dev(), found.ino()) != (own.device, own.inode) => {
                return gone(self.path.clone(), "the directory was replaced");
            }
            (Err(error), _) if !is_passing(&error) => {
                return gone(self.path.clone(), &format!("the directory was removed or renamed ({error})"));
            }
            _ => {}
        }
        // The next open refuses a directory that was replaced by a link.
        let above = [&self.base].into_iter().chain(self.below.iter().map(|(_, directory)| directory));
        for (above, (name, directory)) in above.zip(&self.below) {
            let (found, own) = (above.entry(name).ok().flatten(), directory.identity().ok());
            if found.zip(own).is_some_and(|(found, own)| found.identity != own) {
                return gone(self.path.clone(), &format!("the directory {name:?} was replaced"));
            }
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

    /// Removes the files, the directory, and the parent directories that become empty.
    pub fn remove(self) -> Result<()> {
        if !self.lock.is_own() {
            return Err(inherited(&self.path.to_string_lossy()));
        }
        if fs::symlink_metadata(&self.place).is_err_and(|error| is_absence(&error)) {
            // The directory was removed or renamed. A renamed directory is left alone.
            return Ok(());
        }
        self.check(&[])?;
        // The marker is optional: a full file system may refuse it. `collect` removes what an interrupted removal
        // leaves.
        let _ = self.rank().open(REMOVING, OpenFlags { write: true, make: true, ..OpenFlags::default() });
        self.remove_files()?;
        self.remove_file(LOCK)?;
        for (at, (name, _)) in self.below.iter().enumerate().rev() {
            let above = if at == 0 { &self.base } else { &self.below[at - 1].1 };
            // A directory that is not empty stays.
            if above.remove_directory(name).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn finish_removal(&self) -> Result<()> {
        let found = self.rank().entry(REMOVING);
        match found.map_err(|error| failed("opening", &self.file(REMOVING), error, ""))? {
            Some(_) => self.remove_files(),
            None => Ok(()),
        }
    }

    fn remove_files(&self) -> Result<()> {
        FILES.iter().chain([&REMOVING]).try_for_each(|name| self.remove_file(name))
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.rank().remove_file(name).map_err(|error| failed("removing", &self.file(name), error, ""))
    }
}

/// Error for a removal in a forked child, which removes nothing.
pub(super) fn inherited(path: &str) -> Error {
    Error::Unsupported(format!("{path} is in use by the parent of this process; nothing was removed"))
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

/// Opens the directories of job, host and rank. `None` if one does not exist and `make` is false.
fn enter(
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
            Err(error) => return Err(failed("opening", &path, error, "")),
        }
    }
    Ok(Some(below))
}

fn acquire(rank: &PrivateDirectory, path: &Path) -> Result<FileLock> {
    let file = path.join(LOCK);
    let failed = |doing: &'static str, error: io::Error| failed(doing, &file, error, "");
    loop {
        match FileLock::attempt(rank, LOCK).map_err(|error| failed("opening", error))? {
            LockAttempt::Acquired(mut lock) => {
                // If another process removed the directory meanwhile, the locked file no longer has a name: try again.
                if !lock.is_named(rank, LOCK).map_err(|error| failed("opening", error))? {
                    continue;
                }
                let pid = std::process::id();
                let began = host::process_start(pid).unwrap_or(0);
                let message = format!("process {pid} on {}, started at tick {began}\n", host::name());
                lock.write(&message).map_err(|error| failed("writing", error))?;
                return Ok(lock);
            }
            LockAttempt::HeldByUs => {
                let message = "this process has the tier open, or closed it with a transfer still in flight";
                return Err(locked(path, message));
            }
            LockAttempt::HeldByOther(message) => return Err(locked(path, message.trim())),
        }
    }
}

fn locked(path: &Path, message: &str) -> Error {
    TierError::at(TierKind::Locked, path.to_string_lossy(), message)
}

/// Error of a system call on a directory or a lock. A file that belongs to another user is `Foreign`.
pub(super) fn failed(doing: &'static str, path: &Path, error: io::Error, detail: &str) -> Error {
    if private_files::is_refusal(&error) {
        return TierError::at(TierKind::Foreign, path.to_string_lossy(), error.to_string());
    }
    let errno = error.raw_os_error().unwrap_or(match error.kind() {
        io::ErrorKind::NotFound => libc::ENOENT,
        _ => 0,
    });
    let detail = if errno == 0 { error.to_string() } else { detail.to_string() };
    let (path, kind) = (path.to_string_lossy().into_owned(), IoKind::of_errno(errno));
    IoError { kind, doing, path, offset: 0, bytes: 0, errno, detail }.into()
}

/// A tier directory found by [`scan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Owner named by the path.
    pub owner: Owner,
    /// Path of the directory.
    pub path: PathBuf,
    /// Text of the lock if a live process holds it, or the error of the check. `None` if no live process holds it.
    pub live: Option<String>,
    /// Total length of its files, in bytes.
    pub bytes: u64,
}

/// All tier directories below `base`. Links are not followed, and directories of other users are skipped.
pub fn scan(base: &Path) -> Result<Vec<Found>> {
    let given = PrivateDirectory::open_given(base).map_err(|error| failed("opening", base, error, ""))?;
    let mut all = Vec::new();
    for (job, path, jobs) in list(&given, base)? {
        for (host, path, hosts) in list(&jobs, &path)? {
            for (rank, path, directory) in list(&hosts, &path)? {
                let rank = rank.strip_prefix("rank-").and_then(|rank| rank.parse().ok());
                let Some(rank) = rank.filter(|_| is_file(&directory, LOCK)) else { continue };
                let owner = Owner { job: job.clone(), host: host.clone(), rank };
                let bytes = FILES.iter().filter_map(|file| directory.entry(file).ok().flatten());
                let bytes = bytes.map(|found| found.len).sum();
                let live = match FileLock::attempt(&directory, LOCK) {
                    Ok(LockAttempt::Acquired(_)) => None,
                    Ok(LockAttempt::HeldByUs) => Some("this process".to_string()),
                    Ok(LockAttempt::HeldByOther(message)) => Some(message.trim().to_string()),
                    Err(error) => Some(error.to_string()),
                };
                all.push(Found { owner, path, live, bytes });
            }
        }
    }
    Ok(all)
}

/// Subdirectories, sorted by name, without links.
fn list(directory: &PrivateDirectory, path: &Path) -> Result<Vec<(String, PathBuf, PrivateDirectory)>> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        // The directory belongs to another user, or was removed since it was listed.
        Err(error) if matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(failed("opening", path, error, "")),
    };
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    let found = names.into_iter().filter_map(|name| {
        let found = directory.peek(&name).ok()?;
        Some((name.clone(), path.join(name), found))
    });
    Ok(found.collect())
}

fn is_file(directory: &PrivateDirectory, name: &str) -> bool {
    directory.entry(name).is_ok_and(|found| found.is_some_and(|found| found.regular))
}

/// Fails with `Foreign` if an unlocked directory of another host holds the state of this rank. A new tier would
/// otherwise silently ignore that state.
pub fn check_moved<'a>(bases: impl Iterator<Item = &'a Path>, owner: &Owner) -> Result<()> {
    let Some(path) = bases.flat_map(|base| elsewhere(base, owner)).next() else { return Ok(()) };
    let message = format!(
        "it has the state of this rank of job {:?} under another host name than {:?}; set that host name, or \
         remove the state with spw_tier_collect",
        owner.job, owner.host
    );
    Err(TierError::at(TierKind::Foreign, path.to_string_lossy(), message))
}

/// Unlocked directories below `base` with state of the same job and rank under another host name. Directories of other
/// users are skipped.
fn elsewhere(base: &Path, owner: &Owner) -> Vec<PathBuf> {
    let hosts = fs::read_dir(base.join(&owner.job)).into_iter().flatten().filter_map(|entry| entry.ok());
    let names = hosts.filter_map(|entry| entry.file_name().into_string().ok());
    let Ok(given) = PrivateDirectory::open_given(base) else { return Vec::new() };
    let holds_state = |owner: &Owner| {
        let Ok(Some(below)) = enter(&given, base, owner, false) else { return false };
        let Some((_, rank)) = below.last() else { return false };
        let written =
            |file: &&str| rank.entry(file).is_ok_and(|found| found.is_some_and(|found| found.len > 0));
        FILES[..2].iter().any(written)
            && matches!(FileLock::attempt(rank, LOCK), Ok(LockAttempt::Acquired(_)))
    };
    names
        .filter(|host| *host != owner.host)
        .map(|host| Owner { host, ..owner.clone() })
        .filter(holds_state)
        .map(|owner| owner.below(base))
        .collect()
}

/// Removes the directory of an owner whose process has ended. Fails for a live owner, and for a directory of another
/// user.
pub fn collect(base: &Path, owner: &Owner) -> Result<()> {
    owner.check()?;
    match Directory::claim(base, owner, false)? {
        Some(directory) => directory.remove(),
        None => Err(failed("opening", &owner.below(base), io::ErrorKind::NotFound.into(), "")),
    }
}
