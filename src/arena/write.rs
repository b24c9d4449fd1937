//! The writer of a region.
//!
//! Invariants:
//! - A reservation has the lock of the region, and no other effect: readers use the present generation. A write is a reservation
//!   whose sequence is odd. An odd sequence without the lock is a write whose process ended.
//! - The phase of a reservation changes by one compare-and-swap from the phase that the call needs: the program ends only its
//!   own writes, and a stage only those of its reservation.
//! - A write that no `end` completed leaves the region torn: the sequence stays odd until another writer has written
//!   the whole region.
//! - The generation changes only while the sequence is odd, and only grows.
#![forbid(unsafe_code)]

use std::sync::atomic::{Ordering, fence};

use super::handle::{Arena, WRITER_LOCKS};
use crate::error::{Error, Result};
use crate::sys::{fork, range_lock};

/// No reservation.
const FREE: u32 = 0;
/// A call changes the phase.
const CHANGING: u32 = 1;
/// The program writes the region.
const WRITE: u32 = 2;
/// A stage has the region, and does not write it yet.
const RESERVED: u32 = 3;
/// A stage writes the region.
const RESERVED_WRITE: u32 = 4;

impl Arena {
    /// Begins to write a region as `generation`, which is above the present one. Readers wait from now on. Returns true
    /// if the region is torn: then every byte must be written. Errors: another writer is at work (`Busy`).
    pub fn write_begin(&self, region: u32, generation: u64) -> Result<bool> {
        let (at, torn) = self.take(region, generation)?;
        self.begin(at, WRITE);
        Ok(torn)
    }

    /// Takes the region for a later write as `generation`, which is above the present one. Until
    /// [`Arena::write_reserved`] readers use the present generation. Returns true if the region is torn. Errors: another
    /// writer is at work, or has reserved the region (`Busy`).
    pub fn reserve(&self, region: u32, generation: u64) -> Result<bool> {
        let (at, torn) = self.take(region, generation)?;
        self.writing[at].phase.store(RESERVED, Ordering::Release);
        Ok(torn)
    }

    /// Takes the region, whose phase is `CHANGING` then. Returns its place, and true if it is torn.
    fn take(&self, region: u32, generation: u64) -> Result<(usize, bool)> {
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
        if mine.phase.compare_exchange(FREE, CHANGING, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return Err(busy());
        }
        let refused = |error: Error| {
            mine.phase.store(FREE, Ordering::Release);
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
        mine.generation.store(generation, Ordering::Relaxed);
        if !torn {
            self.mapping.store64(control.writer(), fork::id().into(), Ordering::Relaxed);
        }
        Ok((at, torn))
    }

    /// Begins the write of a reserved region. Readers wait from now on.
    pub fn write_reserved(&self, region: u32) -> Result<()> {
        let at = self.change(region, RESERVED)?;
        self.begin(at, RESERVED_WRITE);
        Ok(())
    }

    /// Gives a reserved region back that was not written.
    pub fn unreserve(&self, region: u32) -> Result<()> {
        let at = self.change(region, RESERVED)?;
        self.release(at);
        Ok(())
    }

    /// Ends a write of [`Arena::write_begin`]: the region holds the whole of its new generation.
    pub fn write_end(&self, region: u32) -> Result<()> {
        self.end(self.change(region, WRITE)?);
        Ok(())
    }

    /// Ends a write of [`Arena::write_begin`] without a new generation. `restored`: every byte is again as it was before
    /// the write, which stays the present generation. Otherwise, or if the region was torn before, it is torn.
    pub fn write_abort(&self, region: u32, restored: bool) -> Result<()> {
        self.abort(self.change(region, WRITE)?, restored);
        Ok(())
    }

    /// As [`Arena::write_end`], for a write of [`Arena::write_reserved`].
    pub fn reserved_end(&self, region: u32) -> Result<()> {
        self.end(self.change(region, RESERVED_WRITE)?);
        Ok(())
    }

    /// As [`Arena::write_abort`], for a write of [`Arena::write_reserved`].
    pub fn reserved_abort(&self, region: u32, restored: bool) -> Result<()> {
        self.abort(self.change(region, RESERVED_WRITE)?, restored);
        Ok(())
    }

    /// True if this handle writes the region, or has reserved it.
    pub(super) fn writes(&self, at: usize) -> bool {
        self.writing[at].phase.load(Ordering::Acquire) != FREE
    }

    /// Begins to change the phase of a region from `needed`; returns the place of the region.
    fn change(&self, region: u32, needed: u32) -> Result<usize> {
        let (at, described) = self.described(region)?;
        let phase = &self.writing[at].phase;
        match phase.compare_exchange(needed, CHANGING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(at),
            Err(found) => {
                let why = match found {
                    RESERVED | RESERVED_WRITE => "belongs to a stage, which ends its write by itself",
                    _ => "is not being written by this handle",
                };
                Err(Error::invalid("region", format!("{:?} {why}", described.name)))
            }
        }
    }

    fn begin(&self, at: usize, phase: u32) {
        let control = self.layout.control(at);
        let sequence = self.mapping.load64(control.sequence(), Ordering::Acquire);
        let step = if sequence % 2 == 1 { 2 } else { 1 };
        self.mapping.store64(control.writer(), fork::id().into(), Ordering::Relaxed);
        self.mapping.store64(control.sequence(), sequence + step, Ordering::SeqCst);
        // No byte of the region is written before the sequence is odd.
        fence(Ordering::SeqCst);
        self.writing[at].phase.store(phase, Ordering::Release);
    }

    fn end(&self, at: usize) {
        let generation = self.writing[at].generation.load(Ordering::Relaxed);
        self.mapping.store64(self.layout.control(at).generation(), generation, Ordering::Release);
        self.finish(at, true);
    }

    fn abort(&self, at: usize, restored: bool) {
        self.finish(at, restored && !self.writing[at].torn.load(Ordering::Relaxed));
    }

    fn finish(&self, at: usize, whole: bool) {
        let control = self.layout.control(at);
        if whole {
            let sequence = self.mapping.load64(control.sequence(), Ordering::Relaxed);
            self.mapping.store64(control.sequence(), sequence + 1, Ordering::SeqCst);
        }
        self.release(at);
        self.mapping.ring(control.bell());
    }

    fn release(&self, at: usize) {
        self.unlock(WRITER_LOCKS + at as u64);
        self.writing[at].phase.store(FREE, Ordering::Release);
    }

    fn unlock(&self, lock: u64) {
        if let Some(file) = self.locks.file() {
            range_lock::release(file, lock);
        }
    }
}
