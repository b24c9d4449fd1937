//! Opens a tier: finds its paths, selects the state to resume from, and makes this state the durable last one.
//!
//! Invariants:
//! - Before any other write, the superblock that the open resumes from is made durable on every working path. A later
//!   crash then cannot bring back an older superblock whose space may have been reused.
//! - An open at the commit before the last one reads and verifies all its blocks. Then it writes the older state as a
//!   new superblock with the highest sequence, over the superblock of the last commit. A crash before this write leaves
//!   both commits; a crash after it leaves only the older one, and the space of the last commit is free.
//! - State of another job, rank or number of ranks is never accepted.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use super::contents::Contents;
use super::copies::{Candidate, Chosen, Looked, choose, gone, leave_out, look};
use super::directory::check_moved;
use super::health::Health;
use super::options::{Durability, Mode, PathOptions, Place, TierOptions};
use super::path::{Path, claim};
use super::space::Space;
use super::state::{Extent, Good, PathState, State};
use super::store::{Opened, Tier};
use super::superblock::{ExtentRecord, PathRecord, Superblock};
use super::transfer::Identity;
use crate::error::{Error, IoError, IoKind, Result, TierError, TierKind};
use crate::sys::host;
use crate::sys::process::Opener;

/// A path that is present: its index in the options, and the superblock copy that the next one must not overwrite.
type Placed = Option<(usize, Path, Option<Good>)>;
/// Paths by number, and their states.
type Paths = (Vec<Option<Arc<Path>>>, Vec<PathState>);

impl Tier {
    /// Opens a tier, or creates one, as `options.mode` says. Errors: `NoState`, `NoStep`, `Foreign`, `Format`,
    /// `PathMissing`, `Locked`, and errors of the devices.
    pub fn open(options: TierOptions) -> Result<Tier> {
        options.check()?;
        let Looked { found, absent, left_out } = look(&options)?;
        match choose(&found, &options)? {
            Some(chosen) if options.mode == Mode::Resume && chosen.superblock.step.is_none() => {
                Err(no_state(&options, "it was made, and nothing was committed to it"))
            }
            Some(chosen) => resume(options, found, absent, chosen),
            None => {
                found.iter().try_for_each(Candidate::check_format)?;
                found.iter().try_for_each(|one| one.path.check_blank())?;
                if options.mode == Mode::Resume || options.at_step.is_some() {
                    return Err(no_state(&options, ""));
                }
                if options.mode == Mode::Auto {
                    let directories = options.paths.iter().filter_map(|path| path.place.directory());
                    check_moved(directories, &options.owner)?;
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
    let names: Vec<String> = (0..options.paths.len()).map(|n| place_name(options, n)).collect();
    let separator = if why.is_empty() { "" } else { ": " };
    let words = format!("job {:?} rank {}{separator}{why}", options.owner.job, options.owner.rank);
    TierError::at(TierKind::NoState, names.join(", "), words)
}

fn create(options: TierOptions, found: Vec<Candidate>, absent: Vec<usize>) -> Result<Tier> {
    let tier = host::random().map_err(|error| Error::system("drawing a number for a tier", &error))?;
    let mut numbered: Vec<(usize, Path)> = found.into_iter().map(|one| (one.given, one.path)).collect();
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
            [],
            0,
            None,
        )?);
        path.sync_directory()?;
        paths.push(Some(Arc::new(path)));
    }
    let block_bytes = options.block_bytes;
    let state = state(states, Vec::new(), None);
    let tier = assemble(options, tier, block_bytes, paths, state, Opened::default())?;
    publish(&tier)?;
    Ok(tier)
}

fn resume(options: TierOptions, found: Vec<Candidate>, absent: Vec<usize>, chosen: Chosen) -> Result<Tier> {
    let newest = &chosen.superblock;
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
        let kept = candidate.kept(chosen.sequence);
        let Candidate { path, given, .. } = candidate;
        match number {
            None => fresh.push((given, path)),
            Some(number) if paths.get(number).is_some_and(Option::is_none) => {
                paths[number] = Some((given, path, kept));
            }
            Some(number) => {
                let words = format!("it is a copy: path {number} of the tier is there already");
                return Err(TierError::at(TierKind::Foreign, name, words));
            }
        }
    }
    let missing: Vec<usize> =
        (0..records.len()).filter(|number| paths[*number].is_none() && in_use(newest, *number)).collect();
    let lost = lost_extents(newest, &missing);
    if !missing.is_empty() && !options.degraded {
        let names: Vec<&str> = missing.iter().map(|number| records[*number].name.as_str()).collect();
        let words = format!("{} extents have a part there; a degraded open names them", lost.len());
        return Err(TierError::at(TierKind::PathMissing, names.join(", "), words));
    }
    for given in absent {
        match claim_new(&options, given) {
            Ok(path) => fresh.push((given, path)),
            // Listed, but not mounted: a degraded open continues without it, even if no data was on it.
            Err(error) if options.degraded && error.io_kind() == Some(IoKind::NotFound) => leave_out(&error),
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
        paths[number] = Some((given, path, None));
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
    if chosen.is_older() {
        prove(&tier)?;
    }
    publish(&tier)?;
    Ok(tier)
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
            chunks.map(|chunk| (chunk.path, chunk.offset, chunk.stored(&extent.shape)))
        });
        let used: Vec<(u64, u64)> =
            chunks.filter(|(path, ..)| *path as usize == number).map(|(_, at, len)| (at, len)).collect();
        let Some((given, path, kept)) = one else {
            let space = Space::new(record.end, record.end, []).unwrap_or_default();
            states.push(PathState {
                name: record.name.clone(),
                memory: record.memory,
                health: Health::Missing,
                reason: "it was not there when the tier was opened".to_string(),
                space,
                good: None,
                gone: false,
                dirty: false,
                written_before: record.written,
            });
            paths.push(None);
            continue;
        };
        let PathOptions { limit, reserve, .. } = options.paths[given];
        states.push(path_state(&path, limit, reserve, used, record.written, kept)?);
        paths.push(Some(Arc::new(path)));
    }
    Ok((paths, states))
}

fn path_state(
    path: &Path,
    limit: Option<u64>,
    reserve: u64,
    used: impl IntoIterator<Item = (u64, u64)>,
    written_before: u64,
    good: Option<Good>,
) -> Result<PathState> {
    let mut end = path.data_len()?;
    let reserve = reserve.min(limit.unwrap_or(u64::MAX));
    if reserve > end {
        path.allocate(end, reserve)?;
        end = reserve;
    }
    let space = Space::new(end, limit.unwrap_or(i64::MAX as u64), used).ok_or_else(|| {
        let words = format!("it has {end} bytes, fewer than the superblock speaks of");
        TierError::at(TierKind::Format, path.data_name(), words)
    })?;
    Ok(PathState {
        name: path.name(),
        memory: !path.lasts(),
        health: Health::Healthy,
        reason: String::new(),
        space,
        good,
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
            doubt: false,
            removed: false,
            writing: false,
            failed: None,
        }
    };
    newest.extents.iter().map(|record| record.as_ref().map(known)).collect()
}

fn state(paths: Vec<PathState>, extents: Vec<Option<Extent>>, newest: Option<&Superblock>) -> State {
    let named =
        extents.iter().enumerate().filter_map(|(n, extent)| Some((extent.as_ref()?.name.clone(), n as u32)));
    State {
        names: named.collect::<HashMap<_, _>>(),
        paths,
        extents,
        slots: HashMap::new(),
        tickets: 0,
        generation: newest.map_or(0, |newest| newest.generation),
        sequence: newest.map_or(0, |newest| newest.sequence),
        step: newest.and_then(|newest| newest.step),
        payload: newest.map_or_else(Vec::new, |newest| newest.payload.clone()),
        committing: false,
        limbo: Vec::new(),
        lingering: Vec::new(),
    }
}

fn assemble(
    options: TierOptions,
    tier: u128,
    block_bytes: u64,
    paths: Vec<Option<Arc<Path>>>,
    state: State,
    opened: Opened,
) -> Result<Tier> {
    let session = host::random().map_err(|error| Error::system("drawing a number for a tier", &error))?;
    let who = Identity { tier, session: session as u64 };
    let (opener, state, changed) = (Opener::this(), Mutex::new(state), Condvar::new());
    Ok(Tier { opener, options, who, block_bytes, paths, state, changed, opened })
}

/// Verifies every block of the older state: later writes may have overwritten some.
fn prove(tier: &Tier) -> Result<()> {
    let step = tier.opened.step.unwrap_or_default();
    let damage = tier.verify_extents()?.damage;
    match damage.into_iter().find(|error| error.tier_kind() != Some(TierKind::Lost)) {
        None => Ok(()),
        Some(error) if error.tier_kind() == Some(TierKind::Corrupt) => {
            Err(gone(tier.some_name(), step, &format!("written over since, or damaged: {error}")))
        }
        Some(error) => Err(error),
    }
}

/// Writes the state that was found, or the empty one, as a new superblock to every path. The superblock that was found
/// may exist only in the page cache, and paths may have been renamed, added or left out.
fn publish(tier: &Tier) -> Result<()> {
    let (step, payload) = {
        let state = tier.lock();
        (state.step, state.payload.clone())
    };
    let (superblock, bytes) = tier.next_superblock(step, &payload)?;
    let table = bytes.on_path(0).len() as u64;
    for path in tier.paths.iter().flatten().filter(|path| path.lasts()) {
        path.reserve_superblocks(table)?;
    }
    if tier.durability() != Durability::Process {
        let live = || tier.paths.iter().flatten().filter(|path| path.lasts());
        for path in live() {
            let all = [path.sync_data()?, path.sync_superblock(0)?, path.sync_superblock(1)?];
            for handle in all {
                path.wait(handle, None)?;
            }
        }
    }
    tier.write_superblocks(&superblock, &bytes)
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

fn claim_new(options: &TierOptions, given: usize) -> Result<Path> {
    claim(options, given, true)?.ok_or_else(|| {
        let path = place_name(options, given);
        IoError {
            kind: IoKind::NotFound,
            doing: "opening",
            path,
            offset: 0,
            bytes: 0,
            errno: libc::ENOENT,
            detail: String::new(),
        }
        .into()
    })
}

fn place_name(options: &TierOptions, given: usize) -> String {
    match &options.paths[given].place {
        Place::Directory(base) => options.owner.below(base).to_string_lossy().into_owned(),
        Place::Bucket(address) => super::bucket::name(address, &options.owner),
        Place::Memory => "memory".to_string(),
        #[cfg(test)]
        Place::Store(_) => super::bucket::name(super::bucket::TEST_ADDRESS, &options.owner),
        #[cfg(any(test, feature = "sim"))]
        Place::Simulated(..) => format!("disk-{given}"),
    }
}
