//! The contents of all extents at one moment, for an export or a verification.
//!
//! Invariants:
//! - All contents of a snapshot, its step and its payload are of one moment: they are taken under one lock.
//! - The space of the contents stays as it is until the snapshot lets them go. Writes and commits go on meanwhile: they
//!   use other space.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::contents::Contents;
use super::extent::Shape;
use super::store::Tier;
use crate::error::{Error, Result, TierError, TierKind};

/// The committed state, or the state that reads see.
#[derive(Debug)]
pub(super) struct Snapshot<'a> {
    /// The last committed step.
    pub(super) step: Option<u64>,
    /// Payload of that commit.
    pub(super) payload: Vec<u8>,
    /// All extents that were written, in order of their numbers.
    pub(super) extents: Vec<HeldExtent<'a>>,
    /// An error for each extent that is lost with a path. Such extents are not in `extents`.
    pub(super) lost: Vec<Error>,
}

/// Contents of one extent; its drop lets them go.
#[derive(Debug)]
pub(super) struct HeldExtent<'a> {
    tier: &'a Tier,
    pub(super) number: u32,
    pub(super) name: String,
    pub(super) shape: Arc<Shape>,
    pub(super) contents: Arc<Contents>,
}

impl Drop for HeldExtent<'_> {
    fn drop(&mut self) {
        self.tier.state.lock().end_holding(&self.contents);
    }
}

/// What a snapshot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    /// What reads see.
    Current,
    /// What the last commit made durable. Uncommitted contents are an error.
    Committed,
}

impl Tier {
    /// Takes a snapshot. Errors: an extent is being written (`Busy`); with `Committed` also no commit (`NoState`), and
    /// an extent that was written since the last commit (`Busy`).
    pub(super) fn snapshot(&self, view: View) -> Result<Snapshot<'_>> {
        let mut state = self.state.lock();
        if let Some(extent) = state.extents.iter().flatten().find(|extent| extent.writing) {
            return Err(Error::Busy(format!("extent {:?} is being written", extent.name)));
        }
        if view == View::Committed {
            if state.step.is_none() {
                let message = "nothing was committed; commit first";
                return Err(TierError::at(TierKind::NoState, self.some_name(), message));
            }
            if let Some(extent) = state.extents.iter().flatten().find(|extent| !extent.is_committed()) {
                let message =
                    format!("extent {:?} was written since the last commit; commit first", extent.name);
                return Err(Error::Busy(message));
            }
        }
        let (mut extents, mut lost) = (Vec::new(), Vec::new());
        for number in 0..state.extents.len() as u32 {
            let contents = match state.contents(number) {
                Ok(contents) => contents,
                Err(error) if error.tier_kind() == Some(TierKind::Lost) => {
                    lost.push(error);
                    continue;
                }
                // No extent has the number, or it was never written.
                Err(_) => continue,
            };
            let Some(known) = &state.extents[number as usize] else { continue };
            contents.hold();
            let (name, shape) = (known.name.clone(), Arc::clone(&known.shape));
            extents.push(HeldExtent { tier: self, number, name, shape, contents });
        }
        Ok(Snapshot { step: state.step, payload: state.payload.clone(), extents, lost })
    }
}
