//! Chooses the plan with the shortest predicted time.
//!
//! Rounding Eq. 1 to a stride loses up to half of the gain of interleaving. So the model predicts the time of whole
//! plans with different numbers of GPU subgroups. With few subgroups, every number is tried. With many subgroups, a
//! grid of numbers is tried, then finer grids around the best number.
#![forbid(unsafe_code)]

use super::memory::{HALF, STATE, bytes, residents_in};
use super::model::{self, Prediction};
use super::placements::{Placement, Plan};
use super::{GpuGrads, Rates, Shape, share};
use crate::error::Result;

/// Maximal number of subgroups for which every number of GPU subgroups is tried.
const TRY_ALL: usize = 64;
/// Intervals of one grid.
const GRID: usize = 16;

/// A plan and its predicted times.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The plan.
    pub plan: Plan,
    /// The predicted times of the plan.
    pub prediction: Prediction,
}

/// The rule that makes the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The number of GPU subgroups with the shortest predicted time, spread evenly.
    Model,
    /// Deep Optimizer States: the stride that follows from Eq. 1, `1 + k` rounded.
    Eq1,
    /// The given stride; see [`Plan::stride`].
    Stride(usize),
    /// The given number of GPU subgroups, spread evenly; see [`Plan::even`].
    Count(usize),
}

/// Makes the plan of a mode, with `residents` subgroups resident at the end. Predicts its step after a backward pass of
/// `backward` seconds. Fails for an invalid shape, rate or backward time, or for more GPU subgroups than the shape has.
pub fn choose(shape: &Shape, rates: &Rates, residents: usize, backward: f64, mode: Mode) -> Result<Choice> {
    let count = shape.count();
    shape.check()?;
    rates.check()?;
    let plan = match mode {
        Mode::Model => return best(shape, rates, residents, backward),
        Mode::Eq1 => Plan::stride(count, share::derived_stride(rates), residents)?,
        Mode::Stride(stride) => Plan::stride(count, stride, residents)?,
        Mode::Count(gpu) => Plan::even(count, gpu, residents)?,
    };
    let prediction = model::predict(shape, rates, &plan, backward)?;
    Ok(Choice { plan, prediction })
}

/// The plan with the shortest predicted time that needs at most `room` bytes of GPU memory: residents alone, or
/// residents beside slots. Residents come first, since they need no transfer.
pub fn within(shape: &Shape, rates: &Rates, room: u64, backward: f64) -> Result<Choice> {
    let beside = room.checked_sub(slots(shape)?).map(|rest| residents_in(shape, rest, STATE));
    alone_or_beside(shape, rates, residents_in(shape, room, STATE), beside, backward)
}

/// As [`within`], but the 16-bit gradients that stay on the GPU are part of `room`: those of residents, and with
/// [`GpuGrads::Kept`] those of fetched subgroups.
pub fn within_with_grads(shape: &Shape, rates: &Rates, room: u64, backward: f64) -> Result<Choice> {
    // With every gradient kept there is room for whatever is fetched.
    let (kept, each) = match shape.gpu_grads {
        GpuGrads::Kept => (HALF * shape.total(), STATE),
        GpuGrads::Fetched => (0, STATE + HALF),
    };
    let beside = room.checked_sub(slots(shape)? + kept).map(|rest| residents_in(shape, rest, each));
    alone_or_beside(shape, rates, residents_in(shape, room, STATE + HALF), beside, backward)
}

/// Bytes of the slots and of fetched gradients in them.
fn slots(shape: &Shape) -> Result<u64> {
    let fetching = Plan::even(shape.count(), shape.slots.min(shape.count()), 0)?;
    Ok(bytes(shape, &fetching).slots)
}

/// The plan with the shorter predicted time: `alone` residents, or `beside` residents and slots.
fn alone_or_beside(
    shape: &Shape,
    rates: &Rates,
    alone: usize,
    beside: Option<usize>,
    backward: f64,
) -> Result<Choice> {
    let alone = choose(shape, rates, alone, backward, Mode::Count(0))?;
    let Some(beside) = beside else { return Ok(alone) };
    let beside = best(shape, rates, beside, backward)?;
    let fetches = beside.plan.count_on(Placement::Gpu) > 0;
    Ok(if fetches && beside.prediction.exposed < alone.prediction.exposed { beside } else { alone })
}

/// Tries numbers of GPU subgroups. A tie goes to the number tried first; within a grid that is the smallest, which
/// needs the least GPU memory.
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
    use super::super::TransferDtype;
    use super::super::placements::Placement;
    use super::super::share::tests::{H100, V100};
    use super::*;

    /// A deterministic pseudo-random generator.
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

        /// Returns a number between `low` and `high`, uniform on a logarithmic scale.
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
                transfer_dtype: [TransferDtype::F32, TransferDtype::Native, TransferDtype::Delivered]
                    [self.below(3) as usize],
                gpu_grads: if self.below(3) == 0 { GpuGrads::Fetched } else { GpuGrads::Kept },
                ..Shape::uniform(count as usize, size)
            }
        }
    }

    /// Seconds of step, rounding and upload of every subgroup, one after the other, with the same memory bandwidth.
    fn serial_seconds(shape: &Shape, rates: &Rates) -> f64 {
        let alone = |engine_seconds: f64, bytes: f64| engine_seconds.max(bytes / rates.dram);
        let grad = if shape.transfer_dtype == TransferDtype::Native { 2.0 } else { 4.0 };
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
                transfer_dtype: TransferDtype::Delivered,
                ..{
                    let count = random.below(40);
                    random.shape(count)
                }
            };
            let residents = random.below(shape.count() as u64 + 1) as usize;
            let chosen = choose(&shape, &rates, residents, 0.0, Mode::Model).unwrap().prediction.exposed;
            let mut serial = serial_seconds(&shape, &rates);
            // The residents are fixed: on a GPU slower than the CPU, the residents alone may take longer.
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

    /// Compares the choice with all 2^8 placements, not only with even ones, for the update phase alone.
    #[test]
    fn the_choice_is_within_2_percent_of_every_placement() {
        let mut random = Random(3);
        for _ in 0..40 {
            let (rates, shape) = (random.rates(), random.shape(8));
            let chosen = choose(&shape, &rates, 0, 0.0, Mode::Model).unwrap().prediction.exposed;
            let placement = |bits: u32| {
                let placement =
                    |index: u32| if bits >> index & 1 == 1_u32 { Placement::Gpu } else { Placement::Cpu };
                Plan::of((0..8).map(placement).collect())
            };
            let seconds = |bits| model::predict(&shape, &rates, &placement(bits), 0.0).unwrap().exposed;
            let best = (0..256).map(seconds).fold(f64::INFINITY, f64::min);
            assert!(chosen <= best * 1.02, "{chosen} over {best}: {rates:?} {shape:?}");
        }
    }

    #[test]
    fn residents_come_first_and_slots_only_where_fetching_gains_more() {
        let shape = Shape { transfer_dtype: TransferDtype::Native, ..Shape::uniform(20, 100_000_000) };
        let letters = |rates: &Rates, room| within(&shape, rates, room, 0.0).unwrap().plan.letters();
        let of = |subgroups: u64| subgroups * 1_200_000_000;
        let busy = Rates { dram: 100e9, ..H100 };
        assert_eq!(letters(&H100, of(20)), "R".repeat(20));
        // Too little for the slots.
        assert_eq!(letters(&H100, of(3) - 1), "c".repeat(18) + "RR");
        // A link slower than the CPU's step gains nothing, so all the memory goes to residents.
        let slow = Rates { h2d: 1.2e9, d2h: 1.2e9, ..H100 };
        assert_eq!(letters(&slow, of(8)), "c".repeat(12) + &"R".repeat(8));
        let both = within(&shape, &H100, of(8), 0.0).unwrap();
        assert_eq!(both.plan.count_on(Placement::Resident), 5);
        assert!(both.plan.count_on(Placement::Gpu) > 0);
        for (rates, subgroups) in [(&H100, 8), (&H100, 4), (&busy, 8), (&slow, 8)] {
            let found = within(&shape, rates, of(subgroups), 0.0).unwrap();
            let used = bytes(&shape, &found.plan);
            assert!(used.slots + used.residents <= of(subgroups));
            for residents in 0..subgroups as usize {
                let tried = choose(&shape, rates, residents, 0.0, Mode::Model).unwrap();
                let used = bytes(&shape, &tried.plan);
                assert!(
                    used.slots + used.residents > of(subgroups)
                        || found.prediction.exposed <= tried.prediction.exposed * 1.0001,
                    "{residents}: {}",
                    tried.plan.letters()
                );
            }
        }
        assert!(within(&shape, &H100, 0, 0.0).unwrap().plan.letters() == "c".repeat(20));
    }

    #[test]
    fn residents_with_their_gradients_stay_within_the_room() {
        let gigabytes = 1_000_000_000;
        for gpu_grads in [GpuGrads::Kept, GpuGrads::Fetched] {
            let shape =
                Shape { transfer_dtype: TransferDtype::Native, gpu_grads, ..Shape::uniform(20, 100_000_000) };
            let mut before = f64::INFINITY;
            for room in 0..40 {
                let found = within_with_grads(&shape, &H100, room * gigabytes, 0.0).unwrap();
                assert!(bytes(&shape, &found.plan).gpu() <= room * gigabytes, "{}", found.plan.letters());
                // Residents that fit alone are never slower than what is chosen.
                let alone = residents_in(&shape, room * gigabytes, STATE + HALF);
                let alone = choose(&shape, &H100, alone, 0.0, Mode::Count(0)).unwrap();
                assert!(found.prediction.exposed <= alone.prediction.exposed);
                // The last resident leaves the CPU idle: 20 steps in place of 19 beside one of the CPU.
                assert!(found.prediction.exposed <= before * 20.0 / 19.0, "{room}: {}", found.plan.letters());
                before = found.prediction.exposed;
            }
            let all = within_with_grads(&shape, &H100, 28 * gigabytes, 0.0).unwrap();
            assert_eq!(all.plan.letters(), "R".repeat(20));
        }
    }

    #[test]
    fn modes_make_the_plans_they_name() {
        let shape = Shape::uniform(50, 100_000_000);
        let on_gpu =
            |rates: &Rates, mode| choose(&shape, rates, 0, 0.0, mode).unwrap().plan.count_on(Placement::Gpu);
        assert_eq!((on_gpu(&H100, Mode::Model), on_gpu(&V100, Mode::Model)), (36, 15));
        assert_eq!((on_gpu(&H100, Mode::Eq1), on_gpu(&V100, Mode::Eq1)), (50, 16));
        assert_eq!((on_gpu(&H100, Mode::Stride(5)), on_gpu(&H100, Mode::Count(7))), (10, 7));
        assert!(choose(&shape, &H100, 20, 0.0, Mode::Count(31)).is_err());
        let fast_cpu = Rates { h2d: 0.8e9, ..H100 };
        assert_eq!(on_gpu(&fast_cpu, Mode::Model), 0);
    }
}
