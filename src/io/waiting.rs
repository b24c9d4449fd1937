//! Waiting for operations: one, some, or all.
//!
//! Invariants:
//! - Exactly one wait takes an outcome. A wait that times out takes none.
//! - A wait for several operations returns when all of them have finished, even if the first has failed.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::engine::Engine;
use super::operation::{EngineState, Entry, Phase, WaitEvent, taken};
use crate::error::{Error, IoError, Result};
use crate::sys::try_vec;

impl Engine {
    /// Waits for one operation and returns its byte count or its error, once. `Timeout` leaves the operation in flight.
    pub fn wait(&self, handle: u64, timeout: Option<Duration>) -> Result<u64> {
        let mut outcome = None;
        self.wait_until(timeout, |state| {
            outcome = state.take(handle)?;
            Ok(outcome.is_none().then_some(WaitEvent::Outcome(handle)))
        })?;
        outcome.unwrap_or_else(|| Err(Error::invalid("handle", "has no outcome")))
    }

    /// Waits for all of `handles` and releases them; returns their byte counts, or the first error in the order of
    /// `handles`. `Timeout` leaves all operations as they are.
    pub fn wait_many(&self, handles: &[u64], timeout: Option<Duration>) -> Result<Vec<u64>> {
        check_distinct(handles)?;
        let (mut done, mut outcomes) = (0, try_vec::with_capacity("listing outcomes", handles.len())?);
        self.wait_until(timeout, |state| {
            while done < handles.len() {
                if matches!(state.entry(handles[done])?.phase, Phase::Pending) {
                    return Ok(Some(WaitEvent::Outcome(handles[done])));
                }
                done += 1;
            }
            // If another wait took one of them meanwhile, this wait takes none of the others.
            handles.iter().try_for_each(|handle| state.check_untaken(*handle))?;
            for handle in handles {
                outcomes.extend(state.take(*handle)?);
            }
            Ok(None)
        })?;
        collect(outcomes)
    }

    /// Waits for all operations and releases them; returns their number, or the first error. Returns 0 at once if there
    /// are none.
    pub fn wait_all(&self, timeout: Option<Duration>) -> Result<u64> {
        self.wait_quiet(timeout)?;
        let outcomes = self.shared.state.lock().take_all();
        Ok(collect(outcomes)?.len() as u64)
    }

    /// Waits until no operation is pending.
    pub(super) fn wait_quiet(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait_until(timeout, |state| Ok((state.unfinished > 0).then_some(WaitEvent::Quiet)))
    }

    /// Waits until `missing` returns no event to wait for.
    pub(super) fn wait_until(
        &self,
        timeout: Option<Duration>,
        mut missing: impl FnMut(&mut EngineState) -> Result<Option<WaitEvent>>,
    ) -> Result<()> {
        let until = timeout.and_then(|time| Instant::now().checked_add(time));
        let mut state = self.shared.state.lock();
        loop {
            let (locked, next_deadline, expired) = self.shared.expire(state);
            state = locked;
            if expired {
                self.shared.wake();
            }
            let Some(event) = missing(&mut state)? else { return Ok(()) };
            if until.is_some_and(|until| Instant::now() >= until) {
                let pending = state.unfinished;
                return Err(IoError::wait_timeout(format!("{pending} operations are still in flight")));
            }
            let nearest = [until, next_deadline].into_iter().flatten().min();
            state = self.shared.await_event(state, event, nearest);
        }
    }
}

impl EngineState {
    /// All outcomes that no wait has taken, in the order of submission.
    pub(super) fn take_all(&mut self) -> Vec<Result<u64>> {
        let is_done = |entry: &Entry| {
            matches!(entry.phase, Phase::Finished(_) | Phase::Expired { unread: Some(_), .. })
        };
        let entries = self.entries.iter().map(|(_, entry)| entry);
        let mut done: Vec<(u64, u64)> =
            entries.filter(|entry| is_done(entry)).map(|entry| (entry.number, entry.handle)).collect();
        done.sort_unstable();
        done.into_iter().filter_map(|(_, handle)| self.take(handle).ok().flatten()).collect()
    }

    /// Fails if a wait has taken the outcome.
    fn check_untaken(&mut self, handle: u64) -> Result<()> {
        match self.entry(handle)?.phase {
            Phase::Expired { unread: None, .. } => Err(taken(handle)),
            _ => Ok(()),
        }
    }
}

fn check_distinct(handles: &[u64]) -> Result<()> {
    let mut sorted = try_vec::with_capacity("copying the handles", handles.len())?;
    sorted.extend_from_slice(handles);
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::invalid("handles", format!("contain {:#x} twice", pair[0]))),
        None => Ok(()),
    }
}

/// The byte counts, or the first error with the number of further errors.
fn collect(outcomes: impl IntoIterator<Item = Result<u64>>) -> Result<Vec<u64>> {
    let (mut bytes, mut first, mut more) = (Vec::new(), None, 0);
    for outcome in outcomes {
        match outcome {
            Ok(count) => bytes.push(count),
            Err(error) if first.is_none() => first = Some(error),
            Err(_) => more += 1,
        }
    }
    match (first, more) {
        (None, _) => Ok(bytes),
        (Some(first), 0) => Err(first),
        (Some(first), more) => Err(first.context(format_args!("{more} more operations failed"))),
    }
}
