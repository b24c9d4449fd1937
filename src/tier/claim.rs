//! Who claims a tier for a tiered update, and who may commit and roll back while the update changes states.
//!
//! Invariants:
//! - At most one claim of a tier exists. Two updates would cache the same subgroups, and each would write over the steps of
//!   the other.
//! - From the first change of a state until the update commits or rolls back, the tier may hold states of two steps: others
//!   are in memory only. Only the update commits and rolls back then. If its claim ends before, a rollback comes before
//!   the next commit and before the next claim.
//! - During an import only the import commits and rolls back, and no change begins. What it has put is committed whole, or
//!   not at all.
//! - After an import the update in memory is older than the tier: it is refused until it has rolled back.
//! - No change begins during a commit, and no commit of another caller after a change began: both decide under the lock of
//!   the tier's state.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU8, Ordering};

use crate::error::{Error, Result, RoundKind, Rounds};

/// The update exists.
const CLAIMED: u8 = 1;
/// The update has changed states since it last committed or rolled back.
const CHANGED: u8 = 2;
/// An update beside the caller is open.
const OPEN: u8 = 4;
/// An import is in progress.
const IMPORTING: u8 = 8;
/// The update has not rolled back since an import replaced its states.
const STALE: u8 = 16;

/// Who commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Committer {
    /// A caller of the tier.
    Caller,
    /// An import.
    Import,
    /// The tiered update.
    Update,
}

/// What the tiered update of a tier does.
#[derive(Debug, Default)]
pub(super) struct Claims(AtomicU8);

impl Claims {
    /// Errors: only the update may commit (`Busy`, or [`RoundKind::Open`] while its step is open).
    pub(super) fn may_commit(&self, by: Committer) -> Result<()> {
        match by {
            Committer::Caller => self.may_roll_back().and_then(|()| self.settled()),
            Committer::Update => self.no_import(),
            Committer::Import => Ok(()),
        }
    }

    /// `Busy` during an import.
    pub(super) fn no_import(&self) -> Result<()> {
        if self.has(IMPORTING) { Err(Error::Busy("an import is in progress".to_string())) } else { Ok(()) }
    }

    /// Begins an import. Errors: those of [`Claims::may_commit`].
    pub(super) fn begin_import(&self) -> Result<()> {
        self.may_commit(Committer::Caller)?;
        self.0.fetch_or(IMPORTING, Ordering::AcqRel);
        Ok(())
    }

    /// Ends an import. `replaced`: it has committed other states.
    pub(super) fn end_import(&self, replaced: bool) {
        if replaced && self.has(CLAIMED) {
            self.0.fetch_or(STALE, Ordering::AcqRel);
        }
        self.clear(IMPORTING);
    }

    /// `Busy` if an import replaced the states of the update, and the update has not rolled back since.
    pub(super) fn fresh(&self) -> Result<()> {
        match self.has(STALE) {
            true => Err(Error::Busy(
                "an import has replaced the states of the tiered update; roll back the update, which takes them over"
                    .to_string(),
            )),
            false => Ok(()),
        }
    }

    /// The update has rolled back.
    pub(super) fn refreshed(&self) {
        self.clear(STALE);
    }

    /// `Busy` if states changed that nobody committed or rolled back.
    fn settled(&self) -> Result<()> {
        if self.has(CHANGED) {
            let message = "a tiered update was closed before it committed the states that it changed; roll the tier back first";
            return Err(Error::Busy(message.to_string()));
        }
        Ok(())
    }

    /// As [`Claims::may_commit`], but a rollback is possible after the claim has ended.
    pub(super) fn may_roll_back(&self) -> Result<()> {
        self.no_import()?;
        if self.has(OPEN) {
            return Err(Rounds::Update.error(RoundKind::Open));
        }
        if self.has(CLAIMED) && self.has(CHANGED) {
            let message = "a tiered update has changed states since its last commit; commit or roll back that update first";
            return Err(Error::Busy(message.to_string()));
        }
        Ok(())
    }

    /// Begins a claim. `Busy` if there is one already, or if the last one ended with uncommitted changes.
    pub(super) fn begin(&self) -> Result<()> {
        if self.0.fetch_or(CLAIMED, Ordering::AcqRel) & CLAIMED != 0 {
            let message = "the tier already has a tiered update; close that update before another is opened";
            return Err(Error::Busy(message.to_string()));
        }
        self.settled().inspect_err(|_| self.end())
    }

    /// The claim has ended.
    pub(super) fn end(&self) {
        self.clear(CLAIMED | OPEN | STALE);
    }

    /// States change from now on. `open`: by an update beside the caller.
    pub(super) fn change(&self, open: bool) {
        self.0.fetch_or(if open { CHANGED | OPEN } else { CHANGED }, Ordering::AcqRel);
    }

    /// The update beside the caller has ended.
    pub(super) fn finish(&self) {
        self.clear(OPEN);
    }

    /// The update has committed, or the tier was rolled back.
    pub(super) fn clear_changes(&self) {
        self.clear(CHANGED);
    }

    fn has(&self, flag: u8) -> bool {
        self.0.load(Ordering::Acquire) & flag != 0
    }

    fn clear(&self, flags: u8) {
        self.0.fetch_and(!flags, Ordering::AcqRel);
    }
}
