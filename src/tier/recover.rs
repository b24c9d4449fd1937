//! Opens a tier: finds its paths, selects the state to resume from, and makes this state the durable last one.
//!
//! Invariants:
//! - With `Mode::Read` an open writes nothing and claims nothing.
//! - With `write_at_open` false, an open at the last step writes nothing but the owner's record, until the first write.
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
//!   until the first write after the last commit (see `catalog`). The disk does not record whether such a write occurred,
//!   so an open at this commit first verifies each of its blocks.
//! - The sequence tells which of two commits of one step is the later one. Their payloads' tags tell an open which one is
//!   meant.
//! - Such an open continues with the sequence and the generation of the last commit, so no number is used twice.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::blocks::TierIdentity;
#[cfg(test)]
use super::bucket;
use super::catalog::Catalog;
use super::claim::Claims;
use super::directory::check_moved;
use super::extent::{Chunk, PAGE, Shape, Version};
use super::format::{ExtentRecord, PathRecord, Superblock};
use super::options::{Mode, PathLocation, PathOptions, TierOptions};
use super::paths::{DurableCopy, FoundCopies, PathState, Paths, Space, Stamp};
use super::store::{Opened, Tickets, Tier, TierState};
use super::volume::{SuperblockCopy, Volume, claim};
use crate::checksum;
use crate::error::{Doing, Error, IoError, IoKind, Result, TierError, TierKind};
use crate::log::{self, Level};
use crate::sys::bell::Bell;
use crate::sys::host;
use crate::sys::sync::{Lock, Signal};

/// Steps that a tier can be opened at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// The last committed step; `None` if nothing was committed, or if there is no tier.
    pub last: Option<u64>,
    /// State before the last commit.
    pub before: Before,
    /// Tag of the last commit, and of the one before: checksum of the first [`TAG_BYTES`] bytes of the payload; 0 without a
    /// payload.
    pub tags: [u64; 2],
    /// True if a tier exists, with or without a commit.
    pub exists: bool,
}

/// Bytes of a payload that tell the commits of one step apart. Ranks write the same ones.
const TAG_BYTES: usize = 48;

/// State of a tier before its last commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// Unknown: no superblock records it any more.
    Unknown,
    /// A tier without a commit; the last commit is its first.
    Empty,
    /// This step, which is the last one if that was committed twice. It is intact if nothing was written since the last commit.
    Step(u64),
}

impl Tier {
    /// Opens a tier, or creates one, as `options.mode` says. Errors: `NoState`, `NoStep`, `Foreign`, `Format`,
    /// `PathMissing`, `Locked`, and errors of the devices.
    pub fn open(options: TierOptions) -> Result<Tier> {
        options.check()?;
        let options = options.absolute()?;
        let Probed { found, absent, left_out } = probe(&options)?;
        match select(&found, &options)? {
            Some(selected) if options.mode.needs_state() && selected.superblock.step.is_none() => {
                Err(no_state(&options, "the tier exists, but nothing was committed to it"))
            }
            Some(selected) => resume(options, found, absent, selected),
            None => {
                found.iter().try_for_each(Candidate::check_format)?;
                found.iter().try_for_each(|one| one.volume.check_blank())?;
                if options.mode.needs_state() || options.at_step.is_some() {
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
    let mut given: Vec<(usize, Volume)> = found.into_iter().map(|one| (one.given, one.volume)).collect();
    for number in absent {
        given.push((number, claim_new(&options, number)?));
    }
    given.sort_by_key(|(given, _)| *given);
    let (mut volumes, mut paths) = (Vec::new(), Vec::new());
    for (given, volume) in given {
        paths.push(path_state(&volume, &options, given, &[], FoundCopies::default(), 0)?);
        volume.sync_directory()?;
        volumes.push(Some(Arc::new(volume)));
    }
    let (tier, block_bytes) = (random()?, options.block_bytes);
    let catalog = Catalog::new(Paths::new(paths), None, options.keeps_before());
    let tier = assemble(options, tier, block_bytes, volumes, catalog, Opened::default())?;
    tier.write_opening_superblock()?;
    Ok(tier)
}

fn resume(
    mut options: TierOptions,
    found: Vec<Candidate>,
    absent: Vec<usize>,
    selected: Selected,
) -> Result<Tier> {
    let newest = &selected.superblock;
    let placed = newest.paths.iter().map(|_| None).collect();
    let mut numbering = Numbering { newest, records: newest.paths.clone(), placed };
    let mut fresh = numbering.place_found(found, selected.sequence)?;
    let (missing, lost) = numbering.missing(options.degraded)?;
    let reads = options.mode == Mode::Read;
    if reads {
        // A reader need not know the number of ranks; exports and snapshots of the tier have it.
        options.world = newest.world;
    }
    for given in absent.into_iter().filter(|_| !reads) {
        match claim_new(&options, given) {
            Ok(volume) => fresh.push((given, volume)),
            // Listed, but not mounted: a degraded open continues without it, even if no data was on it.
            Err(error) if may_leave_out(&options, &error) && error.io_kind() == Some(IoKind::NotFound) => {
                leave_out(&error)
            }
            Err(error) => return Err(error),
        }
    }
    numbering.place_fresh(fresh)?;
    let (volumes, paths) = numbering.open(&options)?;
    let opened = Opened { resumed: true, step: newest.step, payload: newest.payload.clone(), missing, lost };
    let catalog = Catalog::new(paths, Some(newest), options.keeps_before());
    let tier = assemble(options, newest.tier, newest.block_bytes, volumes, catalog, opened)?;
    if selected.is_older() {
        verify_before_resume(&tier)?;
    }
    if reads {
        return Ok(tier);
    }
    if !selected.is_older() && !tier.options.write_at_open {
        *tier.opening_due.lock() = true;
        return Ok(tier);
    }
    match tier.write_opening_superblock() {
        Err(error) if error.is_full() && !selected.is_older() => {
            let path = tier.state.lock().catalog.paths().some_name();
            let message =
                format!("{path}: the tier is open, but a put or a commit needs free space first: {error}");
            log::write(Level::Warn, &message);
            *tier.opening_due.lock() = true;
            Ok(tier)
        }
        other => other.map(|()| tier),
    }
}

/// The paths of a tier that is resumed, by number.
struct Numbering<'a> {
    newest: &'a Superblock,
    records: Vec<PathRecord>,
    /// Paths that are present: index in the options, and what the superblock copies hold.
    placed: Vec<Option<(usize, Volume, FoundCopies)>>,
}

impl Numbering<'_> {
    /// Gives the volumes that were found their numbers. Returns those that the tier does not have yet.
    fn place_found(&mut self, found: Vec<Candidate>, sequence: u64) -> Result<Vec<(usize, Volume)>> {
        let mut fresh = Vec::new();
        for candidate in found {
            candidate.check_tier(self.newest)?;
            let number = self.number_of(&candidate);
            let copies = FoundCopies { kept: candidate.kept(sequence), stamps: candidate.stamps };
            let Candidate { volume, given, .. } = candidate;
            match number {
                None => fresh.push((given, volume)),
                Some(number) if self.placed.get(number).is_some_and(Option::is_none) => {
                    self.placed[number] = Some((given, volume, copies));
                }
                Some(number) => {
                    let message = format!(
                        "it is a copy of path {number}, which was found already; remove one of them from the paths"
                    );
                    return Err(TierError::at(TierKind::Foreign, volume.name(), message));
                }
            }
        }
        Ok(fresh)
    }

    fn number_of(&self, candidate: &Candidate) -> Option<usize> {
        if let Some(own) = candidate.newest() {
            return Some(own.path as usize);
        }
        // The path's first superblock was being written when the run crashed, or its copies are corrupt. A blank path
        // that should hold data is a different disk.
        let name = candidate.volume.name();
        let number = self.records.iter().position(|record| record.name == name)?;
        let may_be = !candidate.broken.is_empty() || lost_extents(self.newest, &[number]).is_empty();
        may_be.then_some(number)
    }

    /// Names of the missing paths, and of the extents that are lost with them. An error unless the open is degraded.
    fn missing(&self, degraded: bool) -> Result<(Vec<String>, Vec<String>)> {
        let missing: Vec<usize> = (0..self.records.len())
            .filter(|number| self.placed[*number].is_none() && self.in_use(*number))
            .collect();
        let lost = lost_extents(self.newest, &missing);
        let names: Vec<String> = missing.iter().map(|number| self.records[*number].name.clone()).collect();
        if !names.is_empty() && !degraded {
            let holds = match lost.len() {
                0 => "no extent has data there, but it may have a later commit".to_string(),
                count => format!("{count} extents have data there"),
            };
            let message = format!(
                "{holds}; restore the path, or open the tier in degraded mode, which lists what is lost"
            );
            return Err(TierError::at(TierKind::PathMissing, names.join(", "), message));
        }
        Ok((names, lost))
    }

    /// True if committed data is on the path, or if the path may hold superblocks that a later open would find.
    fn in_use(&self, number: usize) -> bool {
        let record = self.newest.paths.get(number);
        record.is_some_and(|record| !record.memory && !record.name.is_empty())
            || !lost_extents(self.newest, &[number]).is_empty()
    }

    /// Gives the volumes that the tier does not have yet unused numbers.
    fn place_fresh(&mut self, fresh: Vec<(usize, Volume)>) -> Result<()> {
        for (given, volume) in fresh {
            volume.sync_directory()?;
            let record = PathRecord { name: volume.name(), memory: !volume.lasts(), end: 0, written: 0 };
            let unused = |number: &usize| self.placed[*number].is_none() && !self.in_use(*number);
            let number = (0..self.records.len()).find(unused).unwrap_or(self.records.len());
            if number == self.records.len() {
                self.records.push(record);
                self.placed.push(None);
            } else {
                self.records[number] = record;
            }
            self.placed[number] = Some((given, volume, FoundCopies::default()));
        }
        Ok(())
    }

    /// The volumes, and the state of their paths.
    fn open(self, options: &TierOptions) -> Result<(Vec<Option<Arc<Volume>>>, Paths)> {
        let (mut volumes, mut paths) = (Vec::new(), Vec::new());
        for (number, (record, placed)) in self.records.iter().zip(self.placed).enumerate() {
            let Some((given, volume, copies)) = placed else {
                let PathRecord { name, memory, end, written } = record;
                paths.push(PathState::missing(name, *memory, *end, *written));
                volumes.push(None);
                continue;
            };
            let stored = self.newest.extents.iter().flatten().flat_map(|extent| {
                let chunks = extent.version.iter().flat_map(|version| &version.chunks);
                chunks.map(|chunk| (chunk, &extent.shape))
            });
            let stored: Vec<_> = stored.filter(|(chunk, _)| chunk.path as usize == number).collect();
            paths.push(path_state(&volume, options, given, &stored, copies, record.written)?);
            volumes.push(Some(Arc::new(volume)));
        }
        Ok((volumes, Paths::new(paths)))
    }
}

/// The state of a path that holds the chunks `stored`. Extends a data file that lacks only the padding of its last page,
/// and allocates the reserve, unless the tier is only read.
fn path_state(
    volume: &Volume,
    options: &TierOptions,
    given: usize,
    stored: &[(&Chunk, &Shape)],
    copies: FoundCopies,
    written_before: u64,
) -> Result<PathState> {
    let PathOptions { limit, reserve, .. } = options.paths[given];
    let mut end = volume.data_len()?;
    let written = stored.iter().map(|(chunk, shape)| chunk.written_end(shape)).max().unwrap_or(0);
    let padded = written.next_multiple_of(PAGE);
    let reserve = reserve.min(limit.unwrap_or(u64::MAX));
    for wanted in [if end < written { end } else { padded }, reserve] {
        if wanted > end {
            if options.mode != Mode::Read {
                volume.allocate(end, wanted)?;
            }
            end = wanted;
        }
    }
    let ranges = stored.iter().map(|(chunk, shape)| (chunk.offset, chunk.stored(shape)));
    let space = Space::new(end, limit.unwrap_or(i64::MAX as u64), ranges).ok_or_else(|| {
        let message = format!(
            "the file has {end} bytes, fewer than its superblock records; restore it, or open the tier without this \
             path in degraded mode"
        );
        TierError::at(TierKind::Format, volume.data_name(), message)
    })?;
    Ok(PathState::present(volume.name(), !volume.lasts(), space, copies, written_before))
}

fn assemble(
    options: TierOptions,
    tier: u128,
    block_bytes: u64,
    volumes: Vec<Option<Arc<Volume>>>,
    catalog: Catalog,
    opened: Opened,
) -> Result<Tier> {
    let bell = Arc::<Bell>::default();
    for volume in volumes.iter().flatten() {
        volume.engine.ring_at_outcomes(Arc::clone(&bell))?;
    }
    Ok(Tier {
        options,
        identity: TierIdentity { tier, session: random()? as u64 },
        block_bytes,
        volumes,
        state: Lock::new(TierState { catalog, tickets: Tickets::default() }),
        changed: Signal::default(),
        bell,
        opened,
        claims: Claims::default(),
        opening_due: Lock::new(false),
    })
}

fn random() -> Result<u128> {
    host::random().map_err(|error| Error::system("generating the number of a tier", &error))
}

/// Verifies every block of the older state: later writes may have overwritten some.
fn verify_before_resume(tier: &Tier) -> Result<()> {
    let step = tier.opened.step.unwrap_or_default();
    let damage = tier.verify_extents(&|_| ())?.damage;
    match damage.into_iter().find(|error| error.tier_kind() != Some(TierKind::Lost)) {
        None => Ok(()),
        Some(error) if error.tier_kind() == Some(TierKind::Corrupt) => Err(gone(
            tier.state.lock().catalog.paths().some_name(),
            step,
            &format!("its data was overwritten since, or is damaged: {error}"),
        )),
        Some(error) => Err(error),
    }
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
        PathLocation::Memory(_) => "memory".to_string(),
        #[cfg(test)]
        PathLocation::Store(_) => bucket::name(bucket::TEST_ADDRESS, &options.owner),
        #[cfg(test)]
        PathLocation::Simulated(..) => format!("disk-{given}"),
    }
}

/// A path of the options with its superblocks.
struct Candidate {
    volume: Volume,
    /// Index in the options.
    given: usize,
    copies: [Option<Superblock>; 2],
    /// The stamps of the copies, also of those whose table is corrupt.
    stamps: [Option<Stamp>; 2],
    /// Errors of the corrupt copies.
    broken: Vec<String>,
}

/// The paths of the options: found, absent or unreadable.
struct Probed {
    found: Vec<Candidate>,
    /// Indices in the options of absent paths.
    absent: Vec<usize>,
    /// Error of the first unreadable path that a degraded open leaves out.
    left_out: Option<Error>,
}

/// The superblock that an open resumes from.
struct Selected {
    /// Its content, with the sequence and the generation of the last commit.
    superblock: Superblock,
    /// Sequence number with which it was written.
    sequence: u64,
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
            found.iter().try_for_each(|one| one.volume.check_blank())?;
            return Ok(Steps { last: None, before: Before::Unknown, tags: [0; 2], exists: false });
        };
        check_owner(options, &found_name(&found, last.sequence), last)?;
        found.iter().try_for_each(|one| one.check_tier(last))?;
        check_one_end(&found, last)?;
        let earlier = before(&found, last);
        let tags = [Some(last), earlier].map(|one| one.map_or(0, tag));
        let before = match (last.step, earlier) {
            (Some(_), Some(Superblock { step: Some(step), .. })) => Before::Step(*step),
            // A path that failed long ago may still hold an older superblock.
            (Some(_), Some(empty)) if empty.sequence + 1 == last.sequence => Before::Empty,
            _ => Before::Unknown,
        };
        Ok(Steps { last: last.step, before, tags, exists: true })
    }
}

impl Candidate {
    /// The path's superblock with the highest sequence.
    fn newest(&self) -> Option<&Superblock> {
        self.copies.iter().flatten().max_by_key(|one| one.sequence)
    }

    /// The copy that the next superblock must not overwrite, if the tier resumes from `sequence`. It holds the
    /// superblock `sequence` or the newest before it. A later superblock is overwritten.
    fn kept(&self, sequence: u64) -> Option<DurableCopy> {
        let of = |copy: &usize| self.copies[*copy].as_ref().map(|one| one.sequence);
        let highest = |wanted: &dyn Fn(u64) -> bool| {
            (0..2).filter(|copy| of(copy).is_some_and(wanted)).max_by_key(|copy| of(copy))
        };
        let copy =
            highest(&|found| found <= sequence).or_else(|| Some(1 - highest(&|found| found > sequence)?))?;
        Some(DurableCopy { copy, sequence: of(&copy).unwrap_or(0) })
    }

    /// Fails with `Format` if both copies are corrupt.
    fn check_format(&self) -> Result<()> {
        match self.broken.len() {
            2 => Err(TierError::at(TierKind::Format, self.volume.name(), self.broken.join("; "))),
            _ => Ok(()),
        }
    }

    /// Fails with `Foreign` if the path belongs to another tier than `last`.
    fn check_tier(&self, last: &Superblock) -> Result<()> {
        let Some(own) = self.newest().filter(|own| own.tier != last.tier) else { return Ok(()) };
        let message = format!("it belongs to another tier of job {:?} than the other paths", own.job);
        Err(TierError::at(TierKind::Foreign, self.volume.name(), message))
    }
}

impl Selected {
    /// True if a later commit exists.
    fn is_older(&self) -> bool {
        self.sequence < self.superblock.sequence
    }
}

/// Claims the paths that exist, and reads their superblocks.
fn probe(options: &TierOptions) -> Result<Probed> {
    let (mut found, mut absent, mut left_out) = (Vec::new(), Vec::new(), None);
    for given in 0..options.paths.len() {
        let candidate = match claim(options, given, false) {
            Ok(Some(volume)) => read_copies(volume, given).map(Some),
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
fn may_leave_out(options: &TierOptions, error: &Error) -> bool {
    options.degraded && error.is_of_a_path()
}

fn leave_out(error: &Error) {
    log::write(Level::Warn, &format!("a path of a tier is skipped: {error}"));
}

fn read_copies(volume: Volume, given: usize) -> Result<Candidate> {
    let mut candidate =
        Candidate { volume, given, copies: [None, None], stamps: [None, None], broken: Vec::new() };
    for copy in 0..2 {
        let name = candidate.volume.superblock_name(copy).to_string();
        match candidate.volume.read_superblock(copy)? {
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
    if let Some(own) = candidate.newest() {
        let blank =
            candidate.copies.iter().position(|copy| copy.is_none()).filter(|_| was_written_twice(own));
        let found = match (candidate.broken.first(), blank) {
            (Some(message), _) => Some(("damaged, as by a crash while it was written", message.clone())),
            (None, Some(copy)) => {
                let message = format!("{}: it is blank", candidate.volume.superblock_name(copy));
                Some(("lost, with the step that it may have had", message))
            }
            _ => None,
        };
        if let Some((what, message)) = found {
            log::write(Level::Warn, &format!("one superblock is {what}; the other one is used: {message}"));
        }
    } else if !candidate.broken.is_empty() {
        let messages = candidate.broken.join("; ");
        log::write(Level::Warn, &format!("a path has no superblock that can be read: {messages}"));
    }
    Ok(candidate)
}

/// True if the path of a superblock had one before. A path that joined others begins with a later number than 1.
fn was_written_twice(superblock: &Superblock) -> bool {
    superblock.sequence > 1 && superblock.paths.len() == 1
}

/// The superblock of the last commit, or of the step in the options. `None` if no path has a superblock.
fn select(found: &[Candidate], options: &TierOptions) -> Result<Option<Selected>> {
    let Some(last) = last(found) else { return Ok(None) };
    let name = found_name(found, last.sequence);
    if options.mode == Mode::Create {
        let step = last.step.map_or("no committed step".to_string(), |step| format!("step {step}"));
        let message = format!("it has {step} of job {:?}; resume it, or remove it with collect", last.job);
        return Err(TierError::at(TierKind::Foreign, name, message));
    }
    check_owner(options, &name, last)?;
    check_one_end(found, last)?;
    let wanted = |one: &&Superblock| {
        one.step == options.at_step && (options.at_tag == 0 || tag(one) == options.at_tag)
    };
    let step = match options.at_step {
        Some(step) if !wanted(&last) => step,
        _ => return Ok(Some(Selected { superblock: last.clone(), sequence: last.sequence })),
    };
    let before = before(found, last);
    match before.filter(wanted) {
        Some(older) => older_one(older, last).map(Some).map_err(|message| gone(name, step, &message)),
        None => {
            let known = [Some(last), before].into_iter().flatten().filter_map(|one| one.step);
            let known: Vec<String> = known.map(|step| step.to_string()).collect();
            let which = if options.at_tag == 0 { "" } else { "no commit with the tag of the options; " };
            Err(gone(name, step, &format!("{which}available steps: [{}]", known.join(", "))))
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

fn gone(path: String, step: u64, message: &str) -> Error {
    TierError::at(TierKind::NoStep, path, format!("step {step}: {message}"))
}

fn last(found: &[Candidate]) -> Option<&Superblock> {
    found.iter().filter_map(Candidate::newest).max_by_key(|one| one.sequence)
}

/// The newest superblock of another commit than the last one, whose step may be the same.
fn before<'a>(found: &'a [Candidate], last: &Superblock) -> Option<&'a Superblock> {
    let all = found.iter().flat_map(|one| one.copies.iter().flatten());
    all.filter(|one| one.tier == last.tier && !is_same_commit(one, last)).max_by_key(|one| one.sequence)
}

/// True if two superblocks are of one commit: an open writes a new one of the commit that it found. Such a superblock may also have
/// extents that were never written.
fn is_same_commit(one: &Superblock, other: &Superblock) -> bool {
    let written = |one: &Superblock| -> Vec<(usize, Version)> {
        let extents = one.extents.iter().enumerate();
        extents.filter_map(|(number, extent)| Some((number, extent.as_ref()?.version.clone()?))).collect()
    };
    (one.step, &one.payload) == (other.step, &other.payload) && written(one) == written(other)
}

fn tag(superblock: &Superblock) -> u64 {
    match superblock.payload.as_slice() {
        [] => 0,
        payload => checksum::of(&payload[..payload.len().min(TAG_BYTES)]),
    }
}

/// Name of a path that holds the superblock `sequence`.
fn found_name(found: &[Candidate], sequence: u64) -> String {
    let holds = |one: &&Candidate| one.copies.iter().flatten().any(|copy| copy.sequence == sequence);
    found.iter().find(holds).map_or_else(String::new, |one| one.volume.name())
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
    let same: Vec<String> = same.iter().map(|(one, _)| one.volume.name()).collect();
    let message = format!(
        "it and {} were written without each other and differ; open one of them alone in degraded mode to \
         continue from it",
        same.join(", ")
    );
    Err(TierError::at(TierKind::Foreign, other.volume.name(), message))
}

fn check_owner(options: &TierOptions, path: &str, found: &Superblock) -> Result<()> {
    let (job, rank, world, host) = (&found.job, found.rank, found.world, &found.host);
    let own_world = if options.mode == Mode::Read { world } else { options.world };
    let own = (&options.owner.job, options.owner.rank, own_world, &options.owner.host);
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
