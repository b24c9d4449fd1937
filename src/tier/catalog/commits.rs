//! The part of the catalog that names, completes and gives up commits; see `catalog` for its invariants.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::contents::{Contents, same};
use super::named::{Commit, Named};
use super::{Catalog, Extent, Former, Health, PathState};
use crate::error::{Error, Result};
use crate::tier::format::{ExtentRecord, PathRecord, Superblock};

impl Catalog {
    /// `Busy` while a commit is in flight.
    pub(in crate::tier) fn between_commits(&self) -> Result<()> {
        match self.commit {
            Commit::None => Ok(()),
            _ => Err(Error::Busy("a commit is in progress".to_string())),
        }
    }

    /// True while a commit is in flight beside which writes continue.
    pub(in crate::tier) fn commits_beside(&self) -> bool {
        matches!(self.commit, Commit::Beside(_))
    }

    /// Begins a commit of what the extents hold at its end, until [`Catalog::end_commit`].
    pub(in crate::tier) fn begin_commit(&mut self) -> Result<()> {
        self.between_commits()?;
        self.commit = Commit::Alone;
        self.free_previous();
        Ok(())
    }

    /// Begins a commit beside which writes continue, until [`Catalog::end_commit`]. It names what the extents hold now, and
    /// what writes in flight install; those in `deferred` once [`Catalog::name_deferred`] is called. Errors: a commit is in
    /// flight; a write failed.
    pub(in crate::tier) fn begin_commit_beside(&mut self, deferred: &[u32]) -> Result<()> {
        self.between_commits()?;
        self.failed().map_or(Ok(()), Err)?;
        let mut named = Named { deferred: deferred.iter().copied().collect(), ..Named::default() };
        for (number, extent) in self.numbered().filter(|(number, _)| !named.deferred.contains(number)) {
            if extent.writing {
                named.awaited.insert(number);
            } else {
                named.contents.insert(number, extent.current.clone());
            }
        }
        named.contents.values().flatten().for_each(|contents| self.hold(contents));
        self.commit = Commit::Beside(named);
        self.free_previous();
        Ok(())
    }

    /// The commit names what these extents of a tiered update hold now. They are not being written. Returns the error of a
    /// write of them.
    pub(in crate::tier) fn name_deferred(&mut self, extents: &[u32]) -> Result<()> {
        for number in extents {
            let Ok(Extent { current, failed, .. }) = self.get(*number) else { continue };
            let (contents, failed) = (current.clone(), failed.clone());
            failed.map_or(Ok(()), Err)?;
            let Commit::Beside(named) = &mut self.commit else { break };
            named.contents.insert(*number, contents.clone());
            contents.iter().for_each(|contents| self.hold(contents));
        }
        if let Commit::Beside(named) = &mut self.commit {
            named.deferred.clear();
        }
        Ok(())
    }

    /// True if the commit beside writes has not named this extent of a tiered update yet.
    pub(in crate::tier) fn is_deferred(&self, number: u32) -> bool {
        matches!(&self.commit, Commit::Beside(named) if named.deferred.contains(&number))
    }

    fn free_previous(&mut self) {
        std::mem::take(&mut self.previous).iter().for_each(|contents| self.end_snapshot(contents));
    }

    /// A commit beside writes, which waited for the write that has ended, names what the extent has now.
    pub(in crate::tier) fn written(&mut self, number: u32) {
        let Commit::Beside(named) = &mut self.commit else { return };
        let Some(extent) = self.extents.get(number as usize).and_then(Option::as_ref) else { return };
        if named.awaited.remove(&number) {
            named.failed = named.failed.take().or_else(|| extent.failed.clone());
            let contents = extent.current.clone();
            named.contents.insert(number, contents.clone());
            contents.iter().for_each(|contents| self.hold(contents));
        }
    }

    /// True if a commit beside writes waits for a write of this extent.
    pub(in crate::tier) fn is_awaited(&self, number: u32) -> bool {
        matches!(&self.commit, Commit::Beside(named) if named.awaited.contains(&number))
    }

    /// True if a commit beside writes waits for a write.
    pub(in crate::tier) fn awaits(&self) -> bool {
        matches!(&self.commit, Commit::Beside(named) if !named.awaited.is_empty())
    }

    /// The error of a write that the commit names: of this step, if no write of its extent has succeeded since.
    pub(in crate::tier) fn named_failure(&self) -> Option<Error> {
        match &self.commit {
            Commit::Beside(named) => named.failed.clone(),
            _ => self.failed(),
        }
    }

    /// Ends a commit, whatever its outcome.
    pub(in crate::tier) fn end_commit(&mut self) {
        if let Commit::Beside(named) = std::mem::take(&mut self.commit) {
            named.contents.values().flatten().for_each(|contents| self.end_snapshot(contents));
        }
    }

    /// What the commit in flight names of an extent, or the next commit.
    fn named<'a>(&'a self, number: u32, extent: &'a Extent) -> Option<&'a Arc<Contents>> {
        match &self.commit {
            Commit::Beside(named) => named.contents.get(&number)?.as_ref(),
            _ => extent.current.as_ref(),
        }
    }

    /// True if the commit in flight, or the next commit, has this extent, unless it removes it.
    fn takes(&self, number: u32) -> bool {
        match &self.commit {
            Commit::Beside(named) => named.contents.contains_key(&number),
            _ => true,
        }
    }

    /// The last committed step and its payload.
    pub(in crate::tier) fn last_commit(&self) -> (Option<u64>, Vec<u8>) {
        (self.step, self.payload.clone())
    }

    /// The superblock of the commit in flight, or that of an open, which removes nothing: `commits` is false. `frame` has the fields
    /// of the tier and of the commit; `written` returns the bytes that were written to a path since the open.
    pub(in crate::tier) fn superblock(
        &self,
        frame: Superblock,
        commits: bool,
        written: impl Fn(usize) -> u64,
    ) -> Superblock {
        let stays = |extent: &Extent| !(commits && extent.removed);
        // A path without files and without data is dropped from the tier, so the next open does not report it as
        // missing.
        let retired = |number: usize, path: &PathState| {
            let on = |(n, extent)| stays(extent) && self.is_named_on(number as u32, n, extent);
            (path.health() == Health::Missing || path.gone()) && !self.numbered().any(on)
        };
        let paths = self.paths.iter().enumerate().map(|(number, path)| PathRecord {
            name: if retired(number, path) { String::new() } else { path.name().to_string() },
            memory: path.memory(),
            end: path.space().end(),
            written: path.written_before() + written(number),
        });
        let extents = (0..).zip(&self.extents).map(|(number, extent)| {
            let extent = extent.as_ref().filter(|extent| self.takes(number) && stays(extent))?;
            Some(ExtentRecord {
                name: extent.name.clone(),
                shape: (*extent.shape).clone(),
                version: self.named(number, extent).map(|contents| contents.version.clone()),
            })
        });
        Superblock {
            sequence: self.sequence + 1,
            generation: self.generation,
            paths: paths.collect(),
            extents: extents.collect(),
            ..frame
        }
    }

    /// Records that a superblock is about to be written: no other one gets its sequence.
    pub(in crate::tier) fn use_sequence(&mut self, superblock: &Superblock) {
        self.sequence = superblock.sequence;
    }

    /// Makes exactly what the last superblock named the committed state, and frees everything else but later writes.
    pub(in crate::tier) fn committed(&mut self, step: u64, payload: &[u8]) {
        (self.step, self.payload) = (Some(step), payload.to_vec());
        let commit = std::mem::take(&mut self.commit);
        let mut former = std::mem::take(&mut self.in_doubt);
        let keeps = self.keeps_before && matches!(commit, Commit::Beside(_));
        let mut previous = Vec::new();
        for (number, slot) in (0..).zip(&mut self.extents) {
            let Some(extent) = slot else { continue };
            let named = match &commit {
                Commit::Beside(named) => match named.contents.get(&number) {
                    Some(contents) => contents.clone(),
                    // It was defined since the begin.
                    None => continue,
                },
                _ => extent.current.clone(),
            };
            let all = [extent.committed.take(), extent.current.take(), named.clone()];
            if !extent.removed {
                (extent.committed, extent.current) = (named, all[1].clone());
            }
            let kept = [extent.committed.as_ref(), extent.current.as_ref()];
            for (place, contents) in all.iter().enumerate() {
                let known = kept.into_iter().chain(all[..place].iter().map(Option::as_ref));
                let known = known.filter(|known| same(*known, contents.as_ref())).count() > 0;
                let gone = contents.clone().filter(|_| !known);
                // The first ones are those of the commit before.
                previous.extend(gone.clone().filter(|_| keeps && place == 0));
                former.extend(gone.map(|contents| Former { contents, shape: Arc::clone(&extent.shape) }));
            }
            extent.in_doubt = false;
            if extent.removed {
                self.names.remove(&extent.name);
                *slot = None;
            }
        }
        self.find_unused();
        previous.iter().for_each(|contents| self.hold(contents));
        self.previous = previous;
        former.into_iter().for_each(|one| self.release(one));
        if let Commit::Beside(named) = &commit {
            // Contents that were replaced since the begin are committed now.
            for (number, contents) in &named.contents {
                let holds = contents.as_ref().and_then(|contents| self.held.get_mut(&contents.number));
                holds
                    .filter(|_| self.extents[*number as usize].is_some())
                    .into_iter()
                    .for_each(|holds| holds.former = None);
            }
        }
        self.commit = commit;
    }

    /// Records that a commit failed with an unknown outcome: what it named keeps its space until a commit succeeds.
    pub(in crate::tier) fn in_doubt(&mut self) {
        let Commit::Beside(named) = &self.commit else {
            self.extents.iter_mut().flatten().for_each(|extent| extent.in_doubt = true);
            return;
        };
        for (number, contents) in
            named.contents.iter().filter_map(|(number, one)| Some((number, one.as_ref()?)))
        {
            let Some(extent) = self.extents.get_mut(*number as usize).and_then(Option::as_mut) else {
                continue;
            };
            if same(extent.current.as_ref(), Some(contents)) {
                extent.in_doubt = true;
            } else if let Some(holds) = self.held.get_mut(&contents.number) {
                self.in_doubt.extend(holds.former.take());
            }
        }
    }

    /// Records that a sync of a path failed: what was written there since the last commit, and what is being written, is
    /// not durable, and a later sync would succeed.
    pub(in crate::tier) fn sync_failed(&mut self, path: u32, error: &Error) {
        let limit = self.next_contents();
        self.paths.sync_failed(path as usize, limit, error);
    }

    /// Extents of which the commit names contents that a failed sync has left, and the error of the sync.
    pub(in crate::tier) fn unsynced(&self) -> Vec<(u32, Error)> {
        let unsynced = |(number, extent): (u32, &Extent)| {
            let contents = self.named(number, extent).filter(|_| !extent.removed)?;
            if same(Some(contents), extent.committed.as_ref()) {
                return None;
            }
            let chunks = contents.version.chunks.iter();
            let error = chunks.filter_map(|chunk| self.paths.unsynced(chunk.path, contents.number)).next()?;
            Some((number, error.clone()))
        };
        self.numbered().filter_map(unsynced).collect()
    }

    /// Extents with blocks on a path that the next commit names.
    pub(in crate::tier) fn named_on(&self, path: u32) -> Vec<u32> {
        let there =
            |(number, extent): &(u32, &Extent)| !extent.removed && self.is_named_on(path, *number, extent);
        self.numbered().filter(there).map(|(number, _)| number).collect()
    }

    fn is_named_on(&self, path: u32, number: u32, extent: &Extent) -> bool {
        self.named(number, extent).is_some_and(|contents| contents.version.touches(path))
    }

    /// An extent of the next commit with bytes on `path` behind offset `len`, and the end of these bytes.
    pub(in crate::tier) fn named_beyond(&self, path: u32, len: u64) -> Option<(String, u64)> {
        self.numbered().filter(|(_, extent)| !extent.removed).find_map(|(number, extent)| {
            let chunks = self.named(number, extent)?.version.chunks.iter().filter(|chunk| chunk.path == path);
            let end = chunks.map(|chunk| chunk.written_end(&extent.shape)).max()?;
            (end > len).then(|| (extent.name.clone(), end))
        })
    }
}
