//! Reads the superblocks of all paths, and decides which commit an open resumes from.
//!
//! Invariants:
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

use super::options::{Mode, TierOptions};
use super::path::{SuperblockCopy, TierPath};
use super::path_claim::claim;
use super::state::DurableCopy;
use super::store::Tier;
use super::superblock::{PathRecord, Stamp, Superblock};
use crate::error::{Error, Result, TierError, TierKind};
use crate::log::{self, Level};

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
    pub(super) path: TierPath,
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

fn read_copies(path: TierPath, given: usize) -> Result<Candidate> {
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
