//! What the superblocks on all paths say: which commits a tier can be opened at.
//!
//! Invariants:
//! - The whole superblock with the highest sequence counts. A device error on any copy is an error, not an older step:
//!   nobody knows what the copy would have said.
//! - Two that have this sequence and say different things are of paths that went on without each other. Neither is chosen;
//!   a degraded open of one path alone gives it a higher one. Of paths that went on for different numbers of superblocks the
//!   one with more counts.
//! - The commit before the last one is named by the copy that the last one left alone, and keeps its places up to the
//!   first write after the last commit (see `state`). Nothing on disk says whether that write came: whoever opens at it
//!   proves each of its blocks first.
//! - An open at it goes on with the sequence and the generation of the last commit: no number is given twice.
#![forbid(unsafe_code)]

use super::options::{Mode, TierOptions};
use super::path::{Copy, Path, claim};
use super::state::Good;
use super::store::Tier;
use super::superblock::{PathRecord, Superblock};
use crate::error::{Error, Result, TierError, TierKind};
use crate::log::{self, Level};

/// The steps that a tier can be opened at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// The last committed one; `None` if nothing was committed, or if there is no tier.
    pub last: Option<u64>,
    /// What was there before its commit.
    pub before: Before,
    /// A tier is there, committed or not.
    pub exists: bool,
}

/// What a tier was before its last commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// No superblock says it any more.
    Unknown,
    /// A tier without a commit: the last one is its first.
    Empty,
    /// This step, which is whole if nothing was written since the last commit.
    Step(u64),
}

/// A path of the options, and what its superblocks say.
pub(super) struct Candidate {
    pub(super) path: Path,
    /// Place in the options.
    pub(super) given: usize,
    pub(super) copies: [Option<Superblock>; 2],
    /// What is wrong with copies that are not whole.
    pub(super) broken: Vec<String>,
}

/// The paths of the options, as they were found.
pub(super) struct Looked {
    pub(super) found: Vec<Candidate>,
    /// Places in the options of paths that are not there.
    pub(super) absent: Vec<usize>,
    /// Why a degraded open does without a path that cannot be read.
    pub(super) left_out: Option<Error>,
}

/// The superblock that a tier goes on from.
pub(super) struct Chosen {
    /// What it says, with the sequence and the generation of the last one.
    pub(super) superblock: Superblock,
    /// Its own sequence.
    pub(super) sequence: u64,
}

impl Tier {
    /// The steps that an open with these options could ask for. It changes none of them, so that several ranks can agree on
    /// a step before any of them opens its tier.
    pub fn steps(options: &TierOptions) -> Result<Steps> {
        options.check()?;
        let found = look(options)?.found;
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
            // An older one may be left from long ago on a path that failed.
            (Some(_), Some(empty)) if empty.sequence + 1 == last.sequence => Before::Empty,
            _ => Before::Unknown,
        };
        Ok(Steps { last: last.step, before, exists: true })
    }
}

impl Candidate {
    /// Its superblock with the highest sequence.
    pub(super) fn newest(&self) -> Option<&Superblock> {
        self.copies.iter().flatten().max_by_key(|one| one.sequence)
    }

    /// The copy to be left alone by the next superblock of a tier that goes on from `sequence`: it holds that one or the
    /// newest before it. One that came later is written over.
    pub(super) fn kept(&self, sequence: u64) -> Option<Good> {
        let of = |copy: &usize| self.copies[*copy].as_ref().map(|one| one.sequence);
        let highest = |wanted: &dyn Fn(u64) -> bool| {
            (0..2).filter(|copy| of(copy).is_some_and(wanted)).max_by_key(|copy| of(copy))
        };
        let copy =
            highest(&|found| found <= sequence).or_else(|| Some(1 - highest(&|found| found > sequence)?))?;
        Some(Good { copy, sequence: of(&copy).unwrap_or(0) })
    }

    /// Refuses a path with nothing but damage.
    pub(super) fn check_format(&self) -> Result<()> {
        match self.broken.len() {
            2 => Err(TierError::at(TierKind::Format, self.path.name(), self.broken.join("; "))),
            _ => Ok(()),
        }
    }

    /// Refuses a path of another tier than the one of `last`.
    pub(super) fn check_tier(&self, last: &Superblock) -> Result<()> {
        let Some(own) = self.newest().filter(|own| own.tier != last.tier) else { return Ok(()) };
        let words =
            format!("it belongs to another tier of job {:?}, not to the one on the other paths", own.job);
        Err(TierError::at(TierKind::Foreign, self.path.name(), words))
    }
}

impl Chosen {
    /// True if a commit came after it.
    pub(super) fn is_older(&self) -> bool {
        self.sequence < self.superblock.sequence
    }
}

/// Takes the places that are there and reads their superblocks.
pub(super) fn look(options: &TierOptions) -> Result<Looked> {
    let (mut found, mut absent, mut left_out) = (Vec::new(), Vec::new(), None);
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
            Err(error) if options.degraded => {
                leave_out(&error);
                left_out.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Looked { found, absent, left_out })
}

pub(super) fn leave_out(error: &Error) {
    log::write(Level::Warn, &format!("a path of a tier is left out: {error}"));
}

fn read_copies(path: Path, given: usize) -> Result<Candidate> {
    let mut candidate = Candidate { path, given, copies: [None, None], broken: Vec::new() };
    for copy in 0..2 {
        let name = candidate.path.superblock_name(copy).to_string();
        match candidate.path.read_superblock(copy)? {
            Copy::Blank => {}
            Copy::Broken(words) => candidate.broken.push(format!("{name}: {words}")),
            Copy::Whole(found) => candidate.copies[copy] = Some(*found),
        }
    }
    if let (Some(words), Some(_)) = (candidate.broken.first(), candidate.newest()) {
        let words = format!("a superblock is broken, as a crash leaves one that was being written: {words}");
        log::write(Level::Warn, &words);
    }
    Ok(candidate)
}

/// The superblock of the last commit, or the one that the options ask for; `None` if there is none at all.
pub(super) fn choose(found: &[Candidate], options: &TierOptions) -> Result<Option<Chosen>> {
    let Some(last) = last(found) else { return Ok(None) };
    let name = found_name(found, last.sequence);
    if options.mode == Mode::Create {
        let step = last.step.map_or("no step yet".to_string(), |step| format!("step {step}"));
        let words = format!("it holds {step} of job {:?}; resume or collect it", last.job);
        return Err(TierError::at(TierKind::Foreign, name, words));
    }
    check_owner(options, &name, last)?;
    check_one_end(found, last)?;
    let step = match options.at_step {
        Some(step) if last.step != Some(step) => step,
        _ => return Ok(Some(Chosen { superblock: last.clone(), sequence: last.sequence })),
    };
    let before = before(found, last);
    match before.filter(|before| before.step == Some(step)) {
        Some(older) => older_one(older, last).map(Some).map_err(|words| gone(name, step, &words)),
        None => {
            let known = [Some(last), before].into_iter().flatten().filter_map(|one| one.step);
            let known: Vec<String> = known.map(|step| step.to_string()).collect();
            Err(gone(name, step, &format!("the steps it knows are [{}]", known.join(", "))))
        }
    }
}

/// An older superblock, to go on from it: the paths are known as they were left.
fn older_one(older: &Superblock, last: &Superblock) -> std::result::Result<Chosen, String> {
    let record = |(number, now): (usize, &PathRecord)| match older.paths.get(number) {
        // A path that the last commit did without is missed again if this one has something there.
        Some(then) if now.name.is_empty() => then.clone(),
        _ => now.clone(),
    };
    let superblock = Superblock {
        sequence: last.sequence,
        generation: last.generation.max(older.generation),
        paths: last.paths.iter().enumerate().map(record).collect(),
        ..older.clone()
    };
    Ok(Chosen { superblock: superblock.checked()?, sequence: older.sequence })
}

pub(super) fn gone(path: String, step: u64, words: &str) -> Error {
    TierError::at(TierKind::NoStep, path, format!("step {step}: {words}"))
}

fn last(found: &[Candidate]) -> Option<&Superblock> {
    found.iter().filter_map(Candidate::newest).max_by_key(|one| one.sequence)
}

/// The newest superblock of another step than the last one's.
fn before<'a>(found: &'a [Candidate], last: &Superblock) -> Option<&'a Superblock> {
    let all = found.iter().flat_map(|one| one.copies.iter().flatten());
    all.filter(|one| one.tier == last.tier && one.step != last.step).max_by_key(|one| one.sequence)
}

/// The path that a superblock was read from.
pub(super) fn found_name(found: &[Candidate], sequence: u64) -> String {
    let holds = |one: &&Candidate| one.copies.iter().flatten().any(|copy| copy.sequence == sequence);
    found.iter().find(holds).map_or_else(String::new, |one| one.path.name())
}

/// Refuses paths that say different things with the last sequence.
fn check_one_end(found: &[Candidate], last: &Superblock) -> Result<()> {
    let differs = |one: &&Superblock| {
        (one.step, &one.payload, &one.extents) != (last.step, &last.payload, &last.extents)
    };
    let ends = found.iter().filter_map(|one| Some((one, one.newest()?)));
    let ends = ends.filter(|(_, own)| own.sequence == last.sequence && own.tier == last.tier);
    let (others, same): (Vec<_>, Vec<_>) = ends.partition(|(_, own)| differs(own));
    let Some((other, _)) = others.first() else { return Ok(()) };
    let same: Vec<String> = same.iter().map(|(one, _)| one.path.name()).collect();
    let words = format!(
        "it and {} went on without each other; a degraded open that is given one of them alone goes on from there",
        same.join(", ")
    );
    Err(TierError::at(TierKind::Foreign, other.path.name(), words))
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
