//! `snapshot` and `export` of all ranks of a job, at the step that all of them have committed.
//!
//! Invariants:
//! - Tiers are opened for reading: nothing of the job changes, and no lock is taken.
//! - The directory takes its name when the files of all ranks are in it. An interrupted command leaves a directory
//!   `NAME.partial`.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::{fs, io};

use spillway::error::{Doing, Error, IoError, Result, TierError, TierKind};
use spillway::tier::Tier;
use spillway::tier::inspect::Found;
use spillway::tier::options::{Mode, TierOptions};
use spillway::tier::recover::{Before, Steps};

use super::which::Which;

/// The tiers of all ranks of a job, and the commit that all of them have.
pub(super) struct Ranks {
    found: Vec<Found>,
    commit: Commit,
}

/// A step with the tag of its commit. The ranks of a run write one tag in a round; two rounds may have one step.
type Commit = (u64, u64);

impl Ranks {
    /// Errors: the paths have several jobs, a rank is missing or has several hosts, or the ranks have no commit in common.
    pub fn find(which: &Which) -> Result<Ranks> {
        let found = complete(which.some()?)?;
        let commits: Vec<Vec<Commit>> =
            found.iter().map(|one| Ok(known(&Tier::steps(&reading(one, None))?))).collect::<Result<_>>()?;
        match chosen(&commits) {
            Some(commit) => Ok(Ranks { commit, found }),
            None => Err(TierError::at(TierKind::NoStep, job_of(&found), apart(&found, &commits))),
        }
    }

    /// The step.
    pub fn step(&self) -> u64 {
        self.commit.0
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.found.len()
    }

    /// Writes a new directory: `write` gets each tier with its rank, and a place in the directory.
    pub fn write(&self, to: &Path, mut write: impl FnMut(&Found, Tier, &Path) -> Result<()>) -> Result<()> {
        let partial = added(to, ".partial");
        for taken in [to, &partial] {
            if taken.symlink_metadata().is_ok() {
                return Err(Error::invalid(
                    "TO",
                    format!("{} exists; remove it, or name another place", taken.display()),
                ));
            }
        }
        made(&partial)?;
        let written = self
            .found
            .iter()
            .try_for_each(|found| write(found, Tier::open(reading(found, Some(self.commit)))?, &partial));
        let renamed = written.and_then(|()| named(&partial, to));
        if renamed.is_err() {
            // The first error counts.
            let _ = fs::remove_dir_all(&partial);
        }
        renamed
    }
}

/// Gives a directory its name, after its entries are on the device.
fn named(partial: &Path, to: &Path) -> Result<()> {
    let sync = |directory: &Path| {
        fs::File::open(directory)
            .and_then(|opened| opened.sync_all())
            .map_err(|error| failed(directory, &error))
    };
    sync(partial)?;
    fs::rename(partial, to).map_err(|error| failed(to, &error))?;
    // A path of one name has an empty parent.
    sync(to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")))
}

/// The commit at which the ranks would resume: of the commits that all ranks have, the one of the newest step. `commits`
/// has of each rank the last commit, then the one before. The Python package has this rule in `_ranks.py`, and its
/// `test_common_commit.py` compares both.
fn chosen(commits: &[Vec<Commit>]) -> Option<Commit> {
    let common = |commit: &&Commit| commits.iter().all(|own| own.contains(*commit));
    let known: Vec<Commit> = commits.first()?.iter().filter(common).copied().collect();
    let step = known.iter().map(|(step, _)| *step).max()?;
    let mut of_step = known.into_iter().filter(|(own, _)| *own == step);
    // Two commits may have one step. A rank that lacks the later one has the earlier one as its last.
    let is_whole = commits.iter().all(|own| own.first() == commits[0].first());
    if is_whole { of_step.next() } else { of_step.next_back() }
}

/// Why the ranks have no commit in common.
fn apart(found: &[Found], commits: &[Vec<Commit>]) -> String {
    let steps: Vec<Vec<u64>> =
        commits.iter().map(|own| own.iter().map(|(step, _)| *step).collect()).collect();
    let same = steps
        .first()
        .and_then(|first| first.iter().filter(|step| steps.iter().all(|own| own.contains(*step))).max());
    if let Some(step) = same {
        return format!(
            "the ranks have different commits of step {step}: their payloads begin otherwise; copy each rank by --rank"
        );
    }
    let each = found.iter().zip(&steps).map(|(one, steps)| format!("rank {}: {steps:?}", one.owner.rank));
    let each = each.collect::<Vec<_>>().join(", ");
    format!(
        "the ranks have no committed step in common: {each}; resume the run, so that all ranks commit one step"
    )
}

fn made(directory: &Path) -> Result<()> {
    fs::create_dir(directory).map_err(|error| failed(directory, &error))
}

/// A path with more at the end of its name.
pub(super) fn added(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}

fn failed(path: &Path, error: &io::Error) -> Error {
    IoError::of(error, Doing::Writing, path.to_string_lossy()).into()
}

fn known(steps: &Steps) -> Vec<Commit> {
    let before = if let Before::Step(step) = steps.before { Some(step) } else { None };
    [steps.last, before].into_iter().zip(steps.tags).filter_map(|(step, tag)| Some((step?, tag))).collect()
}

fn reading(found: &Found, at: Option<Commit>) -> TierOptions {
    TierOptions {
        mode: Mode::Read,
        at_step: at.map(|(step, _)| step),
        at_tag: at.map_or(0, |(_, tag)| tag),
        ..TierOptions::new(found.owner.clone(), found.bases.iter().cloned())
    }
}

fn job_of(found: &[Found]) -> String {
    found.first().map_or_else(String::new, |one| one.owner.job.clone())
}

/// The tiers in the order of their ranks, if all ranks of one job are there.
fn complete(mut found: Vec<Found>) -> Result<Vec<Found>> {
    found.sort_by_key(|one| one.owner.rank);
    let job = job_of(&found);
    if let Some(other) = found.iter().find(|one| one.owner.job != job) {
        let reason = format!("has the jobs {job:?} and {:?}; choose one with --job", other.owner.job);
        return Err(Error::invalid("PATH", reason));
    }
    if let Some(twice) = found.windows(2).find(|two| two[0].owner.rank == two[1].owner.rank) {
        let reason = format!("has {} and {}; choose a host with --host", twice[0].owner, twice[1].owner);
        return Err(Error::invalid("PATH", reason));
    }
    let worlds = found.iter().filter_map(|one| one.superblock.as_ref()).map(|superblock| superblock.world);
    let world = worlds.max().unwrap_or(0);
    let there = |rank: &u32| found.iter().any(|one| one.owner.rank == *rank && one.superblock.is_some());
    let missing: Vec<u32> = (0..world).filter(|rank| !there(rank)).collect();
    if world == 0 {
        let message = "no superblock of a rank can be read; pass the directories of all ranks";
        return Err(TierError::at(TierKind::NoState, job, message.to_string()));
    }
    if missing.is_empty() {
        return Ok(found);
    }
    let named: Vec<String> = missing.iter().take(8).map(|rank| format!("{job}/HOST/rank-{rank}")).collect();
    let more = if missing.len() > named.len() { ", ..." } else { "" };
    let message = format!(
        "{} of {world} ranks cannot be read: {}{more}; pass the directories of all ranks",
        missing.len(),
        named.join(", ")
    );
    Err(TierError::at(TierKind::NoState, job, message))
}

/// The place of a rank's part in a directory: the form that a run of the library writes.
pub(super) fn part(directory: &Path, found: &Found) -> PathBuf {
    directory.join(format!("rank-{}", found.owner.rank))
}
