//! Tier directories below a base directory: those of other hosts, of runs that ended, and all of them.
//!
//! Invariant: links are not followed, and directories of other users are skipped.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::directory::{ClaimStep, Directory, FILES, Owner, SUPERBLOCKS, enter};
use super::failures::failed;
use super::holder::Holder;
use super::owned_lock::LOCK;
use super::ownership::{Part, possible_owner};
use super::time_limits::within_timeout;
use crate::error::{Doing, Result, TierError, TierKind};
use crate::sys::lock::{FileLock, LockAttempt};
use crate::sys::private_files::{GivenDirectory, PrivateDirectory};

/// A tier directory found by [`scan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Owner named by the path.
    pub owner: Owner,
    /// Path of the directory.
    pub path: PathBuf,
    /// Text of the lock if a live process holds it, or may hold it on another machine, or the error of the check. `None`
    /// if no live process holds it.
    pub live: Option<String>,
    /// Total length of its files, in bytes.
    pub bytes: u64,
}

/// All tier directories below `base`. Links are not followed, and directories of other users are skipped.
pub fn scan(base: &Path) -> Result<Vec<Found>> {
    let given = GivenDirectory::open(base).map_err(|error| failed(Doing::Opening, base, error, ""))?;
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
                    // A lock that does not reach another mount says nothing about an owner there.
                    Ok(LockAttempt::Acquired(lock)) => {
                        let page = lock.read_page(&directory, LOCK, Part::Record as u64, true).ok().flatten();
                        page.and_then(|page| possible_owner(&page, &Holder::this_process()))
                    }
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
        Err(error) => return Err(failed(Doing::Opening, path, error, "")),
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

/// Removes the directory of an owner whose process has ended. Fails for a live owner, and for a directory of another
/// user.
pub fn collect(base: &Path, owner: &Owner) -> Result<()> {
    collect_within(None, base, owner)
}

/// As [`collect`]. `io_timeout` bounds each part of the removal, but not the wait for another owner's lease.
pub(super) fn collect_within(io_timeout: Option<Duration>, base: &Path, owner: &Owner) -> Result<()> {
    owner.check()?;
    let path = owner.below(base);
    let (base, owner) = (base.to_path_buf(), owner.clone());
    let begin = move || Directory::begin_claim(&base, &owner, false);
    let mut step = within_timeout(io_timeout, Doing::Opening, &path, begin)?;
    let found = loop {
        match step {
            ClaimStep::Done(found) => break found,
            ClaimStep::Wait(pending, time) => {
                std::thread::sleep(time);
                step = within_timeout(io_timeout, Doing::Opening, &path, move || pending.resume())?;
            }
        }
    };
    match found {
        Some(directory) => within_timeout(io_timeout, Doing::Removing, &path, move || directory.remove()),
        None => Err(failed(Doing::Opening, &path, io::ErrorKind::NotFound.into(), "")),
    }
}
