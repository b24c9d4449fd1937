//! Partitions of caches and memory bandwidth between trainer and optimizer: Arm's MPAM, Intel's RDT and AMD's QoS, through
//! the kernel's resctrl file system. Nothing is changed without a request.
//!
//! | file | content |
//! |---|---|
//! | `support.rs` | what processor and kernel support, and what is mounted |
//! | `partition.rs` | the two partitions of SuperOffload's release page, for this machine |
//! | `groups.rs` | groups of resctrl: made, checked, removed |
//! | `owner.rs` | the process for which they were made, in a file that outlives a crash |
#![forbid(unsafe_code)]

mod groups;
mod owner;
pub mod partition;
pub mod support;
#[cfg(test)]
mod tests;

use std::io;

use partition::Partition;

use crate::error::{Error, Result};
use crate::sys::topology::Root;

/// Outcome of [`restore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restored {
    /// There was nothing to undo.
    Nothing,
    /// The groups were removed.
    Removed,
}

/// Makes the partitions, for process `owner`. Partitions that a dead process left are undone first. On an error nothing
/// is left.
///
/// [`Error::Busy`] if a live process has partitions, or if the groups exist without an owner. [`Error::Unsupported`] if
/// resctrl is not mounted.
pub fn apply(root: &Root, partitions: &[Partition], owner: u32) -> Result<()> {
    support::mounted(root)?;
    let place = owner::Place::lock(root)?;
    if let Some(before) = place.owner()? {
        if before.is_alive() {
            return Err(Error::Busy(format!(
                "{before} has partitions of resctrl already; end it or wait for its end"
            )));
        }
        groups::remove(root)?;
        place.clear()?;
    }
    groups::check_absent(root)?;
    place.set(owner)?;
    let made = groups::make(root, partitions);
    if made.is_err() {
        groups::remove(root)?;
        place.clear()?;
    }
    made
}

/// Removes partitions, and makes no file: those of process `mine`, and those of a process that has ended. `force` removes those of a live
/// process too.
pub fn restore(root: &Root, mine: Option<u32>, force: bool) -> Result<Restored> {
    let Some(place) = owner::Place::lock_present(root)? else { return Ok(Restored::Nothing) };
    let Some(owner) = place.owner()? else { return Ok(Restored::Nothing) };
    if owner.is_alive() && !force && Some(owner.pid()) != mine {
        return Err(Error::Busy(format!(
            "{owner} still uses the partitions of resctrl; --force removes them anyway"
        )));
    }
    groups::remove(root)?;
    place.clear()?;
    Ok(Restored::Removed)
}

/// The system's words for an error, and what to do.
fn words(error: &io::Error) -> String {
    let advice = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => "; run as root",
        Some(libc::EROFS) => "; mounted read-only, as in a container: run on the host as root",
        _ => "",
    };
    format!("{error}{advice}").replace("os error", "errno")
}
