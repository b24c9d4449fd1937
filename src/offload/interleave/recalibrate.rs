//! Rates from the timings of every step, and the decision to change the plan.
//!
//! Each kind of work has a smoothed time per parameter. Guards keep one bad step from changing the plan:
//! - A step in which a kind of work moved less than `MIN_SAMPLE` parameters, or took no time, is no sample for it.
//! - A sample counts as at most `MAX_FACTOR` times slower or faster than the known rate. A single outlier therefore has
//!   little effect, and a lasting change is followed within a few steps.
//! - A new plan must be better than the present plan by more than `MIN_GAIN` under the new rates.
#![forbid(unsafe_code)]

use super::Timing;
use crate::error::Result;
use spillway_planner::interleave::choose::{self, Mode};
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::Work;
use spillway_planner::interleave::{Rates, Shape, model};

/// Weight of the newest sample in the smoothed time.
const NEWEST_WEIGHT: f64 = 0.25;
/// Parameters below which a sample is mostly overhead.
const MIN_SAMPLE: f64 = 1e5;
/// Largest factor by which a sample may differ from the known time per parameter.
const MAX_FACTOR: f64 = 2.0;
/// Relative gain in exposed time above which the plan changes.
const MIN_GAIN: f64 = 0.02;

/// The current rates, corrected by the timings of every step.
#[derive(Debug, Clone)]
pub struct RateMeter {
    rates: Rates,
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
        Ok(RateMeter { rates })
    }

    /// Updates the rates with the timings of a step.
    pub fn observe(&mut self, shape: &Shape, timings: &[Timing]) {
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
        // The CPU step writes the 16-bit copy in the same pass, so its time includes the downscale.
        if move_towards(&mut self.rates.cpu, cpu) {
            self.rates.downscale = f64::INFINITY;
        }
        move_towards(&mut self.rates.gpu, gpu);
        move_towards(&mut self.rates.h2d, h2d);
        move_towards(&mut self.rates.d2h, d2h);
        if self.rates.cast.is_finite() {
            move_towards(&mut self.rates.cast, cast);
        }
    }

    /// The plan for the next step: the best plan under the current rates, or the present plan if that is nearly as
    /// good. `backward`: seconds of the backward pass that the step overlaps.
    pub fn replan(&self, shape: &Shape, present: &Plan, backward: f64) -> Result<Plan> {
        let residents = present.count_on(Placement::Resident);
        let best = choose::choose(shape, &self.rates, residents, backward, Mode::Model)?;
        let now = model::predict(shape, &self.rates, present, backward)?;
        let worth = best.prediction.exposed < now.exposed * (1.0 - MIN_GAIN);
        Ok(if worth { best.plan } else { present.clone() })
    }
}

/// Moves a rate towards a sample; false if the sample is too small to count.
fn move_towards(rate: &mut f64, mut sample: Sample) -> bool {
    let seconds = sample.seconds();
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
    use spillway_planner::interleave::schedule::{Lane, Part, StateArray};

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
        meter.observe(&shape, &[cpu_step(50.0)]);
        assert!(meter.rates.cpu > 1.5e9, "one step that took a thousand times as long");
        for _ in 0..40 {
            meter.observe(&shape, &[cpu_step(0.1)]);
        }
        assert!((meter.rates.cpu / 1e9 - 1.0).abs() < 0.01);
        assert_eq!((meter.rates.gpu, meter.rates.h2d), (KNOWN.gpu, KNOWN.h2d));
    }

    /// Uploads and prefetches share the engine: time in which one waits for the other counts once for the link.
    #[test]
    fn time_in_which_two_copies_share_an_engine_counts_once() {
        let shape = Shape::uniform(2, 100_000_000);
        let mut meter = RateMeter::new(KNOWN).unwrap();
        let part = Part { from: 0, len: 100_000_000 };
        let seconds = 1.5e8 / KNOWN.h2d;
        let prefetch = Work::Prefetch { subgroup: 0, slot: 0, state: StateArray::Param, part };
        let both = [(Lane::H2d, prefetch), (Lane::Upload, Work::Upload { subgroup: 1, stage: 0 })];
        let timings = both.map(|(lane, work)| Timing { lane, work, start: 1.0, end: 1.0 + seconds });
        meter.observe(&shape, &timings);
        assert!((meter.rates.h2d / KNOWN.h2d - 1.0).abs() < 1e-6, "{}", meter.rates.h2d / 1e9);
    }

    #[test]
    fn samples_that_say_nothing_are_left_out() {
        let shape = Shape::uniform(10, 100_000_000);
        let mut meter = RateMeter::new(KNOWN).unwrap();
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            meter.observe(&shape, &[cpu_step(seconds)]);
        }
        meter.observe(&Shape::uniform(10, 1000), &[cpu_step(1.0)]);
        meter.observe(&shape, &[]);
        assert_eq!(meter.rates, KNOWN);
    }

    #[test]
    fn the_plan_follows_the_rates_and_ignores_their_noise() {
        let shape = Shape::uniform(50, 100_000_000);
        let mut meter = RateMeter::new(KNOWN).unwrap();
        let plan = meter.replan(&shape, &Plan::cpu(50), 0.0).unwrap();
        assert_eq!(plan.count_on(Placement::Gpu), 34);
        for round in 0..30 {
            meter.observe(&shape, &[cpu_step(0.05 * (1.0 + 0.03 * f64::from(round % 3 - 1)))]);
            assert_eq!(meter.replan(&shape, &plan, 0.0).unwrap(), plan);
        }
        for _ in 0..40 {
            meter.observe(&shape, &[cpu_step(0.0125)]);
        }
        let faster_cpu = meter.replan(&shape, &plan, 0.0).unwrap();
        assert!(faster_cpu.count_on(Placement::Gpu) < 25, "{}", faster_cpu.count_on(Placement::Gpu));
    }
}
