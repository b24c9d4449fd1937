//! A discrete-event simulator of engines. Each engine serves one operation at a time, in order of readiness.
//!
//! An operation is ready when all operations that it depends on are done. If the operations in flight need more host
//! memory bandwidth than available, all operations that use host memory slow down by the same factor.
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::super::events::{Successors, Time};

/// An engine, which serves operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// All cores of the CPU, which work on one operation together.
    Cpu = 0,
    /// The copy engine to the device.
    H2d = 1,
    /// The copy engine from the device.
    D2h = 2,
    /// The multiprocessors of the GPU.
    Gpu = 3,
    /// Time of the framework, which uses none of the other engines.
    Clock = 4,
    /// The paths of a tier together.
    Paths = 5,
    /// A host thread that waits.
    Host = 6,
}

/// Number of engines.
pub const ENGINES: usize = 7;

/// Operations and their dependencies.
#[derive(Debug, Default)]
pub struct Timeline {
    ops: Vec<Op>,
    /// Dependencies as pairs (before, after) of operation numbers.
    edges: Vec<(u32, u32)>,
}

#[derive(Debug)]
struct Op {
    engine: Engine,
    seconds: f64,
    host_bytes: f64,
}

/// Start and end time of an operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ran {
    /// Start, in seconds from the start of the timeline.
    pub start: f64,
    /// End, in seconds from the start of the timeline.
    pub end: f64,
}

/// Resources that the engines share.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bandwidth of host memory, in bytes per second.
    pub dram: f64,
    /// True if both copy engines can work at the same time.
    pub duplex: bool,
}

impl Timeline {
    /// Adds an operation that depends on all operations in `after`, and returns its number. `seconds` is its duration
    /// at full speed; `host_bytes` are the bytes of host memory that it reads and writes.
    pub fn add(&mut self, engine: Engine, seconds: f64, host_bytes: f64, after: &[u32]) -> u32 {
        let number = self.ops.len() as u32;
        self.ops.push(Op { engine, seconds, host_bytes });
        self.edges.extend(after.iter().map(|before| (*before, number)));
        number
    }

    /// The engine of an operation.
    pub fn engine(&self, number: u32) -> Engine {
        self.ops[number as usize].engine
    }

    /// Simulates all operations. Returns the start and end time of each operation, in order of their numbers.
    pub fn run(&self, limits: Limits) -> Vec<Ran> {
        Run::new(self, limits).finish()
    }
}

struct Run<'a> {
    timeline: &'a Timeline,
    limits: Limits,
    next: Successors,
    missing: Vec<u32>,
    queues: [BinaryHeap<Reverse<(Time, u32)>>; ENGINES],
    /// The operation that each engine serves, and its remaining seconds at full speed.
    active: [Option<(u32, f64)>; ENGINES],
    ran: Vec<Ran>,
    now: f64,
}

impl<'a> Run<'a> {
    fn new(timeline: &'a Timeline, limits: Limits) -> Self {
        let count = timeline.ops.len();
        let mut missing = vec![0_u32; count];
        timeline.edges.iter().for_each(|(_, after)| missing[*after as usize] += 1);
        let next = Successors::of(vec![0; count + 1], vec![0; timeline.edges.len()], &timeline.edges);
        let ran = vec![Ran { start: 0.0, end: 0.0 }; count];
        let mut run = Run {
            timeline,
            limits,
            next,
            missing,
            queues: Default::default(),
            active: [None; ENGINES],
            ran,
            now: 0.0,
        };
        let ready: Vec<u32> = (0..count as u32).filter(|op| run.missing[*op as usize] == 0).collect();
        ready.into_iter().for_each(|op| run.enqueue(op));
        run
    }

    fn enqueue(&mut self, op: u32) {
        let engine = match self.timeline.ops[op as usize].engine {
            Engine::D2h if !self.limits.duplex => Engine::H2d,
            engine => engine,
        };
        self.queues[engine as usize].push(Reverse((Time(self.now), op)));
    }

    fn finish(mut self) -> Vec<Ran> {
        loop {
            for engine in 0..ENGINES {
                if self.active[engine].is_none()
                    && let Some(Reverse((_, op))) = self.queues[engine].pop()
                {
                    self.active[engine] = Some((op, self.timeline.ops[op as usize].seconds));
                    self.ran[op as usize].start = self.now;
                }
            }
            let speed = self.speed();
            let left = |(op, seconds): &(u32, f64)| seconds / self.rate(*op, speed);
            let Some(step) = self.active.iter().flatten().map(left).min_by(f64::total_cmp) else {
                return self.ran;
            };
            self.advance(step, speed);
        }
    }

    /// Fraction of full speed at which operations on host memory run.
    fn speed(&self) -> f64 {
        let wanted = |(op, _): &(u32, f64)| {
            let op = &self.timeline.ops[*op as usize];
            if op.seconds > 0.0 { op.host_bytes / op.seconds } else { 0.0 }
        };
        let wanted: f64 = self.active.iter().flatten().map(wanted).sum();
        if wanted > self.limits.dram { self.limits.dram / wanted } else { 1.0 }
    }

    fn rate(&self, op: u32, speed: f64) -> f64 {
        if self.timeline.ops[op as usize].host_bytes > 0.0 { speed } else { 1.0 }
    }

    /// Advances the time by `step` seconds. Ends the operations whose remaining time is zero within rounding errors.
    fn advance(&mut self, step: f64, speed: f64) {
        self.now += step;
        for engine in 0..ENGINES {
            let Some((op, seconds)) = self.active[engine] else { continue };
            let left = seconds - step * self.rate(op, speed);
            if left > 1e-12 * self.timeline.ops[op as usize].seconds {
                self.active[engine] = Some((op, left));
                continue;
            }
            self.active[engine] = None;
            self.ran[op as usize].end = self.now;
            for at in 0..self.next.after(op).len() {
                let after = self.next.after(op)[at];
                self.missing[after as usize] -= 1;
                if self.missing[after as usize] == 0 {
                    self.enqueue(after);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: Limits = Limits { dram: f64::INFINITY, duplex: true };

    #[test]
    fn an_engine_serves_one_at_a_time_in_order_of_readiness() {
        let mut timeline = Timeline::default();
        let first = timeline.add(Engine::Cpu, 2.0, 0.0, &[]);
        let copy = timeline.add(Engine::H2d, 1.0, 0.0, &[]);
        let late = timeline.add(Engine::H2d, 1.0, 0.0, &[first]);
        let early = timeline.add(Engine::H2d, 5.0, 0.0, &[copy]);
        let ran = timeline.run(FREE);
        assert_eq!(ran[early as usize], Ran { start: 1.0, end: 6.0 });
        assert_eq!(ran[late as usize], Ran { start: 6.0, end: 7.0 });
    }

    #[test]
    fn half_duplex_takes_turns_and_scarce_memory_slows_all_that_touch_it() {
        let mut timeline = Timeline::default();
        timeline.add(Engine::H2d, 2.0, 200.0, &[]);
        timeline.add(Engine::D2h, 2.0, 200.0, &[]);
        timeline.add(Engine::Gpu, 2.0, 0.0, &[]);
        let end = |limits| timeline.run(limits).iter().map(|ran| ran.end).collect::<Vec<f64>>();
        assert_eq!(end(FREE), [2.0, 2.0, 2.0]);
        assert_eq!(end(Limits { duplex: false, ..FREE }), [2.0, 4.0, 2.0]);
        assert_eq!(end(Limits { dram: 100.0, ..FREE }), [4.0, 4.0, 2.0]);
        assert_eq!(end(Limits { dram: 1e3, ..FREE }), [2.0, 2.0, 2.0]);
    }

    #[test]
    fn nothing_takes_no_time() {
        assert!(Timeline::default().run(FREE).is_empty());
        let mut timeline = Timeline::default();
        let empty = timeline.add(Engine::Gpu, 0.0, 0.0, &[]);
        let after = timeline.add(Engine::Gpu, 1.0, 0.0, &[empty]);
        assert_eq!(timeline.run(FREE)[after as usize].end, 1.0);
    }
}
