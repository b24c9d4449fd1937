//! The readers of a region: the values of one whole step, or an error.
//!
//! Invariants:
//! - A read is valid if the sequence was even before it and is the same after it.
//! - A reader sleeps in slices, and looks at the writer's lock between them. A writer that was killed is an error after
//!   one slice at most; a writer that is stopped is waited for until the timeout.
#![forbid(unsafe_code)]

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::handle::{Arena, WRITER_LOCKS};
use crate::error::{ArenaKind, Error, Result};
use crate::sys::sync::deadline_after;

/// Longest sleep between two looks at the writer's lock.
pub(super) const SLICE: Duration = Duration::from_millis(20);

/// A region at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionVersion {
    /// The step whose values the region held.
    pub generation: u64,
    /// Sequence of the region, for the validation.
    pub sequence: u64,
}

/// The end of a wait; `None` without limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    began: Instant,
    end: Option<Instant>,
}

impl Deadline {
    pub fn after(timeout: Option<Duration>) -> Deadline {
        Deadline { began: Instant::now(), end: deadline_after(timeout) }
    }

    /// Time to sleep until the next look; the error `late` after the end.
    pub fn slice(self, late: impl FnOnce() -> String) -> Result<Duration> {
        let left = self.end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
        match left {
            Duration::ZERO => {
                let waited = self.began.elapsed().as_secs_f64();
                Err(Error::Timeout(format!("timed out after {waited:.3} s; {}", late())))
            }
            left => Ok(left.min(SLICE)),
        }
    }
}

impl Arena {
    /// Waits until no writer is at work and the region has at least generation `at_least`. Data that is read after
    /// this call is valid only if [`Arena::read_validate`] accepts the snapshot.
    pub fn read_begin(&self, region: u32, at_least: u64, timeout: Option<Duration>) -> Result<RegionVersion> {
        self.stable(region, at_least, Deadline::after(timeout))
    }

    /// Returns Ok if the region was not written since the snapshot.
    pub fn read_validate(&self, region: u32, seen: RegionVersion) -> Result<()> {
        let (at, described) = self.described(region)?;
        // Reads of data before this call are ordered before the read of the sequence.
        fence(Ordering::SeqCst);
        let sequence = self.mapping.load64(self.layout.control(at).sequence(), Ordering::SeqCst);
        match sequence == seen.sequence && sequence.is_multiple_of(2) {
            true => Ok(()),
            false => {
                let part = format!(", region {:?}", described.name);
                Err(self.error(ArenaKind::Changed, &part, "discard what was read, and read again"))
            }
        }
    }

    /// Copies bytes of a region, all of one generation, and returns that generation: at least `at_least`. After an
    /// error `to` has unspecified bytes.
    pub fn copy(
        &self,
        region: u32,
        at_least: u64,
        offset: u64,
        to: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<u64> {
        let (_, described) = self.described(region)?;
        let fits = usize::try_from(offset)
            .ok()
            .filter(|offset| *offset <= described.bytes && to.len() <= described.bytes - *offset);
        let Some(offset) = fits else {
            let (len, all) = (to.len(), described.bytes);
            return Err(Error::invalid(
                "bytes",
                format!("{offset}+{len} is not inside a region of {all} bytes"),
            ));
        };
        let deadline = Deadline::after(timeout);
        loop {
            let seen = self.stable(region, at_least, deadline)?;
            self.mapping.copy_out(described.offset + offset, to);
            match self.read_validate(region, seen) {
                Ok(()) => return Ok(seen.generation),
                // A new write: `stable` waits for its end, or times out.
                Err(error) if error.arena_kind() == Some(ArenaKind::Changed) => {
                    deadline.slice(|| format!("region {:?} is written again and again", described.name))?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The error for a region that is torn.
    pub fn torn_error(&self, region: u32, why: &str) -> Result<Error> {
        let (_, described) = self.described(region)?;
        let part = format!(", region {:?}", described.name);
        Ok(self.error(ArenaKind::Torn, &part, format!("{why}; write the whole region again")))
    }

    fn stable(&self, region: u32, at_least: u64, deadline: Deadline) -> Result<RegionVersion> {
        let (at, described) = self.described(region)?;
        let control = self.layout.control(at);
        loop {
            let bell = self.mapping.load32(control.bell(), Ordering::Acquire);
            let sequence = self.mapping.load64(control.sequence(), Ordering::SeqCst);
            let generation = self.mapping.load64(control.generation(), Ordering::Acquire);
            fence(Ordering::SeqCst);
            let same = || self.mapping.load64(control.sequence(), Ordering::SeqCst) == sequence;
            if sequence.is_multiple_of(2) {
                if !same() {
                    continue;
                }
                if generation >= at_least {
                    return Ok(RegionVersion { generation, sequence });
                }
            } else if !self.writes(at) && !self.is_locked(WRITER_LOCKS + u64::from(region))? && same() {
                let writer = self.mapping.load64(control.writer(), Ordering::Relaxed);
                let why = format!("process {writer} was to replace generation {generation}");
                return Err(self.torn_error(region, &why)?);
            }
            let late = || match sequence % 2 {
                0 => format!("region {:?} has generation {generation}, not {at_least}", described.name),
                _ => {
                    let writer = self.mapping.load64(control.writer(), Ordering::Relaxed);
                    format!("process {writer} is writing region {:?}", described.name)
                }
            };
            self.mapping.wait(control.bell(), bell, deadline.slice(late)?);
        }
    }
}
