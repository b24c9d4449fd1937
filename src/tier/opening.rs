//! The superblock that an open writes before anything else.
//!
//! Invariants:
//! - It is written to every working path, and synced except with `Durability::Process`, before space is reused.
//! - If the paths are too full for it, the tier is open for reading. The first put or commit writes it, or fails.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use super::options::Durability;
use super::store::Tier;
use crate::error::Result;

impl Tier {
    /// Writes the state that was found, or the empty one, as a new superblock to every path. The superblock that was
    /// found may exist only in the page cache, and paths may have been renamed, added or left out.
    pub(super) fn write_opening_superblock(&self) -> Result<()> {
        let (step, payload) = {
            let state = self.state.lock();
            (state.step, state.payload.clone())
        };
        let (superblock, bytes) = self.next_superblock(step, &payload)?;
        let table = bytes.on_path(0).len() as u64;
        for path in self.paths.iter().flatten().filter(|path| path.lasts()) {
            path.reserve_superblocks(table)?;
        }
        if self.durability() != Durability::Process {
            let live = || self.paths.iter().flatten().filter(|path| path.lasts());
            for path in live() {
                let all = [path.sync_data()?, path.sync_superblock(0)?, path.sync_superblock(1)?];
                for handle in all {
                    path.wait(handle, None)?;
                }
            }
        }
        self.write_superblocks(&superblock, &bytes)
    }

    /// Writes the opening superblock if the open had no room for it. Without it no space may be used.
    pub(super) fn complete_opening(&self) -> Result<()> {
        if !self.opening_due.load(Ordering::Acquire) {
            return Ok(());
        }
        let _one_at_a_time = self.opening.lock();
        if self.opening_due.load(Ordering::Acquire) {
            let more =
                "the tier was opened without room for a superblock; free some space, then repeat the call";
            self.write_opening_superblock().map_err(|error| error.context(more))?;
            self.opening_due.store(false, Ordering::Release);
        }
        Ok(())
    }
}
