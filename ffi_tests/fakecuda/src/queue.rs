//! Queued work of the streams. It runs only when the host waits for it, or when the queue is full.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::code::{Code, ILLEGAL_ADDRESS, INVALID_HANDLE};
use crate::memory::{Guarded, Reach};
use crate::order::{Access, Checker, Clock, HOST, Operation};
use crate::ptx::Kernel;

/// The streams of a device with their queued work, and the memory that the work reaches.
#[derive(Debug, Default)]
pub struct Queues {
    /// Calls that had to wait because the queue was full.
    pub blocked: usize,
    /// The largest number of operations that were queued at one time.
    pub most_queued: usize,
    /// The limits of the device.
    pub limits: Limits,
    /// The reasons why kernels were terminated, and the kernels whose module was unloaded before they ran.
    pub failures: Vec<String>,
    /// Instructions of all threads of all kernels that ran.
    pub instructions: u64,
    pub(crate) checker: Checker,
    pub(crate) reach: Reach,
    pub(crate) host: Clock,
    pub(crate) lost: Option<Code>,
    streams: HashMap<usize, Stream>,
    /// The number of clock entries for streams so far, and the entries of destroyed streams.
    actors: usize,
    idle_actors: Vec<usize>,
    /// Streams that were destroyed while the device was stalled, and have work left.
    destroyed: Vec<usize>,
    queued: usize,
    /// Operations so far.
    pushed: u64,
    engines: [f64; 3],
}

/// The capacities and the speeds of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Operations that may be queued in all streams together. At the limit, a call blocks until
    /// one operation has finished.
    pub depth: usize,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes per second to the device, to the host, and threads per second through kernels; 0 means that
    /// work takes no time.
    pub rates: [f64; 3],
}

impl Default for Limits {
    fn default() -> Limits {
        let depth = std::env::var("FAKECUDA_DEPTH").ok().and_then(|text| text.parse().ok()).unwrap_or(1024);
        Limits { depth, memory_bytes: 1 << 34, rates: [1e8, 1e8, 1e9] }
    }
}

#[derive(Debug, Default)]
struct Stream {
    actor: usize,
    clock: Clock,
    seconds: f64,
    queue: VecDeque<Queued>,
    queued: u64,
    done: u64,
}

#[derive(Debug)]
struct Queued {
    /// Its place in the stream.
    place: u64,
    /// Its place among all operations of the device.
    number: u64,
    operation: Operation,
    work: Work,
}

/// A point in a stream.
#[derive(Debug, Clone)]
pub(crate) struct Mark {
    pub(crate) stream: usize,
    pub(crate) place: u64,
    pub(crate) clock: Clock,
    pub(crate) seconds: f64,
}

#[derive(Debug)]
pub(crate) enum Work {
    Copy { from: u64, to: u64, bytes: usize },
    Kernel { kernel: Arc<Kernel>, blocks: u32, threads: u32, parameters: Vec<u8> },
    Wait(Option<Mark>),
    Mark,
}

impl Queues {
    /// The stream of this number; creates the default stream on first use.
    fn stream(&mut self, id: usize) -> &mut Stream {
        self.streams.entry(id).or_insert_with(|| {
            let actor = self.idle_actors.pop().unwrap_or_else(|| {
                self.actors += 1;
                HOST + self.actors
            });
            Stream { actor, ..Stream::default() }
        })
    }

    pub(crate) fn create(&mut self, id: usize) {
        self.stream(id);
    }

    pub(crate) fn known(&self, stream: usize) -> Result<(), Code> {
        let destroyed = self.destroyed.contains(&stream);
        if stream == 0 || self.streams.contains_key(&stream) && !destroyed {
            Ok(())
        } else {
            Err(INVALID_HANDLE)
        }
    }

    /// Streams of the program that are not destroyed.
    pub(crate) fn alive(&self) -> usize {
        let own = |stream: &&usize| **stream != 0 && !self.destroyed.contains(stream);
        self.streams.keys().filter(own).count()
    }

    /// Destroys a stream. On a stalled device, the work that it has left is done later.
    pub(crate) fn destroy(&mut self, stream: usize, stalled: bool) -> Result<(), Code> {
        if stalled && self.is_busy(stream) {
            self.destroyed.push(stream);
            return Ok(());
        }
        self.drain(stream)?;
        // The host has waited for all of the stream's work, and the next stream with this
        // number inherits that knowledge.
        self.idle_actors.extend(self.streams.remove(&stream).map(|gone| gone.actor));
        Ok(())
    }

    /// Does the work of destroyed streams. An error of the work is that of later calls.
    pub(crate) fn finish_destroyed(&mut self) {
        for stream in std::mem::take(&mut self.destroyed) {
            let _ = self.destroy(stream, false);
        }
    }

    /// True if a stream has work that did not run.
    pub(crate) fn is_busy(&self, stream: usize) -> bool {
        self.streams.get(&stream).is_some_and(|stream| !stream.queue.is_empty())
    }

    /// True if another operation does not fit into the queue.
    pub(crate) fn is_full(&self) -> bool {
        self.queued >= self.limits.depth.max(1)
    }

    /// The place in a stream behind all work so far.
    pub(crate) fn mark(&mut self, stream: usize) -> Mark {
        let source = self.stream(stream);
        Mark { stream, place: source.queued, clock: source.clock.clone(), seconds: source.seconds }
    }

    /// True if work before a mark has not run.
    pub(crate) fn is_pending(&self, mark: &Mark) -> bool {
        self.streams.get(&mark.stream).is_some_and(|stream| stream.done < mark.place)
    }

    /// Later work of a stream knows of the work before a mark.
    pub(crate) fn follow(&mut self, stream: usize, mark: &Mark) {
        let stream = self.stream(stream);
        stream.clock.merge(&mark.clock);
        stream.seconds = stream.seconds.max(mark.seconds);
    }

    /// Runs all work before a mark.
    pub(crate) fn run_before(&mut self, mark: &Mark) -> Result<(), Code> {
        self.run_to(mark.stream, mark.place)
    }

    /// Runs all work before a mark; the host then knows that it has finished.
    pub(crate) fn wait(&mut self, mark: &Mark) -> Result<(), Code> {
        self.run_before(mark)?;
        self.host.merge(&mark.clock);
        Ok(())
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Result<u64, Code> {
        self.reach.allocate(bytes, self.limits.memory_bytes)
    }

    /// Waits for all work, then frees an allocation.
    pub(crate) fn free(&mut self, start: u64) -> Result<(), Code> {
        let bytes = self.reach.bytes(start)?;
        let streams: Vec<usize> = self.streams.keys().copied().collect();
        streams.into_iter().try_for_each(|stream| self.drain(stream))?;
        self.reach.free(start);
        self.checker.forget(start, start + bytes);
        Ok(())
    }

    /// Queues work that takes `cost` units on an engine, or no time. If the queue is full, the oldest operation runs
    /// first, and the caller waits for it.
    pub(crate) fn push(
        &mut self,
        id: usize,
        what: &str,
        work: Work,
        cost: Option<(usize, f64)>,
    ) -> Result<(), Code> {
        self.blocked += usize::from(self.is_full());
        while self.is_full() {
            self.run_oldest()?;
        }
        let host = self.host.clone();
        let (rates, mut engines, number) = (self.limits.rates, self.engines, self.pushed);
        let stream = self.stream(id);
        stream.clock.merge(&host);
        stream.clock.tick(stream.actor);
        if let Some((engine, units)) = cost.filter(|(engine, _)| rates[*engine] > 0.0) {
            stream.seconds = stream.seconds.max(engines[engine]) + units / rates[engine];
            engines[engine] = stream.seconds;
        }
        stream.queued += 1;
        let operation = Operation {
            actor: stream.actor,
            clock: stream.clock.clone(),
            what: format!("{what} in stream {id}"),
        };
        stream.queue.push_back(Queued { place: stream.queued, number, operation, work });
        (self.engines, self.pushed) = (engines, number + 1);
        self.queued += 1;
        self.most_queued = self.most_queued.max(self.queued);
        Ok(())
    }

    /// Operations that have not run.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Kernels that were launched and have not run.
    pub fn queued_kernels(&self) -> usize {
        let queued = self.streams.values().flat_map(|stream| &stream.queue);
        queued.filter(|queued| matches!(queued.work, Work::Kernel { .. })).count()
    }

    /// The name of a kernel that has not run, if there is one of these.
    pub(crate) fn queued_kernel(&self, of: impl Fn(&Arc<Kernel>) -> bool) -> Option<String> {
        let queued = self.streams.values().flat_map(|stream| &stream.queue);
        let mut kernels = queued.filter_map(|queued| match &queued.work {
            Work::Kernel { kernel, .. } => Some(kernel),
            Work::Copy { .. } | Work::Wait(_) | Work::Mark => None,
        });
        kernels.find(|kernel| of(kernel)).map(|kernel| kernel.name.clone())
    }

    /// Runs all work of a stream; the host then knows that it has finished.
    pub(crate) fn drain(&mut self, stream: usize) -> Result<(), Code> {
        let place = self.stream(stream).queued;
        self.run_to(stream, place)?;
        let clock = self.stream(stream).clock.clone();
        self.host.merge(&clock);
        Ok(())
    }

    /// Runs the operation that was queued first. It depends on no other queued operation.
    fn run_oldest(&mut self) -> Result<(), Code> {
        let fronts = self.streams.iter().filter_map(|(id, stream)| Some((*id, stream.queue.front()?)));
        match fronts.min_by_key(|(_, front)| front.number).map(|(id, front)| (id, front.place)) {
            Some((stream, place)) => self.run_to(stream, place),
            None => Ok(()),
        }
    }

    /// Runs a stream up to `place`, together with the work that it waits for.
    fn run_to(&mut self, stream: usize, place: u64) -> Result<(), Code> {
        if let Some(lost) = self.lost {
            return Err(lost);
        }
        while let Some(front) = self.streams.get(&stream).and_then(|stream| stream.queue.front())
            && front.place <= place
        {
            let Some(Queued { place, operation, work, .. }) = self.stream(stream).queue.pop_front() else {
                break;
            };
            self.queued -= 1;
            self.run(operation, work).inspect_err(|code| self.lost = Some(*code))?;
            self.stream(stream).done = place;
        }
        Ok(())
    }

    fn run(&mut self, operation: Operation, work: Work) -> Result<(), Code> {
        let accesses = match work {
            Work::Mark | Work::Wait(None) => return Ok(()),
            Work::Wait(Some(mark)) => return self.run_to(mark.stream, mark.place),
            Work::Copy { from, to, bytes } => {
                // SAFETY: the device side was checked when the copy was queued; the caller promises that the
                // host side is valid.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
                let of = |start: u64, write| Access { start, end: start + bytes as u64, write };
                vec![of(from, false), of(to, true)]
            }
            Work::Kernel { kernel, blocks, threads, parameters } => {
                let mut memory = Guarded { reach: &self.reach, accesses: Vec::new() };
                let outcome = kernel.run(blocks, threads, &parameters, &mut memory);
                let accesses = memory.accesses;
                match outcome {
                    Ok(instructions) => self.instructions += instructions,
                    Err(words) => {
                        self.failures.push(words);
                        return Err(ILLEGAL_ADDRESS);
                    }
                }
                accesses
            }
        };
        self.checker.note(operation, accesses);
        if self.streams.values().all(|stream| stream.queue.is_empty()) {
            self.checker.settle(&self.host);
        }
        Ok(())
    }
}
