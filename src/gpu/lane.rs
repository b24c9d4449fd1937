//! One direction of copies: its streams, the buffers between them, and the thread that gives its copies to the driver.
//!
//! A copy is split into chunks. If the host type is f32 and the device type has 16 bits, the GPU converts: a cast stream
//! and a copy stream exchange chunks through two buffers and so overlap. Between equal types the bytes are copied
//! unchanged.
//!
//! Invariants:
//! - A chunk's buffer is overwritten only after the event of its last use.
//! - The thread alone uses a lane, and holds no lock while it is in the driver. Only it waits: for the end of a
//!   registration, for space in the driver's queues, and for space in the window.
//! - About [`DEPTH`] operations of a direction, at most, are in the driver's queues. They hold about 1,000, and past that
//!   the driver blocks whoever launches, the framework included.
//! - Chunks of a copy that failed are over when the failure is known.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::copy::{Copy, Direction};
use super::device::Device;
use super::kernels::{DeviceFloats, Kernels};
use super::memory::{DeviceMemory, HostSpan};
use super::stream::{GpuEvent, Stream};
use super::tickets::{Request, Running, Tickets};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

const BUFFERS: usize = 2;
/// Operations of a direction in the driver's queues.
pub(super) const DEPTH: usize = 256;
/// Operations between two fences: space is made in steps of this size.
const STEP: usize = 64;

/// The streams of one direction.
#[derive(Debug)]
pub(super) struct Lane {
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    direction: Direction,
    chunk_elements: u64,
    copies: Stream,
    casts: Stream,
    /// Created when the first copy needs them.
    buffers: Vec<Buffer>,
    next: usize,
    window: Window,
}

#[derive(Debug)]
struct Buffer {
    memory: DeviceMemory,
    full: GpuEvent,
    free: GpuEvent,
}

/// The operations of a lane that may not be over.
#[derive(Debug, Default)]
struct Window {
    /// Events behind operations, and how many lie between them and the event before.
    fences: VecDeque<(GpuEvent, usize)>,
    /// Fences that may be recorded again.
    spare: Vec<GpuEvent>,
    /// Operations in front of the fences and behind the last one.
    all: usize,
    /// Operations behind the last fence.
    since: usize,
    /// Those behind the last fence end with the stream of casts.
    ends_in_casts: bool,
}

impl Lane {
    pub(super) fn new(
        device: &Arc<Device>,
        kernels: &Arc<Kernels>,
        direction: Direction,
        chunk_elements: u64,
    ) -> Result<Lane> {
        Ok(Lane {
            device: Arc::clone(device),
            kernels: Arc::clone(kernels),
            direction,
            chunk_elements,
            copies: Stream::new(device)?,
            // A cast is short, and a copy waits for it: it gets priority over the model's kernels.
            casts: Stream::urgent(device)?,
            buffers: Vec::new(),
            next: 0,
            window: Window::default(),
        })
    }

    /// The thread: gives the copies of a queue to the driver until the queue is closed and empty.
    pub(super) fn serve(&mut self, tickets: &Tickets) {
        while let Some((ticket, request)) = tickets.next(self.direction) {
            tickets.forget_done(self.direction.streams());
            let last = request.copy.last_stream();
            let given = catch_unwind(AssertUnwindSafe(|| self.give(&request)));
            let given = given.unwrap_or_else(|panic| Err(Error::of_panic(&*panic)));
            let Request { copy, lease, .. } = request;
            // Whoever knows that the copy is over may expect that its memory is let go.
            drop(copy);
            let running = given.map(|(done, host)| Running { done, _host: host, _lease: lease });
            tickets.gave(ticket, last, running);
        }
    }

    /// Gives a copy to the driver. Returns the event of its end, and its memory.
    fn give(&mut self, request: &Request) -> Result<(Arc<GpuEvent>, HostSpan)> {
        let host = request.copy.host.page_lock()?;
        let done = match &request.timed {
            Some([_, done]) => Arc::clone(done),
            None => Arc::new(GpuEvent::new(&self.device)?),
        };
        if let Err(error) = self.enqueue(request, &host, &done) {
            // Chunks that are queued already must not access the caller's memory after the failure is known.
            let _ = (self.casts.synchronize(), self.copies.synchronize());
            return Err(error);
        }
        Ok((done, host))
    }

    fn enqueue(&mut self, request: &Request, host: &HostSpan, done: &GpuEvent) -> Result<()> {
        let Request { copy, mark, timed, .. } = request;
        let casts = copy.casts();
        // A wait and two records.
        self.make_room(3, copy.ends_in_casts())?;
        // Parameters must not be overwritten before the mark, but the host may be read earlier: an upload with a cast
        // first fills a buffer of Spillway, and only the cast writes to the framework's memory.
        let first = if casts { &self.casts } else { &self.copies };
        mark.as_ref().map_or(Ok(()), |mark| first.wait(mark))?;
        if let Some([begun, _]) = timed {
            let first = if casts && copy.direction == Direction::D2h { &self.casts } else { &self.copies };
            first.record(begun)?;
        }
        if casts {
            self.cast_chunks(copy, host)?
        } else {
            self.copy_chunks(copy, host)?
        }
        if copy.ends_in_casts() { self.casts.record(done) } else { self.copies.record(done) }
    }

    /// Enqueues the chunks of a copy between equal types.
    fn copy_chunks(&mut self, copy: &Copy, host: &HostSpan) -> Result<()> {
        let size = copy.host_dtype.size();
        let step = self.chunk_elements * (Dtype::F32.size() / size) as u64;
        for (from, n) in chunks(copy.device.len(), step) {
            self.make_room(1, false)?;
            let device = copy.device.part(from, n).span();
            let host = host.part(from as usize * size, n as usize * size);
            match copy.direction {
                Direction::D2h => self.copies.download(device, &host)?,
                Direction::H2d => self.copies.upload(&host, device)?,
            }
        }
        Ok(())
    }

    /// Enqueues the chunks of a copy between 16 bits on the device and f32 on the host.
    fn cast_chunks(&mut self, copy: &Copy, host: &HostSpan) -> Result<()> {
        let size = Dtype::F32.size();
        self.make_buffers(self.chunk_elements * size as u64)?;
        for (from, n) in chunks(copy.device.len(), self.chunk_elements) {
            self.make_room(6, copy.ends_in_casts())?;
            let device = copy.device.part(from, n);
            let host = host.part(from as usize * size, n as usize * size);
            let Lane { copies, casts, buffers, next, kernels, .. } = self;
            let buffer = &buffers[*next];
            *next = (*next + 1) % BUFFERS;
            let wide =
                DeviceFloats::new(buffer.memory.span().part(0, n * size as u64), Dtype::F32, "buffer")?;
            let (first, second) = match copy.direction {
                Direction::D2h => (&*casts, &*copies),
                Direction::H2d => (&*copies, &*casts),
            };
            first.wait(&buffer.free)?;
            match copy.direction {
                Direction::D2h => kernels.cast(casts, device, wide)?,
                Direction::H2d => copies.upload(&host, wide.span())?,
            }
            first.record(&buffer.full)?;
            second.wait(&buffer.full)?;
            match copy.direction {
                Direction::D2h => copies.download(wide.span(), &host)?,
                Direction::H2d => kernels.cast(casts, wide, device)?,
            }
            second.record(&buffer.free)?;
        }
        Ok(())
    }

    fn make_buffers(&mut self, bytes: u64) -> Result<()> {
        while self.buffers.len() < BUFFERS {
            self.buffers.push(Buffer {
                memory: DeviceMemory::new(&self.device, bytes)?,
                full: GpuEvent::new(&self.device)?,
                free: GpuEvent::new(&self.device)?,
            });
        }
        Ok(())
    }

    /// Waits until the window has space for this many operations, which end with the stream of casts or of copies.
    fn make_room(&mut self, operations: usize, ends_in_casts: bool) -> Result<()> {
        let window = &mut self.window;
        if window.since > 0 && (window.since + operations > STEP || window.ends_in_casts != ends_in_casts) {
            let fence = window.spare.pop().map_or_else(|| GpuEvent::new(&self.device), Ok)?;
            if window.ends_in_casts {
                self.casts.record(&fence)?
            } else {
                self.copies.record(&fence)?
            }
            window.fences.push_back((fence, window.since + 1));
            window.all += 1;
            window.since = 0;
        }
        while window.all + operations > DEPTH
            && let Some((fence, before)) = window.fences.pop_front()
        {
            fence.synchronize()?;
            window.spare.push(fence);
            window.all -= before;
        }
        window.ends_in_casts = ends_in_casts;
        window.since += operations;
        window.all += operations;
        Ok(())
    }
}

/// Start and length, in elements, of each chunk of `n` elements.
fn chunks(n: u64, step: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..n.div_ceil(step)).map(move |index| (index * step, step.min(n - index * step)))
}
