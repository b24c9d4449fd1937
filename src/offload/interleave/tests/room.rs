//! A step does not overfill the device's queues, and the CPU does not wait while they are full.
#![forbid(unsafe_code)]

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::super::engine::{InterleavedUpdate, Reader};
use super::super::host::Host;
use super::super::{Backend, Model as Stream, Timing};
use super::bits::{Model, rules};
use super::cuda::{Arrays, Fixture};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::gpu::tests::foreign;
use crate::kernel::AdamRule;
use crate::offload::interleave::device::Gpu;
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::{Command, LaneEvent, Work};
use spillway_planner::interleave::{Shape, TransferDtype};

const PATIENCE: Duration = Duration::from_secs(60);

/// A device whose queues are full until the CPU has updated a subgroup.
struct Full {
    host: Host,
    stepped: Mutex<bool>,
    changed: Condvar,
}

impl Backend for Full {
    fn play(&self, command: Command, stream: Stream) -> Result<()> {
        match command {
            Command::Run(_, Work::GpuStep { .. }) => {
                let stepped = self.stepped.lock().unwrap();
                let waited = self.changed.wait_timeout_while(stepped, PATIENCE, |stepped| !*stepped).unwrap();
                if waited.1.timed_out() {
                    return Err(Error::Unsupported("the CPU waits for the queues of the device".into()));
                }
            }
            Command::Run(_, Work::CpuStep { .. }) => {
                *self.stepped.lock().unwrap() = true;
                self.changed.notify_all();
            }
            _ => {}
        }
        self.host.play(command, stream)
    }

    fn begin(&self, rules: Arc<[AdamRule]>) -> Result<()> {
        self.host.begin(rules)
    }

    fn reached(&self, event: LaneEvent) -> Result<bool> {
        self.host.reached(event)
    }

    fn timings(&self) -> Vec<Timing> {
        self.host.timings()
    }
}

#[test]
fn the_cpu_works_while_the_queues_of_the_device_are_full() {
    let sizes = [64; 4];
    let shape = Shape { sizes: sizes.to_vec(), chunk: 30, slots: 2, ..Shape::uniform(4, 64) };
    let model = Model::of(&sizes, Dtype::Bf16, Dtype::Bf16);
    let host = Host::new(&shape, model.lend()).unwrap();
    let full = Full { host, stepped: Mutex::default(), changed: Condvar::new() };
    let engine = InterleavedUpdate::new(shape, Box::new(full)).unwrap();
    engine.set_plan(Plan::of(vec![Placement::Gpu, Placement::Cpu, Placement::Gpu, Placement::Cpu])).unwrap();
    model.gradients(1);
    (0..4).for_each(|subgroup| engine.gradient(subgroup, None).unwrap());
    engine.begin(rules(4, 1), None).unwrap();
    engine.finish(Reader::Caller).unwrap();
}

/// 40 fetched subgroups of 20 chunks and 20 residents: 6,000 operations if enqueued at once.
#[test]
fn a_step_of_many_subgroups_fits_the_queues_of_the_device() {
    const COUNT: usize = 60;
    let fixture = Fixture::new(48);
    let plain = Model::of(&[80; COUNT], Dtype::Bf16, Dtype::Bf16);
    let shape =
        Shape { chunk: 4, slots: 2, transfer_dtype: TransferDtype::Native, ..Shape::uniform(COUNT, 80) };
    let arrays = Arrays::new(&fixture, &plain, true);
    let gpu = Gpu::new(
        &fixture.device,
        &fixture.kernels,
        &fixture.registry,
        &shape,
        arrays.lend(shape.transfer_dtype),
    )
    .unwrap();
    let engine = InterleavedUpdate::new(shape, Box::new(gpu)).unwrap();
    let residents = |index: usize| if index.is_multiple_of(3) { Placement::Resident } else { Placement::Gpu };
    engine.set_plan(Plan::of((0..COUNT).map(residents).collect())).unwrap();
    let stream = Some(foreign(&fixture.stream));
    for step in 1..=2 {
        plain.gradients(step);
        plain.step(&rules(COUNT, step));
        for subgroup in 0..COUNT {
            arrays.make(subgroup, &plain);
            engine.gradient(subgroup, stream).unwrap();
        }
        fixture.stream.synchronize().unwrap();
        fakecuda::with(48, |gpu| (gpu.queues.blocked, gpu.queues.most_queued) = (0, 0));
        engine.begin(rules(COUNT, step), stream).unwrap();
        engine.finish(Reader::Stream(stream)).unwrap();
        let (blocked, most) = fakecuda::with(48, |gpu| (gpu.queues.blocked, gpu.queues.most_queued));
        // Before the first step, the change of plan brings all residents in at once.
        let fits = step == 1 || blocked == 0 && most > 300;
        assert!(fits, "step {step}: {blocked} calls blocked, {most} were queued");
        (0..COUNT).for_each(|subgroup| arrays.read(subgroup));
        fixture.stream.synchronize().unwrap();
        assert!(arrays.has_copies_of(&plain));
    }
    engine.set_plan(Plan::cpu(COUNT)).unwrap();
    engine.drain().unwrap();
    assert!(arrays.has_states_of(&plain) && engine.away().is_empty());
    drop(engine);
    assert_eq!(fixture.seen(), (0, 0));
}

/// The driver waits for every stream when memory is freed. A former resident's memory is therefore freed only once its
/// states are in host memory.
#[test]
fn memory_of_former_residents_is_freed_once_their_states_are_home() {
    let fixture = Fixture::new(49);
    let plain = Model::of(&[100, 100], Dtype::Bf16, Dtype::Bf16);
    let shape = Shape { chunk: 30, ..Shape::uniform(2, 100) };
    let arrays = Arrays::new(&fixture, &plain, true);
    let gpu = Gpu::new(
        &fixture.device,
        &fixture.kernels,
        &fixture.registry,
        &shape,
        arrays.lend(shape.transfer_dtype),
    )
    .unwrap();
    let engine = InterleavedUpdate::new(shape, Box::new(gpu)).unwrap();
    let freed = || fakecuda::with(49, |gpu| gpu.calls.iter().filter(|call| **call == "cuMemFree_v2").count());
    engine.set_plan(Plan::of(vec![Placement::Resident; 2])).unwrap();
    engine.set_plan(Plan::cpu(2)).unwrap();
    assert_eq!(freed(), 0);
    engine.drain().unwrap();
    assert_eq!(freed(), 2);
    assert!(arrays.has_states_of(&plain));
}
