//! What a tiered update may do with its tier, and nobody else; `claim` has the rules.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::claim::Committer;
use super::commit::CommitBeside;
use super::store::Tier;
use crate::error::Result;

/// The right to step the states of a tier, which one tiered update has at a time. It ends with its value, and takes no
/// lock, so that a forked child can drop it.
#[derive(Debug)]
pub struct UpdateClaim(Arc<Tier>);

impl UpdateClaim {
    /// Claims the tier. `Busy` if another update has it, or if the last one was closed with uncommitted changes.
    pub fn new(tier: &Arc<Tier>) -> Result<UpdateClaim> {
        tier.claims.begin()?;
        Ok(UpdateClaim(Arc::clone(tier)))
    }

    /// Call before states change: others cannot commit and roll back from then on. `Busy` while a commit is in flight
    /// that excludes writes.
    pub fn change(&self) -> Result<()> {
        self.changes(false)
    }

    /// As [`UpdateClaim::change`], for an update beside the caller. It is open until [`UpdateClaim::finish`].
    pub fn begin(&self) -> Result<()> {
        self.changes(true)
    }

    /// Ends an update beside the caller.
    pub fn finish(&self) {
        self.0.claims.finish();
    }

    /// [`Tier::commit`], by the update.
    pub fn commit(&self, step: u64, payload: &[u8]) -> Result<()> {
        self.0.commit_if(Committer::Update, step, payload)
    }

    /// Begins a commit beside writes, by the update, whose extents are `deferred` until [`CommitBeside::run`]. The states
    /// count as changed again if it fails.
    pub fn begin_commit(&self, payload: &[u8], deferred: &[u32]) -> Result<CommitBeside> {
        self.0.begin_commit_beside(Committer::Update, payload, deferred)
    }

    /// Waits until no commit beside writes is in flight.
    pub fn after_commit(&self) {
        drop(self.0.after_commit_beside());
    }

    /// The tier.
    pub fn tier(&self) -> &Tier {
        &self.0
    }

    /// [`Tier::rollback`], by the update.
    pub fn rollback(&self) -> Result<()> {
        self.0.rollback_if(|| self.0.claims.no_import())?;
        self.0.claims.refreshed();
        Ok(())
    }

    /// `Busy` if an import replaced the states since the last rollback.
    pub fn fresh(&self) -> Result<()> {
        self.0.claims.fresh()
    }

    fn changes(&self, open: bool) -> Result<()> {
        let state = self.0.state.lock();
        self.0.claims.no_import()?;
        if !state.catalog.commits_beside() {
            state.catalog.between_commits()?;
        }
        self.0.claims.change(open);
        Ok(())
    }
}

impl Drop for UpdateClaim {
    fn drop(&mut self) {
        self.0.claims.end();
    }
}
