//! Lets a host thread poll the framework's events and streams, instead of blocking in the driver.
//!
//! Each watch polls an event of Spillway, the mark, that is ordered behind the framework's event. The framework may
//! record its own event again, or destroy it, as soon as the call has returned.

use std::sync::Arc;

use super::device::Device;
use super::stream::{ForeignEvent, ForeignStream, GpuEvent, Stream};
use crate::error::Result;
use crate::sys::event::{PollSource, Status};
use crate::sys::sync::{Guard, Lock};

/// Creates watches on one device.
#[derive(Debug)]
pub struct Watches {
    device: Arc<Device>,
    /// Streams with nothing queued. Each pending watch has a stream to itself, so that watches do not delay each other.
    idle: Lock<Vec<MarkedStream>>,
}

#[derive(Debug)]
struct MarkedStream {
    stream: Stream,
    mark: GpuEvent,
}

/// One awaited event or stream position.
#[derive(Debug)]
pub struct Watch {
    watches: Arc<Watches>,
    /// `Some` until the watch is dropped.
    marked: Option<MarkedStream>,
}

impl Watches {
    /// No watches yet.
    pub fn new(device: &Arc<Device>) -> Watches {
        Watches { device: Arc::clone(device), idle: Lock::default() }
    }

    /// Watches the last record of `event`.
    pub fn event(self: &Arc<Self>, event: ForeignEvent) -> Result<Watch> {
        let marked = self.marked_stream()?;
        marked.stream.wait_foreign(event)?;
        marked.stream.record(&marked.mark)?;
        Ok(Watch { watches: Arc::clone(self), marked: Some(marked) })
    }

    /// Watches the work queued on `stream` so far.
    pub fn stream(self: &Arc<Self>, stream: ForeignStream) -> Result<Watch> {
        let marked = self.marked_stream()?;
        stream.record(&marked.mark)?;
        Ok(Watch { watches: Arc::clone(self), marked: Some(marked) })
    }

    fn marked_stream(&self) -> Result<MarkedStream> {
        // Checks for a forked child before locking: another thread of the parent may have held the lock during the
        // fork.
        drop(self.device.enter()?);
        let idle = self.idle().pop();
        match idle {
            Some(marked) => Ok(marked),
            None => {
                Ok(MarkedStream { stream: Stream::new(&self.device)?, mark: GpuEvent::new(&self.device)? })
            }
        }
    }

    fn idle(&self) -> Guard<'_, Vec<MarkedStream>> {
        self.idle.lock()
    }
}

impl PollSource for Watch {
    fn status(&self) -> Status {
        match self.marked.as_ref().map(|marked| marked.mark.done()) {
            Some(Ok(false)) => Status::Pending,
            Some(Err(_)) => Status::Broken("the GPU reported an error"),
            Some(Ok(true)) | None => Status::Ready,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(marked) = self.marked.take()
            && self.watches.device.is_own()
            && marked.mark.done().unwrap_or(false)
        {
            self.watches.idle().push(marked);
        }
    }
}
