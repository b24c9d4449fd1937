//! The backend on a GPU: lanes are CUDA streams, events are CUDA events, copies use pinned memory only. Prefetches and
//! uploads share a stream: a device serves the copies of one stream in the order in which they are enqueued, and between
//! streams in an order of its own.
//!
//! Invariants:
//! - The arrays stay in use until every stream is idle: dropping the backend waits for that. If the device hangs, the
//!   backend's memory is never freed.
//! - An event is created at its first use. As the schedule requires, waiting for an unrecorded event does not block.
//! - Times come from the GPU, relative to a mark recorded when a step begins. They are for planning and traces only.
//! - Consecutive parts of one copy get a single timing, since timing events take space in the device's queues.
//! - No lock is held during a call of the driver, which may block. A lane's commands come from one thread at a time, so
//!   its streams and timings need no lock over several steps.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::device_memory::{Memory, Subgroup};
use super::{Backend, Model, Timing};
use crate::error::{Error, Result};
use crate::gpu::device::Device;
use crate::gpu::kernels::Kernels;
use crate::gpu::memory::Registry;
use crate::gpu::stream::{GpuEvent, Stream};
use crate::kernel::AdamRule;
use crate::sys::sync::Lock;
use spillway_planner::interleave::Shape;
use spillway_planner::interleave::placements::Plan;
use spillway_planner::interleave::schedule::{Command, Edge, Lane, LaneEvent, ParamRange, Work};

/// Lanes with a CUDA stream of their own.
const STREAMS: [Lane; 5] = [Lane::Cast, Lane::D2h, Lane::H2d, Lane::Gpu, Lane::Resident];
/// Maximum number of timings in flight or kept, for a caller that never reads them; each lane may add one.
const MOST_TIMED: usize = 1 << 14;

/// One GPU, and the arrays of one rank.
pub struct Gpu {
    device: Arc<Device>,
    /// See [`Gpu::stream`].
    streams: HashMap<Lane, Stream>,
    clock: Stream,
    events: Lock<HashMap<LaneEvent, Arc<GpuEvent>>>,
    memory: Arc<Memory>,
    rules: Lock<Arc<[AdamRule]>>,
    opened: Instant,
    times: Lock<Times>,
}

/// A point in GPU time whose host time is known, in seconds since the backend was created.
struct Mark {
    event: GpuEvent,
    at: f64,
}

#[derive(Default)]
struct Times {
    mark: Option<Arc<Mark>>,
    /// Start events of work whose end is not enqueued yet.
    begun: HashMap<Lane, (Arc<Mark>, GpuEvent)>,
    under_way: Vec<(Lane, Work, Arc<Mark>, GpuEvent, GpuEvent)>,
    ran: Vec<Timing>,
    spare: Vec<GpuEvent>,
}

impl Gpu {
    /// A backend for these subgroups. Errors: an array's length or type differs from `shape`.
    pub fn new(
        device: &Arc<Device>,
        kernels: &Arc<Kernels>,
        registry: &Arc<Registry>,
        shape: &Shape,
        subgroups: Vec<Subgroup>,
    ) -> Result<Gpu> {
        shape.check()?;
        // A cast is short, and a copy waits for it: it gets priority over the model's kernels.
        let stream = |lane: &Lane| match lane {
            Lane::Cast => Ok((*lane, Stream::urgent(device)?)),
            _ => Ok((*lane, Stream::new(device)?)),
        };
        Ok(Gpu {
            device: Arc::clone(device),
            streams: STREAMS.iter().map(stream).collect::<Result<_>>()?,
            clock: Stream::new(device)?,
            events: Lock::default(),
            memory: Arc::new(Memory::new(device, kernels, registry, shape, subgroups)?),
            rules: Lock::new(Arc::new([])),
            opened: Instant::now(),
            times: Lock::default(),
        })
    }

    /// The stream of a lane; `None` for a lane of a host thread, or of the framework.
    fn stream(&self, lane: Lane) -> Option<&Stream> {
        self.streams.get(if lane == Lane::Upload { &Lane::H2d } else { &lane })
    }

    fn event(&self, event: LaneEvent) -> Result<Arc<GpuEvent>> {
        let known = self.events.lock().get(&event).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let made = Arc::new(GpuEvent::new(&self.device)?);
        // Another thread may have been faster.
        Ok(Arc::clone(self.events.lock().entry(event).or_insert(made)))
    }

    /// Frees the memory of former residents whose states have reached host memory.
    fn free_evicted(&self) -> Result<()> {
        self.memory.free_evicted(|subgroup| self.event(LaneEvent::Home(subgroup))?.done())
    }

    fn run(&self, lane: Lane, work: Work) -> Result<()> {
        let rules = Arc::clone(&self.rules.lock());
        match self.stream(lane) {
            Some(stream) => {
                let (mut whole, mut first, mut last) = (work, true, true);
                if let Some(part) = whole.stretch() {
                    let size = self.memory.size(work.subgroup());
                    (first, last) = (part.from == 0, part.from + part.len == size);
                    *part = ParamRange { from: 0, len: size };
                }
                if first {
                    self.start_timing(stream, lane)?;
                }
                self.memory.enqueue(stream, work, &rules)?;
                if last { self.end_timing(stream, lane, whole) } else { Ok(()) }
            }
            None => {
                let start = self.opened.elapsed().as_secs_f64();
                self.memory.step_on_cpu(work, &rules)?;
                let end = self.opened.elapsed().as_secs_f64();
                let mut times = self.times.lock();
                if times.ran.len() < MOST_TIMED {
                    times.ran.push(Timing { lane, work, start, end });
                }
                Ok(())
            }
        }
    }

    /// Records the start of work, if a step has begun and fewer than `MOST_TIMED` timings are in flight.
    fn start_timing(&self, stream: &Stream, lane: Lane) -> Result<()> {
        let (mark, spare) = {
            let mut times = self.times.lock();
            let Some(mark) = times.mark.clone().filter(|_| times.under_way.len() < MOST_TIMED) else {
                return Ok(());
            };
            (mark, times.spare.pop())
        };
        let start = self.record_timing(stream, spare)?;
        self.times.lock().begun.insert(lane, (mark, start));
        Ok(())
    }

    fn end_timing(&self, stream: &Stream, lane: Lane, work: Work) -> Result<()> {
        let (begun, spare) = {
            let mut times = self.times.lock();
            let Some(begun) = times.begun.remove(&lane) else { return Ok(()) };
            (begun, times.spare.pop())
        };
        let (mark, start) = begun;
        let end = self.record_timing(stream, spare)?;
        self.times.lock().under_way.push((lane, work, mark, start, end));
        Ok(())
    }

    fn record_timing(&self, stream: &Stream, spare: Option<GpuEvent>) -> Result<GpuEvent> {
        let event = spare.map_or_else(|| GpuEvent::timing(&self.device), Ok)?;
        stream.record(&event)?;
        Ok(event)
    }
}

impl Backend for Gpu {
    fn play(&self, command: Command, model: Model) -> Result<()> {
        let framework =
            || model.ok_or_else(|| Error::invalid("stream", "is missing; pass the framework's stream"));
        match command {
            Command::Run(lane, work) => self.run(lane, work),
            Command::Wait(lane, event, edge) => {
                let recorded = self.event(event)?;
                match (lane, self.stream(lane)) {
                    (_, Some(stream)) => stream.wait(&recorded),
                    (Lane::Model, None) => framework()?.wait(&recorded),
                    (_, None) => {
                        recorded.wait()?;
                        // The driver may wait for the whole device when memory is freed. A caller that reads states
                        // is in no step.
                        if edge == Edge::HomeBeforeRead { self.free_evicted() } else { Ok(()) }
                    }
                }
            }
            Command::Record(lane, event) => {
                let event = self.event(event)?;
                match self.stream(lane) {
                    Some(stream) => stream.record(&event),
                    None => framework()?.record(&event),
                }
            }
        }
    }

    fn accepts(&self, plan: Plan) -> Result<Plan> {
        self.free_evicted()?;
        self.memory.accepts(plan)
    }

    fn room(&self) -> Result<Option<u64>> {
        self.memory.room()
    }

    fn begin(&self, rules: Arc<[AdamRule]>) -> Result<()> {
        let event = GpuEvent::timing(&self.device)?;
        self.clock.record(&event)?;
        let mark = Mark { event, at: self.opened.elapsed().as_secs_f64() };
        self.times.lock().mark = Some(Arc::new(mark));
        *self.rules.lock() = rules;
        Ok(())
    }

    fn reached(&self, event: LaneEvent) -> Result<bool> {
        self.event(event)?.done()
    }

    fn timings(&self) -> Vec<Timing> {
        let (all, mut ran) = {
            let times = &mut *self.times.lock();
            (std::mem::take(&mut times.under_way), std::mem::take(&mut times.ran))
        };
        let (mut pending, mut spare) = (Vec::new(), Vec::new());
        for (lane, work, mark, start, end) in all {
            if !end.done().unwrap_or(false) {
                pending.push((lane, work, mark, start, end));
                continue;
            }
            if let (Ok(from), Ok(took)) = (mark.event.seconds_to(&start), start.seconds_to(&end)) {
                let start = mark.at + from;
                ran.push(Timing { lane, work, start, end: start + took });
            }
            spare.extend([start, end]);
        }
        let mut times = self.times.lock();
        times.under_way.splice(0..0, pending);
        times.spare.extend(spare);
        ran
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let finished = self.streams.values().map(Stream::finish);
        // A lost context does no more work, so its errors are ignored.
        if finished.fold(false, |hangs, one| hangs | matches!(one, Err(Error::Timeout(_)))) {
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}
