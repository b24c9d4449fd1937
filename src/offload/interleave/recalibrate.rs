//! Rates from the timings of every step, and the decision to change the plan.
//!
//! Each kind of work has a smoothed time per parameter. Guards keep one bad step from changing the plan:
//! - A step in which a kind of work moved less than `MIN_SAMPLE` parameters, or took no time, is no sample for it.
//! - A sample counts as at most `MAX_FACTOR` times slower or faster than the known rate. A single outlier therefore has
//!   little effect, and a lasting change is followed within a few steps.
//! - A new plan must be better than the present plan by more than `MIN_GAIN` under the new rates.
//!
//! No plan lasts whose steps take longer than without it. Steps on the CPU alone are measured first, then steps with
//! residents, then steps that fetch subgroups too. Each is compared with the one before.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use super::Timing;
use crate::error::Result;
use spillway_planner::interleave::choose::{self, Mode};
use spillway_planner::interleave::memory::bytes;
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::Work;
use spillway_planner::interleave::timeline::Engine;
use spillway_planner::interleave::{Rates, Shape, model};

/// Weight of the newest sample in the smoothed time.
const NEWEST_WEIGHT: f64 = 0.25;
/// Parameters below which a sample is mostly overhead.
const MIN_SAMPLE: f64 = 1e5;
/// Largest factor by which a sample may differ from the known time per parameter.
const MAX_FACTOR: f64 = 2.0;
/// Relative gain in exposed time above which the plan changes.
const MIN_GAIN: f64 = 0.02;

/// A plan is given up if this number of steps in a row was slower than a step without its fetched subgroups, or without
/// its residents.
const SLOWER_IN_A_ROW: u32 = 2;
/// Number of steps until a plan is tried again after one that was slower.
const STEPS_WITHOUT: u32 = 100;

/// The current rates, corrected by the timings of every step, and what steps took.
#[derive(Debug, Clone)]
pub struct RateMeter {
    rates: Rates,
    /// True after the first step, whose buffers are allocated while it runs.
    warm: bool,
    /// Seconds of a step that fetches no subgroup, by its number of residents.
    unfetched: BTreeMap<usize, f64>,
    /// True once the number of residents was chosen here, and not by the caller.
    chose: bool,
    /// False if the GPU has no memory for slots.
    fetches: bool,
    /// Number of steps in a row that were slower than what the plan is compared with.
    slower: u32,
    /// Number of steps until a plan that fetches is tried again.
    hold: u32,
}

/// Amount of work of one engine (copies: f32 words; updates: parameters), and the intervals in which it worked. Lanes
/// may share an engine: a copy that waits for another lane's copy has started on its own lane, but the time counts
/// once.
#[derive(Debug, Default, Clone)]
struct Sample {
    words: f64,
    busy: Vec<(f64, f64)>,
}

impl Sample {
    fn add(&mut self, words: f64, timing: &Timing) {
        if timing.end > timing.start && timing.start.is_finite() && timing.end.is_finite() {
            self.words += words;
            self.busy.push((timing.start, timing.end));
        }
    }

    /// Seconds in which the engine worked; overlapping intervals count once.
    fn seconds(&mut self) -> f64 {
        self.busy.sort_by(|left, right| left.0.total_cmp(&right.0));
        let (mut sum, mut until) = (0.0, f64::NEG_INFINITY);
        for (start, end) in &self.busy {
            sum += (end - start.max(until)).max(0.0);
            until = until.max(*end);
        }
        sum
    }
}

impl RateMeter {
    /// Starts with the rates of a profile or a probe.
    pub fn new(rates: Rates) -> Result<RateMeter> {
        rates.check()?;
        let unfetched = BTreeMap::new();
        Ok(RateMeter { rates, warm: false, unfetched, chose: false, fetches: true, slower: 0, hold: 0 })
    }

    /// Updates the rates with the timings of steps of `plan`. What the model predicts for the plan includes the host
    /// memory that the engines share, so a rate stays that of an engine alone.
    pub fn observe(&mut self, shape: &Shape, plan: &Plan, timings: &[Timing], backward: f64) -> Result<()> {
        let (mut cpu, mut gpu, mut h2d, mut d2h, mut cast) =
            <(Sample, Sample, Sample, Sample, Sample)>::default();
        let size = |subgroup: usize| shape.sizes.get(subgroup).copied().unwrap_or(0) as f64;
        for timing in timings {
            match timing.work {
                Work::Cast { part, .. } => cast.add(part.len as f64, timing),
                Work::GradOut { part, .. } => d2h.add(part.len as f64 * shape.transfer_words(), timing),
                Work::Flush { part, .. } | Work::Evict { part, .. } => d2h.add(part.len as f64, timing),
                Work::Prefetch { part, .. } | Work::Admit { part, .. } => h2d.add(part.len as f64, timing),
                Work::FetchGrad { part, .. } => h2d.add(part.len as f64 * shape.fetched_words(), timing),
                Work::Upload { subgroup, .. } => h2d.add(size(subgroup) / 2.0, timing),
                Work::GpuStep { subgroup, .. } | Work::ResidentStep { subgroup } => {
                    gpu.add(size(subgroup), timing);
                }
                Work::CpuStep { subgroup, .. } => cpu.add(size(subgroup), timing),
            }
        }
        let slowed = self.slowed(shape, plan, backward)?;
        // The CPU step writes the 16-bit copy in the same pass, so its time includes the downscale.
        if move_towards(&mut self.rates.cpu, slowed[Engine::Cpu as usize], cpu) {
            self.rates.downscale = f64::INFINITY;
        }
        move_towards(&mut self.rates.gpu, 1.0, gpu);
        move_towards(&mut self.rates.h2d, slowed[Engine::H2d as usize], h2d);
        move_towards(&mut self.rates.d2h, slowed[Engine::D2h as usize], d2h);
        if self.rates.cast.is_finite() {
            move_towards(&mut self.rates.cast, 1.0, cast);
        }
        Ok(())
    }

    /// The factors by which the model expects engines to be slower in a step than alone, because they share host memory.
    fn slowed(&self, shape: &Shape, plan: &Plan, backward: f64) -> Result<[f64; 4]> {
        if self.rates.dram.is_infinite() {
            return Ok([1.0; 4]);
        }
        let alone = Rates { dram: f64::INFINITY, ..self.rates };
        let together = model::predict(shape, &self.rates, plan, backward)?.busy;
        let alone = model::predict(shape, &alone, plan, backward)?.busy;
        Ok(std::array::from_fn(
            |engine| if alone[engine] > 0.0 { together[engine] / alone[engine] } else { 1.0 },
        ))
    }

    /// Compares what the last step took, by its timings, with a step that fetches no subgroup, or one on the CPU alone.
    /// False if timings are missing.
    fn compare(&mut self, shape: &Shape, plan: &Plan, last: &[Timing]) -> bool {
        self.hold = self.hold.saturating_sub(1);
        let Some(seconds) = seconds_of(shape, last) else { return false };
        if !std::mem::replace(&mut self.warm, true) {
            return true;
        }
        let residents = plan.count_on(Placement::Resident);
        let fetched = plan.count_on(Placement::Gpu) > 0;
        if !fetched {
            let known = self.unfetched.entry(residents).or_insert(seconds);
            *known += NEWEST_WEIGHT * (seconds - *known);
        }
        let without = if fetched { residents } else { 0 };
        let compared = fetched || self.chose && residents > 0;
        let slower = compared && self.unfetched.get(&without).is_some_and(|without| seconds > *without);
        self.slower = if slower { self.slower + 1 } else { 0 };
        true
    }

    /// True if the number of residents is not chosen yet.
    pub fn chooses_residents(&self, present: &Plan) -> bool {
        !self.chose && present.count_on(Placement::Resident) == 0
    }

    /// The GPU had no memory for a plan: no subgroup is fetched from now on.
    pub fn found_no_room(&mut self) {
        self.fetches = false;
    }

    /// The plan for the next step: the best plan under the current rates, or the present plan if that is nearly as
    /// good. A plan that fetches subgroups is never kept if its steps take longer than one that fetches none: such a
    /// step is measured first. The same holds for residents that are chosen here. `last`: the timings of the last step.
    /// `backward`: seconds of the backward pass that the step overlaps. `room`: bytes of GPU memory for residents and
    /// slots, if the number of residents is to be chosen.
    pub fn replan(
        &mut self,
        shape: &Shape,
        present: &Plan,
        last: &[Timing],
        backward: f64,
        room: Option<u64>,
    ) -> Result<Plan> {
        let timed = self.compare(shape, present, last);
        let mut residents = present.count_on(Placement::Resident);
        if self.slower >= SLOWER_IN_A_ROW {
            self.slower = 0;
            match present.count_on(Placement::Gpu) {
                0 => (residents, self.fetches) = (0, true),
                _ => self.hold = STEPS_WITHOUT,
            }
        }
        if let Some(room) = room.filter(|_| self.knows(0, timed)) {
            residents = self.choose_residents(shape, room, backward)?;
        }
        let others = residents != present.count_on(Placement::Resident);
        if others || self.hold > 0 || !self.fetches || !self.knows(residents, timed) {
            return Plan::even(shape.count(), 0, residents).map_err(Into::into);
        }
        let best = choose::choose(shape, &self.rates, residents, backward, Mode::Model)?;
        let now = model::predict(shape, &self.rates, present, backward)?;
        let worth = best.prediction.exposed < now.exposed * (1.0 - MIN_GAIN);
        Ok(if worth { best.plan } else { present.clone() })
    }

    /// True if a step with this number of residents was measured, or steps have no timings.
    fn knows(&self, residents: usize, timed: bool) -> bool {
        !timed || self.unfetched.contains_key(&residents)
    }

    fn choose_residents(&mut self, shape: &Shape, room: u64, backward: f64) -> Result<usize> {
        let chosen = choose::within(shape, &self.rates, room, backward)?.plan;
        let residents = chosen.count_on(Placement::Resident);
        let fetched = shape.slots.min(shape.count() - residents);
        let needed = bytes(shape, &Plan::even(shape.count(), fetched, residents)?);
        self.fetches = needed.slots + needed.residents <= room;
        self.chose = true;
        Ok(residents)
    }
}

/// Seconds from the first work of a step until the last subgroup has its new parameters; `None` if timings are missing.
fn seconds_of(shape: &Shape, step: &[Timing]) -> Option<f64> {
    let ready = |work| matches!(work, Work::GpuStep { .. } | Work::ResidentStep { .. } | Work::Upload { .. });
    let ends = step.iter().filter(|timing| ready(timing.work));
    let done: BTreeSet<usize> = ends.clone().map(|timing| timing.work.subgroup()).collect();
    let works = |work| ready(work) || matches!(work, Work::Prefetch { .. } | Work::CpuStep { .. });
    let starts = step.iter().filter(|timing| works(timing.work)).map(|timing| timing.start);
    let seconds = ends.map(|timing| timing.end).fold(f64::NEG_INFINITY, f64::max)
        - starts.fold(f64::INFINITY, f64::min);
    (done.len() == shape.count() && seconds > 0.0).then_some(seconds)
}

/// Moves a rate towards a sample of an engine that is `slowed` by others; false if the sample is too small to count.
fn move_towards(rate: &mut f64, slowed: f64, mut sample: Sample) -> bool {
    let seconds = sample.seconds() / slowed;
    let valid = sample.words >= MIN_SAMPLE && seconds > 0.0;
    if valid {
        let known = 1.0 / *rate;
        let seen = (seconds / sample.words).clamp(known / MAX_FACTOR, known * MAX_FACTOR);
        *rate = 1.0 / (known + NEWEST_WEIGHT * (seen - known));
    }
    valid
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_planner::interleave::schedule::{Lane, ParamRange, StateArray};

    const KNOWN: Rates = Rates {
        cpu: 2e9,
        downscale: f64::INFINITY,
        gpu: 25e9,
        h2d: 13e9,
        d2h: 13e9,
        cast: f64::INFINITY,
        dram: f64::INFINITY,
        duplex: true,
    };

    fn cpu_step(seconds: f64) -> Timing {
        Timing {
            lane: Lane::Cpu,
            work: Work::CpuStep { subgroup: 0, stage: 0 },
            start: 1.0,
            end: 1.0 + seconds,
        }
    }

    #[test]
    fn a_lasting_change_is_followed_and_a_hiccup_passes() {
        let shape = Shape::uniform(10, 100_000_000);
        let mut meter = RateMeter::new(KNOWN).unwrap();
        meter.observe(&shape, &Plan::cpu(10), &[cpu_step(50.0)], 0.0).unwrap();
        assert!(meter.rates.cpu > 1.5e9, "one step that took a thousand times as long");
        for _ in 0..40 {
            meter.observe(&shape, &Plan::cpu(10), &[cpu_step(0.1)], 0.0).unwrap();
        }
        assert!((meter.rates.cpu / 1e9 - 1.0).abs() < 0.01);
        assert_eq!((meter.rates.gpu, meter.rates.h2d), (KNOWN.gpu, KNOWN.h2d));
    }

    /// Uploads and prefetches share the engine: time in which one waits for the other counts once for the link.
    #[test]
    fn time_in_which_two_copies_share_an_engine_counts_once() {
        let shape = Shape::uniform(2, 100_000_000);
        let mut meter = RateMeter::new(KNOWN).unwrap();
        let part = ParamRange { from: 0, len: 100_000_000 };
        let seconds = 1.5e8 / KNOWN.h2d;
        let prefetch = Work::Prefetch { subgroup: 0, slot: 0, state: StateArray::Param, part };
        let both = [(Lane::H2d, prefetch), (Lane::Upload, Work::Upload { subgroup: 1, stage: 0 })];
        let timings = both.map(|(lane, work)| Timing { lane, work, start: 1.0, end: 1.0 + seconds });
        meter.observe(&shape, &Plan::even(2, 1, 0).unwrap(), &timings, 0.0).unwrap();
        assert!((meter.rates.h2d / KNOWN.h2d - 1.0).abs() < 1e-6, "{}", meter.rates.h2d / 1e9);
    }

    #[test]
    fn samples_that_say_nothing_are_left_out() {
        let shape = Shape::uniform(10, 100_000_000);
        let mut meter = RateMeter::new(KNOWN).unwrap();
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            meter.observe(&shape, &Plan::cpu(10), &[cpu_step(seconds)], 0.0).unwrap();
        }
        meter.observe(&Shape::uniform(10, 1000), &Plan::cpu(10), &[cpu_step(1.0)], 0.0).unwrap();
        meter.observe(&shape, &Plan::cpu(10), &[], 0.0).unwrap();
        assert_eq!(meter.rates, KNOWN);
    }

    #[test]
    fn the_plan_follows_the_rates_and_ignores_their_noise() {
        let shape = Shape::uniform(50, 100_000_000);
        let mut meter = RateMeter::new(KNOWN).unwrap();
        let plan = meter.replan(&shape, &Plan::cpu(50), &[], 0.0, None).unwrap();
        assert_eq!(plan.count_on(Placement::Gpu), 34);
        for round in 0..30 {
            let noisy = cpu_step(0.05 * (1.0 + 0.03 * f64::from(round % 3 - 1)));
            meter.observe(&shape, &plan, &[noisy], 0.0).unwrap();
            assert_eq!(meter.replan(&shape, &plan, &[], 0.0, None).unwrap(), plan);
        }
        for _ in 0..40 {
            meter.observe(&shape, &plan, &[cpu_step(0.0125)], 0.0).unwrap();
        }
        let faster_cpu = meter.replan(&shape, &plan, &[], 0.0, None).unwrap();
        assert!(faster_cpu.count_on(Placement::Gpu) < 25, "{}", faster_cpu.count_on(Placement::Gpu));
    }

    /// A step of two subgroups that takes `seconds`: on the CPU, or with one of them on the GPU.
    fn step(seconds: f64, fetches: bool) -> Vec<Timing> {
        let upload =
            Timing { lane: Lane::Upload, work: Work::Upload { subgroup: 0, stage: 0 }, ..cpu_step(seconds) };
        let other = match fetches {
            true => Timing {
                lane: Lane::Gpu,
                work: Work::GpuStep { subgroup: 1, slot: 0 },
                ..cpu_step(seconds / 2.0)
            },
            false => Timing { work: Work::Upload { subgroup: 1, stage: 1 }, ..upload },
        };
        vec![upload, other]
    }

    #[test]
    fn a_plan_that_is_slower_than_the_cpu_alone_is_given_up() {
        let shape = Shape::uniform(2, 100_000_000);
        let slow_link = Rates { h2d: 8e9, d2h: 8e9, ..KNOWN };
        let (mut meter, on_cpu) = (RateMeter::new(slow_link).unwrap(), Plan::cpu(2));
        let interleaved = Plan::even(2, 1, 0).unwrap();
        // Buffers are allocated in the first step.
        assert_eq!(meter.replan(&shape, &on_cpu, &step(9.0, false), 0.0, None).unwrap(), on_cpu);
        // A plan from elsewhere: the CPU alone is measured first.
        assert_eq!(meter.replan(&shape, &interleaved, &step(0.1, true), 0.0, None).unwrap(), on_cpu);
        assert_eq!(meter.replan(&shape, &on_cpu, &step(0.1, false), 0.0, None).unwrap(), interleaved);
        for seconds in [0.09, 0.11, 0.09, 0.11] {
            assert_eq!(
                meter.replan(&shape, &interleaved, &step(seconds, true), 0.0, None).unwrap(),
                interleaved
            );
        }
        assert_eq!(meter.replan(&shape, &interleaved, &step(0.11, true), 0.0, None).unwrap(), on_cpu);
        for _ in 1..STEPS_WITHOUT {
            assert_eq!(meter.replan(&shape, &on_cpu, &step(0.1, false), 0.0, None).unwrap(), on_cpu);
        }
        assert_eq!(meter.replan(&shape, &on_cpu, &step(0.1, false), 0.0, None).unwrap(), interleaved);
    }

    /// A step of two subgroups that takes `seconds`, the second one resident.
    fn resident_step(seconds: f64) -> Vec<Timing> {
        let mut step = step(seconds, true);
        step[1].work = Work::ResidentStep { subgroup: 1 };
        step
    }

    #[test]
    fn residents_that_are_slower_than_the_cpu_alone_are_given_up() {
        let shape = Shape::uniform(2, 100_000_000);
        let slow_link = Rates { h2d: 1e9, d2h: 1e9, ..KNOWN };
        let (on_cpu, resident) = (Plan::cpu(2), Plan::even(2, 0, 1).unwrap());
        let room = Some(1_200_000_000);
        let begun = || {
            let mut meter = RateMeter::new(slow_link).unwrap();
            assert_eq!(meter.replan(&shape, &on_cpu, &step(9.0, false), 0.0, room).unwrap(), on_cpu);
            assert_eq!(meter.replan(&shape, &on_cpu, &step(0.1, false), 0.0, room).unwrap(), resident);
            assert!(!meter.chooses_residents(&on_cpu));
            meter
        };
        let mut faster = begun();
        for seconds in [0.06, 0.11, 0.06, 0.06] {
            let kept = faster.replan(&shape, &resident, &resident_step(seconds), 0.0, None).unwrap();
            assert_eq!(kept, resident);
        }
        let mut slower = begun();
        assert_eq!(slower.replan(&shape, &resident, &resident_step(0.11), 0.0, None).unwrap(), resident);
        assert_eq!(slower.replan(&shape, &resident, &resident_step(0.11), 0.0, None).unwrap(), on_cpu);
        assert_eq!(slower.replan(&shape, &on_cpu, &step(0.1, false), 0.0, None).unwrap(), on_cpu);
    }

    #[test]
    fn no_subgroup_is_fetched_without_room_for_slots() {
        let shape = Shape::uniform(50, 100_000_000);
        let mut meter = RateMeter::new(KNOWN).unwrap();
        let plan = meter.replan(&shape, &Plan::cpu(50), &[], 0.0, Some(2_400_000_000)).unwrap();
        assert_eq!(plan, Plan::even(50, 0, 2).unwrap());
        let mut meter = RateMeter::new(KNOWN).unwrap();
        let plan = meter.replan(&shape, &Plan::cpu(50), &[], 0.0, Some(12_000_000_000)).unwrap();
        assert_eq!(plan, Plan::even(50, 0, 7).unwrap());
        let plan = meter.replan(&shape, &plan, &[], 0.0, None).unwrap();
        assert_eq!(plan.count_on(Placement::Resident), 7);
        assert!(plan.count_on(Placement::Gpu) > 10);
        meter.found_no_room();
        let without = meter.replan(&shape, &plan, &[], 0.0, None).unwrap();
        assert_eq!(without, Plan::even(50, 0, 7).unwrap());
    }

    #[test]
    fn a_rate_is_that_of_an_engine_alone_although_memory_is_shared() {
        let shape = Shape::uniform(20, 100_000_000);
        let scarce = Rates { cpu: 4.85e9, dram: 186e9, ..KNOWN };
        let (mut meter, plan) = (RateMeter::new(scarce).unwrap(), Plan::even(20, 8, 0).unwrap());
        let spans = model::predict(&shape, &scarce, &plan, 0.0).unwrap().spans;
        let timings: Vec<Timing> = spans
            .iter()
            .filter_map(|span| Some((span.work?, span)))
            .map(|(work, span)| Timing { lane: span.lane, work, start: span.ran.start, end: span.ran.end })
            .collect();
        for _ in 0..20 {
            meter.observe(&shape, &plan, &timings, 0.0).unwrap();
        }
        assert!((meter.rates.cpu / scarce.cpu - 1.0).abs() < 0.02, "{}", meter.rates.cpu / 1e9);
        assert!((meter.rates.h2d / scarce.h2d - 1.0).abs() < 0.02, "{}", meter.rates.h2d / 1e9);
    }
}
