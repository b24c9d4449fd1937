//! Opening a tier: which paths are there, what the last commit was, and making sure that it stays the last.
//!
//! Invariants:
//! - The whole superblock with the highest sequence counts. A device error on any copy is an error, not an older step:
//!   nobody knows what the copy would have said.
//! - Before anything is written, that superblock is durable on every path that works, so that no later crash brings an
//!   older one back, whose places may have been used again.
//! - Nothing of another run, rank or size is ever taken for the own.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use super::options::{Durability, Mode, PathOptions, Place, TierOptions};
use super::path::{Copy, Path, claim};
use super::space::Space;
use super::state::{Contents, Extent, Health, PathState, State};
use super::store::{Opened, Tier};
use super::superblock::{ExtentRecord, PathRecord, Superblock};
use super::transfer::Identity;
use crate::error::{Error, IoError, IoKind, Result, TierError, TierKind};
use crate::log::{self, Level};
use crate::sys::host;

/// A path of the options, and what its superblocks say.
struct Candidate {
    path: Path,
    /// Place in the options.
    given: usize,
    best: Option<(usize, Superblock)>,
    /// What is wrong with copies that are not whole.
    broken: Vec<String>,
}

/// A path that is there: its place in the options, and its own newest superblock.
type Placed = Option<(usize, Path, Option<(usize, Superblock)>)>;
/// Paths by number, and their states.
type Paths = (Vec<Option<Arc<Path>>>, Vec<PathState>);

impl Tier {
    /// Opens a tier, or makes one.
    pub fn open(options: TierOptions) -> Result<Tier> {
        options.check()?;
        let (found, absent) = look(&options)?;
        let newest = found.iter().filter_map(|one| one.best.as_ref()).max_by_key(|(_, found)| found.sequence);
        match newest.map(|(_, superblock)| superblock.clone()) {
            Some(newest) if options.mode == Mode::Create => {
                let step = newest.step.map_or("no step yet".to_string(), |step| format!("step {step}"));
                let words = format!("it holds {step} of job {:?}; resume or collect it", newest.job);
                Err(TierError::at(TierKind::Foreign, found_name(&found, &newest), words))
            }
            Some(newest) => resume(options, found, absent, newest),
            None => {
                if let Some(one) = found.iter().find(|one| one.broken.len() == 2) {
                    return Err(TierError::at(TierKind::Format, one.path.name(), one.broken.join("; ")));
                }
                if options.mode == Mode::Resume {
                    let names: Vec<String> =
                        (0..options.paths.len()).map(|n| place_name(&options, n)).collect();
                    let words = format!("job {:?} rank {}", options.owner.job, options.owner.rank);
                    return Err(TierError::at(TierKind::NoState, names.join(", "), words));
                }
                create(options, found, absent)
            }
        }
    }
}

/// Takes the places that are there and reads their superblocks; the others by their place in the options.
fn look(options: &TierOptions) -> Result<(Vec<Candidate>, Vec<usize>)> {
    let (mut found, mut absent) = (Vec::new(), Vec::new());
    for given in 0..options.paths.len() {
        let candidate = match claim(options, given, false) {
            Ok(Some(path)) => read_copies(path, given).map(Some),
            Ok(None) => Ok(None),
            // A store that does not answer; not one that a live process holds, or that the settings do not describe.
            Err(error @ Error::Io(_)) => Err(error),
            Err(error) => return Err(error),
        };
        match candidate {
            Ok(Some(candidate)) => found.push(candidate),
            Ok(None) => absent.push(given),
            Err(error) if options.degraded => leave_out(&error),
            Err(error) => return Err(error),
        }
    }
    Ok((found, absent))
}

fn leave_out(error: &Error) {
    log::write(Level::Warn, &format!("a path of a tier is left out: {error}"));
}

fn read_copies(path: Path, given: usize) -> Result<Candidate> {
    let mut candidate = Candidate { path, given, best: None, broken: Vec::new() };
    for copy in 0..2 {
        let name = candidate.path.superblock_name(copy).to_string();
        match candidate.path.read_superblock(copy)? {
            Copy::Blank => {}
            Copy::Broken(words) => candidate.broken.push(format!("{name}: {words}")),
            Copy::Whole(found) => {
                if candidate.best.as_ref().is_none_or(|(_, best)| best.sequence < found.sequence) {
                    candidate.best = Some((copy, *found));
                }
            }
        }
    }
    if let (Some(words), Some(_)) = (candidate.broken.first(), &candidate.best) {
        let words = format!("a superblock is broken, as a crash leaves one that was being written: {words}");
        log::write(Level::Warn, &words);
    }
    Ok(candidate)
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

fn resume(
    options: TierOptions,
    found: Vec<Candidate>,
    absent: Vec<usize>,
    newest: Superblock,
) -> Result<Tier> {
    check_owner(&options, &found_name(&found, &newest), &newest)?;
    let mut records = newest.paths.clone();
    let mut paths: Vec<Placed> = records.iter().map(|_| None).collect();
    let mut fresh = Vec::new();
    for Candidate { path, given, best, broken } in found {
        let name = path.name();
        let number = match &best {
            Some((_, own)) if own.tier != newest.tier => {
                let words = format!(
                    "it belongs to another tier of job {:?}, not to the one on the other paths",
                    own.job
                );
                return Err(TierError::at(TierKind::Foreign, name, words));
            }
            Some((_, own)) => Some(own.path as usize),
            // Its first superblock was under way when the run crashed, or its copies are damaged. A blank one that
            // should hold something is another disk.
            None => records
                .iter()
                .position(|record| record.name == name)
                .filter(|number| !broken.is_empty() || lost_extents(&newest, &[*number]).is_empty()),
        };
        match number {
            None => fresh.push((given, path)),
            Some(number) if paths.get(number).is_some_and(Option::is_none) => {
                paths[number] = Some((given, path, best));
            }
            Some(number) => {
                let words = format!("it is a copy: path {number} of the tier is there already");
                return Err(TierError::at(TierKind::Foreign, name, words));
            }
        }
    }
    let missing: Vec<usize> =
        (0..records.len()).filter(|number| paths[*number].is_none() && in_use(&newest, *number)).collect();
    let lost = lost_extents(&newest, &missing);
    if !missing.is_empty() && !options.degraded {
        let names: Vec<&str> = missing.iter().map(|number| records[*number].name.as_str()).collect();
        let words = format!("{} extents have a part there; a degraded open names them", lost.len());
        return Err(TierError::at(TierKind::PathMissing, names.join(", "), words));
    }
    for given in absent {
        match claim_new(&options, given) {
            Ok(path) => fresh.push((given, path)),
            // Listed, but not mounted: a degraded open does without it, whether anything was lost with it or not.
            Err(error) if options.degraded && error.io_kind() == Some(IoKind::NotFound) => leave_out(&error),
            Err(error) => return Err(error),
        }
    }
    for (given, path) in fresh {
        path.sync_directory()?;
        let record = PathRecord { name: path.name(), memory: !path.lasts(), end: 0, written: 0 };
        let unused = |number: &usize| paths[*number].is_none() && !in_use(&newest, *number);
        let number = (0..records.len()).find(unused).unwrap_or(records.len());
        if number == records.len() {
            records.push(record);
            paths.push(None);
        } else {
            records[number] = record;
        }
        paths[number] = Some((given, path, None));
    }
    let (paths, states) = path_states(&options, &newest, &records, paths)?;
    let opened = Opened {
        resumed: true,
        step: newest.step,
        payload: newest.payload.clone(),
        missing: missing.iter().map(|number| records[*number].name.clone()).collect(),
        lost,
    };
    let state = state(states, extents(&newest), Some(&newest));
    let tier = assemble(options, newest.tier, newest.block_bytes, paths, state, opened)?;
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
        let Some((given, path, best)) = one else {
            let space = Space::new(record.end, record.end, []).unwrap_or_default();
            states.push(PathState {
                name: record.name.clone(),
                memory: record.memory,
                health: Health::Missing,
                reason: "it was not there when the tier was opened".to_string(),
                space,
                good: None,
                dirty: false,
                written_before: record.written,
            });
            paths.push(None);
            continue;
        };
        let good = best.as_ref().map(|(copy, _)| *copy);
        let PathOptions { limit, reserve, .. } = options.paths[given];
        states.push(path_state(&path, limit, reserve, used, record.written, good)?);
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
    good: Option<usize>,
) -> Result<PathState> {
    let mut end = path.data_len()?;
    let reserve = reserve.min(limit.unwrap_or(u64::MAX));
    if reserve > end {
        path.allocate(reserve)?;
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
        dirty: false,
        written_before,
    })
}

fn extents(newest: &Superblock) -> Vec<Option<Extent>> {
    let known = |record: &ExtentRecord| {
        let contents =
            record.version.clone().map(|version| Arc::new(Contents { version, sums: OnceLock::new() }));
        Extent {
            name: record.name.clone(),
            shape: Arc::new(record.shape.clone()),
            committed: contents.clone(),
            current: contents,
            doubt: false,
            removed: false,
            readers: 0,
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
    Ok(Tier { options, who, block_bytes, paths, state: Mutex::new(state), changed: Condvar::new(), opened })
}

/// Makes the state that was found, or the empty one, durable on every path, as a superblock of its own: one that was
/// found may be in the page cache only, and paths may have been renamed, added or left behind.
fn publish(tier: &Tier) -> Result<()> {
    let table = {
        let state = tier.lock();
        tier.superblock(&state, state.step, state.payload.clone()).encode().len() as u64
    };
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
    let superblock = {
        let mut state = tier.lock();
        state.sequence += 1;
        tier.superblock(&state, state.step, state.payload.clone())
    };
    tier.write_superblocks(&superblock)
}

fn check_owner(options: &TierOptions, path: &str, found: &Superblock) -> Result<()> {
    let own = (&options.owner.job, options.owner.rank, options.world, &options.owner.host);
    let (job, rank, world, host) = (&found.job, found.rank, found.world, &found.host);
    match own == (job, rank, world, host) {
        true => Ok(()),
        false => {
            let words = format!(
                "it was written by job {job:?} on {host}, rank {rank} of {world}; this is job {:?} on {}, rank {} of {}",
                own.0, own.3, own.1, own.2
            );
            Err(TierError::at(TierKind::Foreign, path, words))
        }
    }
}

/// Whether anything committed lies on a path, or it holds superblocks that may come back.
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

/// The path that the newest superblock was read from.
fn found_name(found: &[Candidate], newest: &Superblock) -> String {
    let holder =
        found.iter().find(|one| one.best.as_ref().is_some_and(|(_, best)| best.sequence == newest.sequence));
    holder.map_or_else(String::new, |one| one.path.name())
}
