//! Points in the framework's work, at the time of a call.
//!
//! Invariants:
//! - A mark is an event of Spillway behind the framework's event or stream. The framework may record its own event again,
//!   or destroy it, as soon as the call has returned.
//! - The framework's streams get no work but the marks. Marks of events share one stream, unless calls overlap.
//! - No lock is held during a call of the driver.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::device::Device;
use super::stream::{ForeignEvent, GpuEvent, Stream};
use crate::error::Result;
use crate::sys::sync::Lock;

/// Makes marks behind events of the framework.
#[derive(Debug)]
pub(super) struct Marks {
    device: Arc<Device>,
    /// Streams that no call uses.
    streams: Lock<Vec<Stream>>,
}

impl Marks {
    pub(super) fn new(device: &Arc<Device>) -> Marks {
        Marks { device: Arc::clone(device), streams: Lock::default() }
    }

    /// Records `mark` behind the last record of `event`. Errors: it was recorded during a graph capture.
    pub(super) fn behind(&self, event: ForeignEvent, mark: &GpuEvent) -> Result<()> {
        let idle = self.streams.lock().pop();
        let stream = idle.map_or_else(|| Stream::new(&self.device), Ok)?;
        // After an error the stream may take part in a capture, and is not used again.
        stream.wait_foreign(event)?;
        stream.record(mark)?;
        self.streams.lock().push(stream);
        Ok(())
    }
}
