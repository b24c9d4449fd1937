//! Directories of a tier: one per path, job, host and rank, with a lock that a live process holds.
//!
//! Invariants:
//! - Everything a process writes lies in directories whose lock it holds.
//! - The directory given for a path must exist: a disk that is not mounted is an error, never a new directory on the
//!   disk below it.
//! - Removing takes the superblocks first, so that a half-removed directory holds no state.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::extent::check_name;
use crate::error::{Error, IoError, IoKind, Result, TierError, TierKind};
use crate::sys::host;
use crate::sys::lock::{Attempt, FileLock};

/// Files of a directory, superblocks first.
pub const FILES: [&str; 3] = ["superblock.0", "superblock.1", "data"];
const LOCK: &str = "lock";

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
    base: PathBuf,
    _lock: FileLock,
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
        base.join(&self.job).join(&self.host).join(format!("rank-{}", self.rank))
    }
}

impl Directory {
    /// Takes the directory of `owner` below `base`. `None` if it does not exist and is not to be made.
    pub fn claim(base: &Path, owner: &Owner, make: bool) -> Result<Option<Directory>> {
        let path = owner.below(base);
        if !base.is_dir() {
            return match make {
                true => Err(failed("opening", base, io::ErrorKind::NotFound.into(), "is it mounted?")),
                false => Ok(None),
            };
        }
        if !path.is_dir() && !make {
            return Ok(None);
        }
        if make {
            fs::create_dir_all(&path).map_err(|error| failed("opening", &path, error, ""))?;
        }
        let lock = acquire(&path)?;
        Ok(Some(Directory { path, base: base.to_path_buf(), _lock: lock }))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file of it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Makes durable which files there are, and that the directory itself is.
    pub fn sync(&self) -> Result<()> {
        let mut at = Some(self.path.as_path());
        while let Some(path) = at.filter(|path| path.starts_with(&self.base)) {
            let synced = fs::File::open(path).and_then(|directory| directory.sync_all());
            synced.map_err(|error| failed("syncing", path, error, ""))?;
            at = path.parent();
        }
        Ok(())
    }

    /// Removes the files, the directory, and the directories above it that are empty then.
    pub fn remove(self) -> Result<()> {
        for name in FILES.iter().chain([&LOCK]) {
            let path = self.file(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed("removing", &path, error, ""));
                }
                _ => {}
            }
        }
        let mut at = Some(self.path.as_path());
        while let Some(path) = at.filter(|path| *path != self.base && path.starts_with(&self.base)) {
            // A directory that something else lies in stays.
            if fs::remove_dir(path).is_err() {
                break;
            }
            at = path.parent();
        }
        Ok(())
    }
}

fn acquire(path: &Path) -> Result<FileLock> {
    let file = path.join(LOCK);
    loop {
        match FileLock::attempt(&file).map_err(|error| failed("opening", &file, error, ""))? {
            // Whoever removed the directory meanwhile removed the file that was locked.
            Attempt::Held(lock) if !lock.names(&file) => {}
            Attempt::Held(mut lock) => {
                let pid = std::process::id();
                let began = host::process_start(pid).unwrap_or(0);
                let words = format!("process {pid} on {}, started at tick {began}\n", host::name());
                lock.write(&words).map_err(|error| failed("writing", &file, error, ""))?;
                return Ok(lock);
            }
            Attempt::Ours => return Err(locked(path, "this process has it open")),
            Attempt::Theirs(words) => return Err(locked(path, words.trim())),
        }
    }
}

fn locked(path: &Path, words: &str) -> Error {
    TierError::at(TierKind::Locked, path.to_string_lossy(), words)
}

/// A system call on a directory or a lock failed.
pub(super) fn failed(doing: &'static str, path: &Path, error: io::Error, detail: &str) -> Error {
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
    /// What its live owner wrote into the lock; `None` if no live process holds it.
    pub live: Option<String>,
    /// Bytes of its files.
    pub bytes: u64,
}

/// All directories of tiers below `base`.
pub fn scan(base: &Path) -> Result<Vec<Found>> {
    let list = |path: &Path| -> Result<Vec<(String, PathBuf)>> {
        let entries = fs::read_dir(path).map_err(|error| failed("opening", path, error, ""))?;
        let mut found: Vec<(String, PathBuf)> = entries
            .filter_map(|entry| entry.ok())
            .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
            .filter(|(_, path)| path.is_dir())
            .collect();
        found.sort();
        Ok(found)
    };
    let mut all = Vec::new();
    for (job, path) in list(base)? {
        for (host, path) in list(&path)? {
            for (rank, path) in list(&path)? {
                let rank = rank.strip_prefix("rank-").and_then(|rank| rank.parse().ok());
                let Some(rank) = rank.filter(|_| path.join(LOCK).is_file()) else { continue };
                let owner = Owner { job: job.clone(), host: host.clone(), rank };
                let bytes = FILES.iter().filter_map(|file| fs::metadata(path.join(file)).ok());
                let bytes = bytes.map(|found| found.len()).sum();
                let live = match FileLock::attempt(&path.join(LOCK)) {
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
fn elsewhere(base: &Path, owner: &Owner) -> Vec<PathBuf> {
    let hosts = fs::read_dir(base.join(&owner.job)).into_iter().flatten().filter_map(|entry| entry.ok());
    let names = hosts.filter_map(|entry| entry.file_name().into_string().ok());
    let has_state = |path: &PathBuf| {
        FILES[..2].iter().any(|file| fs::metadata(path.join(file)).is_ok_and(|found| found.len() > 0))
    };
    names
        .filter(|host| *host != owner.host)
        .map(|host| Owner { host, ..owner.clone() }.below(base))
        .filter(has_state)
        .filter(|path| matches!(FileLock::attempt(&path.join(LOCK)), Ok(Attempt::Held(_))))
        .collect()
}

/// Removes the directory of a dead owner; a live one is refused.
pub fn collect(base: &Path, owner: &Owner) -> Result<()> {
    owner.check()?;
    match Directory::claim(base, owner, false)? {
        Some(directory) => directory.remove(),
        None => Err(failed("opening", &owner.below(base), io::ErrorKind::NotFound.into(), "")),
    }
}
