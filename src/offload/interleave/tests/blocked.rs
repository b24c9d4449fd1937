//! A call that the driver blocks, because its queues are full, keeps no other call waiting.
#![forbid(unsafe_code)]

use super::super::device::Gpu;
use super::super::engine::{InterleavedUpdate, Reader};
use super::super::{Backend, Timing};
use super::bits::{Model, rules};
use super::cuda::{Arrays, Fixture};
use crate::dtype::Dtype;
use crate::gpu::tests::{fill, foreign, while_blocked};
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::{Command, Lane, LaneEvent, ParamRange, StateArray, Work};
use spillway_planner::interleave::{Shape, TransferDtype};

const COUNT: usize = 4;

fn shape() -> Shape {
    Shape { transfer_dtype: TransferDtype::Delivered, chunk: 8, ..Shape::uniform(COUNT, 20) }
}

fn model() -> Model {
    Model::of(&[20; COUNT], Dtype::Bf16, Dtype::Bf16)
}

fn backend(fixture: &Fixture, arrays: &Arrays<'_>) -> Gpu {
    let lent = arrays.lend(TransferDtype::Delivered);
    Gpu::new(&fixture.device, &fixture.kernels, &fixture.registry, &shape(), lent).unwrap()
}

fn update(fixture: &Fixture, arrays: &Arrays<'_>) -> InterleavedUpdate {
    InterleavedUpdate::new(shape(), Box::new(backend(fixture, arrays))).unwrap()
}

/// The calls of other threads, which queue nothing.
fn ask(engine: &InterleavedUpdate, residents: usize) {
    assert_eq!(engine.plan().count_on(Placement::Resident), residents);
    assert_eq!(engine.shape().count(), COUNT);
    assert!(engine.is_ready(COUNT).is_err());
    assert!(engine.is_ready(1).unwrap());
    engine.away();
    engine.ran();
    engine.publish(1, Reader::Caller).unwrap();
}

#[test]
fn questions_do_not_wait_while_the_driver_blocks_a_call_of_an_iteration() {
    const ORDINAL: u32 = 83;
    let fixture = Fixture::new(ORDINAL);
    let plain = model();
    let arrays = Arrays::new(&fixture, &plain, true);
    let engine = update(&fixture, &arrays);
    let stream = Some(foreign(&fixture.stream));
    let blocked = |space: usize, residents: usize, call: &(dyn Fn() + Sync)| {
        fill(ORDINAL, &fixture.stream, space);
        while_blocked(ORDINAL, call, || ask(&engine, residents));
    };
    // Its copies are queued under the old plan.
    blocked(0, 0, &|| engine.set_plan(Plan::even(COUNT, 1, 2).unwrap()).unwrap());
    blocked(3, 2, &|| engine.set_plan(Plan::even(COUNT, 1, 1).unwrap()).unwrap());
    plain.gradients(1);
    (0..COUNT).for_each(|subgroup| arrays.make(subgroup, &plain));
    blocked(0, 1, &|| engine.params_free(0, stream).unwrap());
    for subgroup in 0..COUNT {
        blocked(0, 1, &|| engine.gradient(subgroup, stream).unwrap());
    }
    // After the mark of the step's time, a record for the parameters that were not released.
    blocked(1, 1, &|| engine.begin(rules(COUNT, 1), stream).unwrap());
    engine.finish(Reader::Caller).unwrap();
    plain.step(&rules(COUNT, 1));
    engine.set_plan(Plan::cpu(COUNT)).unwrap();
    engine.drain().unwrap();
    assert!(arrays.has_states_of(&plain));
    drop(engine);
    fixture.stream.synchronize().unwrap();
    assert_eq!(fixture.seen(), (0, 0));
}

/// The driver may wait for the device when memory is freed.
#[test]
fn questions_do_not_wait_while_the_driver_frees_the_memory_of_former_residents() {
    const ORDINAL: u32 = 84;
    let fixture = Fixture::new(ORDINAL);
    let plain = model();
    let arrays = Arrays::new(&fixture, &plain, true);
    let engine = update(&fixture, &arrays);
    engine.set_plan(Plan::even(COUNT, 0, COUNT).unwrap()).unwrap();
    engine.set_plan(Plan::cpu(COUNT)).unwrap();
    // The first answer of the driver is "not ready".
    engine.away();
    assert_eq!(engine.away(), [0; 0]);
    fill(ORDINAL, &fixture.stream, 1000);
    while_blocked(ORDINAL, || engine.set_plan(Plan::cpu(COUNT)).unwrap(), || ask(&engine, 0));
    fixture.stream.synchronize().unwrap();
}

const STEP: Command = Command::Run(Lane::Cpu, Work::CpuStep { subgroup: 0, stage: 0 });

fn prefetch(subgroup: usize) -> Command {
    let part = ParamRange { from: 0, len: 20 };
    Command::Run(Lane::H2d, Work::Prefetch { subgroup, slot: 0, state: StateArray::ExpAvg, part })
}

/// A prefetch, with the events before and after it for its time.
#[test]
fn the_cpu_and_the_timings_do_not_wait_while_the_driver_blocks_the_thread_that_enqueues() {
    const ORDINAL: u32 = 85;
    let fixture = Fixture::new(ORDINAL);
    let plain = model();
    let arrays = Arrays::new(&fixture, &plain, true);
    let gpu = backend(&fixture, &arrays);
    plain.gradients(1);
    (0..COUNT).for_each(|subgroup| arrays.make(subgroup, &plain));
    fixture.stream.synchronize().unwrap();
    gpu.begin(rules(1, 1).into()).unwrap();
    // The first use of a buffer allocates it.
    for command in [STEP, prefetch(1)] {
        gpu.play(command, None).unwrap();
    }
    let of = |timings: &[Timing], lane| timings.iter().filter(|timing| timing.lane == lane).count();
    gpu.timings();
    assert_eq!(of(&gpu.timings(), Lane::H2d), 1);
    for space in 0..3 {
        fill(ORDINAL, &fixture.stream, space);
        let others = || {
            gpu.play(STEP, None).unwrap();
            let timings = gpu.timings();
            assert_eq!((of(&timings, Lane::Cpu), of(&timings, Lane::H2d)), (1, 0));
        };
        while_blocked(ORDINAL, || gpu.play(prefetch(2), None).unwrap(), others);
        gpu.timings();
        assert_eq!(of(&gpu.timings(), Lane::H2d), 1);
    }
    drop(gpu);
    fixture.stream.synchronize().unwrap();
    assert_eq!(fixture.seen(), (0, 0));
}

/// The driver has locks of its own, which any call may wait for.
#[test]
fn a_call_of_the_driver_that_queues_nothing_keeps_no_other_thread_waiting() {
    const ORDINAL: u32 = 86;
    let fixture = Fixture::new(ORDINAL);
    let plain = model();
    let arrays = Arrays::new(&fixture, &plain, true);
    let gpu = backend(&fixture, &arrays);
    plain.gradients(1);
    (0..COUNT).for_each(|subgroup| arrays.make(subgroup, &plain));
    fixture.stream.synchronize().unwrap();
    gpu.begin(rules(1, 1).into()).unwrap();
    let known = Command::Record(Lane::D2h, LaneEvent::Home(0));
    for command in [STEP, prefetch(1), known] {
        gpu.play(command, None).unwrap();
    }
    let hold = |call| fakecuda::with(ORDINAL, |gpu| (gpu.stalled, gpu.held) = (true, vec![call]));
    hold("cuEventQuery");
    while_blocked(ORDINAL, || drop(gpu.timings()), || gpu.play(STEP, None).unwrap());
    hold("cuEventCreate");
    let unknown = Command::Record(Lane::H2d, LaneEvent::Home(1));
    while_blocked(ORDINAL, || gpu.play(unknown, None).unwrap(), || gpu.play(known, None).unwrap());

    let engine = InterleavedUpdate::new(shape(), Box::new(gpu)).unwrap();
    let questions: [&(dyn Fn() + Sync); 2] = [&|| drop(engine.away()), &|| drop(engine.is_ready(0))];
    for question in questions {
        hold("cuEventQuery");
        while_blocked(ORDINAL, question, || assert_eq!(engine.plan().count(), COUNT));
    }
    drop(engine);
    fixture.stream.synchronize().unwrap();
}
