//! The seconds of a step: forward, backward, copies, steps and transfers of paths on the simulator.
//!
//! | strategy | a bucket is stepped | its weights return |
//! |---|---|---|
//! | `gpu` | after backward, on the GPU | they are there |
//! | `host` | after the last gradient arrived: the norm needs all of them | after its step |
//! | `speculation` | as soon as its gradient arrived | after its step |
//! | `interleave*` | as `crate::interleave::model` predicts | as predicted there |
//! | `tier*` | after its fetch, which begins after the last gradient arrived; then it is flushed | after its step |
#![forbid(unsafe_code)]

use serde::Serialize;

use super::super::interleave::schedule::Lane;
use super::super::interleave::timeline::{Engine, Limits, Timeline};
use super::strategy::{Case, Placement, Strategy, TierNeed};

const HALF: f64 = 2.0;
/// Bytes that adding a 16-bit gradient to an f32 sum moves, relative to the 28 of an Adam step.
const SUM: f64 = 10.0 / 28.0;
/// Bytes of a step with bf16 moments, relative to one with f32 moments; so were the measured times.
const BF16_MOMENTS: f64 = 20.0 / 28.0;
/// The same with split masters too: 2 bytes read of the gradient, 8 read and written of weights, low bits and moments.
const SPLIT_MASTER: f64 = 18.0 / 28.0;
/// The same with 8-bit moments: 4 bytes of moments in place of 8.
const INT8_MOMENTS: f64 = 14.0 / 28.0;
/// Pieces of a forward pass whose weights are loaded.
const MOST_PIECES: u64 = 32;

/// One unit of work of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Span {
    /// The row of the timeline.
    pub row: &'static str,
    /// The kind of work.
    pub work: &'static str,
    /// Start in seconds.
    pub start: f64,
    /// End in seconds.
    pub end: f64,
}

/// The rows of a timeline, from top to bottom.
pub const ROWS: [&str; 5] = ["GPU", "GPU to host", "host to GPU", "CPU", "paths"];

/// The seconds of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes {
    /// Forward passes.
    pub forward: f64,
    /// Backward passes.
    pub backward: f64,
    /// Seconds of the step in which the GPU runs neither.
    pub exposed: f64,
    /// The whole step.
    pub total: f64,
    /// All work.
    pub spans: Vec<Span>,
}

/// Bandwidth of the paths together, for one rank: seconds per byte of a read and of a write.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathSeconds {
    /// Of a read.
    pub read: f64,
    /// Of a write.
    pub write: f64,
}

struct Work<'a> {
    case: &'a Case<'a>,
    timeline: Timeline,
    names: Vec<(&'static str, &'static str)>,
    /// Fraction of the weights that is loaded for each pass.
    flow: f64,
    /// The GPU's last pass.
    pass: Vec<u32>,
    /// Passes after which a window of loaded weights may be overwritten.
    windows: Vec<u32>,
}

/// Predicts the step of a strategy. `flow`: fraction of the weights in host memory.
pub fn predict(
    case: &Case,
    strategy: Strategy,
    placed: &Placement,
    flow: f64,
    paths: Option<PathSeconds>,
) -> StepTimes {
    let mut work = Work {
        case,
        timeline: Timeline::default(),
        names: Vec::new(),
        flow,
        pass: Vec::new(),
        windows: Vec::new(),
    };
    let offloads = strategy != Strategy::Gpu;
    work.earlier_batches(offloads);
    work.forward();
    let buckets = work.buckets(strategy);
    let tail = (placed.tail as usize).min(buckets.len());
    let leaving = match strategy {
        Strategy::Gpu => 0,
        Strategy::Interleave | Strategy::InterleaveResidents => placed.leaving,
        _ => buckets.len() - tail,
    };
    let grads = work.backward(&buckets, leaving);
    match (strategy, placed.tier.zip(paths)) {
        (Strategy::Gpu, _) => work.gpu_step(case.shard),
        (Strategy::Speculation, _) => {
            work.gpu_step(buckets.iter().rev().take(tail).sum());
            work.cpu_steps(&buckets, &grads, 1.0, false);
        }
        (Strategy::Interleave | Strategy::InterleaveResidents, _) => {}
        (Strategy::HostBf16Moments, _) => work.cpu_steps(&buckets, &grads, BF16_MOMENTS, true),
        (Strategy::HostSplitMaster, _) => work.cpu_steps(&buckets, &grads, SPLIT_MASTER, true),
        (Strategy::HostInt8Moments, _) => work.cpu_steps(&buckets, &grads, INT8_MOMENTS, true),
        (_, Some((need, paths))) => work.tier_steps(&buckets, &grads, &need, paths),
        (_, None) => work.cpu_steps(&buckets, &grads, 1.0, true),
    }
    work.finish(placed)
}

impl Work<'_> {
    fn add(&mut self, row: usize, work: &'static str, seconds: f64, after: &[u32]) -> u32 {
        const ENGINES: [Engine; ROWS.len()] =
            [Engine::Gpu, Engine::D2h, Engine::H2d, Engine::Cpu, Engine::Paths];
        self.names.push((ROWS[row], work));
        self.timeline.add(ENGINES[row], seconds, 0.0, after)
    }

    fn gpu_pass(&mut self, work: &'static str, seconds: f64, loaded: Option<u32>) -> u32 {
        let mut after = std::mem::take(&mut self.pass);
        after.extend(loaded);
        let op = self.add(0, work, seconds, &after);
        self.pass = vec![op];
        self.windows.push(op);
        op
    }

    /// Loads `part` of the weights, as soon as one of two windows is free.
    fn load(&mut self, part: f64) -> Option<u32> {
        let seconds = self.flow * HALF * self.case.weights() as f64 * part / self.case.machine.h2d;
        let free: Vec<u32> = self.windows.iter().rev().nth(1).copied().into_iter().collect();
        (self.flow > 0.0).then(|| self.add(2, "load weights", seconds, &free))
    }

    /// All micro-batches but the last; the host adds up their gradients.
    fn earlier_batches(&mut self, offloads: bool) {
        let (shard, rates) = (self.case.shard as f64, self.case.rates());
        for _ in 1..self.case.run.accumulation {
            let loaded = self.load(1.0);
            self.gpu_pass("forward", self.case.forward(), loaded);
            let loaded = self.load(1.0);
            let backward = self.gpu_pass("backward", self.case.backward(), loaded);
            if offloads {
                let copied = self.add(1, "gradients", HALF * shard / self.case.machine.d2h, &[backward]);
                self.add(3, "add gradients", SUM * shard / rates.cpu, &[copied]);
            }
        }
    }

    fn forward(&mut self) {
        let pieces = if self.flow > 0.0 { self.case.model.layers.clamp(1, MOST_PIECES) } else { 1 };
        for _ in 0..pieces {
            let loaded = self.load(1.0 / pieces as f64);
            self.gpu_pass("forward", self.case.forward() / pieces as f64, loaded);
        }
    }

    /// Parameters of each bucket, in the order in which gradients arrive.
    fn buckets(&self, strategy: Strategy) -> Vec<u64> {
        if strategy.is_tiered() || strategy.is_interleaved() {
            return self.case.sizes.clone();
        }
        let (size, shard) = (self.case.bucket(), self.case.shard);
        let mut buckets = vec![size; (shard / size) as usize];
        if !shard.is_multiple_of(size) {
            buckets.push(shard % size);
        }
        buckets
    }

    /// The last backward pass. Returns the arrival of the gradients of the first `leaving` buckets on the host.
    fn backward(&mut self, buckets: &[u64], leaving: usize) -> Vec<u32> {
        let (shard, rates) = (self.case.shard as f64, self.case.rates());
        let mut arrived = Vec::with_capacity(leaving);
        for (nth, size) in buckets.iter().enumerate() {
            let size = *size as f64;
            let loaded = self.load(size / shard);
            let passed = self.gpu_pass("backward", self.case.backward() * size / shard, loaded);
            if nth < leaving {
                let copied = self.add(1, "gradients", HALF * size / self.case.machine.d2h, &[passed]);
                arrived.push(match self.case.run.accumulation {
                    1 => copied,
                    _ => self.add(3, "add gradients", SUM * size / rates.cpu, &[copied]),
                });
            }
        }
        arrived
    }

    fn gpu_step(&mut self, parameters: u64) {
        if parameters > 0 {
            let after = self.pass.clone();
            self.add(0, "GPU step", parameters as f64 / self.case.machine.gpu, &after);
        }
    }

    fn step_and_upload(&mut self, size: u64, bytes: f64, after: &[u32]) -> u32 {
        let rates = self.case.rates();
        let seconds = bytes / rates.cpu + 1.0 / rates.downscale;
        let stepped = self.add(3, "CPU step", size as f64 * seconds, after);
        let upload = HALF * size as f64 * (1.0 - self.flow) / self.case.machine.h2d;
        self.add(2, "upload weights", upload, &[stepped]);
        stepped
    }

    /// Steps of states in host memory. `waits`: for the last gradient.
    fn cpu_steps(&mut self, buckets: &[u64], arrived: &[u32], bytes: f64, waits: bool) {
        for (size, own) in buckets.iter().zip(arrived) {
            let after = if waits { arrived.last().copied().into_iter().collect() } else { vec![*own] };
            self.step_and_upload(*size, bytes, &after);
        }
    }

    /// Steps of states on paths. The last `cached` subgroups are in memory and stay there.
    fn tier_steps(&mut self, buckets: &[u64], arrived: &[u32], need: &TierNeed, paths: PathSeconds) {
        let (cached, bytes_each) = (need.cached as usize, need.state_bytes as f64 / self.case.shard as f64);
        let begin: Vec<u32> = arrived.last().copied().into_iter().collect();
        let working = (need.buffers as usize).saturating_sub(cached).max(1);
        let mut flushed: Vec<u32> = Vec::new();
        for (nth, size) in buckets.iter().rev().enumerate() {
            if nth < cached {
                self.step_and_upload(*size, 1.0, &begin);
                continue;
            }
            let bytes = bytes_each * *size as f64;
            let mut after = begin.clone();
            after.extend(flushed.len().checked_sub(working).map(|at| flushed[at]));
            let fetched = self.add(4, "fetch", bytes * paths.read, &after);
            let stepped = self.step_and_upload(*size, 1.0, &[fetched]);
            flushed.push(self.add(4, "flush", bytes * paths.write, &[stepped]));
        }
    }

    fn finish(self, placed: &Placement) -> StepTimes {
        let case = self.case;
        let ran = self.timeline.run(Limits { dram: f64::INFINITY, duplex: case.machine.duplex });
        let mut spans: Vec<Span> = self
            .names
            .iter()
            .zip(&ran)
            .map(|((row, work), ran)| Span { row, work, start: ran.start, end: ran.end })
            .filter(|span| span.end > span.start)
            .collect();
        let mut total = spans.iter().map(|span| span.end).fold(0.0, f64::max);
        if let Some(chosen) = &placed.interleaved {
            let begin = total;
            spans.extend(chosen.prediction.spans.iter().filter_map(|span| {
                let (row, work) = row_of(span.lane, span.work?.name())?;
                Some(Span { row, work, start: begin + span.ran.start, end: begin + span.ran.end })
            }));
            total = begin + chosen.prediction.exposed;
            // The last flushes end after the step.
            spans.iter_mut().for_each(|span| span.end = span.end.min(total));
            spans.retain(|span| span.end > span.start);
        }
        let batches = case.run.accumulation as f64;
        let (forward, backward) = (batches * case.forward(), batches * case.backward());
        StepTimes { forward, backward, exposed: (total - forward - backward).max(0.0), total, spans }
    }
}

fn row_of(lane: Lane, work: &'static str) -> Option<(&'static str, &'static str)> {
    let row = match lane {
        Lane::Model | Lane::Cast | Lane::Gpu | Lane::Resident => 0,
        Lane::D2h => 1,
        Lane::H2d | Lane::Upload => 2,
        Lane::Cpu => 3,
        Lane::Caller => return None,
    };
    Some((ROWS[row], work))
}
