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

use super::Which;

/// The tiers of all ranks of a job, and the step that all of them have.
pub(super) struct Ranks {
    found: Vec<Found>,
    step: u64,
}

impl Ranks {
    /// Errors: the paths have several jobs, a rank is missing or has several hosts, or the ranks have no step in common.
    pub fn find(which: &Which) -> Result<Ranks> {
        let found = complete(which.some()?)?;
        let steps: Vec<Vec<u64>> =
            found.iter().map(|one| Ok(known(&Tier::steps(&reading(one, None))?))).collect::<Result<_>>()?;
        let common = |step: &&u64| steps.iter().all(|own| own.contains(*step));
        match steps.first().and_then(|first| first.iter().filter(common).max()) {
            Some(step) => Ok(Ranks { step: *step, found }),
            None => {
                let each = found
                    .iter()
                    .zip(&steps)
                    .map(|(one, steps)| format!("rank {}: {steps:?}", one.owner.rank));
                let message = format!(
                    "the ranks have no committed step in common: {}",
                    each.collect::<Vec<_>>().join(", ")
                );
                Err(TierError::at(TierKind::NoStep, job_of(&found), message))
            }
        }
    }

    /// The step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.found.len()
    }

    /// Writes a new directory: `write` gets each tier with its rank, and a place in the directory.
    pub fn write(&self, to: &Path, mut write: impl FnMut(&Found, Tier, &Path) -> Result<()>) -> Result<()> {
        if to.symlink_metadata().is_ok() {
            return Err(failed(to, &io::ErrorKind::AlreadyExists.into()));
        }
        let partial = added(to, ".partial");
        made(&partial)?;
        let written = self
            .found
            .iter()
            .try_for_each(|found| write(found, Tier::open(reading(found, Some(self.step)))?, &partial));
        let renamed = written.and_then(|()| fs::rename(&partial, to).map_err(|error| failed(to, &error)));
        if renamed.is_err() {
            // The first error counts.
            let _ = fs::remove_dir_all(&partial);
        }
        renamed
    }
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

fn known(steps: &Steps) -> Vec<u64> {
    let before = if let Before::Step(step) = steps.before { Some(step) } else { None };
    [steps.last, before].into_iter().flatten().collect()
}

fn reading(found: &Found, at_step: Option<u64>) -> TierOptions {
    TierOptions {
        mode: Mode::Read,
        at_step,
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
    let missing: Vec<String> = (0..world)
        .filter(|rank| !there(rank))
        .take(8)
        .map(|rank| format!("{job}/HOST/rank-{rank}"))
        .collect();
    if missing.is_empty() && world > 0 {
        return Ok(found);
    }
    let message = format!(
        "{} of {world} ranks cannot be read: {}; pass the directories of all ranks",
        missing.len(),
        missing.join(", ")
    );
    Err(TierError::at(TierKind::NoState, job, message))
}

/// The place of a rank's part in a directory: the form that a run of the library writes.
pub(super) fn part(directory: &Path, found: &Found) -> PathBuf {
    directory.join(format!("rank-{}", found.owner.rank))
}
