//! The predicted seconds of a step: runs the commands of the schedule on the simulator.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use super::pieces;
use super::placements::{Placement, Plan};
use super::schedule::{self, Command, Lane, LaneEvent, Work};
use super::timeline::{Engine, Limits, Ran, Timeline};
use super::{Rates, Shape, TransferDtype};
use crate::check;
use crate::error::{Error, Result};

/// Bytes of one f32.
const WORD: f64 = 4.0;

/// One unit of work with its lane and its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// The lane of the work.
    pub lane: Lane,
    /// The work; `None` for time of the framework.
    pub work: Option<Work>,
    /// Start and end, in seconds from the start of backward.
    pub ran: Ran,
}

/// The predicted times of a step, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// From the end of backward until all parameters on the GPU are updated. The next forward pass waits for this time.
    pub exposed: f64,
    /// From the end of backward until the last flush is complete.
    pub home: f64,
    /// From the end of backward until the parameters of each subgroup are updated.
    pub ready: Vec<f64>,
    /// Busy seconds of the CPU, of copies to the device, of copies to the host, and of the GPU.
    pub busy: [f64; 4],
    /// All work, with times from the start of backward.
    pub spans: Vec<Span>,
}

/// Predicts the step of `plan` after a backward pass of `backward` seconds, in which gradients arrive at equal
/// intervals. With `backward` zero, predicts the update phase alone: all gradients are already where the updates need
/// them. Fails for an invalid shape, rate or backward time, or if `plan` and `shape` have different numbers of
/// subgroups.
pub fn predict(shape: &Shape, rates: &Rates, plan: &Plan, backward: f64) -> Result<Prediction> {
    shape.check()?;
    rates.check()?;
    check::not_negative("backward", backward)?;
    if plan.count() != shape.count() {
        let reason = format!("has {} subgroups, but there are {}", plan.count(), shape.count());
        return Err(Error::invalid("plan", reason));
    }
    let mut model = Model::new(shape, rates);
    let each = backward / shape.count().max(1) as f64;
    for subgroup in 0..shape.count() {
        if backward > 0.0 {
            model.pass(each);
            model.play(Command::Record(Lane::Model, LaneEvent::Grad(subgroup)))?;
            model.play(Command::Record(Lane::Model, LaneEvent::ParamFree(subgroup)))?;
            schedule::gradient_out(shape, plan, subgroup, &mut |command| model.play(command))?;
        }
    }
    model.step(plan)?;
    Ok(model.finish(plan, backward))
}

/// Converts commands to operations of the simulator.
struct Model<'a> {
    shape: &'a Shape,
    rates: &'a Rates,
    timeline: Timeline,
    spans: Vec<(Lane, Option<Work>)>,
    /// Per lane: the operations that its next operation must follow.
    frontier: [Vec<u32>; Lane::ALL.len()],
    /// Per recorded event: the operations that must be done before it.
    events: HashMap<LaneEvent, Vec<u32>>,
    /// The host thread that enqueues the current commands.
    issuer: Lane,
}

impl<'a> Model<'a> {
    fn new(shape: &'a Shape, rates: &'a Rates) -> Self {
        Model {
            shape,
            rates,
            timeline: Timeline::default(),
            spans: Vec::new(),
            frontier: Default::default(),
            events: HashMap::new(),
            issuer: Lane::Caller,
        }
    }

    /// Adds `seconds` of computation of the framework.
    fn pass(&mut self, seconds: f64) {
        self.add(Lane::Model, None, Engine::Clock, seconds, 0.0);
    }

    fn step(&mut self, plan: &Plan) -> Result<()> {
        for (piece, room) in pieces::pieces(self.shape, plan) {
            pieces::room(&room, &mut |command| self.play(command))?;
            pieces::enqueue(self.shape, piece, &mut |command| self.play(command))?;
        }
        self.issuer = Lane::Cpu;
        for (nth, subgroup) in plan.on(Placement::Cpu).enumerate() {
            schedule::cpu_part(nth, subgroup, &mut |command| self.play(command))?;
        }
        Ok(())
    }

    fn play(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Wait(lane, event, _) => {
                if let Some(after) = self.events.get(&event) {
                    self.frontier[lane as usize].extend_from_slice(after);
                }
                if lane == Lane::Caller {
                    // One operation stands for all that this thread has waited for. It takes no time.
                    let waited = self.timeline.add(Engine::Host, 0.0, 0.0, &self.frontier[lane as usize]);
                    self.spans.push((lane, None));
                    self.frontier[lane as usize] = vec![waited];
                }
            }
            Command::Record(lane, event) => {
                let after = self.after(lane);
                self.events.insert(event, after);
            }
            Command::Run(lane, work) => {
                let (engine, seconds, host_bytes) = self.cost(work);
                self.add(lane, Some(work), engine, seconds, host_bytes);
            }
        }
        Ok(())
    }

    /// The operations that the next operation of a lane must follow: the lane's earlier operations and waits, and
    /// everything that the enqueueing thread has waited for.
    fn after(&self, lane: Lane) -> Vec<u32> {
        let mut after = self.frontier[lane as usize].clone();
        if self.issuer != lane {
            after.extend_from_slice(&self.frontier[self.issuer as usize]);
        }
        after.sort_unstable();
        after.dedup();
        after
    }

    fn add(&mut self, lane: Lane, work: Option<Work>, engine: Engine, seconds: f64, host_bytes: f64) {
        let op = self.timeline.add(engine, seconds, host_bytes, &self.after(lane));
        self.spans.push((lane, work));
        self.frontier[lane as usize] = vec![op];
    }

    /// The engine of the work, its seconds at full speed, and the bytes of host memory that it reads and writes.
    fn cost(&self, work: Work) -> (Engine, f64, f64) {
        let Rates { cpu, downscale, gpu, h2d, d2h, cast, .. } = *self.rates;
        let size = |subgroup: usize| self.shape.sizes[subgroup] as f64;
        let copy = |engine, words: f64, rate: f64| (engine, words / rate, words * WORD);
        match work {
            Work::Cast { part, .. } => (Engine::Gpu, part.len as f64 / cast, 0.0),
            Work::GradOut { part, .. } => {
                copy(Engine::D2h, part.len as f64 * self.shape.transfer_words(), d2h)
            }
            Work::Prefetch { part, .. } | Work::Admit { part, .. } => copy(Engine::H2d, part.len as f64, h2d),
            Work::FetchGrad { part, .. } => {
                copy(Engine::H2d, part.len as f64 * self.shape.fetched_words(), h2d)
            }
            Work::Flush { part, .. } | Work::Evict { part, .. } => copy(Engine::D2h, part.len as f64, d2h),
            Work::GpuStep { subgroup, .. } | Work::ResidentStep { subgroup } => {
                (Engine::Gpu, size(subgroup) / gpu, 0.0)
            }
            Work::CpuStep { subgroup, .. } => {
                let seconds = size(subgroup) * (1.0 / cpu + 1.0 / downscale);
                (Engine::Cpu, seconds, size(subgroup) * self.step_bytes())
            }
            Work::Upload { subgroup, .. } => copy(Engine::H2d, size(subgroup) / 2.0, h2d),
        }
    }

    /// Bytes of host memory per parameter that a CPU update reads and writes: three states read and written, the
    /// gradient, and the 16-bit parameter. If rounding is a separate pass, that pass reads the parameter once more.
    fn step_bytes(&self) -> f64 {
        let grad = if self.shape.transfer_dtype == TransferDtype::Native { 2.0 } else { 4.0 };
        let again = if self.rates.downscale.is_finite() { 4.0 } else { 0.0 };
        24.0 + grad + 2.0 + again
    }

    fn finish(self, plan: &Plan, backward: f64) -> Prediction {
        let limits = Limits { dram: self.rates.dram, duplex: self.rates.duplex };
        let ran = self.timeline.run(limits);
        let end = |event: LaneEvent| {
            let ends = self.events.get(&event).into_iter().flatten().map(|op| ran[*op as usize].end);
            (ends.fold(0.0, f64::max) - backward).max(0.0)
        };
        let ready: Vec<f64> = (0..plan.count()).map(|subgroup| end(LaneEvent::Ready(subgroup))).collect();
        let home = (0..plan.count()).map(|subgroup| end(LaneEvent::Home(subgroup))).fold(0.0, f64::max);
        let mut busy = [0.0; 4];
        for (op, ran) in ran.iter().enumerate() {
            if let Some(busy) = busy.get_mut(self.timeline.engine(op as u32) as usize) {
                *busy += ran.end - ran.start;
            }
        }
        let spans = self.spans.iter().zip(&ran).map(|((lane, work), ran)| Span {
            lane: *lane,
            work: *work,
            ran: *ran,
        });
        Prediction {
            exposed: ready.iter().copied().fold(0.0, f64::max),
            home,
            ready,
            busy,
            spans: spans.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::GpuGrads;
    use super::super::share::tests::{H100, V100};
    use super::super::share::{Balance, serial_throughput, throughput};
    use super::*;

    fn rate(rates: &Rates, plan: &Plan) -> f64 {
        let shape = Shape::uniform(plan.count(), 100_000_000);
        shape.total() as f64 / predict(&shape, rates, plan, 0.0).unwrap().exposed
    }

    fn even(gpu: usize) -> Plan {
        Plan::even(50, gpu, 0).unwrap()
    }

    fn stride(stride: usize) -> Plan {
        Plan::stride(50, stride, 0).unwrap()
    }

    /// Asserts that `value` is within 2 % of `expected`.
    fn close(value: f64, expected: f64) {
        assert!((value / expected - 1.0).abs() < 0.02, "{value} is not {expected}");
    }

    #[test]
    fn the_papers_machines_reach_what_an_independent_simulation_reached() {
        let fused = |rates: Rates| Rates { downscale: f64::INFINITY, ..rates };
        for (k, h100, v100) in [(2, 3.53, 1.71), (3, 2.60, 2.30), (4, 2.33, 2.12)] {
            close(rate(&H100, &stride(k)) / 1e9, h100);
            close(rate(&V100, &stride(k)) / 1e9, v100);
        }
        close(rate(&H100, &even(36)) / 1e9, 5.95);
        close(rate(&fused(H100), &even(34)) / 1e9, 6.22);
        close(rate(&V100, &even(15)) / 1e9, 2.31);
        close(rate(&fused(V100), &even(12)) / 1e9, 2.61);
        let half = |rates: Rates| Rates { duplex: false, ..rates };
        let chunked = Shape { chunk: 16 << 20, ..Shape::uniform(50, 100_000_000) };
        let seconds = |rates: &Rates, gpu| predict(&chunked, rates, &even(gpu), 0.0).unwrap().exposed;
        let best = |rates| 5.0 / (0..=50).map(|gpu| seconds(&rates, gpu)).fold(f64::INFINITY, f64::min);
        close(best(half(H100)), 3.91);
        close(best(half(V100)), 1.97);
    }

    #[test]
    fn best_plans_of_the_papers_machines_are_3_5_and_1_8_times_the_serial_update() {
        let best = |rates: &Rates| {
            let best = (0..=50).map(|gpu| rate(rates, &even(gpu))).fold(0.0, f64::max);
            best / serial_throughput(rates)
        };
        close(best(&H100), 3.58);
        close(best(&V100), 1.80);
        close(rate(&H100, &stride(2)) / serial_throughput(&H100), 2.12);
    }

    #[test]
    fn engines_at_stride_2_are_as_busy_as_the_paper_saw_the_links() {
        let shape = Shape::uniform(50, 100_000_000);
        let seen = predict(&shape, &H100, &stride(2), 0.0).unwrap();
        let part: Vec<f64> = seen.busy.iter().map(|busy| (100.0 * busy / seen.exposed).round()).collect();
        assert_eq!(part, [100.0, 45.0, 39.0, 7.0]);
    }

    #[test]
    fn fetched_gradients_and_large_subgroups_cost_what_they_should() {
        let best = |gpu_grads, transfer_dtype| {
            let shape = Shape { gpu_grads, transfer_dtype, ..Shape::uniform(50, 100_000_000) };
            let seconds = |gpu| predict(&shape, &H100, &even(gpu), 0.0).unwrap().exposed;
            5.0 / (0..=50).map(seconds).fold(f64::INFINITY, f64::min)
        };
        close(best(GpuGrads::Fetched, TransferDtype::F32), 4.90);
        close(best(GpuGrads::Fetched, TransferDtype::Native), 5.39);
        let few = Shape::uniform(5, 1_000_000_000);
        let seen = predict(&few, &H100, &Plan::stride(5, 2, 0).unwrap(), 0.0).unwrap();
        close(5.0 / seen.exposed, 2.89);
    }

    #[test]
    fn an_endless_update_is_the_closed_form() {
        for rates in [H100, V100, Rates { duplex: false, ..H100 }, Rates { dram: 1e12, ..V100 }] {
            for gpu in [0, 50, 200, 333, 500, 666, 800, 1000] {
                let shape = Shape::uniform(1000, 10_000_000);
                let plan = Plan::even(1000, gpu, 0).unwrap();
                let seen = predict(&shape, &rates, &plan, 0.0).unwrap();
                let closed = throughput(&rates, 0.0, gpu as f64 / 1000.0, Balance::TwoSlots);
                close(shape.total() as f64 / seen.exposed, closed);
            }
        }
    }

    #[test]
    fn scarce_host_memory_is_worth_more_on_the_link_than_in_the_cpu() {
        let scarce = Rates { dram: 100e9, ..H100 };
        let all = rate(&scarce, &even(50));
        assert!((0..50).all(|gpu| rate(&scarce, &even(gpu)) <= all * 1.0001));
        close(all / serial_throughput(&scarce), 2.5);
    }

    #[test]
    fn residents_are_last_because_their_gradients_are() {
        let shape = Shape::uniform(50, 100_000_000);
        let rates = Rates { downscale: f64::INFINITY, ..H100 };
        let last = Plan::even(50, 0, 10).unwrap();
        let first = Plan::of(last.placements().iter().rev().copied().collect());
        let exposed = |plan, backward| predict(&shape, &rates, plan, backward).unwrap().exposed;
        close(exposed(&last, 1.0), 1.031);
        close(exposed(&first, 1.0), 1.231);
        close(exposed(&last, 2.5), 0.004);
        close(exposed(&first, 2.5), 0.061);
    }

    #[test]
    fn empty_and_odd_shapes_have_a_time() {
        let none = Shape::uniform(0, 1);
        assert_eq!(predict(&none, &H100, &Plan::cpu(0), 0.0).unwrap().exposed, 0.0);
        let hollow = Shape { sizes: vec![0, 5, 0, 7], chunk: 2, ..Shape::uniform(0, 0) };
        for gpu in 0..=4 {
            let seen = predict(&hollow, &H100, &Plan::even(4, gpu, 0).unwrap(), 1.0).unwrap();
            assert!(seen.exposed > 0.0 && seen.exposed.is_finite());
        }
        assert!(predict(&hollow, &H100, &Plan::cpu(3), 0.0).is_err());
        assert!(predict(&hollow, &Rates { cpu: 0.0, ..H100 }, &Plan::cpu(4), 0.0).is_err());
        assert!(predict(&hollow, &H100, &Plan::cpu(4), f64::NAN).is_err());
    }

    /// The H100 with 16 cores of ffi_tests/bench/records/gpu_update.json. Alone, its CPU steps 4.85 G parameters a
    /// second, 3.95 G beside copies in both directions. Memory therefore has 0.814 of the 228 GB/s of all three.
    const MEASURED: Rates = Rates {
        cpu: 4.85e9,
        downscale: f64::INFINITY,
        gpu: 98.6e9,
        h2d: 11.59e9,
        d2h: 11.59e9,
        cast: f64::INFINITY,
        dram: 186e9,
        duplex: true,
    };

    fn measured_shape() -> Shape {
        let transfer_dtype = TransferDtype::Native;
        Shape { chunk: 16 << 20, transfer_dtype, ..Shape::uniform(20, 100_000_000) }
    }

    /// Seconds of a step whose uploads begin after all prefetches, as copies behind a queue of copies do.
    fn uploads_last(shape: &Shape, plan: &Plan) -> f64 {
        let mut model = Model::new(shape, &MEASURED);
        for (piece, _) in pieces::pieces(shape, plan) {
            pieces::enqueue(shape, piece, &mut |command| model.play(command)).unwrap();
        }
        model.issuer = Lane::Cpu;
        let lane = |lane| if lane == Lane::Upload { Lane::H2d } else { lane };
        for (nth, subgroup) in plan.on(Placement::Cpu).enumerate() {
            let behind = &mut |command| {
                model.play(match command {
                    Command::Wait(on, event, edge) => Command::Wait(lane(on), event, edge),
                    Command::Record(on, event) => Command::Record(lane(on), event),
                    Command::Run(on, work) => Command::Run(lane(on), work),
                })
            };
            schedule::cpu_part(nth, subgroup, behind).unwrap();
        }
        model.finish(plan, 0.0).exposed
    }

    #[test]
    fn the_h100_took_as_long_as_uploads_behind_all_prefetches() {
        let shape = Shape { slots: 2, ..measured_shape() };
        let plans = [Plan::cpu(20), Plan::even(20, 9, 0).unwrap(), Plan::even(20, 10, 0).unwrap()];
        for (plan, took) in plans.iter().zip([0.413, 0.437, 0.459]) {
            let seen = uploads_last(&shape, plan);
            assert!((seen / took - 1.0).abs() < 0.05, "{seen} is not {took}");
        }
        let stride = uploads_last(&shape, &Plan::stride(20, 2, 0).unwrap());
        assert!((stride / 0.473 - 1.0).abs() < 0.08, "{stride}");
    }

    /// DeepSpeed steps, rounds and uploads one after the other, and its rounding pass is at the bandwidth of host memory:
    /// 6 bytes per parameter. Its partial offload steps the share on the GPU before that.
    #[test]
    fn the_rows_of_deepspeed_are_those_of_the_serial_update() {
        let rounded = serial_throughput(&Rates { downscale: MEASURED.dram / 6.0, ..MEASURED });
        let total = measured_shape().total() as f64;
        for (share, took) in [(0.0, 0.562), (0.3, 0.402)] {
            let seen = total * (share / MEASURED.gpu + (1.0 - share) / rounded);
            assert!((seen / took - 1.0).abs() < 0.05, "{seen} is not {took}");
        }
    }

    /// The updates on this GPU take as long as a fetch. With two slots the link waits for them.
    #[test]
    fn three_slots_keep_the_link_busy_beside_a_slow_gpu() {
        let rates = Rates { cpu: 0.5e9, downscale: f64::INFINITY, gpu: 4.5e9, ..H100 };
        let busy = |slots| {
            let shape = Shape { slots, ..Shape::uniform(60, 100_000_000) };
            let seen = predict(&shape, &rates, &Plan::even(60, 60, 0).unwrap(), 0.0).unwrap();
            seen.busy[Engine::H2d as usize] / seen.exposed
        };
        assert!(busy(2) < 0.85, "{}", busy(2));
        assert!(busy(3) > 0.95, "{}", busy(3));
        close(busy(4), busy(3));
    }

    #[test]
    fn thirty_percent_residents_are_1_35_times_the_cpu_on_that_machine() {
        let seconds = |plan: &Plan| predict(&measured_shape(), &MEASURED, plan, 0.0).unwrap().exposed;
        let gain = seconds(&Plan::cpu(20)) / seconds(&Plan::even(20, 0, 6).unwrap());
        assert!(gain >= 1.35, "{gain}");
    }

    #[test]
    fn uploads_between_prefetches_and_residents_pay_on_that_machine() {
        let seconds = |gpu, residents| {
            let plan = Plan::even(20, gpu, residents).unwrap();
            predict(&measured_shape(), &MEASURED, &plan, 0.0).unwrap().exposed
        };
        let on_cpu = seconds(0, 0);
        close(on_cpu / seconds(8, 0), 1.39);
        close(on_cpu / seconds(0, 6), 1.42);
        close(on_cpu / seconds(5, 6), 1.94);
    }
}
