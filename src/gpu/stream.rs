//! Streams and events: Spillway's own, and the framework's, which are passed as integers.
//!
//! Spillway's streams do not wait for the legacy default stream. Only events order them against the framework's work.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream, CUstream_flags};

use super::device::Device;
use super::table::code;
use super::waiters::EventRecord;
use crate::error::{Error, Result};

const STREAM_NON_BLOCKING: c_uint = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
/// A lower number is a higher priority. The range of every device that supports priorities includes -1.
const URGENT: c_int = -1;
const EVENT_BLOCKING_SYNC: c_uint = CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint;
const EVENT_DISABLE_TIMING: c_uint = CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;

/// An event of the framework: `event.cuda_event` in torch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForeignEvent(usize);

impl ForeignEvent {
    /// # Safety
    /// `handle` is 0, or an event of the device's primary context that outlives the calls it is passed to.
    pub unsafe fn new(handle: u64, argument: &'static str) -> Result<ForeignEvent> {
        match handle as usize {
            0 => Err(Error::invalid(
                argument,
                "is 0; record the event first (torch creates it at the first record())",
            )),
            handle => Ok(ForeignEvent(handle)),
        }
    }
}

/// A stream of the framework: `stream.cuda_stream` in torch; 0 is the legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForeignStream(usize);

impl ForeignStream {
    /// # Safety
    /// `handle` is 0, or a stream of the device's primary context that outlives the calls it is passed to.
    pub unsafe fn new(handle: u64) -> ForeignStream {
        ForeignStream(handle as usize)
    }

    /// Makes later work on the stream wait for `event`. Errors: the stream is being captured into a graph.
    pub fn wait(self, event: &GpuEvent) -> Result<()> {
        self.refuse_capture(&event.device)?;
        wait_event(&event.device, self.0, event.handle)
    }

    /// Records `event` behind all work queued on the stream. Errors: the stream is being captured into a graph.
    pub fn record(self, event: &GpuEvent) -> Result<()> {
        self.refuse_capture(&event.device)?;
        event.record_in(self.0)
    }

    /// Refuses a stream in capture: the graph would replay Spillway's event, but not Spillway's work.
    fn refuse_capture(self, device: &Device) -> Result<()> {
        match is_capturing(device, self.0)? {
            false => Ok(()),
            true => {
                Err(Error::invalid("stream", "is being captured into a CUDA graph, which is not supported"))
            }
        }
    }
}

/// A stream of Spillway.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    handle: usize,
}

impl Stream {
    /// A stream of the default priority.
    pub fn new(device: &Arc<Device>) -> Result<Stream> {
        Stream::with_priority(device, 0)
    }

    /// A stream whose kernels run before those of other streams.
    pub fn urgent(device: &Arc<Device>) -> Result<Stream> {
        Stream::with_priority(device, URGENT)
    }

    fn with_priority(device: &Arc<Device>, priority: c_int) -> Result<Stream> {
        let _current = device.enter()?;
        let mut handle: CUstream = std::ptr::null_mut();
        // SAFETY: the context is current; the pointer is valid. The driver clamps the priority to its range.
        let made = unsafe {
            (device.table().cuStreamCreateWithPriority)(&raw mut handle, STREAM_NON_BLOCKING, priority)
        };
        device.check(made, || "creating a stream".to_string())?;
        Ok(Stream { device: Arc::clone(device), handle: handle as usize })
    }

    /// The stream's device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn handle(&self) -> CUstream {
        self.handle as CUstream
    }

    /// Makes later work wait for `event`. An event that was never recorded does not block.
    pub fn wait(&self, event: &GpuEvent) -> Result<()> {
        wait_event(&self.device, self.handle, event.handle)
    }

    /// Makes later work wait for an event of the framework. Errors: the event was recorded during a graph capture. A
    /// stream that waits for such an event joins the capture and runs no work until the capture ends.
    pub fn wait_foreign(&self, event: ForeignEvent) -> Result<()> {
        wait_event(&self.device, self.handle, event.0)?;
        match is_capturing(&self.device, self.handle)? {
            false => Ok(()),
            true => {
                let reason = "was recorded in a stream that is being captured into a CUDA graph; record it \
                              outside the capture";
                Err(Error::invalid("event", reason))
            }
        }
    }

    /// Records `event` behind all queued work.
    pub fn record(&self, event: &GpuEvent) -> Result<()> {
        event.record_in(self.handle)
    }

    /// Blocks the calling thread until the work queued so far is done. Errors: `Timeout` after the device's patience; the
    /// device may use the memory of the work then.
    pub fn finish(&self) -> Result<()> {
        let there = Arc::new(GpuEvent::new(&self.device)?);
        self.record(&there)?;
        there.wait()
    }

    /// Blocks the calling thread until all queued work is done.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: a live stream of this object.
        let outcome = unsafe { (self.device.table().cuStreamSynchronize)(self.handle()) };
        self.device.check(outcome, || "waiting for a stream".to_string())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: a live stream of this object; the driver lets queued work finish first.
            unsafe { (self.device.table().cuStreamDestroy_v2)(self.handle()) };
        }
    }
}

/// An event of Spillway.
#[derive(Debug)]
pub struct GpuEvent {
    device: Arc<Device>,
    handle: usize,
    /// Number of records so far.
    records: AtomicU64,
}

impl GpuEvent {
    /// An event for ordering, without a timestamp.
    pub fn new(device: &Arc<Device>) -> Result<GpuEvent> {
        GpuEvent::with_flags(device, EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC)
    }

    /// An event with a timestamp.
    pub fn timing(device: &Arc<Device>) -> Result<GpuEvent> {
        GpuEvent::with_flags(device, EVENT_BLOCKING_SYNC)
    }

    fn with_flags(device: &Arc<Device>, flags: c_uint) -> Result<GpuEvent> {
        let _current = device.enter()?;
        let mut handle: CUevent = std::ptr::null_mut();
        // SAFETY: the context is current; the pointer is valid.
        let made = unsafe { (device.table().cuEventCreate)(&raw mut handle, flags) };
        device.check(made, || "creating an event".to_string())?;
        Ok(GpuEvent { device: Arc::clone(device), handle: handle as usize, records: AtomicU64::new(0) })
    }

    /// The event as a `CUevent`; valid until this object is dropped.
    #[cfg(test)]
    pub fn address(&self) -> u64 {
        self.handle as u64
    }

    /// True if the work before the last record is done, or the event was never recorded.
    pub fn done(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        // SAFETY: a live event of this object.
        match unsafe { (self.device.table().cuEventQuery)(self.handle as CUevent) } {
            code::NOT_READY => Ok(false),
            outcome => self.device.check(outcome, || "querying an event".to_string()).map(|()| true),
        }
    }

    /// Blocks the calling thread until the work before the last record is done.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: a live event of this object.
        let outcome = unsafe { (self.device.table().cuEventSynchronize)(self.handle as CUevent) };
        self.device.check(outcome, || "waiting for an event".to_string())
    }

    /// As [`GpuEvent::synchronize`], at most until `until`. False if that time has come.
    pub fn wait_until(self: &Arc<GpuEvent>, until: Option<Instant>) -> Result<bool> {
        match until {
            None => self.synchronize().map(|()| true),
            Some(_) if self.done()? => Ok(true),
            Some(until) if until <= Instant::now() => Ok(false),
            Some(until) => {
                let event = Arc::clone(self);
                self.device.waiters().wait(self.last_record(), move || event.synchronize(), until)
            }
        }
    }

    /// As [`GpuEvent::synchronize`]. Errors: `Timeout` after the device's patience; the device may use the memory of the
    /// work then.
    pub fn wait(self: &Arc<GpuEvent>) -> Result<()> {
        let reached = self.wait_until(Some(self.device.patience()))?;
        self.device.waited(reached);
        match reached {
            true => Ok(()),
            false => Err(self.device.hangs()),
        }
    }

    /// The event and the number of its last record.
    fn last_record(&self) -> EventRecord {
        (self.handle, self.records.load(Ordering::Acquire))
    }

    fn record_in(&self, stream: usize) -> Result<()> {
        self.records.fetch_add(1, Ordering::AcqRel);
        record(&self.device, stream, self.handle)
    }

    /// Seconds from `self` to `later`. Both are timing events, and both are done.
    pub fn seconds_to(&self, later: &GpuEvent) -> Result<f64> {
        let _current = self.device.enter()?;
        let mut milliseconds = 0.0;
        let (from, to) = (self.handle as CUevent, later.handle as CUevent);
        // SAFETY: both events are live; the pointer is valid.
        let outcome = unsafe { (self.device.table().cuEventElapsedTime)(&raw mut milliseconds, from, to) };
        self.device.check(outcome, || "reading the time between events".to_string())?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for GpuEvent {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: an event of this object; the driver keeps what waiting streams need of it.
            unsafe { (self.device.table().cuEventDestroy_v2)(self.handle as CUevent) };
        }
    }
}

fn is_capturing(device: &Device, stream: usize) -> Result<bool> {
    let _current = device.enter()?;
    let mut capturing = 0;
    // SAFETY: a live stream: of Spillway, or by the promise of `ForeignStream::new`. The pointer is valid.
    let asked = unsafe { (device.table().cuStreamIsCapturing)(stream as CUstream, &raw mut capturing) };
    device.check(asked, || "querying whether a stream is being captured".to_string())?;
    Ok(capturing != 0)
}

fn wait_event(device: &Device, stream: usize, event: usize) -> Result<()> {
    let _current = device.enter()?;
    // SAFETY: both are live: objects of Spillway, or by the promises of `ForeignStream::new` and `ForeignEvent::new`.
    let outcome = unsafe { (device.table().cuStreamWaitEvent)(stream as CUstream, event as CUevent, 0) };
    device.check(outcome, || "making a stream wait for an event".to_string())
}

fn record(device: &Device, stream: usize, event: usize) -> Result<()> {
    let _current = device.enter()?;
    // SAFETY: both are live: objects of Spillway, or by the promise of `ForeignStream::new`.
    let outcome = unsafe { (device.table().cuEventRecord)(event as CUevent, stream as CUstream) };
    device.check(outcome, || "recording an event".to_string())
}
