//! Which tiers a command of `spillway tier` is about, and how they are opened and named.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use spillway::error::{Error, Result, TierError, TierKind};
use spillway::tier::Tier;
use spillway::tier::inspect::{self, Found, Search};
use spillway::tier::options::{Mode, PathLocation, TierOptions};

use crate::stdout;

/// The tiers that a command is about.
#[derive(clap::Args)]
pub(super) struct Which {
    /// The paths of the tier, as its program was given them.
    #[arg(required = true, value_name = "PATH")]
    pub(super) paths: Vec<PathBuf>,
    /// Takes the tiers of this job only.
    #[arg(long)]
    pub(super) job: Option<String>,
    /// Takes the tiers of this host only.
    #[arg(long)]
    pub(super) host: Option<String>,
    /// Takes the tiers of this rank only.
    #[arg(long)]
    pub(super) rank: Option<u32>,
}

impl Which {
    /// The paths, each once.
    pub(super) fn distinct(&self) -> Vec<&PathBuf> {
        let mut distinct = Vec::<&PathBuf>::new();
        for path in &self.paths {
            if !distinct.iter().any(|other| inspect::same(other, path)) {
                distinct.push(path);
            }
        }
        distinct
    }

    /// The paths that are directories, and those in object stores. An object store is not searched.
    pub(super) fn divided(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let is_directory =
            |path: &PathBuf| matches!(PathLocation::of(path.clone()), PathLocation::Directory(_));
        self.paths.iter().cloned().partition(is_directory)
    }

    /// The tiers, without an error if there are none.
    pub(super) fn find(&self) -> Result<Vec<Found>> {
        self.search().map(readable)
    }

    pub(super) fn search(&self) -> Result<Search> {
        let (directories, stores) = self.divided();
        if directories.is_empty() {
            return Err(Error::invalid(
                "PATH",
                "has no directory; tiers are found in directories, so pass one of the tier's too",
            ));
        }
        let mut search = inspect::find(&directories)?;
        search.tiers.retain(|Found { owner, .. }| {
            self.job.as_ref().is_none_or(|job| *job == owner.job)
                && self.host.as_ref().is_none_or(|host| *host == owner.host)
                && self.rank.is_none_or(|rank| rank == owner.rank)
        });
        search.tiers.iter_mut().for_each(|found| found.bases.extend(stores.iter().cloned()));
        Ok(search)
    }

    /// At least one tier.
    pub(super) fn some(&self) -> Result<Vec<Found>> {
        let search = self.search()?;
        match search.tiers.is_empty() {
            false => Ok(readable(search)),
            true => {
                let filters = [
                    self.job.as_ref().map(|job| format!("job {job:?}")),
                    self.host.as_ref().map(|host| format!("host {host:?}")),
                    self.rank.map(|rank| format!("rank {rank}")),
                ];
                let filters: Vec<String> = filters.into_iter().flatten().collect();
                let of =
                    if filters.is_empty() { String::new() } else { format!(" of {}", filters.join(", ")) };
                let unread = search.unread.iter().map(|text| format!("; {text}")).collect::<String>();
                let message = format!(
                    "there is no tier{of} that can be read; pass the directories that its program was given{unread}"
                );
                Err(TierError::at(TierKind::NoState, self.names(), message))
            }
        }
    }

    /// The only tier.
    pub(super) fn one(&self) -> Result<Found> {
        let mut tiers = self.some()?;
        match tiers.len() {
            1 => Ok(tiers.remove(0)),
            count => {
                let names: Vec<String> = tiers.iter().map(|found| found.owner.to_string()).collect();
                let reason = format!(
                    "has {count} tiers: {}; choose one with --job, --host and --rank",
                    names.join("; ")
                );
                Err(Error::invalid("PATH", reason))
            }
        }
    }

    pub(super) fn names(&self) -> String {
        self.paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    }
}

/// The tiers of a search. What cannot be read is named on standard error.
fn readable(search: Search) -> Vec<Found> {
    if let Some(warning) = warning(&search.unread) {
        stdout::note(&warning);
    }
    search.tiers
}

fn warning(unread: &[String]) -> Option<String> {
    let first = unread.first()?;
    let more = if unread.len() > 1 { format!(", and {} more", unread.len() - 1) } else { String::new() };
    Some(format!("spillway: warning: tiers that cannot be read are left out: {}{more}", plain(first)))
}

/// A text without letters that control a terminal, which names may hold.
pub(super) fn plain(text: &str) -> String {
    const KEPT: [char; 3] = ['"', '\'', '\\'];
    let escaped = |part: &str| {
        let end = part.trim_end_matches(KEPT).len();
        format!("{}{}", part[..end].escape_debug(), &part[end..])
    };
    text.split_inclusive(KEPT).map(escaped).collect()
}

/// The step of a commit, in words.
pub(super) fn step_of(step: Option<u64>) -> String {
    step.map_or("no commit".to_string(), |step| format!("step {step}"))
}

/// Opens a tier at its last commit. Nothing is written to it until the first change.
pub(super) fn open(found: &Found) -> Result<Tier> {
    open_in(found, Mode::Resume)
}

/// As [`open`], without a lock where this user, or a mount, forbids to write.
pub(super) fn open_to_read(found: &Found) -> Result<Tier> {
    open_in(found, Mode::Resume).or_else(|error| match &error {
        Error::Io(io) if is_forbidden(io.errno) => open_in(found, Mode::Read),
        _ => Err(error),
    })
}

fn is_forbidden(errno: i32) -> bool {
    use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(std::io::Error::from_raw_os_error(errno).kind(), PermissionDenied | ReadOnlyFilesystem)
}

fn open_in(found: &Found, mode: Mode) -> Result<Tier> {
    let Some(superblock) = &found.superblock else {
        let damage = if found.damage.is_empty() {
            "its superblocks are blank: nothing was committed".to_string()
        } else {
            found.damage.join("; ")
        };
        return Err(TierError::at(TierKind::Format, found.owner.to_string(), damage));
    };
    Tier::open(TierOptions {
        mode,
        world: superblock.world,
        write_at_open: false,
        ..TierOptions::new(found.owner.clone(), found.bases.iter().cloned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_told_in_one_line() {
        assert_eq!(warning(&[]), None);
        let unread = ["opening /a\u{1b}b: denied", "opening /c: denied"].map(String::from);
        let told = warning(&unread).expect("a warning");
        assert!(told.ends_with(": opening /a\\u{1b}b: denied, and 1 more"), "{told}");
        assert!(warning(&unread[1..]).is_some_and(|told| told.ends_with(": opening /c: denied")));
    }
}
