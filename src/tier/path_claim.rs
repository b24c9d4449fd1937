//! Claims the path of an options entry and opens it. The I/O timeout bounds each part of the open.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use super::directory::{ClaimStep, Directory, Owner, PendingClaim};
use super::options::{PathLocation, TierOptions};
use super::path::TierPath;
use super::storage::{DirStorage, MemoryStorage, Storage};
use super::time_limits::within_timeout;
use crate::error::{Doing, Result};
use crate::io::engine::Engine;
use crate::io::options::Options as IoOptions;

/// Claims a path and opens it. `None` if it does not exist and `make` is false.
pub(super) fn claim(options: &TierOptions, number: usize, make: bool) -> Result<Option<TierPath>> {
    // A tier allocates its files itself.
    let io = IoOptions { preallocate: false, ..options.io };
    let (storage, engine): (Box<dyn Storage>, Engine) = match &options.paths[number].location {
        PathLocation::Directory(base) => {
            let (base, owner) = (base.clone(), options.owner.clone());
            return claim_directory(base, owner, io, make);
        }
        // Each request has a timeout, and so has each listing.
        #[cfg(feature = "s3")]
        PathLocation::Bucket(address) => match super::bucket::open(address, &options.owner, io, make)? {
            Some(opened) => opened,
            None => return Ok(None),
        },
        #[cfg(not(feature = "s3"))]
        PathLocation::Bucket(_) => return Err(super::options::no_object_stores()),
        PathLocation::Memory if !make => return Ok(None),
        PathLocation::Memory => (Box::new(MemoryStorage::new()?), Engine::open(io)?),
        #[cfg(test)]
        PathLocation::Store(store) => match super::bucket::open_in_memory(store, &options.owner, io, make)? {
            Some(opened) => opened,
            None => return Ok(None),
        },
        #[cfg(any(test, feature = "sim"))]
        PathLocation::Simulated(disk, faults) => {
            let storage = super::storage::SimStorage::claim(disk, number as u64, faults.stop)?;
            let key = storage.key();
            let sim = crate::io::sim::Sim::new(disk, faults.clone());
            return within_timeout(io.io_timeout, Doing::Opening, &key, move || {
                TierPath::open(Box::new(storage), Engine::open_simulated(io, sim)?).map(Some)
            });
        }
    };
    TierPath::open(storage, engine).map(Some)
}

/// Claims a directory and opens it. The I/O timeout bounds each part of the claim, but not the wait for another owner's
/// lease.
fn claim_directory(base: PathBuf, owner: Owner, io: IoOptions, make: bool) -> Result<Option<TierPath>> {
    type Opening = std::result::Result<Option<TierPath>, (Box<PendingClaim>, Duration)>;
    let open = move |step: ClaimStep| -> Result<Opening> {
        match step {
            ClaimStep::Done(None) => Ok(Ok(None)),
            ClaimStep::Done(Some(directory)) => {
                let directory = DirStorage::new(directory, io.direct, io.io_timeout);
                TierPath::open(Box::new(directory), Engine::open(io)?).map(|path| Ok(Some(path)))
            }
            ClaimStep::Wait(pending, time) => Ok(Err((pending, time))),
        }
    };
    let place = owner.below(&base);
    let begin = move || Directory::begin_claim(&base, &owner, make).and_then(open);
    let mut opening = within_timeout(io.io_timeout, Doing::Opening, &place, begin)?;
    loop {
        match opening {
            Ok(path) => return Ok(path),
            Err((pending, time)) => {
                std::thread::sleep(time);
                let go_on = move || pending.resume().and_then(open);
                opening = within_timeout(io.io_timeout, Doing::Opening, &place, go_on)?;
            }
        }
    }
}
