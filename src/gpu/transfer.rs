//! Copies between the framework's device memory and pinned host memory: gradients to the host, parameters to the
//! device.
//!
//! Each direction has its own streams. A copy is split into chunks, and waits on the device for the framework's event
//! or stream. If the host type is f32 and the device type has 16 bits, the GPU converts: a cast stream and a copy
//! stream exchange chunks through two buffers and so overlap. Between equal types the bytes are copied unchanged.
//!
//! Invariants:
//! - A chunk's buffer is overwritten only after the event of its last use.
//! - A copy holds its pinned memory until the copy's event is done.
//! - The host side is a [`HostSpan`]: no copy uses pageable memory.
//! - A direction is locked while the chunks of one of its copies are queued, which blocks at the depth of the driver's
//!   queues. Neither waits nor the other direction need that lock. No lock is held during a wait.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::Device;
use super::kernels::{DeviceFloats, Kernels};
use super::memory::{DeviceMemory, HostSpan};
use super::stream::{ForeignEvent, ForeignStream, GpuEvent, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::pool::region::Lease;
use crate::sys::sync::{Guard, Lock, deadline_after};

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To the host.
    D2h,
    /// To the device.
    H2d,
}

/// What a copy waits for on the device before it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// Nothing.
    Now,
    /// The last record of an event of the framework.
    Event(ForeignEvent),
    /// All work queued on a stream of the framework.
    Stream(ForeignStream),
}

/// One copy.
#[derive(Debug, Clone)]
pub struct Copy {
    /// Direction.
    pub direction: Direction,
    /// The framework's device memory.
    pub device: DeviceFloats,
    /// Pinned memory with the same number of elements.
    pub host: HostSpan,
    /// Element type on the host: the device's type, or f32.
    pub host_dtype: Dtype,
    /// What the copy waits for.
    pub after: After,
}

/// Index of the stream that ends a copy: 0 for copies to the host, 1 for copies to the device, 2 for casts after them.
const H2D_CASTS: usize = 2;

impl Copy {
    /// True if the GPU converts between types.
    fn casts(&self) -> bool {
        self.host_dtype != self.device.dtype()
    }

    fn last_stream(&self) -> usize {
        match (self.direction, self.casts()) {
            (Direction::D2h, _) => 0,
            (Direction::H2d, false) => 1,
            (Direction::H2d, true) => H2D_CASTS,
        }
    }

    /// Checks types and lengths.
    pub fn check(&self) -> Result<()> {
        let (device, host) = (self.device.dtype(), self.host_dtype);
        if device != host && host != Dtype::F32 {
            let reason = format!(
                "is {}, but the device type is {}; use the same type, or f32 on the host",
                host.name(),
                device.name()
            );
            return Err(Error::invalid("host_dtype", reason));
        }
        let bytes = self.device.len() * host.size() as u64;
        match self.host.span().len() as u64 == bytes {
            true => Ok(()),
            false => Err(Error::invalid(
                "host",
                format!("has {} bytes, but {bytes} are needed", self.host.span().len()),
            )),
        }
    }
}

/// The copies of one device. Thread-safe.
#[derive(Debug)]
pub struct Transfers {
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    chunk_elements: u64,
    d2h: Lock<DirectionStreams>,
    h2d: Lock<DirectionStreams>,
    tickets: Lock<Tickets>,
}

#[derive(Debug, Default)]
struct Tickets {
    running: HashMap<u64, Running>,
    /// Tickets per last stream (see [`H2D_CASTS`]). Copies of one queue end in queue order.
    order: [VecDeque<u64>; 3],
    /// Number of tickets so far. The first one is 1.
    count: u64,
}

#[derive(Debug)]
struct Running {
    done: Arc<GpuEvent>,
    _host: HostSpan,
    /// Keeps pool memory from being reused if its owner frees it too early.
    _lease: Lease,
}

/// The streams of one direction, and the buffers between them.
#[derive(Debug)]
struct DirectionStreams {
    copies: Stream,
    casts: Stream,
    /// Created when the first copy needs them.
    buffers: Vec<Buffer>,
    next: usize,
}

#[derive(Debug)]
struct Buffer {
    memory: DeviceMemory,
    full: GpuEvent,
    free: GpuEvent,
}

const BUFFERS: usize = 2;
/// First sleep of a polling thread; each further sleep is twice as long, up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_micros(5);
const MAX_PAUSE: Duration = Duration::from_millis(1);

impl Transfers {
    /// Prepares copies in chunks of `chunk_bytes` bytes on the link.
    pub fn new(device: &Arc<Device>, kernels: &Arc<Kernels>, chunk_bytes: u64) -> Result<Transfers> {
        let streams = || -> Result<Lock<DirectionStreams>> {
            Ok(Lock::new(DirectionStreams {
                copies: Stream::new(device)?,
                // A cast is short, and a copy waits for it: it gets priority over the model's kernels.
                casts: Stream::urgent(device)?,
                buffers: Vec::new(),
                next: 0,
            }))
        };
        let chunk_elements = (chunk_bytes / Dtype::F32.size() as u64).max(1);
        Ok(Transfers {
            device: Arc::clone(device),
            kernels: Arc::clone(kernels),
            chunk_elements,
            d2h: streams()?,
            h2d: streams()?,
            tickets: Lock::default(),
        })
    }

    /// Enqueues a copy, and returns its ticket.
    pub fn start(&self, copy: &Copy) -> Result<u64> {
        self.start_between(copy, None, GpuEvent::new(&self.device)?)
    }

    /// Runs a copy, blocks until it is done, and returns its seconds on the device.
    pub fn measure(&self, copy: &Copy) -> Result<f64> {
        let (begun, done) = (GpuEvent::timing(&self.device)?, GpuEvent::timing(&self.device)?);
        let ticket = self.start_between(copy, Some(&begun), done)?;
        let done = self.event(ticket)?;
        self.wait(ticket, None)?;
        done.map_or(Ok(0.0), |done| begun.seconds_to(&done))
    }

    /// Enqueues a copy between two events.
    fn start_between(&self, copy: &Copy, begun: Option<&GpuEvent>, done: GpuEvent) -> Result<u64> {
        copy.check()?;
        let done = Arc::new(done);
        // Dropped without the lock: the end of a registration may wait for copies.
        let over = self.tickets()?.take_done();
        drop(over);
        let mut streams = match copy.direction {
            Direction::D2h => self.d2h.lock(),
            Direction::H2d => self.h2d.lock(),
        };
        if let Err(error) = self.queue(&mut streams, copy, begun, &done) {
            // Chunks that are queued already must not access the caller's memory after this call.
            let _ = (streams.casts.synchronize(), streams.copies.synchronize());
            return Err(error);
        }
        // Before another copy of the direction is queued: tickets of a stream are in the order of the stream.
        let mut tickets = self.tickets.lock();
        tickets.count += 1;
        let ticket = tickets.count;
        tickets.order[copy.last_stream()].push_back(ticket);
        tickets.running.insert(ticket, Running { done, _host: copy.host.clone(), _lease: copy.host.lease() });
        Ok(ticket)
    }

    fn queue(
        &self,
        streams: &mut DirectionStreams,
        copy: &Copy,
        begun: Option<&GpuEvent>,
        done: &GpuEvent,
    ) -> Result<()> {
        streams.begin(&self.device, copy)?;
        if let Some(begun) = begun {
            let first = if copy.casts() && copy.direction == Direction::D2h {
                &streams.casts
            } else {
                &streams.copies
            };
            first.record(begun)?;
        }
        if copy.casts() {
            self.cast_chunks(streams, copy)?
        } else {
            self.copy_chunks(streams, copy)?
        }
        match copy.last_stream() {
            H2D_CASTS => streams.casts.record(done),
            _ => streams.copies.record(done),
        }
    }

    /// Enqueues the chunks of a copy between equal types.
    fn copy_chunks(&self, streams: &DirectionStreams, copy: &Copy) -> Result<()> {
        let size = copy.host_dtype.size();
        let step = self.chunk_elements * (Dtype::F32.size() / size) as u64;
        for (from, n) in chunks(copy.device.len(), step) {
            let device = copy.device.part(from, n).span();
            let host = copy.host.part(from as usize * size, n as usize * size);
            match copy.direction {
                Direction::D2h => streams.copies.download(device, &host)?,
                Direction::H2d => streams.copies.upload(&host, device)?,
            }
        }
        Ok(())
    }

    /// Enqueues the chunks of a copy between 16 bits on the device and f32 on the host.
    fn cast_chunks(&self, streams: &mut DirectionStreams, copy: &Copy) -> Result<()> {
        let size = Dtype::F32.size();
        streams.make_buffers(&self.device, self.chunk_elements * size as u64)?;
        for (from, n) in chunks(copy.device.len(), self.chunk_elements) {
            let device = copy.device.part(from, n);
            let host = copy.host.part(from as usize * size, n as usize * size);
            let DirectionStreams { copies, casts, buffers, next } = streams;
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
                Direction::D2h => self.kernels.cast(casts, device, wide)?,
                Direction::H2d => copies.upload(&host, wide.span())?,
            }
            first.record(&buffer.full)?;
            second.wait(&buffer.full)?;
            match copy.direction {
                Direction::D2h => copies.download(wide.span(), &host)?,
                Direction::H2d => self.kernels.cast(casts, wide, device)?,
            }
            second.record(&buffer.free)?;
        }
        Ok(())
    }

    /// Blocks the calling thread until a copy is done, for at most `timeout`. Other threads may use the object
    /// meanwhile.
    pub fn wait(&self, ticket: u64, timeout: Option<Duration>) -> Result<()> {
        let Some(event) = self.event(ticket)? else { return Ok(()) };
        let Some(end) = deadline_after(timeout) else { return event.synchronize() };
        // Polls: the driver's wait has no limit.
        let mut pause = MIN_PAUSE;
        while !event.done()? {
            if Instant::now() >= end {
                return Err(Error::Timeout(format!("copy {ticket} is still in flight")));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
        Ok(())
    }

    /// Makes later work on a framework stream wait for a copy.
    pub fn stream_wait(&self, ticket: u64, stream: ForeignStream) -> Result<()> {
        self.event(ticket)?.map_or(Ok(()), |event| stream.wait(&event))
    }

    /// Blocks until all copies are done.
    pub fn finish(&self) -> Result<()> {
        let last: Vec<Arc<GpuEvent>> = {
            let tickets = self.tickets()?;
            let last = tickets.order.iter().filter_map(|order| tickets.running.get(order.back()?));
            last.map(|running| Arc::clone(&running.done)).collect()
        };
        last.iter().try_for_each(|done| done.synchronize())?;
        let over = self.tickets()?.take_done();
        drop(over);
        Ok(())
    }

    /// The event of a copy; `None` for a copy that is done and forgotten.
    fn event(&self, ticket: u64) -> Result<Option<Arc<GpuEvent>>> {
        let tickets = self.tickets()?;
        if ticket == 0 || ticket > tickets.count {
            return Err(Error::invalid("ticket", format!("{ticket} is not a ticket of this object")));
        }
        Ok(tickets.running.get(&ticket).map(|running| Arc::clone(&running.done)))
    }

    fn tickets(&self) -> Result<Guard<'_, Tickets>> {
        // Checks for a forked child before locking: another thread of the parent may have held the lock during the
        // fork.
        drop(self.device.enter()?);
        Ok(self.tickets.lock())
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // Owners free their memory as soon as this object is gone. With a lost context there is nothing to wait for.
        let _ = self.finish();
    }
}

impl Tickets {
    /// Forgets copies that are done, and returns what they held. Queries only the oldest copy of each queue, since later
    /// copies end after it.
    fn take_done(&mut self) -> Vec<Running> {
        let mut over = Vec::new();
        for order in &mut self.order {
            while let Some(ticket) = order.front()
                && self.running.get(ticket).is_none_or(|running| matches!(running.done.done(), Ok(true)))
            {
                over.extend(self.running.remove(ticket));
                order.pop_front();
            }
        }
        over
    }
}

impl DirectionStreams {
    /// Makes the first stream that touches the framework's memory wait for `copy.after`.
    fn begin(&self, device: &Arc<Device>, copy: &Copy) -> Result<()> {
        // Parameters must not be overwritten before the event, but the host may be read earlier: an upload with a cast
        // first fills a buffer of Spillway, and only the cast writes to the framework's memory.
        let first = if copy.casts() { &self.casts } else { &self.copies };
        match copy.after {
            After::Now => Ok(()),
            After::Event(event) => first.wait_foreign(event),
            After::Stream(stream) => {
                let there = GpuEvent::new(device)?;
                stream.record(&there)?;
                first.wait(&there)
            }
        }
    }

    fn make_buffers(&mut self, device: &Arc<Device>, bytes: u64) -> Result<()> {
        while self.buffers.len() < BUFFERS {
            self.buffers.push(Buffer {
                memory: DeviceMemory::new(device, bytes)?,
                full: GpuEvent::new(device)?,
                free: GpuEvent::new(device)?,
            });
        }
        Ok(())
    }
}

/// Start and length, in elements, of each chunk of `n` elements.
fn chunks(n: u64, step: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..n.div_ceil(step)).map(move |index| (index * step, step.min(n - index * step)))
}
