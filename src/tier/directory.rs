//! Directories of a tier: one per path, job, host and rank, with a lock that a live process holds.
//!
//! Invariants:
//! - Everything a process writes lies in directories whose lock it holds. The lock ends with the last file of the
//!   directory that an operation uses, however the tier was closed (see [`Directory`] and `medium`).
//! - The directory given for a path must exist: a disk that is not mounted is an error, never a new directory on the
//!   disk below it. Its owner and its mode are the caller's choice; it may be one that everybody writes to.
//! - The directories below it, and the files in them, belong to the effective user, and nobody else may change them; no
//!   symbolic link is followed (see `sys::own`). New directories have mode 0700, files 0600.
//! - Removing takes the superblocks first, so that a half-removed directory holds no state. A file named `removing` lies
//!   there meanwhile: who takes the directory next finishes the removal.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::extent::check_name;
use crate::error::{Error, IoError, IoKind, Result, TierError, TierKind};
use crate::sys::file::Identity;
use crate::sys::host;
use crate::sys::lock::{Attempt, FileLock};
use crate::sys::own::Want;
use crate::sys::own::{self, OwnDirectory};

/// Files of a directory, superblocks first.
pub const FILES: [&str; 3] = ["superblock.0", "superblock.1", "data"];
const LOCK: &str = "lock";
const REMOVING: &str = "removing";
/// Errors of the moment: they do not say that a file is gone.
const PASSING: [i32; 5] = [libc::EINTR, libc::EAGAIN, libc::ENOMEM, libc::EIO, libc::ETIMEDOUT];

/// Whose directories are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Name of the run.
    pub job: String,
    /// Name of the machine.
    pub host: String,
    /// Rank in the run.
    pub rank: u32,
}

/// A directory whose lock this process holds.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// The same, wherever this process changes its working directory to.
    place: PathBuf,
    base: OwnDirectory,
    /// The directories of job, host and rank, and their names.
    below: Vec<(String, OwnDirectory)>,
    lock: FileLock,
}

impl Owner {
    /// Refuses names that are no names of directories.
    pub fn check(&self) -> Result<()> {
        for (argument, name) in [("options.job", &self.job), ("options.host", &self.host)] {
            check_name(argument, name)?;
            if name.contains('/') || name.starts_with('.') || name.chars().any(char::is_control) {
                return Err(Error::invalid(argument, format!("{name:?} is no name for a directory")));
            }
        }
        Ok(())
    }

    /// The directory below `base`.
    pub fn below(&self, base: &Path) -> PathBuf {
        self.names().iter().fold(base.to_path_buf(), |path, name| path.join(name))
    }

    fn names(&self) -> [String; 3] {
        [self.job.clone(), self.host.clone(), format!("rank-{}", self.rank)]
    }
}

impl Directory {
    /// Takes the directory of `owner` below `base`. `None` if it does not exist and is not to be made.
    pub fn claim(base: &Path, owner: &Owner, make: bool) -> Result<Option<Directory>> {
        let path = owner.below(base);
        let given = match OwnDirectory::given(base) {
            Err(error) if !is_absence(&error) => return Err(failed("opening", base, error, "")),
            Err(error) if error.raw_os_error() == Some(libc::ENOTDIR) => {
                let words = "it, or what it lies in, is not a directory";
                return Err(TierError::at(TierKind::Foreign, base.to_string_lossy(), words));
            }
            Err(_) if make => {
                return Err(failed("opening", base, io::ErrorKind::NotFound.into(), "is it mounted?"));
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file of it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn rank(&self) -> &OwnDirectory {
        self.below.last().map_or(&self.base, |(_, rank)| rank)
    }

    /// Opens a file of it.
    pub fn open(&self, name: &str, want: Want) -> io::Result<fs::File> {
        self.rank().open(name, want)
    }

    /// Length of a file of it; `None` if it does not exist.
    pub fn len(&self, name: &str) -> Result<Option<u64>> {
        let found = self.rank().entry(name);
        let found = found.map_err(|error| failed("opening", &self.file(name), error, ""))?;
        Ok(found.map(|found| found.len))
    }

    /// Makes durable which files there are, and that the directory itself is.
    pub fn sync(&self) -> Result<()> {
        let mut path = self.path.as_path();
        for directory in self.below.iter().rev().map(|(_, one)| one).chain([&self.base]) {
            directory.sync().map_err(|error| failed("syncing", path, error, ""))?;
            path = path.parent().unwrap_or(path);
        }
        Ok(())
    }

    /// Refuses if the directory, the lock or one of these open files is not what its name stands for any more: what is
    /// written there is lost with the process. Errors of the moment are left to the next read or write.
    pub fn check(&self, files: &[(&str, Identity)]) -> Result<()> {
        let gone = |path: PathBuf, words: &str| {
            let words = format!(
                "{words} while the tier was open; what was written there since cannot be found again"
            );
            Err(TierError::at(TierKind::PathMissing, path.to_string_lossy(), words))
        };
        let is_passing =
            |error: &io::Error| error.raw_os_error().is_some_and(|errno| PASSING.contains(&errno));
        if !self.lock.is_held() {
            return gone(self.file(LOCK), "the lock was lost to another process");
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
        // A directory that became a link is refused by the next open.
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
                    return gone(self.file(name), "the file was given to another user");
                }
                Ok(Some(found)) if found.shared => {
                    return gone(self.file(name), "the file was given a second name (a hard link)");
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

    /// Removes the files, the directory, and the directories above it that are empty then.
    pub fn remove(self) -> Result<()> {
        if !self.lock.is_own() {
            return Err(parents(&self.path.to_string_lossy()));
        }
        if fs::symlink_metadata(&self.place).is_err_and(|error| is_absence(&error)) {
            // Removed already, or moved away: what was moved is not touched.
            return Ok(());
        }
        self.check(&[])?;
        // A file system without room for it does without: an end halfway leaves what `collect` removes.
        let _ = self.rank().open(REMOVING, Want { write: true, make: true, ..Want::default() });
        self.remove_files()?;
        self.remove_file(LOCK)?;
        for (at, (name, _)) in self.below.iter().enumerate().rev() {
            let above = if at == 0 { &self.base } else { &self.below[at - 1].1 };
            // A directory that something else lies in stays.
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

/// A forked child removes nothing.
pub(super) fn parents(path: &str) -> Error {
    Error::Unsupported(format!("{path} is in use by the process that forked this one: nothing was removed"))
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

/// The directories of job, host and rank; `None` if one does not exist and is not to be made.
fn enter(
    given: &OwnDirectory,
    base: &Path,
    owner: &Owner,
    make: bool,
) -> Result<Option<Vec<(String, OwnDirectory)>>> {
    let (mut below, mut path) = (Vec::<(String, OwnDirectory)>::new(), base.to_path_buf());
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

fn acquire(rank: &OwnDirectory, path: &Path) -> Result<FileLock> {
    let file = path.join(LOCK);
    let failed = |doing: &'static str, error: io::Error| failed(doing, &file, error, "");
    loop {
        match FileLock::attempt(rank, LOCK).map_err(|error| failed("opening", error))? {
            Attempt::Held(mut lock) => {
                // Whoever removed the directory meanwhile removed the file that was locked.
                if !lock.names(rank, LOCK).map_err(|error| failed("opening", error))? {
                    continue;
                }
                let pid = std::process::id();
                let began = host::process_start(pid).unwrap_or(0);
                let words = format!("process {pid} on {}, started at tick {began}\n", host::name());
                lock.write(&words).map_err(|error| failed("writing", error))?;
                return Ok(lock);
            }
            Attempt::Ours => {
                let words =
                    "this process has it open, or a transfer of a tier that it closed is still in flight";
                return Err(locked(path, words));
            }
            Attempt::Theirs(words) => return Err(locked(path, words.trim())),
        }
    }
}

fn locked(path: &Path, words: &str) -> Error {
    TierError::at(TierKind::Locked, path.to_string_lossy(), words)
}

/// A system call on a directory or a lock failed, or what lies there is not this user's.
pub(super) fn failed(doing: &'static str, path: &Path, error: io::Error, detail: &str) -> Error {
    if own::is_refusal(&error) {
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

/// A directory found below a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Whose it is.
    pub owner: Owner,
    /// Where.
    pub path: PathBuf,
    /// What its live owner wrote into the lock, or why nobody can tell; `None` if no live process holds it.
    pub live: Option<String>,
    /// Bytes of its files.
    pub bytes: u64,
}

/// All directories of tiers below `base`. No link is followed, and nothing of another user is opened.
pub fn scan(base: &Path) -> Result<Vec<Found>> {
    let given = OwnDirectory::given(base).map_err(|error| failed("opening", base, error, ""))?;
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
                    Ok(Attempt::Held(_)) => None,
                    Ok(Attempt::Ours) => Some("this process".to_string()),
                    Ok(Attempt::Theirs(words)) => Some(words.trim().to_string()),
                    Err(error) => Some(error.to_string()),
                };
                all.push(Found { owner, path, live, bytes });
            }
        }
    }
    Ok(all)
}

/// The directories in a directory, sorted; links are none.
fn list(directory: &OwnDirectory, path: &Path) -> Result<Vec<(String, PathBuf, OwnDirectory)>> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        // Another user's, or gone since it was listed.
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

fn is_file(directory: &OwnDirectory, name: &str) -> bool {
    directory.entry(name).is_ok_and(|found| found.is_some_and(|found| found.regular))
}

/// Refuses to begin where the rank's state lies under the name of another host, and nobody holds it: it would be forgotten
/// without a word.
pub fn check_moved<'a>(bases: impl Iterator<Item = &'a Path>, owner: &Owner) -> Result<()> {
    let Some(path) = bases.flat_map(|base| elsewhere(base, owner)).next() else { return Ok(()) };
    let words = format!(
        "it has the state of this rank of job {:?}, and host {:?} has none: name the host, or collect it",
        owner.job, owner.host
    );
    Err(TierError::at(TierKind::Foreign, path.to_string_lossy(), words))
}

/// Directories below `base` in which the same rank of the run has state under another host's name, and nobody holds them.
/// Another user's are none.
fn elsewhere(base: &Path, owner: &Owner) -> Vec<PathBuf> {
    let hosts = fs::read_dir(base.join(&owner.job)).into_iter().flatten().filter_map(|entry| entry.ok());
    let names = hosts.filter_map(|entry| entry.file_name().into_string().ok());
    let Ok(given) = OwnDirectory::given(base) else { return Vec::new() };
    let holds_state = |owner: &Owner| {
        let Ok(Some(below)) = enter(&given, base, owner, false) else { return false };
        let Some((_, rank)) = below.last() else { return false };
        let written =
            |file: &&str| rank.entry(file).is_ok_and(|found| found.is_some_and(|found| found.len > 0));
        FILES[..2].iter().any(written) && matches!(FileLock::attempt(rank, LOCK), Ok(Attempt::Held(_)))
    };
    names
        .filter(|host| *host != owner.host)
        .map(|host| Owner { host, ..owner.clone() })
        .filter(holds_state)
        .map(|owner| owner.below(base))
        .collect()
}

/// Removes the directory of a dead owner; a live one is refused, and another user's too.
pub fn collect(base: &Path, owner: &Owner) -> Result<()> {
    owner.check()?;
    match Directory::claim(base, owner, false)? {
        Some(directory) => directory.remove(),
        None => Err(failed("opening", &owner.below(base), io::ErrorKind::NotFound.into(), "")),
    }
}
