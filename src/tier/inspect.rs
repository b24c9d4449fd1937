//! The tiers below directories and what their superblocks say, read without a claim.
//!
//! Invariants:
//! - Nothing is created, written or locked, so a tier that a process uses stays as it is.
//! - A superblock may be replaced while it is read. It counts only if its checksums match; the other copy is valid then.
//! - A file may hold anything. A read ends, and takes memory for the bytes that the file has, up to [`MAX_TABLE`].
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::directory::Owner;
use super::extent::PAGE;
use super::format::{HEADER_BYTES, MAX_TABLE, Superblock, SuperblockHeader};
use super::ownership::{Holder, Life, OwnerRecord};
use super::storage::{LOCK, SUPERBLOCKS, failed};
use crate::error::{Doing, Result};
use crate::sys::{private_files, try_vec};

/// A tier that [`find`] found.
#[derive(Debug, Clone)]
pub struct Found {
    /// Job, host and rank, which its directories name.
    pub owner: Owner,
    /// The given directories below which it has files.
    pub bases: Vec<PathBuf>,
    /// The superblock of the last commit; `None` if none can be read.
    pub superblock: Option<Superblock>,
    /// What is wrong with superblocks, one text for each.
    pub damage: Vec<String>,
    /// The process that claimed the tier last, if its record can be read.
    pub claimed_by: Option<Claimant>,
}

/// What [`find`] found.
#[derive(Debug, Clone, Default)]
pub struct Search {
    /// The tiers, in the order of job, host and rank.
    pub tiers: Vec<Found>,
    /// The directories that could not be read, with the reason.
    pub unread: Vec<String>,
}

/// The process that claimed a tier last.
#[derive(Debug, Clone)]
pub struct Claimant {
    /// Description of the process.
    pub process: String,
    /// True if it runs, false if it has ended or gave the tier back; `None` if this machine cannot know it.
    pub lives: Option<bool>,
}

impl Found {
    /// Names of paths with data or superblocks of the tier that are not below [`Found::bases`].
    pub fn missing(&self) -> Vec<String> {
        let Some(superblock) = &self.superblock else { return Vec::new() };
        let records = superblock.paths.iter().filter(|record| !record.memory && !record.name.is_empty());
        let is_here = |name: &Path| {
            // Job, host and rank are the last three names.
            let recorded = name.ancestors().nth(3).unwrap_or(name);
            self.bases.iter().any(|base| {
                same(base, recorded)
                    || std::path::absolute(base).is_ok_and(|base| self.owner.below(&base) == name)
            })
        };
        records.map(|record| record.name.clone()).filter(|name| !is_here(Path::new(name))).collect()
    }
}

/// The tiers below these directories. A directory without tiers adds none.
pub fn find(bases: &[PathBuf]) -> Result<Search> {
    let mut tiers = BTreeMap::<(String, String, u32), Found>::new();
    let mut unread = Vec::new();
    for base in bases {
        for owner in owners(base, &mut unread)? {
            let key = (owner.job.clone(), owner.host.clone(), owner.rank);
            let Some(read) = Copies::read(&owner.below(base), &mut unread)? else { continue };
            let found = tiers.entry(key).or_insert_with(|| Found {
                owner,
                bases: Vec::new(),
                superblock: None,
                damage: Vec::new(),
                claimed_by: None,
            });
            if found.bases.iter().any(|other| same(other, base)) {
                continue;
            }
            found.bases.push(base.clone());
            found.damage.extend(read.damage);
            let sequence = |one: &Superblock| one.sequence;
            for superblock in read.valid {
                if found.superblock.as_ref().map(sequence) < Some(sequence(&superblock)) {
                    found.superblock = Some(superblock);
                }
            }
            found.claimed_by = found.claimed_by.take().or(read.claimed_by);
        }
    }
    Ok(Search { tiers: tiers.into_values().collect(), unread })
}

/// True if both name one directory.
pub fn same(one: &Path, other: &Path) -> bool {
    one == other
        || matches!((fs::canonicalize(one), fs::canonicalize(other)), (Ok(one), Ok(other)) if one == other)
}

/// The owners that directories below `base` name. `unread` gets the directories that cannot be read.
fn owners(base: &Path, unread: &mut Vec<String>) -> Result<Vec<Owner>> {
    let entries = fs::read_dir(base).map_err(|error| failed(Doing::Opening, base, error, ""))?;
    let mut owners = Vec::new();
    for (job, path) in directories(entries) {
        for (host, path) in below(&path, unread) {
            for (rank, _) in below(&path, unread) {
                let Some(rank) = rank.strip_prefix("rank-").and_then(|rank| rank.parse().ok()) else {
                    continue;
                };
                let owner = Owner { job: job.clone(), host: host.clone(), rank };
                if owner.check().is_ok() {
                    owners.push(owner);
                }
            }
        }
    }
    Ok(owners)
}

/// The directories in a directory; none if it cannot be read.
fn below(path: &Path, unread: &mut Vec<String>) -> Vec<(String, PathBuf)> {
    match fs::read_dir(path) {
        Ok(entries) => directories(entries).collect(),
        Err(error) => {
            unread.push(failed(Doing::Opening, path, error, "").to_string());
            Vec::new()
        }
    }
}

/// The directories among entries, without links, with their names. What cannot be read is left out.
fn directories(
    entries: impl Iterator<Item = io::Result<fs::DirEntry>>,
) -> impl Iterator<Item = (String, PathBuf)> {
    let directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let found = entries.filter_map(io::Result::ok).filter(directory);
    found.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
}

/// What the files of one path hold.
struct Copies {
    valid: Vec<Superblock>,
    damage: Vec<String>,
    claimed_by: Option<Claimant>,
}

impl Copies {
    /// `None` if the directory is not one of a tier: it has neither a superblock nor an owner's record.
    fn read(directory: &Path, unread: &mut Vec<String>) -> Result<Option<Copies>> {
        let claimed_by = claimant(&directory.join(LOCK));
        let mut copies = Copies { valid: Vec::new(), damage: Vec::new(), claimed_by };
        let (mut marked, mut refused) = (false, None);
        for name in SUPERBLOCKS {
            let path = directory.join(name);
            match superblock(&path) {
                Ok(None) => {}
                Ok(Some(Ok(found))) => copies.valid.push(found),
                Ok(Some(Err((magic, message)))) => {
                    marked |= magic;
                    copies.damage.push(format!("{}: {message}", path.display()));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let denied = error.kind() == io::ErrorKind::PermissionDenied;
                    let message = failed(Doing::Reading, &path, error, "").to_string();
                    refused = refused.or(denied.then(|| message.clone()));
                    copies.damage.push(message);
                }
            }
        }
        let is_tier = marked || !copies.valid.is_empty() || copies.claimed_by.is_some();
        if !is_tier {
            unread.extend(refused);
        }
        Ok(is_tier.then_some(copies))
    }
}

/// The superblock in a file: `None` if it is blank; an error text, and whether the file begins as a superblock does, if
/// it is damaged.
fn superblock(path: &Path) -> io::Result<Option<std::result::Result<Superblock, (bool, String)>>> {
    let mut file = private_files::open_to_check(path)?;
    let mut bytes = read_up_to(&mut file, HEADER_BYTES as u64)?;
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let damaged = |magic: bool, message: String| Ok(Some(Err((magic, message))));
    let magic = bytes.starts_with(b"SPWSUPER");
    let header = match SuperblockHeader::parse(&bytes) {
        Ok(header) => header,
        Err(message) => return damaged(magic, message),
    };
    if file.metadata()?.len() < HEADER_BYTES as u64 + header.table_bytes {
        return damaged(magic, "its table is truncated".to_string());
    }
    bytes.append(&mut read_up_to(&mut file, header.table_bytes.min(MAX_TABLE))?);
    match Superblock::parse(&bytes) {
        Ok(superblock) => Ok(Some(Ok(superblock))),
        Err(message) => damaged(magic, message),
    }
}

fn read_up_to(file: &mut File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = try_vec::with_capacity("reading a superblock", most as usize)
        .map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error.to_string()))?;
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn claimant(lock: &Path) -> Option<Claimant> {
    let mut file = private_files::open_to_check(lock).ok()?;
    let record = OwnerRecord::parse(&read_up_to(&mut file, PAGE).ok()?)?;
    let me = Holder::this_process();
    let lives = match record.holder.life(&me, &record.claim) {
        _ if !record.held => Some(false),
        Life::Alive => Some(true),
        Life::Dead => Some(false),
        Life::Unknown => None,
    };
    Some(Claimant { process: record.holder.describe(&me), lives })
}
