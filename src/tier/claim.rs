//! The right to step the states of a tier, which one tiered update has at a time.
//!
//! Invariants:
//! - At most one [`UpdateClaim`] of a tier exists. Two updates would cache the same subgroups, and each would write
//!   over the steps of the other.
//! - The claim ends with its value. It takes no lock, so that a forked child can drop it.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::store::Tier;
use crate::error::{Error, Result};

/// Proof that no other tiered update uses the tier.
#[derive(Debug)]
pub struct UpdateClaim(Arc<Tier>);

impl UpdateClaim {
    /// Claims the tier. Errors: another update has it (`Busy`).
    pub fn new(tier: &Arc<Tier>) -> Result<UpdateClaim> {
        match tier.claimed.swap(true, Ordering::AcqRel) {
            false => Ok(UpdateClaim(Arc::clone(tier))),
            true => Err(Error::Busy(
                "the tier already has a tiered update; close that update before another is opened"
                    .to_string(),
            )),
        }
    }
}

impl Drop for UpdateClaim {
    fn drop(&mut self) {
        self.0.claimed.store(false, Ordering::Release);
    }
}
