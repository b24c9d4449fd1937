//! Queued work of the streams. It runs only when the host waits for it, or when the queue is full.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::gpu::{Code, Gpu, ILLEGAL_ADDRESS};
use crate::memory::Guarded;
use crate::order::{Access, Clock, Operation};
use crate::ptx::Kernel;

#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) actor: usize,
    pub(crate) clock: Clock,
    pub(crate) seconds: f64,
    pub(crate) queue: VecDeque<Queued>,
    pub(crate) queued: u64,
    pub(crate) done: u64,
}

#[derive(Debug)]
pub(crate) struct Queued {
    /// Its place in the stream.
    pub(crate) place: u64,
    /// Its place among all operations of the device.
    pub(crate) number: u64,
    pub(crate) operation: Operation,
    pub(crate) work: Work,
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

impl Gpu {
    /// Queues work that takes `cost` units on an engine, or no time. If the queue is full, the oldest operation runs
    /// first, and the caller waits for it.
    pub(crate) fn push(
        &mut self,
        id: usize,
        what: &str,
        work: Work,
        cost: Option<(usize, f64)>,
    ) -> Result<(), Code> {
        if self.captures(id)? {
            return Ok(());
        }
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
    pub(crate) fn run_to(&mut self, stream: usize, place: u64) -> Result<(), Code> {
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
                let mut memory = Guarded { gpu: self, accesses: Vec::new() };
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
