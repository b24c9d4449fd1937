//! The interleaved update on the fake CUDA driver: bitwise equal to the all-CPU run, and every missing wait is
//! detected.
//!
//! The fake driver delays queued work until the host waits for a later operation. Its vector clocks detect accesses
//! that no event orders. A missing wait therefore shows as a race, as wrong bits, or as a conflicting borrow of an
//! array.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::device::Gpu;
use super::super::device_memory::{Grad, Pinned, Subgroup};
use super::super::engine::{InterleavedUpdate, Reader};
use super::super::{Backend, Model as Foreign, Timing};
use super::bits::{Model, Random, bits, rules};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::gpu::device::Device;
use crate::gpu::kernels::{DeviceFloats, Kernels};
use crate::gpu::memory::{DeviceMemory, HostSpan, Registry};
use crate::gpu::stream::Stream;
use crate::gpu::tests::{device, foreign};
use crate::kernel::AdamRule;
use crate::pool::pinned;
use crate::pool::region::{self, Backing};
use sampled::Sample;
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::{Command, Edge, Lane, LaneEvent, NUMBERED_EDGES};
use spillway_planner::interleave::{GpuGrads, Shape, TransferDtype};

/// A framework on fake GPU `ordinal`: a stream, and pinned memory.
pub(super) struct Fixture {
    ordinal: u32,
    pub device: Arc<Device>,
    pub kernels: Arc<Kernels>,
    pub registry: Arc<Registry>,
    pub stream: Stream,
    blocks: Mutex<Vec<usize>>,
}

impl Fixture {
    pub fn new(ordinal: u32) -> Fixture {
        let device = device(ordinal);
        Fixture {
            ordinal,
            kernels: Arc::new(Kernels::load(&device).unwrap()),
            registry: Arc::new(Registry::new(&device)),
            stream: Stream::new(&device).unwrap(),
            blocks: Mutex::default(),
            device,
        }
    }

    fn pinned(&self, bytes: &[u8]) -> HostSpan {
        let block = pinned::alloc(bytes.len().max(1), Backing::default()).unwrap();
        self.blocks.lock().unwrap().push(block.address());
        block.write(bytes);
        self.registry.host(block.part(0, bytes.len()), "host").unwrap()
    }

    pub fn seen(&self) -> (usize, usize) {
        fakecuda::with(self.ordinal, |gpu| (gpu.races().len(), gpu.pageable_copies))
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.blocks.lock().unwrap().iter().for_each(|block| pinned::free(*block).unwrap());
    }
}

/// The arrays of a model on the GPU and in host memory, initially equal to those of `plain`.
pub(super) struct Arrays<'a> {
    fixture: &'a Fixture,
    grad: Dtype,
    states: Vec<[HostSpan; 3]>,
    grads: Vec<(DeviceMemory, HostSpan, HostSpan)>,
    copies: Vec<(DeviceMemory, HostSpan)>,
    copy: Dtype,
    waits: bool,
}

impl<'a> Arrays<'a> {
    pub fn new(fixture: &'a Fixture, plain: &Model, waits: bool) -> Arrays<'a> {
        let (grad, copy) = (plain.grads[0].dtype(), plain.copies[0].dtype());
        let raw = |lent| bytes(&bits(lent), lent.dtype());
        let device = |bytes: &Vec<u8>| DeviceMemory::new(&fixture.device, bytes.len() as u64).unwrap();
        let grads = plain.grads.iter().map(|lent| raw(lent));
        let copies = plain.copies.iter().map(|lent| raw(lent));
        Arrays {
            fixture,
            states: plain
                .states
                .iter()
                .map(|states| states.each_ref().map(|state| fixture.pinned(&raw(state))))
                .collect(),
            grads: grads.map(|raw| (device(&raw), fixture.pinned(&raw), fixture.pinned(&raw))).collect(),
            copies: copies.map(|raw| (device(&raw), fixture.pinned(&raw))).collect(),
            grad,
            copy,
            waits,
        }
    }

    pub fn lend(&self, transfer_dtype: TransferDtype) -> Vec<Subgroup> {
        let floats = |memory: &DeviceMemory, dtype| DeviceFloats::new(memory.span(), dtype, "lent").unwrap();
        let pinned = |span: &HostSpan, dtype| Pinned::from_span(span.clone(), dtype, "lent").unwrap();
        let of = |index: usize| {
            let (device, _, host) = &self.grads[index];
            let device = floats(device, self.grad);
            Subgroup {
                states: self.states[index].each_ref().map(|state| pinned(state, Dtype::F32)),
                grad: match transfer_dtype {
                    TransferDtype::Delivered => Grad::Delivered { device, host: pinned(host, self.grad) },
                    TransferDtype::F32 | TransferDtype::Native => Grad::Device(device),
                },
                copy: Some(floats(&self.copies[index].0, self.copy)),
            }
        };
        (0..self.states.len()).map(of).collect()
    }

    /// The framework computes a gradient on its stream; the caller's own transfer puts a copy in host memory.
    pub fn make(&self, index: usize, plain: &Model) {
        let (device, staging, host) = &self.grads[index];
        let raw = bytes(&bits(&plain.grads[index]), self.grad);
        let staging = if self.waits { staging.clone() } else { self.fixture.pinned(&raw) };
        staging.span().write(&raw);
        self.fixture.stream.upload(&staging, device.span()).unwrap();
        self.fixture.stream.download(device.span(), host).unwrap();
    }

    /// The framework reads a subgroup's parameters on its stream.
    pub fn read(&self, index: usize) {
        let (device, host) = &self.copies[index];
        self.fixture.stream.download(device.span(), host).unwrap();
    }

    pub fn has_copies_of(&self, plain: &Model) -> bool {
        let same = |(own, plain): (&(DeviceMemory, HostSpan), &Vec<u32>)| {
            own.1.span().to_vec() == bytes(plain, self.copy)
        };
        self.copies.iter().zip(&plain.copies()).all(same)
    }

    pub fn has_states_of(&self, plain: &Model) -> bool {
        let same = |(own, plain): (&HostSpan, &Vec<u32>)| own.span().to_vec() == bytes(plain, Dtype::F32);
        self.states.iter().flatten().zip(&plain.states()).all(same)
    }
}

fn bytes(bits: &[u32], dtype: Dtype) -> Vec<u8> {
    bits.iter().flat_map(|bits| bits.to_ne_bytes()[..dtype.size()].to_vec()).collect()
}

/// The GPU backend with one of the waits left out.
struct Without {
    gpu: Gpu,
    left_out: Option<(Edge, Lane)>,
    seen: Arc<Mutex<BTreeSet<(u32, usize)>>>,
}

impl Backend for Without {
    fn play(&self, command: Command, model: Foreign) -> Result<()> {
        if let Command::Wait(lane, _, edge) = command {
            self.seen.lock().unwrap().insert((edge as u32, lane as usize));
            if self.left_out == Some((edge, lane)) {
                return Ok(());
            }
        }
        self.gpu.play(command, model)
    }

    fn begin(&self, rules: Arc<[AdamRule]>) -> Result<()> {
        self.gpu.begin(rules)
    }

    fn reached(&self, event: LaneEvent) -> Result<bool> {
        self.gpu.reached(event)
    }

    /// Empty while a wait is left out: reading timings would make the fake driver run queued work.
    fn timings(&self) -> Vec<Timing> {
        if self.left_out.is_none() { self.gpu.timings() } else { Vec::new() }
    }
}

/// Settings of a training run.
#[derive(Debug, Clone)]
struct Run {
    shape: Shape,
    types: (Dtype, Dtype),
    plans: Vec<Plan>,
    /// True if the framework reads parameters after it enqueued the gradient; false if before.
    reads_late: bool,
    /// True if the host waits for the framework's stream after every step; false if only after the last step.
    waits: bool,
}

type Seen = Arc<Mutex<BTreeSet<(u32, usize)>>>;

/// Trains on the fake GPU and on the CPU. The error describes the difference, the race, or the refused call.
fn train(fixture: &Fixture, run: &Run, left_out: Option<(Edge, Lane)>, seen: &Seen) -> Result<()> {
    let plain = Model::of(&run.shape.sizes, run.types.0, run.types.1);
    let arrays = Arrays::new(fixture, &plain, run.waits);
    let before = fixture.seen();
    let gpu = Gpu::new(
        &fixture.device,
        &fixture.kernels,
        &fixture.registry,
        &run.shape,
        arrays.lend(run.shape.transfer_dtype),
    )?;
    let engine = InterleavedUpdate::new(
        run.shape.clone(),
        Box::new(Without { gpu, left_out, seen: Arc::clone(seen) }),
    )?;
    let outcome = steps(fixture, run, &plain, &arrays, &engine);
    // No work may still be queued when the arrays are freed, whatever the outcome.
    drop(engine);
    fixture.stream.synchronize()?;
    outcome?;
    match fixture.seen() {
        after if after == before => Ok(()),
        after => Err(Error::Unsupported(format!("races and pageable copies: {before:?}, then {after:?}"))),
    }
}

fn steps(
    fixture: &Fixture,
    run: &Run,
    plain: &Model,
    arrays: &Arrays<'_>,
    engine: &InterleavedUpdate,
) -> Result<()> {
    let (count, stream) = (run.shape.count(), Some(foreign(&fixture.stream)));
    let differs = |what: &str, step| Err(Error::Unsupported(format!("{what} of step {step} differ")));
    for (step, plan) in (1..).zip(&run.plans) {
        engine.set_plan(plan.clone())?;
        plain.gradients(step);
        plain.step(&rules(count, step));
        for subgroup in (0..count).rev() {
            if !run.reads_late {
                engine.params_free(subgroup, stream)?;
            }
            arrays.make(subgroup, plain);
            engine.gradient(subgroup, stream)?;
            if run.reads_late {
                arrays.read(subgroup);
                engine.params_free(subgroup, stream)?;
            }
        }
        engine.begin(rules(count, step), stream)?;
        for subgroup in 0..count {
            engine.publish(subgroup, Reader::Stream(stream))?;
            arrays.read(subgroup);
        }
        if run.waits || step == run.plans.len() as u64 {
            fixture.stream.synchronize()?;
            if !arrays.has_copies_of(plain) {
                return differs("parameters", step);
            }
        }
    }
    engine.set_plan(Plan::cpu(count))?;
    engine.drain()?;
    match arrays.has_states_of(plain) && engine.away().is_empty() {
        true => Ok(()),
        false => differs("states", run.plans.len() as u64),
    }
}

/// Steps, each with another plan, for every transfer dtype and place of gradients; one to three slots.
#[test]
fn many_steps_on_the_driver_have_the_bits_of_the_all_cpu_run() {
    const SIZES: [u64; 6] = [70, 33, 1, 0, 64, 45];
    let fixture = Fixture::new(40);
    let types = [(Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F16)];
    let (mut round, mut sample) = (0, Sample::new());
    for transfer_dtype in [TransferDtype::F32, TransferDtype::Native, TransferDtype::Delivered] {
        for gpu_grads in [GpuGrads::Kept, GpuGrads::Fetched] {
            round += 1;
            let mut random = Random(round as u64);
            let shape =
                Shape { sizes: SIZES.to_vec(), chunk: 30, slots: 1 + round % 3, transfer_dtype, gpu_grads };
            let plans = sample.of(25, (0..100).map(|_| random.plan(SIZES.len())));
            let run = Run { shape, types: types[round % 2], plans, reads_late: round % 2 == 0, waits: true };
            train(&fixture, &run, None, &Seen::default()).unwrap();
        }
    }
}

#[test]
fn arrays_of_the_library_are_unmapped_with_their_last_owner() {
    let fixture = Fixture::new(42);
    let array = Pinned::new(&fixture.registry, Dtype::F32, 1 << 20).unwrap();
    let own = array.span.span().address();
    assert!(region::find(own, 4).is_some());
    drop(array);
    assert!(region::find(own, 4).is_none());
}

/// The driver may wait for the whole device when memory is freed. Residents that left are freed by the drain.
#[test]
fn no_device_memory_is_freed_in_a_step() {
    let fixture = Fixture::new(39);
    let (types, count) = ((Dtype::Bf16, Dtype::Bf16), 4);
    let shape = Shape { transfer_dtype: TransferDtype::Native, chunk: 8, ..Shape::uniform(count, 20) };
    let plain = Model::of(&shape.sizes, types.0, types.1);
    let arrays = Arrays::new(&fixture, &plain, true);
    let lent = arrays.lend(shape.transfer_dtype);
    let gpu = Gpu::new(&fixture.device, &fixture.kernels, &fixture.registry, &shape, lent).unwrap();
    let engine = InterleavedUpdate::new(shape, Box::new(gpu)).unwrap();
    let stream = Some(foreign(&fixture.stream));
    let frees = || fakecuda::with(39, |gpu| gpu.calls.iter().filter(|call| **call == "cuMemFree_v2").count());
    engine.set_plan(Plan::even(count, 0, count).unwrap()).unwrap();
    engine.set_plan(Plan::cpu(count)).unwrap();
    plain.gradients(1);
    let before = frees();
    for subgroup in 0..count {
        arrays.make(subgroup, &plain);
        engine.gradient(subgroup, stream).unwrap();
    }
    engine.begin(rules(count, 1), stream).unwrap();
    engine.finish(Reader::Caller).unwrap();
    assert_eq!(frees() - before, 0);
    engine.drain().unwrap();
    assert_eq!(frees() - before, count);
    fixture.stream.synchronize().unwrap();
}

const SUBGROUPS: usize = 5;

/// Plans that move subgroups from each placement to each other placement, and plans in which all subgroups have the
/// same placement.
fn scenarios() -> Vec<Run> {
    let even = |gpu, residents| Plan::even(SUBGROUPS, gpu, residents).unwrap();
    let last_alone = Plan::of(
        (0..SUBGROUPS).map(|i| if i == SUBGROUPS - 1 { Placement::Gpu } else { Placement::Cpu }).collect(),
    );
    let plans = vec![
        even(3, 0),
        even(5, 0),
        last_alone,
        even(0, 0),
        even(2, 2),
        even(5, 0),
        even(0, 5),
        even(0, 0),
        even(3, 0),
    ];
    let mut runs = Vec::new();
    for transfer_dtype in [TransferDtype::F32, TransferDtype::Native, TransferDtype::Delivered] {
        for gpu_grads in [GpuGrads::Kept, GpuGrads::Fetched] {
            for (slots, reads_late, waits) in
                [(1, false, true), (1, true, true), (2, false, true), (2, true, true), (2, false, false)]
            {
                let shape =
                    Shape { transfer_dtype, gpu_grads, slots, chunk: 8, ..Shape::uniform(SUBGROUPS, 20) };
                let types = (Dtype::Bf16, Dtype::F16);
                runs.push(Run { shape, types, plans: plans.clone(), reads_late, waits });
            }
        }
    }
    runs
}

/// Leaves each wait of each lane out in turn, in `make test` six of them; at least one scenario must detect that.
#[test]
fn every_wait_that_is_left_out_is_seen_by_the_driver() {
    let fixture = Fixture::new(41);
    let (scenarios, seen) = (scenarios(), Seen::default());
    for run in &scenarios {
        train(&fixture, run, None, &seen).unwrap();
    }
    let edges = NUMBERED_EDGES.into_iter().chain([
        Edge::GradHomeBeforeFetch,
        Edge::SettledBeforeStep,
        Edge::ReadyBeforeEvict,
        Edge::HomeBeforeRead,
    ]);
    let mut waits: Vec<(Edge, Lane)> =
        edges.flat_map(|edge| Lane::ALL.into_iter().map(move |lane| (edge, lane))).collect();
    // The caller reads host memory only, so in these runs nothing depends on the caller's wait for the device.
    waits.retain(|wait| *wait != (Edge::ReadyBeforeRead, Lane::Caller));
    waits.retain(|(edge, lane)| seen.lock().unwrap().contains(&(*edge as u32, *lane as usize)));
    assert_eq!(waits.len(), 21);
    let found = |wait: (Edge, Lane)| {
        let unseen = Seen::default();
        scenarios.iter().any(|run| train(&fixture, run, Some(wait), &unseen).is_err())
    };
    let missed: Vec<_> = Sample::new().of(6, waits).into_iter().filter(|wait| !found(*wait)).collect();
    assert_eq!(missed, []);
}

/// The step fails, and what the device may still use stays.
#[test]
fn a_device_that_hangs_is_a_timeout_and_keeps_the_arrays() {
    const ORDINAL: u32 = 76;
    let fixture = Fixture::new(ORDINAL);
    let (types, count) = ((Dtype::Bf16, Dtype::Bf16), 4);
    let shape = Shape { transfer_dtype: TransferDtype::Native, chunk: 8, ..Shape::uniform(count, 20) };
    let plain = Model::of(&shape.sizes, types.0, types.1);
    let arrays = Arrays::new(&fixture, &plain, true);
    let lent = arrays.lend(shape.transfer_dtype);
    let gpu = Gpu::new(&fixture.device, &fixture.kernels, &fixture.registry, &shape, lent).unwrap();
    let engine = InterleavedUpdate::new(shape, Box::new(gpu)).unwrap();
    let stream = Some(foreign(&fixture.stream));
    engine.set_plan(Plan::even(count, 2, 0).unwrap()).unwrap();
    plain.gradients(1);
    let step = |number| {
        for subgroup in 0..count {
            arrays.make(subgroup, &plain);
            engine.gradient(subgroup, stream).unwrap();
        }
        engine.begin(rules(count, number), stream).unwrap();
    };
    step(1);
    engine.drain().unwrap();
    fixture.device.set_patience(Duration::from_millis(5));
    let alive = || fakecuda::with(ORDINAL, |gpu| [gpu.alive()[3], gpu.alive()[4]]);
    let before = alive();
    fakecuda::with(ORDINAL, |gpu| gpu.stalled = true);
    step(2);
    let late = engine.drain().unwrap_err().to_string();
    assert!(late.contains("has not ended its work within"), "{late}");
    drop(engine);
    assert_eq!(alive(), before, "allocations and registrations");
    fakecuda::resume(ORDINAL);
    fixture.stream.synchronize().unwrap();
    assert_eq!(fixture.seen(), (0, 0));
}
