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
//! - The valid superblock with the highest sequence wins. A device error on any copy fails the open instead of
//!   selecting an older step, because the content of the unread copy is unknown. Only a degraded open continues without
//!   the path, and only after an error of the path itself ([`may_leave_out`]).
//! - An owner's record is written before the superblocks are read (see `ownership`).
//! - Two superblocks with the highest sequence but different contents mean that the paths were opened separately. The
//!   open then fails. A degraded open of one path alone gives this path a higher sequence. If paths were opened
//!   separately and have different numbers of superblocks, the path with more wins.
//! - The commit before the last one is named by the copy that the last commit did not overwrite. Its data stays intact
//!   until the first write after the last commit (see `state`). The disk does not record whether such a write occurred,
//!   so an open at this commit first verifies each of its blocks.
//! - Such an open continues with the sequence and the generation of the last commit, so no number is used twice.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

#[cfg(test)]
use super::bucket;
use super::commit::{UsedSpace, opened_length};
use super::contents::Contents;
use super::directory::check_moved;
use super::format::{ExtentRecord, PathRecord, Stamp, Superblock};
use super::health::Health;
use super::options::{Mode, PathLocation, PathOptions, TierOptions};
use super::space::Space;
use super::state::{DurableCopy, Extent, PathState, TierState};
use super::store::{Opened, Tier};
use super::transfer::TierIdentity;
use super::volume::{SuperblockCopy, Volume, claim};
use crate::error::{Doing, Error, IoError, IoKind, Result, TierError, TierKind};
use crate::log::{self, Level};
use crate::sys::bell::Bell;
use crate::sys::host;
use crate::sys::process::OpeningProcess;
use crate::sys::sync::{Lock, Signal};

/// Steps that a tier can be opened at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// The last committed step; `None` if nothing was committed, or if there is no tier.
    pub last: Option<u64>,
    /// State before the last commit.
    pub before: Before,
    /// True if a tier exists, with or without a commit.
    pub exists: bool,
}

/// State of a tier before its last commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// Unknown: no superblock records it any more.
    Unknown,
    /// A tier without a commit; the last commit is its first.
    Empty,
    /// This step. It is intact if nothing was written since the last commit.
    Step(u64),
}

/// A path of the options with its superblocks.
pub(super) struct Candidate {
    pub(super) path: Volume,
    /// Index in the options.
    pub(super) given: usize,
    pub(super) copies: [Option<Superblock>; 2],
    /// The stamps of the copies, also of those whose table is corrupt.
    pub(super) stamps: [Option<Stamp>; 2],
    /// Errors of the corrupt copies.
    pub(super) broken: Vec<String>,
}

/// The paths of the options: found, absent or unreadable.
pub(super) struct Probed {
    pub(super) found: Vec<Candidate>,
    /// Indices in the options of absent paths.
    pub(super) absent: Vec<usize>,
    /// Error of the first unreadable path that a degraded open leaves out.
    pub(super) left_out: Option<Error>,
}

/// The superblock that an open resumes from.
pub(super) struct Selected {
    /// Its content, with the sequence and the generation of the last commit.
    pub(super) superblock: Superblock,
    /// Sequence number with which it was written.
    pub(super) sequence: u64,
}

impl Tier {
    /// The steps that an open with these options can resume from. It changes no committed state, so several ranks can
    /// agree on a step before they open their tiers.
    pub fn steps(options: &TierOptions) -> Result<Steps> {
        options.check()?;
        let options = &options.clone().absolute()?;
        let found = probe(options)?.found;
        let Some(last) = last(&found) else {
            found.iter().try_for_each(Candidate::check_format)?;
            found.iter().try_for_each(|one| one.path.check_blank())?;
            return Ok(Steps { last: None, before: Before::Unknown, exists: false });
        };
        check_owner(options, &found_name(&found, last.sequence), last)?;
        found.iter().try_for_each(|one| one.check_tier(last))?;
        check_one_end(&found, last)?;
        let before = match (last.step, before(&found, last)) {
            (Some(_), Some(Superblock { step: Some(step), .. })) => Before::Step(*step),
            // A path that failed long ago may still hold an older superblock.
            (Some(_), Some(empty)) if empty.sequence + 1 == last.sequence => Before::Empty,
            _ => Before::Unknown,
        };
        Ok(Steps { last: last.step, before, exists: true })
    }
}

impl Candidate {
    /// The path's superblock with the highest sequence.
    pub(super) fn newest(&self) -> Option<&Superblock> {
        self.copies.iter().flatten().max_by_key(|one| one.sequence)
    }

    /// The copy that the next superblock must not overwrite, if the tier resumes from `sequence`. It holds the
    /// superblock `sequence` or the newest before it. A later superblock is overwritten.
    pub(super) fn kept(&self, sequence: u64) -> Option<DurableCopy> {
        let of = |copy: &usize| self.copies[*copy].as_ref().map(|one| one.sequence);
        let highest = |wanted: &dyn Fn(u64) -> bool| {
            (0..2).filter(|copy| of(copy).is_some_and(wanted)).max_by_key(|copy| of(copy))
        };
        let copy =
            highest(&|found| found <= sequence).or_else(|| Some(1 - highest(&|found| found > sequence)?))?;
        Some(DurableCopy { copy, sequence: of(&copy).unwrap_or(0) })
    }

    /// Fails with `Format` if both copies are corrupt.
    pub(super) fn check_format(&self) -> Result<()> {
        match self.broken.len() {
            2 => Err(TierError::at(TierKind::Format, self.path.name(), self.broken.join("; "))),
            _ => Ok(()),
        }
    }

    /// Fails with `Foreign` if the path belongs to another tier than `last`.
    pub(super) fn check_tier(&self, last: &Superblock) -> Result<()> {
        let Some(own) = self.newest().filter(|own| own.tier != last.tier) else { return Ok(()) };
        let message = format!("it belongs to another tier of job {:?} than the other paths", own.job);
        Err(TierError::at(TierKind::Foreign, self.path.name(), message))
    }
}

impl Selected {
    /// True if a later commit exists.
    pub(super) fn is_older(&self) -> bool {
        self.sequence < self.superblock.sequence
    }
}

/// Claims the paths that exist, and reads their superblocks.
pub(super) fn probe(options: &TierOptions) -> Result<Probed> {
    let (mut found, mut absent, mut left_out) = (Vec::new(), Vec::new(), None);
    for given in 0..options.paths.len() {
        let candidate = match claim(options, given, false) {
            Ok(Some(path)) => read_copies(path, given).map(Some),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        match candidate {
            Ok(Some(candidate)) => found.push(candidate),
            Ok(None) => absent.push(given),
            Err(error) if may_leave_out(options, &error) => {
                leave_out(&error);
                left_out.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Probed { found, absent, left_out })
}

/// True if the open continues without the path of this error. Other errors fail the open: a lock of a live process,
/// invalid settings, or a lack of memory. The path may then have a newer step.
pub(super) fn may_leave_out(options: &TierOptions, error: &Error) -> bool {
    options.degraded && error.is_of_a_path()
}

pub(super) fn leave_out(error: &Error) {
    log::write(Level::Warn, &format!("a path of a tier is skipped: {error}"));
}

fn read_copies(path: Volume, given: usize) -> Result<Candidate> {
    let mut candidate =
        Candidate { path, given, copies: [None, None], stamps: [None, None], broken: Vec::new() };
    for copy in 0..2 {
        let name = candidate.path.superblock_name(copy).to_string();
        match candidate.path.read_superblock(copy)? {
            SuperblockCopy::Blank => {}
            SuperblockCopy::Corrupt(message, stamp) => {
                candidate.stamps[copy] = stamp;
                candidate.broken.push(format!("{name}: {message}"));
            }
            SuperblockCopy::Valid(found) => {
                candidate.stamps[copy] = Some(found.stamp());
                candidate.copies[copy] = Some(*found);
            }
        }
    }
    if let (Some(message), Some(_)) = (candidate.broken.first(), candidate.newest()) {
        let message = format!(
            "one superblock is damaged, as by a crash while it was written; the other one is used: {message}"
        );
        log::write(Level::Warn, &message);
    }
    Ok(candidate)
}

/// The superblock of the last commit, or of the step in the options. `None` if no path has a superblock.
pub(super) fn select(found: &[Candidate], options: &TierOptions) -> Result<Option<Selected>> {
    let Some(last) = last(found) else { return Ok(None) };
    let name = found_name(found, last.sequence);
    if options.mode == Mode::Create {
        let step = last.step.map_or("no committed step".to_string(), |step| format!("step {step}"));
        let message =
            format!("it has {step} of job {:?}; resume it, or remove it with spw_tier_collect", last.job);
        return Err(TierError::at(TierKind::Foreign, name, message));
    }
    check_owner(options, &name, last)?;
    check_one_end(found, last)?;
    let step = match options.at_step {
        Some(step) if last.step != Some(step) => step,
        _ => return Ok(Some(Selected { superblock: last.clone(), sequence: last.sequence })),
    };
    let before = before(found, last);
    match before.filter(|before| before.step == Some(step)) {
        Some(older) => older_one(older, last).map(Some).map_err(|message| gone(name, step, &message)),
        None => {
            let known = [Some(last), before].into_iter().flatten().filter_map(|one| one.step);
            let known: Vec<String> = known.map(|step| step.to_string()).collect();
            Err(gone(name, step, &format!("available steps: [{}]", known.join(", "))))
        }
    }
}

/// Combines an older superblock with the paths of the last one, to resume from the older one.
fn older_one(older: &Superblock, last: &Superblock) -> std::result::Result<Selected, String> {
    let record = |(number, now): (usize, &PathRecord)| match older.paths.get(number) {
        // A path that the last commit dropped counts again if the older superblock has data there.
        Some(then) if now.name.is_empty() => then.clone(),
        _ => now.clone(),
    };
    let superblock = Superblock {
        sequence: last.sequence,
        generation: last.generation.max(older.generation),
        paths: last.paths.iter().enumerate().map(record).collect(),
        ..older.clone()
    };
    Ok(Selected { superblock: superblock.checked()?, sequence: older.sequence })
}

pub(super) fn gone(path: String, step: u64, message: &str) -> Error {
    TierError::at(TierKind::NoStep, path, format!("step {step}: {message}"))
}

fn last(found: &[Candidate]) -> Option<&Superblock> {
    found.iter().filter_map(Candidate::newest).max_by_key(|one| one.sequence)
}

/// The newest superblock of a step other than the last one.
fn before<'a>(found: &'a [Candidate], last: &Superblock) -> Option<&'a Superblock> {
    let all = found.iter().flat_map(|one| one.copies.iter().flatten());
    all.filter(|one| one.tier == last.tier && one.step != last.step).max_by_key(|one| one.sequence)
}

/// Name of a path that holds the superblock `sequence`.
pub(super) fn found_name(found: &[Candidate], sequence: u64) -> String {
    let holds = |one: &&Candidate| one.copies.iter().flatten().any(|copy| copy.sequence == sequence);
    found.iter().find(holds).map_or_else(String::new, |one| one.path.name())
}

/// Fails with `Foreign` if superblocks with the last sequence differ.
fn check_one_end(found: &[Candidate], last: &Superblock) -> Result<()> {
    let differs = |one: &&Superblock| {
        (one.step, &one.payload, &one.extents) != (last.step, &last.payload, &last.extents)
    };
    let ends = found.iter().filter_map(|one| Some((one, one.newest()?)));
    let ends = ends.filter(|(_, own)| own.sequence == last.sequence && own.tier == last.tier);
    let (others, same): (Vec<_>, Vec<_>) = ends.partition(|(_, own)| differs(own));
    let Some((other, _)) = others.first() else { return Ok(()) };
    let same: Vec<String> = same.iter().map(|(one, _)| one.path.name()).collect();
    let message = format!(
        "it and {} were written without each other and differ; open one of them alone in degraded mode to \
         continue from it",
        same.join(", ")
    );
    Err(TierError::at(TierKind::Foreign, other.path.name(), message))
}

fn check_owner(options: &TierOptions, path: &str, found: &Superblock) -> Result<()> {
    let own = (&options.owner.job, options.owner.rank, options.world, &options.owner.host);
    let (job, rank, world, host) = (&found.job, found.rank, found.world, &found.host);
    match own == (job, rank, world, host) {
        true => Ok(()),
        false => {
            let message = format!(
                "it was written by job {job:?} on {host}, rank {rank} of {world}, but this is job {:?} on \
                 {}, rank {} of {}",
                own.0, own.3, own.1, own.2
            );
            Err(TierError::at(TierKind::Foreign, path, message))
        }
    }
}

/// A path that is present: its index in the options, and what its superblock copies hold.
type Placed = Option<(usize, Volume, FoundCopies)>;

/// What an open found in the superblock copies of a path.
#[derive(Debug, Clone, Copy, Default)]
struct FoundCopies {
    /// The copy that the next superblock must not overwrite.
    kept: Option<DurableCopy>,
    stamps: [Option<Stamp>; 2],
}

/// Paths by number, and their states.
type Paths = (Vec<Option<Arc<Volume>>>, Vec<PathState>);

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
    let mut numbered: Vec<(usize, Volume)> = found.into_iter().map(|one| (one.given, one.path)).collect();
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
    path: &Volume,
    limit: Option<u64>,
    reserve: u64,
    used: &[UsedSpace],
    written_before: u64,
    copies: FoundCopies,
) -> Result<PathState> {
    let mut end = opened_length(path, used)?;
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
    paths: Vec<Option<Arc<Volume>>>,
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
        volumes: paths,
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

fn claim_new(options: &TierOptions, given: usize) -> Result<Volume> {
    let missing = || IoError::of_errno(libc::ENOENT, Doing::Opening, location_name(options, given));
    claim(options, given, true)?.ok_or_else(|| missing().into())
}

fn location_name(options: &TierOptions, given: usize) -> String {
    match &options.paths[given].location {
        PathLocation::Directory(base) => options.owner.below(base).to_string_lossy().into_owned(),
        PathLocation::Bucket(address) => options.owner.below(address.as_ref()).to_string_lossy().into_owned(),
        PathLocation::Memory => "memory".to_string(),
        #[cfg(test)]
        PathLocation::Store(_) => bucket::name(bucket::TEST_ADDRESS, &options.owner),
        #[cfg(any(test, feature = "sim"))]
        PathLocation::Simulated(..) => format!("disk-{given}"),
    }
}
