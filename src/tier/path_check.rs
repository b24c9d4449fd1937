//! The check of all paths at the begin of a commit.
#![forbid(unsafe_code)]

use super::contents::WriteOrigin;
use super::failures::with_reason;
use super::health::Health;
use super::path::TierPath;
use super::state::Extent;
use super::store::Tier;
use crate::error::{Error, Result};

impl Tier {
    /// Marks paths as failed whose files were removed, replaced or renamed, or which do not respond. Moves readable data
    /// off the paths whose files are gone: no open would find the data there. Fails if a part cannot be moved, or if no
    /// durable path is left.
    pub(super) fn check_paths(&self) -> Result<()> {
        let present: Vec<(usize, &TierPath)> = self
            .paths
            .iter()
            .enumerate()
            .filter_map(|(number, path)| Some((number, path.as_deref()?)))
            .collect();
        let checked = TierPath::check_all(&present.iter().map(|(_, path)| *path).collect::<Vec<_>>());
        let failed: Vec<(usize, Error)> = present
            .iter()
            .zip(checked)
            .filter_map(|((number, _), checked)| Some((*number, checked.err()?)))
            .collect();
        for (number, error) in &failed {
            self.mark(*number, Health::Failed, &error.to_string());
        }
        // The files of a path that does not respond may be where they were.
        let gone = || failed.iter().filter(|(_, error)| error.tier_kind().is_some());
        let silent =
            |number: usize| failed.iter().any(|(one, error)| *one == number && error.io_kind().is_some());
        for (number, path) in
            self.state.lock().paths.iter_mut().enumerate().filter(|(number, _)| !silent(*number))
        {
            path.gone = gone().any(|(one, _)| *one == number);
        }
        for (number, error) in gone() {
            self.move_all(*number as u32).map_err(|reason| with_reason(error, &reason))?;
        }
        match failed.into_iter().next() {
            Some((_, error)) if self.superblock_paths().is_empty() => Err(error),
            _ => Ok(()),
        }
    }

    /// Moves everything that the next commit names off a path.
    fn move_all(&self, path: u32) -> Result<()> {
        let there = |extent: &Extent| {
            let current = extent.current.as_ref().filter(|_| !extent.removed);
            current.is_some_and(|current| current.version.touches(path))
        };
        let extents: Vec<u32> = {
            let state = self.state.lock();
            let numbered = (0..).zip(&state.extents);
            numbered.filter_map(|(n, extent)| extent.as_ref().filter(|one| there(one)).map(|_| n)).collect()
        };
        extents.into_iter().try_for_each(|extent| self.move_extent(extent, WriteOrigin::Commit))
    }
}
