//! Residents take the device memory that is free beside the reserve, and no step fails where memory is missing.
#![forbid(unsafe_code)]

use super::super::device::Gpu;
use super::super::engine::{InterleavedUpdate, Reader};
use super::bits::{Model, rules};
use super::cuda::{Arrays, Fixture};
use crate::dtype::Dtype;
use crate::gpu::tests::foreign;
use spillway_planner::interleave::placements::Plan;
use spillway_planner::interleave::{Rates, Shape, TransferDtype};

const COUNT: usize = 6;
/// Three arrays of this number of elements fill device memory without gaps.
const SIZE: u64 = 64;
/// Bytes of a resident, and of a slot.
const STATE: u64 = 12 * SIZE;
/// A link that is too slow for fetching.
const RATES: Rates = Rates {
    cpu: 2e9,
    downscale: f64::INFINITY,
    gpu: 25e9,
    h2d: 1e9,
    d2h: 1e9,
    cast: f64::INFINITY,
    dram: f64::INFINITY,
    duplex: true,
};

/// Leaves the device this number of free bytes in all, or beside the reserve of a tenth of its memory.
fn leave(fixture: &Fixture, bytes: u64, beside_the_reserve: bool) {
    fakecuda::with(fixture.device.ordinal(), |gpu| {
        let all = gpu.memory_used() + bytes;
        gpu.queues.limits.memory_bytes = if beside_the_reserve { all * 10 / 9 } else { all };
    });
}

struct Trainer<'a> {
    fixture: &'a Fixture,
    plain: Model,
    arrays: Arrays<'a>,
    engine: InterleavedUpdate,
    steps: u64,
}

impl<'a> Trainer<'a> {
    fn new(fixture: &'a Fixture) -> Trainer<'a> {
        let plain = Model::of(&[SIZE; COUNT], Dtype::Bf16, Dtype::Bf16);
        let shape = Shape { transfer_dtype: TransferDtype::Native, ..Shape::uniform(COUNT, SIZE) };
        let arrays = Arrays::new(fixture, &plain, true);
        let lent = arrays.lend(shape.transfer_dtype);
        let gpu = Gpu::new(&fixture.device, &fixture.kernels, &fixture.registry, &shape, lent).unwrap();
        let engine = InterleavedUpdate::new(shape, Box::new(gpu)).unwrap();
        engine.calibrate(RATES).unwrap();
        let mut trainer = Trainer { fixture, plain, arrays, engine, steps: 0 };
        // The first step allocates what every step needs.
        trainer.step();
        trainer
    }

    fn step(&mut self) {
        self.steps += 1;
        let stream = Some(foreign(&self.fixture.stream));
        self.plain.gradients(self.steps);
        self.plain.step(&rules(COUNT, self.steps));
        for subgroup in 0..COUNT {
            self.arrays.make(subgroup, &self.plain);
            self.engine.gradient(subgroup, stream).unwrap();
        }
        self.engine.begin(rules(COUNT, self.steps), stream).unwrap();
        self.engine.finish(Reader::Stream(stream)).unwrap();
        (0..COUNT).for_each(|subgroup| self.arrays.read(subgroup));
        self.engine.drain().unwrap();
        self.fixture.stream.synchronize().unwrap();
        assert!(self.arrays.has_copies_of(&self.plain), "step {}", self.steps);
    }

    fn letters(&self) -> String {
        self.engine.plan().letters()
    }

    /// Steps until the engine has chosen its residents.
    fn replan(&mut self) -> String {
        self.engine.replan(0.0).unwrap();
        self.step();
        self.engine.replan(0.0).unwrap();
        self.letters()
    }

    fn end(self) {
        self.engine.set_plan(Plan::cpu(COUNT)).unwrap();
        self.engine.drain().unwrap();
        assert!(self.arrays.has_states_of(&self.plain) && self.engine.away().is_empty());
        assert_eq!(self.fixture.seen(), (0, 0));
    }
}

#[test]
fn the_last_subgroups_are_resident_in_the_memory_beside_the_reserve() {
    let fixture = Fixture::new(6);
    let mut trainer = Trainer::new(&fixture);
    leave(&fixture, 4 * STATE, true);
    assert_eq!(trainer.replan(), "ccRRRR");
    for _ in 0..3 {
        trainer.step();
        // What it has chosen stays, although the memory is no longer free.
        assert_eq!(trainer.letters(), "ccRRRR");
    }
    trainer.end();
}

#[test]
fn the_number_of_residents_of_the_caller_stays() {
    let fixture = Fixture::new(8);
    let mut trainer = Trainer::new(&fixture);
    trainer.engine.set_plan(Plan::even(COUNT, 0, 1).unwrap()).unwrap();
    trainer.step();
    assert_eq!(trainer.replan(), "cccccR");
    trainer.end();
    let mut trainer = Trainer::new(&fixture);
    trainer.engine.set_plan(Plan::cpu(COUNT)).unwrap();
    trainer.step();
    assert_eq!(trainer.replan(), "cccccc");
    trainer.end();
}

#[test]
fn a_subgroup_without_memory_steps_on_the_cpu_and_no_step_fails() {
    let fixture = Fixture::new(9);
    let mut trainer = Trainer::new(&fixture);
    leave(&fixture, 3 * STATE - 1, false);
    trainer.engine.set_plan(Plan::even(COUNT, 0, 4).unwrap()).unwrap();
    assert_eq!(trainer.letters(), "ccccRR");
    trainer.step();
    // Slots take memory first: no subgroup is fetched without them.
    trainer.engine.set_plan(Plan::even(COUNT, 2, 2).unwrap()).unwrap();
    assert_eq!(trainer.letters(), "ccccRR");
    trainer.step();
    // The memory of residents is free once their states are home.
    trainer.engine.set_plan(Plan::cpu(COUNT)).unwrap();
    trainer.engine.drain().unwrap();
    trainer.engine.set_plan(Plan::even(COUNT, 1, 3).unwrap()).unwrap();
    assert_eq!(trainer.letters(), "cGcccR");
    trainer.step();
    trainer.end();
}

#[test]
fn the_second_rank_on_a_device_takes_what_the_first_has_left() {
    let fixture = Fixture::new(10);
    let (mut first, mut second) = (Trainer::new(&fixture), Trainer::new(&fixture));
    leave(&fixture, 4 * STATE, true);
    assert_eq!(first.replan(), "ccRRRR");
    assert_eq!(second.replan(), "cccccc");
    leave(&fixture, 2 * STATE, true);
    let mut third = Trainer::new(&fixture);
    leave(&fixture, 2 * STATE, true);
    assert_eq!(third.replan(), "ccccRR");
    [first, second, third].into_iter().for_each(|mut trainer| {
        trainer.step();
        trainer.end();
    });
}
