//! Lets a host thread poll the framework's events and streams, instead of blocking in the driver.
//!
//! Each watch polls an event of Spillway, the mark, that is ordered behind the framework's event. The framework may
//! record its own event again, or destroy it, as soon as the call has returned.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::Device;
use super::stream::{Event, ForeignEvent, ForeignStream, Stream};
use crate::error::Result;
use crate::sys::event::{Question, Standing};

/// Creates watches on one device.
#[derive(Debug)]
pub struct Watches {
    device: Arc<Device>,
    /// Streams with nothing queued. Each pending watch has a stream to itself, so that watches do not delay each other.
    idle: Mutex<Vec<Lane>>,
}

#[derive(Debug)]
struct Lane {
    stream: Stream,
    mark: Event,
}

/// One awaited event or stream position.
#[derive(Debug)]
pub struct Watch {
    watches: Arc<Watches>,
    /// `Some` until the watch is dropped.
    lane: Option<Lane>,
}

impl Watches {
    /// No watches yet.
    pub fn new(device: &Arc<Device>) -> Watches {
        Watches { device: Arc::clone(device), idle: Mutex::default() }
    }

    /// Watches the last record of `event`.
    pub fn event(self: &Arc<Self>, event: ForeignEvent) -> Result<Watch> {
        let lane = self.lane()?;
        lane.stream.wait_foreign(event)?;
        lane.stream.record(&lane.mark)?;
        Ok(Watch { watches: Arc::clone(self), lane: Some(lane) })
    }

    /// Watches the work queued on `stream` so far.
    pub fn stream(self: &Arc<Self>, stream: ForeignStream) -> Result<Watch> {
        let lane = self.lane()?;
        stream.record(&lane.mark)?;
        Ok(Watch { watches: Arc::clone(self), lane: Some(lane) })
    }

    fn lane(&self) -> Result<Lane> {
        // Checks for a forked child before locking: another thread of the parent may have held the lock during the
        // fork.
        drop(self.device.enter()?);
        let idle = self.idle().pop();
        match idle {
            Some(lane) => Ok(lane),
            None => Ok(Lane { stream: Stream::new(&self.device)?, mark: Event::new(&self.device)? }),
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Question for Watch {
    fn standing(&self) -> Standing {
        match self.lane.as_ref().map(|lane| lane.mark.done()) {
            Some(Ok(false)) => Standing::Pending,
            Some(Err(_)) => Standing::Broken("the GPU reports an error"),
            Some(Ok(true)) | None => Standing::Ready,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take()
            && self.watches.device.is_own()
            && lane.mark.done().unwrap_or(false)
        {
            self.watches.idle().push(lane);
        }
    }
}
