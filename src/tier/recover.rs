//! Opens a tier: finds its paths, selects the state to resume from, and makes this state the durable last one.
//!
//! Invariants:
//! - Before any other write, the superblock that the open resumes from is written to every working path, and synced
//!   except with `Durability::Process`. A later crash then cannot bring back an older superblock whose space may have
//!   been reused.
//! - An open at the commit before the last one reads and verifies all its blocks. Then it writes the older state as a
//!   new superblock with the highest sequence, over the superblock of the last commit. A crash before this write leaves
//!   both commits; a crash after it leaves only the older one, and the space of the last commit is free.
//! - State of another job, rank or number of ranks is never accepted.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::contents::Contents;
use super::data_length::{self, UsedSpace};
use super::health::Health;
use super::options::{Mode, PathLocation, PathOptions, TierOptions};
use super::path::TierPath;
use super::path_claim::claim;
use super::scan::check_moved;
use super::space::Space;
use super::state::{DurableCopy, Extent, PathState, TierState};
use super::store::{Opened, Tier};
use super::superblock::{ExtentRecord, PathRecord, Stamp, Superblock};
use super::superblock_set::{Candidate, Probed, Selected, gone, leave_out, may_leave_out, probe, select};
use super::transfer::TierIdentity;
use crate::error::{Doing, Error, IoError, IoKind, Result, TierError, TierKind};
use crate::log::{self, Level};
use crate::sys::bell::Bell;
use crate::sys::host;
use crate::sys::process::OpeningProcess;
use crate::sys::sync::{Lock, Signal};

/// A path that is present: its index in the options, and what its superblock copies hold.
type Placed = Option<(usize, TierPath, FoundCopies)>;

/// What an open found in the superblock copies of a path.
#[derive(Debug, Clone, Copy, Default)]
struct FoundCopies {
    /// The copy that the next superblock must not overwrite.
    kept: Option<DurableCopy>,
    stamps: [Option<Stamp>; 2],
}

/// Paths by number, and their states.
type Paths = (Vec<Option<Arc<TierPath>>>, Vec<PathState>);

impl Tier {
    /// Opens a tier, or creates one, as `options.mode` says. Errors: `NoState`, `NoStep`, `Foreign`, `Format`,
    /// `PathMissing`, `Locked`, and errors of the devices.
    pub fn open(options: TierOptions) -> Result<Tier> {
        options.check()?;
        let options = options.absolute()?;
        let Probed { found, absent, left_out } = probe(&options)?;
        match select(&found, &options)? {
            Some(selected) if options.mode == Mode::Resume && selected.superblock.step.is_none() => {
                Err(no_state(&options, "the tier exists, but nothing was committed to it"))
            }
            Some(selected) => resume(options, found, absent, selected),
            None => {
                found.iter().try_for_each(Candidate::check_format)?;
                found.iter().try_for_each(|one| one.path.check_blank())?;
                if options.mode == Mode::Resume || options.at_step.is_some() {
                    return Err(no_state(&options, ""));
                }
                if options.mode == Mode::Auto {
                    let directories = options.paths.iter().filter_map(|path| path.location.directory());
                    check_moved(directories, &options.owner, options.io.io_timeout)?;
                }
                // A path that cannot be read may hold the existing tier.
                if let Some(error) = left_out {
                    return Err(error);
                }
                create(options, found, absent)
            }
        }
    }
}

fn no_state(options: &TierOptions, why: &str) -> Error {
    let names: Vec<String> = (0..options.paths.len()).map(|n| location_name(options, n)).collect();
    let separator = if why.is_empty() { "" } else { ": " };
    let message = format!("job {:?} rank {}{separator}{why}", options.owner.job, options.owner.rank);
    TierError::at(TierKind::NoState, names.join(", "), message)
}

fn create(options: TierOptions, found: Vec<Candidate>, absent: Vec<usize>) -> Result<Tier> {
    let tier = host::random().map_err(|error| Error::system("generating the number of a tier", &error))?;
    let mut numbered: Vec<(usize, TierPath)> = found.into_iter().map(|one| (one.given, one.path)).collect();
    for given in absent {
        numbered.push((given, claim_new(&options, given)?));
    }
    numbered.sort_by_key(|(given, _)| *given);
    let mut paths = Vec::new();
    let mut states = Vec::new();
    for (given, path) in numbered {
        states.push(path_state(
            &path,
            options.paths[given].limit,
            options.paths[given].reserve,
            &[],
            0,
            FoundCopies::default(),
        )?);
        path.sync_directory()?;
        paths.push(Some(Arc::new(path)));
    }
    let block_bytes = options.block_bytes;
    let state = state(states, Vec::new(), None);
    let tier = assemble(options, tier, block_bytes, paths, state, Opened::default())?;
    tier.write_opening_superblock()?;
    Ok(tier)
}

fn resume(
    options: TierOptions,
    found: Vec<Candidate>,
    absent: Vec<usize>,
    selected: Selected,
) -> Result<Tier> {
    let newest = &selected.superblock;
    let mut records = newest.paths.clone();
    let mut paths: Vec<Placed> = records.iter().map(|_| None).collect();
    let mut fresh = Vec::new();
    for candidate in found {
        candidate.check_tier(newest)?;
        let name = candidate.path.name();
        let number = match candidate.newest() {
            Some(own) => Some(own.path as usize),
            // The path's first superblock was being written when the run crashed, or its copies are corrupt. A blank
            // path that should hold data is a different disk.
            None => records
                .iter()
                .position(|record| record.name == name)
                .filter(|number| !candidate.broken.is_empty() || lost_extents(newest, &[*number]).is_empty()),
        };
        let copies = FoundCopies { kept: candidate.kept(selected.sequence), stamps: candidate.stamps };
        let Candidate { path, given, .. } = candidate;
        match number {
            None => fresh.push((given, path)),
            Some(number) if paths.get(number).is_some_and(Option::is_none) => {
                paths[number] = Some((given, path, copies));
            }
            Some(number) => {
                let message = format!(
                    "it is a copy of path {number}, which was found already; remove one of them from the paths"
                );
                return Err(TierError::at(TierKind::Foreign, name, message));
            }
        }
    }
    let missing: Vec<usize> =
        (0..records.len()).filter(|number| paths[*number].is_none() && in_use(newest, *number)).collect();
    let lost = lost_extents(newest, &missing);
    if !missing.is_empty() && !options.degraded {
        let names: Vec<&str> = missing.iter().map(|number| records[*number].name.as_str()).collect();
        let message = format!(
            "{} extents have data there; restore the path, or open the tier in degraded mode, which lists them",
            lost.len()
        );
        return Err(TierError::at(TierKind::PathMissing, names.join(", "), message));
    }
    for given in absent {
        match claim_new(&options, given) {
            Ok(path) => fresh.push((given, path)),
            // Listed, but not mounted: a degraded open continues without it, even if no data was on it.
            Err(error) if may_leave_out(&options, &error) && error.io_kind() == Some(IoKind::NotFound) => {
                leave_out(&error)
            }
            Err(error) => return Err(error),
        }
    }
    for (given, path) in fresh {
        path.sync_directory()?;
        let record = PathRecord { name: path.name(), memory: !path.lasts(), end: 0, written: 0 };
        let unused = |number: &usize| paths[*number].is_none() && !in_use(newest, *number);
        let number = (0..records.len()).find(unused).unwrap_or(records.len());
        if number == records.len() {
            records.push(record);
            paths.push(None);
        } else {
            records[number] = record;
        }
        paths[number] = Some((given, path, FoundCopies::default()));
    }
    let (paths, states) = path_states(&options, newest, &records, paths)?;
    let opened = Opened {
        resumed: true,
        step: newest.step,
        payload: newest.payload.clone(),
        missing: missing.iter().map(|number| records[*number].name.clone()).collect(),
        lost,
    };
    let state = state(states, extents(newest), Some(newest));
    let tier = assemble(options, newest.tier, newest.block_bytes, paths, state, opened)?;
    if selected.is_older() {
        verify_before_resume(&tier)?;
    }
    match tier.write_opening_superblock() {
        Err(error) if error.is_full() && !selected.is_older() => {
            let message = format!(
                "{}: the tier is open, but a put or a commit needs free space first: {error}",
                tier.some_name()
            );
            log::write(Level::Warn, &message);
            tier.opening_due.store(true, Ordering::Release);
            Ok(tier)
        }
        other => other.map(|()| tier),
    }
}

fn path_states(
    options: &TierOptions,
    newest: &Superblock,
    records: &[PathRecord],
    placed: Vec<Placed>,
) -> Result<Paths> {
    let (mut paths, mut states) = (Vec::new(), Vec::new());
    for (number, (record, one)) in records.iter().zip(placed).enumerate() {
        let chunks = newest.extents.iter().flatten().flat_map(|extent| {
            let chunks = extent.version.iter().flat_map(|version| &version.chunks);
            chunks.map(|chunk| (chunk.path, UsedSpace::of(chunk, &extent.shape)))
        });
        let used: Vec<UsedSpace> =
            chunks.filter(|(path, _)| *path as usize == number).map(|(_, space)| space).collect();
        let Some((given, path, copies)) = one else {
            let space = Space::new(record.end, record.end, []).unwrap_or_default();
            states.push(PathState {
                name: record.name.clone(),
                memory: record.memory,
                health: Health::Missing,
                reason: "it was missing when the tier was opened".to_string(),
                space,
                durable_copy: None,
                found: [None, None],
                gone: false,
                dirty: false,
                written_before: record.written,
            });
            paths.push(None);
            continue;
        };
        let PathOptions { limit, reserve, .. } = options.paths[given];
        states.push(path_state(&path, limit, reserve, &used, record.written, copies)?);
        paths.push(Some(Arc::new(path)));
    }
    Ok((paths, states))
}

fn path_state(
    path: &TierPath,
    limit: Option<u64>,
    reserve: u64,
    used: &[UsedSpace],
    written_before: u64,
    copies: FoundCopies,
) -> Result<PathState> {
    let mut end = data_length::opened(path, used)?;
    let reserve = reserve.min(limit.unwrap_or(u64::MAX));
    if reserve > end {
        path.allocate(end, reserve)?;
        end = reserve;
    }
    let ranges = used.iter().map(|space| space.range);
    let space = Space::new(end, limit.unwrap_or(i64::MAX as u64), ranges).ok_or_else(|| {
        let message = format!("the file has {end} bytes, fewer than its superblock records");
        TierError::at(TierKind::Format, path.data_name(), message)
    })?;
    Ok(PathState {
        name: path.name(),
        memory: !path.lasts(),
        health: Health::Healthy,
        reason: String::new(),
        space,
        durable_copy: copies.kept,
        found: copies.stamps,
        gone: false,
        dirty: false,
        written_before,
    })
}

fn extents(newest: &Superblock) -> Vec<Option<Extent>> {
    let known = |record: &ExtentRecord| {
        let contents =
            record.version.clone().map(|version| Arc::new(Contents::new(version, OnceLock::new())));
        Extent {
            name: record.name.clone(),
            shape: Arc::new(record.shape.clone()),
            committed: contents.clone(),
            current: contents,
            in_doubt: false,
            removed: false,
            writing: false,
            failed: None,
        }
    };
    newest.extents.iter().map(|record| record.as_ref().map(known)).collect()
}

fn state(paths: Vec<PathState>, extents: Vec<Option<Extent>>, newest: Option<&Superblock>) -> TierState {
    let named =
        extents.iter().enumerate().filter_map(|(n, extent)| Some((extent.as_ref()?.name.clone(), n as u32)));
    TierState {
        names: named.collect::<HashMap<_, _>>(),
        paths,
        extents,
        ticket_states: HashMap::new(),
        tickets: 0,
        generation: newest.map_or(0, |newest| newest.generation),
        sequence: newest.map_or(0, |newest| newest.sequence),
        step: newest.and_then(|newest| newest.step),
        payload: newest.map_or_else(Vec::new, |newest| newest.payload.clone()),
        committing: false,
        in_doubt_frees: Vec::new(),
        deferred_frees: Vec::new(),
    }
}

fn assemble(
    options: TierOptions,
    tier: u128,
    block_bytes: u64,
    paths: Vec<Option<Arc<TierPath>>>,
    state: TierState,
    opened: Opened,
) -> Result<Tier> {
    let session = host::random().map_err(|error| Error::system("generating the number of a tier", &error))?;
    let identity = TierIdentity { tier, session: session as u64 };
    let (opener, state, changed) = (OpeningProcess::current(), Lock::new(state), Signal::default());
    let bell = Arc::<Bell>::default();
    for path in paths.iter().flatten() {
        path.engine.ring_at_outcomes(Arc::clone(&bell))?;
    }
    let claimed = AtomicBool::new(false);
    let opening_due = AtomicBool::new(false);
    let opening = Lock::new(());
    Ok(Tier {
        opener,
        options,
        identity,
        block_bytes,
        paths,
        state,
        changed,
        bell,
        opened,
        claimed,
        opening_due,
        opening,
    })
}

/// Verifies every block of the older state: later writes may have overwritten some.
fn verify_before_resume(tier: &Tier) -> Result<()> {
    let step = tier.opened.step.unwrap_or_default();
    let damage = tier.verify_extents()?.damage;
    match damage.into_iter().find(|error| error.tier_kind() != Some(TierKind::Lost)) {
        None => Ok(()),
        Some(error) if error.tier_kind() == Some(TierKind::Corrupt) => Err(gone(
            tier.some_name(),
            step,
            &format!("its data was overwritten since, or is damaged: {error}"),
        )),
        Some(error) => Err(error),
    }
}

/// True if committed data is on the path, or if the path may hold superblocks that a later open would find.
fn in_use(newest: &Superblock, number: usize) -> bool {
    let lasts = newest.paths.get(number).is_some_and(|record| !record.memory && !record.name.is_empty());
    let versions = newest.extents.iter().flatten().filter_map(|extent| extent.version.as_ref());
    lasts || versions.into_iter().any(|version| version.touches(number as u32))
}

fn lost_extents(newest: &Superblock, missing: &[usize]) -> Vec<String> {
    let there = |extent: &&ExtentRecord| {
        let version = extent.version.as_ref();
        version.is_some_and(|version| missing.iter().any(|number| version.touches(*number as u32)))
    };
    newest.extents.iter().flatten().filter(there).map(|extent| extent.name.clone()).collect()
}

fn claim_new(options: &TierOptions, given: usize) -> Result<TierPath> {
    let missing = || IoError::of_errno(libc::ENOENT, Doing::Opening, location_name(options, given));
    claim(options, given, true)?.ok_or_else(|| missing().into())
}

fn location_name(options: &TierOptions, given: usize) -> String {
    match &options.paths[given].location {
        PathLocation::Directory(base) => options.owner.below(base).to_string_lossy().into_owned(),
        PathLocation::Bucket(address) => options.owner.below(address.as_ref()).to_string_lossy().into_owned(),
        PathLocation::Memory => "memory".to_string(),
        #[cfg(test)]
        PathLocation::Store(_) => super::bucket::name(super::bucket::TEST_ADDRESS, &options.owner),
        #[cfg(any(test, feature = "sim"))]
        PathLocation::Simulated(..) => format!("disk-{given}"),
    }
}
