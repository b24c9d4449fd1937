//! The writer of a region.
//!
//! Invariants:
//! - The sequence is odd from the begin of a write to its end. The writer holds the lock of the region for longer: an
//!   odd sequence without that lock is a write whose process ended.
//! - A write that no `end` completed leaves the region torn: the sequence stays odd until another writer has written
//!   the whole region.
//! - The generation changes only while the sequence is odd, and only grows.
#![forbid(unsafe_code)]

use std::sync::atomic::{Ordering, fence};

use super::handle::{Arena, WRITER_LOCKS};
use crate::error::{Error, Result};
use crate::sys::{process, range_lock};

impl Arena {
    /// Begins to write a region as `generation`, which is above the present one. Readers wait from now on. Returns true
    /// if the region is torn: then every byte must be written. Errors: another writer is at work (`Busy`).
    pub fn write_begin(&self, region: u32, generation: u64) -> Result<bool> {
        self.check_process()?;
        self.check_writable()?;
        let (at, described) = self.described(region)?;
        let control = self.layout.control(at);
        let busy = || {
            let writer = self.mapping.load64(control.writer(), Ordering::Relaxed);
            Error::Busy(format!(
                "{}, region {:?}: process {writer} is writing it",
                self.title, described.name
            ))
        };
        if generation == 0 {
            return Err(Error::invalid("generation", "is 0; generations are counted from 1"));
        }
        let mine = &self.writing[at];
        if mine.generation.compare_exchange(0, generation, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return Err(busy());
        }
        let refused = |error: Error| {
            mine.generation.store(0, Ordering::Release);
            error
        };
        let lock = WRITER_LOCKS + u64::from(region);
        if !self.take_lock(lock).map_err(refused)? {
            return Err(refused(busy()));
        }
        let present = self.mapping.load64(control.generation(), Ordering::Acquire);
        if generation <= present {
            self.unlock(lock);
            let reason = format!("is {generation}, but region {:?} has generation {present}", described.name);
            return Err(refused(Error::invalid("generation", reason)));
        }
        let sequence = self.mapping.load64(control.sequence(), Ordering::Acquire);
        let torn = sequence % 2 == 1;
        mine.torn.store(torn, Ordering::Relaxed);
        self.mapping.store64(control.writer(), process::id().into(), Ordering::Relaxed);
        self.mapping.store64(control.sequence(), sequence + if torn { 2 } else { 1 }, Ordering::SeqCst);
        // No byte of the region is written before the sequence is odd.
        fence(Ordering::SeqCst);
        Ok(torn)
    }

    /// Ends a write: the region holds the whole of its new generation.
    pub fn write_end(&self, region: u32) -> Result<()> {
        let (at, generation) = self.in_write(region)?;
        let control = self.layout.control(at);
        self.mapping.store64(control.generation(), generation, Ordering::Release);
        self.settle(at, true);
        Ok(())
    }

    /// Ends a write without a new generation. `restored`: every byte is again as it was before the write, which stays
    /// the present generation. Otherwise, or if the region was torn before, it is torn.
    pub fn write_abort(&self, region: u32, restored: bool) -> Result<()> {
        let (at, _) = self.in_write(region)?;
        self.settle(at, restored && !self.writing[at].torn.load(Ordering::Relaxed));
        Ok(())
    }

    /// True if this handle writes the region.
    pub(super) fn writes(&self, at: usize) -> bool {
        self.writing[at].generation.load(Ordering::Acquire) != 0
    }

    fn in_write(&self, region: u32) -> Result<(usize, u64)> {
        self.check_process()?;
        let (at, described) = self.described(region)?;
        match self.writing[at].generation.load(Ordering::Acquire) {
            0 => Err(Error::invalid(
                "region",
                format!("{:?} is not being written by this handle", described.name),
            )),
            generation => Ok((at, generation)),
        }
    }

    fn settle(&self, at: usize, whole: bool) {
        let control = self.layout.control(at);
        if whole {
            let sequence = self.mapping.load64(control.sequence(), Ordering::Relaxed);
            self.mapping.store64(control.sequence(), sequence + 1, Ordering::SeqCst);
        }
        self.unlock(WRITER_LOCKS + at as u64);
        self.writing[at].generation.store(0, Ordering::Release);
        self.mapping.ring(control.bell());
    }

    fn unlock(&self, lock: u64) {
        if let Some(file) = self.locks.file() {
            range_lock::release(file, lock);
        }
    }
}
