//! The plan that the model likes best.
//!
//! Rounding Eq. 1 to a stride wastes up to half of what interleaving gains, so the model times whole plans: every
//! number of GPU subgroups where there are few, a grid and then the neighbourhood of its best where there are many.
#![forbid(unsafe_code)]

use super::model::{self, Prediction};
use super::sites::Plan;
use super::{Rates, Shape, share};
use crate::error::Result;

/// Up to this many subgroups every number is tried.
const TRY_ALL: usize = 64;
/// Numbers tried in one round of narrowing down.
const GRID: usize = 16;

/// A plan and what the model says of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The plan.
    pub plan: Plan,
    /// Seconds and spans.
    pub prediction: Prediction,
}

/// Which rule makes the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The model's best number of GPU subgroups, spread evenly.
    Model,
    /// Deep Optimizer States: the stride that Eq. 1 means, `1 + k` rounded.
    Eq1,
    /// Deep Optimizer States as printed: Eq. 1 rounded and used as the stride.
    Paper,
    /// A stride of the caller's.
    Stride(usize),
    /// A number of GPU subgroups of the caller's, spread evenly.
    Count(usize),
}

/// The plan of a mode, with `residents` at the end, for a step after a backward pass of `backward` seconds.
pub fn choose(shape: &Shape, rates: &Rates, residents: usize, backward: f64, mode: Mode) -> Result<Choice> {
    let count = shape.count();
    shape.check()?;
    rates.check()?;
    let plan = match mode {
        Mode::Model => return best(shape, rates, residents, backward),
        Mode::Eq1 => Plan::stride(count, share::derived_stride(rates), residents)?,
        Mode::Paper => Plan::stride(count, share::paper_stride(rates), residents)?,
        Mode::Stride(stride) => Plan::stride(count, stride, residents)?,
        Mode::Count(gpu) => Plan::even(count, gpu, residents)?,
    };
    let prediction = model::predict(shape, rates, &plan, backward)?;
    Ok(Choice { plan, prediction })
}

/// Tries numbers of GPU subgroups; of equals the fewest win, as they need less of the GPU's memory.
fn best(shape: &Shape, rates: &Rates, residents: usize, backward: f64) -> Result<Choice> {
    let count = shape.count();
    let at = |gpu: usize| -> Result<Choice> {
        let plan = Plan::even(count, gpu, residents)?;
        let prediction = model::predict(shape, rates, &plan, backward)?;
        Ok(Choice { plan, prediction })
    };
    let mut found = (0, at(0)?);
    let (mut low, mut high) = (0, count.saturating_sub(residents));
    loop {
        let step = if count <= TRY_ALL { 1 } else { ((high - low) / GRID).max(1) };
        for gpu in (low..=high).step_by(step) {
            let tried = at(gpu)?;
            if tried.prediction.exposed < found.1.prediction.exposed {
                found = (gpu, tried);
            }
        }
        if step == 1 {
            return Ok(found.1);
        }
        (low, high) = (found.0.saturating_sub(step), (found.0 + step).min(high.max(found.0)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::share::tests::{H100, V100};
    use super::super::sites::Site;
    use super::super::{GpuGrads, Wire};
    use super::*;

    /// A generator whose every run is the same.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        fn below(&mut self, limit: u64) -> u64 {
            (self.next() >> 11) % limit
        }

        /// Between the two, evenly on a logarithmic scale.
        fn between(&mut self, low: f64, high: f64) -> f64 {
            let part = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
            low * (high / low).powf(part)
        }

        fn rates(&mut self) -> Rates {
            let h2d = self.between(1e9, 1e11);
            Rates {
                cpu: self.between(0.2e9, 20e9),
                downscale: if self.below(2) == 0 { f64::INFINITY } else { self.between(2e9, 60e9) },
                gpu: self.between(5e9, 200e9),
                h2d,
                d2h: h2d * self.between(0.5, 1.5),
                cast: f64::INFINITY,
                dram: if self.below(2) == 0 { f64::INFINITY } else { self.between(5e10, 1e12) },
                duplex: self.below(4) > 0,
            }
        }

        fn shape(&mut self, count: u64) -> Shape {
            let size = 1 + self.below(200_000_000);
            Shape {
                chunk: if self.below(2) == 0 { u64::MAX } else { size / 3 + 1 },
                slots: 2 + self.below(2) as usize,
                wire: [Wire::F32, Wire::Native, Wire::Delivered][self.below(3) as usize],
                gpu_grads: if self.below(3) == 0 { GpuGrads::Fetched } else { GpuGrads::Kept },
                ..Shape::uniform(count as usize, size)
            }
        }
    }

    /// Step, rounding and upload of every subgroup, one after the other, on the same memory.
    fn serial_seconds(shape: &Shape, rates: &Rates) -> f64 {
        let alone = |engine_seconds: f64, bytes: f64| engine_seconds.max(bytes / rates.dram);
        let grad = if shape.wire == Wire::Native { 2.0 } else { 4.0 };
        let again = if rates.downscale.is_finite() { 4.0 } else { 0.0 };
        let step = alone(1.0 / rates.cpu + 1.0 / rates.downscale, 26.0 + grad + again);
        shape.total() as f64 * (step + alone(0.5 / rates.h2d, 2.0))
    }

    #[test]
    fn no_chosen_plan_is_slower_than_the_serial_update() {
        let mut random = Random(1);
        for _ in 0..400 {
            let rates = random.rates();
            let shape = Shape {
                wire: Wire::Delivered,
                ..{
                    let count = random.below(40);
                    random.shape(count)
                }
            };
            let residents = random.below(shape.count() as u64 + 1) as usize;
            let chosen = choose(&shape, &rates, residents, 0.0, Mode::Model).unwrap().prediction.exposed;
            let mut serial = serial_seconds(&shape, &rates);
            // Residents are given: where the GPU is slower than the CPU they alone may take longer.
            serial = serial.max(residents as f64 * shape.largest() as f64 / rates.gpu);
            assert!(chosen <= serial * (1.0 + 1e-9), "{chosen} over {serial}: {rates:?} {shape:?}");
        }
    }

    #[test]
    fn the_choice_is_within_2_percent_of_every_number_of_gpu_subgroups() {
        let mut random = Random(2);
        for round in 0..60 {
            let rates = random.rates();
            let count = if round < 50 { 1 + random.below(60) } else { 65 + random.below(300) };
            let shape = random.shape(count);
            let backward = if random.below(2) == 0 { 0.0 } else { random.between(0.01, 10.0) };
            let residents = random.below(count / 2 + 1) as usize;
            let chosen = choose(&shape, &rates, residents, backward, Mode::Model).unwrap();
            let best = (0..=count as usize - residents)
                .map(|gpu| choose(&shape, &rates, residents, backward, Mode::Count(gpu)).unwrap())
                .map(|tried| tried.prediction.exposed)
                .fold(f64::INFINITY, f64::min);
            let seen = chosen.prediction.exposed;
            assert!(seen <= best * 1.02, "{seen} over {best}: {rates:?} {shape:?} {backward}");
        }
    }

    /// Not only the number: every one of the 2^N placements of an update phase.
    #[test]
    fn the_choice_is_within_2_percent_of_every_placement() {
        let mut random = Random(3);
        for _ in 0..40 {
            let (rates, shape) = (random.rates(), random.shape(8));
            let chosen = choose(&shape, &rates, 0, 0.0, Mode::Model).unwrap().prediction.exposed;
            let placement = |bits: u32| {
                let site = |index: u32| if bits >> index & 1 == 1_u32 { Site::Gpu } else { Site::Cpu };
                Plan::of((0..8).map(site).collect())
            };
            let seconds = |bits| model::predict(&shape, &rates, &placement(bits), 0.0).unwrap().exposed;
            let best = (0..256).map(seconds).fold(f64::INFINITY, f64::min);
            assert!(chosen <= best * 1.02, "{chosen} over {best}: {rates:?} {shape:?}");
        }
    }

    #[test]
    fn modes_make_the_plans_they_name() {
        let shape = Shape::uniform(50, 100_000_000);
        let on_gpu =
            |rates: &Rates, mode| choose(&shape, rates, 0, 0.0, mode).unwrap().plan.count_on(Site::Gpu);
        assert_eq!((on_gpu(&H100, Mode::Model), on_gpu(&V100, Mode::Model)), (36, 15));
        assert_eq!((on_gpu(&H100, Mode::Paper), on_gpu(&V100, Mode::Paper)), (25, 25));
        assert_eq!((on_gpu(&H100, Mode::Eq1), on_gpu(&V100, Mode::Eq1)), (50, 16));
        assert_eq!((on_gpu(&H100, Mode::Stride(5)), on_gpu(&H100, Mode::Count(7))), (10, 7));
        assert!(choose(&shape, &H100, 20, 0.0, Mode::Count(31)).is_err());
        let fast_cpu = Rates { h2d: 0.8e9, ..H100 };
        assert_eq!(on_gpu(&fast_cpu, Mode::Model), 0);
    }
}
