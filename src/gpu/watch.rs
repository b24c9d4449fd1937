//! Events and streams of the framework, as a thread of the host waits for them without sleeping in the driver.
//!
//! What is watched is a mark of our own behind the framework's: the framework may record its event again, or destroy it, as
//! soon as the call returned.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::Device;
use super::stream::{Event, ForeignEvent, ForeignStream, Stream};
use crate::error::Result;
use crate::sys::event::{Question, Standing};

/// Makes marks on one device.
#[derive(Debug)]
pub struct Watches {
    device: Arc<Device>,
    /// Streams with nothing queued: a mark that waits has one to itself, so that none holds another back.
    idle: Mutex<Vec<Lane>>,
}

#[derive(Debug)]
struct Lane {
    stream: Stream,
    mark: Event,
}

/// One thing that is waited for.
#[derive(Debug)]
pub struct Watch {
    watches: Arc<Watches>,
    /// There until the watch goes.
    lane: Option<Lane>,
}

impl Watches {
    /// Nothing is watched yet.
    pub fn new(device: &Arc<Device>) -> Watches {
        Watches { device: Arc::clone(device), idle: Mutex::default() }
    }

    /// The event as it was last recorded.
    pub fn event(self: &Arc<Self>, event: ForeignEvent) -> Result<Watch> {
        let lane = self.lane()?;
        lane.stream.wait_foreign(event)?;
        lane.stream.record(&lane.mark)?;
        Ok(Watch { watches: Arc::clone(self), lane: Some(lane) })
    }

    /// All that is queued on the stream.
    pub fn stream(self: &Arc<Self>, stream: ForeignStream) -> Result<Watch> {
        let lane = self.lane()?;
        stream.record(&lane.mark)?;
        Ok(Watch { watches: Arc::clone(self), lane: Some(lane) })
    }

    fn lane(&self) -> Result<Lane> {
        // Before the lock, which another thread may have held when a child was forked.
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
