//! The piece size in bytes: given by the caller, by the profile for the file's file system, or by default.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::file::File;
use super::options::BLOCK_BYTES;
use super::profile::Profile;
use crate::log::{self, Level};
use crate::sys::profile as shared;
use crate::sys::sync::Lock;

#[derive(Debug)]
pub(super) struct PieceSize {
    /// Given by the caller; 0 if not.
    given: u64,
    profile: Option<Profile>,
    /// Sizes resolved so far, by device.
    by_device: Lock<HashMap<u64, u64>>,
    last: AtomicU64,
}

impl PieceSize {
    pub(super) fn new(given: u64, profile: Option<Profile>) -> PieceSize {
        let first = if given == 0 { BLOCK_BYTES } else { given };
        PieceSize { given, profile, by_device: Lock::default(), last: first.into() }
    }

    /// Bytes of a piece of this file.
    pub(super) fn of(&self, file: &File) -> u64 {
        if self.given > 0 {
            return self.given;
        }
        let Some(profile) = &self.profile else { return BLOCK_BYTES };
        let device = file.identity().device;
        let known = || self.by_device.lock();
        let found = known().get(&device).copied();
        // The map is not locked while the log callback runs.
        let bytes = found.unwrap_or_else(|| look_up(profile, file));
        known().insert(device, bytes);
        self.last.store(bytes, Ordering::Relaxed);
        bytes
    }

    /// The size for the most recent file.
    pub(super) fn last(&self) -> u64 {
        self.last.load(Ordering::Relaxed)
    }

    /// Path of the profile; empty if there is none.
    pub(super) fn profile(&self) -> String {
        self.profile.as_ref().map(|profile| profile.path.display().to_string()).unwrap_or_default()
    }
}

fn look_up(profile: &Profile, file: &File) -> u64 {
    let (path, name) = (profile.path.display(), file.name());
    match file.file_system().and_then(|system| Some((system, profile.get(system)?))) {
        Some((system, settings)) => {
            let bytes = settings.block_bytes;
            let message =
                format!("profile {path}: blocks of {bytes} bytes on file system {system}, for {name}");
            log::write(Level::Info, &message);
            bytes
        }
        None => {
            shared::warn(&format!(
                "profile {path} has no entry for the file system of {name}, so blocks have {BLOCK_BYTES} \
                 bytes; run spillway tune there"
            ));
            BLOCK_BYTES
        }
    }
}
