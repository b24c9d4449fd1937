//! The writer of a region.
//!
//! Invariants:
//! - A claim has the lock of the region, and no other effect: readers use the present generation. A write is a claim
//!   whose sequence is odd. An odd sequence without the lock is a write whose process ended.
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
        let torn = self.claim(region, generation)?;
        self.write_claimed(region)?;
        Ok(torn)
    }

    /// Takes the region for a later write as `generation`, which is above the present one. Until
    /// [`Arena::write_claimed`] readers use the present generation. Returns true if the region is torn. Errors: another
    /// writer is at work, or has claimed the region (`Busy`).
    pub fn claim(&self, region: u32, generation: u64) -> Result<bool> {
        self.check_process()?;
        self.check_writable()?;
        let (at, described) = self.described(region)?;
        let control = self.layout.control(at);
        let busy = || {
            let writer = self.mapping.load64(control.writer(), Ordering::Relaxed);
            Error::Busy(format!(
                "{}, region {:?}: process {writer} is writing it, or has a stage that will",
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
        let torn = self.mapping.load64(control.sequence(), Ordering::Acquire) % 2 == 1;
        mine.torn.store(torn, Ordering::Relaxed);
        if !torn {
            self.mapping.store64(control.writer(), process::id().into(), Ordering::Relaxed);
        }
        Ok(torn)
    }

    /// Begins the write of a claimed region. Readers wait from now on.
    pub fn write_claimed(&self, region: u32) -> Result<()> {
        let (at, _) = self.claimed(region)?;
        let control = self.layout.control(at);
        let sequence = self.mapping.load64(control.sequence(), Ordering::Acquire);
        let step = if sequence % 2 == 1 { 2 } else { 1 };
        self.mapping.store64(control.writer(), process::id().into(), Ordering::Relaxed);
        self.mapping.store64(control.sequence(), sequence + step, Ordering::SeqCst);
        // No byte of the region is written before the sequence is odd.
        fence(Ordering::SeqCst);
        self.writing[at].begun.store(true, Ordering::Release);
        Ok(())
    }

    /// Gives a claimed region back that was not written.
    pub fn unclaim(&self, region: u32) -> Result<()> {
        let (at, _) = self.claimed(region)?;
        self.release(at);
        Ok(())
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

    /// The region's place and its new generation, while this handle has claimed it and does not write it.
    fn claimed(&self, region: u32) -> Result<(usize, u64)> {
        self.held(region, false)
    }

    fn in_write(&self, region: u32) -> Result<(usize, u64)> {
        self.held(region, true)
    }

    fn held(&self, region: u32, begun: bool) -> Result<(usize, u64)> {
        self.check_process()?;
        let (at, described) = self.described(region)?;
        let mine = &self.writing[at];
        let generation = mine.generation.load(Ordering::Acquire);
        match generation > 0 && mine.begun.load(Ordering::Acquire) == begun {
            true => Ok((at, generation)),
            false => {
                let reason = format!("{:?} is not being written by this handle", described.name);
                Err(Error::invalid("region", reason))
            }
        }
    }

    fn settle(&self, at: usize, whole: bool) {
        let control = self.layout.control(at);
        if whole {
            let sequence = self.mapping.load64(control.sequence(), Ordering::Relaxed);
            self.mapping.store64(control.sequence(), sequence + 1, Ordering::SeqCst);
        }
        self.release(at);
        self.mapping.ring(control.bell());
    }

    fn release(&self, at: usize) {
        self.writing[at].begun.store(false, Ordering::Release);
        self.unlock(WRITER_LOCKS + at as u64);
        self.writing[at].generation.store(0, Ordering::Release);
    }

    fn unlock(&self, lock: u64) {
        if let Some(file) = self.locks.file() {
            range_lock::release(file, lock);
        }
    }
}
