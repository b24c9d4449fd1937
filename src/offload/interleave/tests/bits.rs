//! The interleaved update on threads is bitwise equal to the all-CPU update, whatever the plans.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use super::super::Backend;
use super::super::Model as Stream;
use super::super::engine::{InterleavedUpdate, Reader};
use super::super::host::{Host, Subgroup};
use crate::dtype::{Dtype, Floats, FloatsMut, bf16, f16};
use crate::error::{Error, Result};
use crate::kernel::{AdamRule, States, Tensor};
use crate::optim;
use crate::optim::adam::AdamOptions;
use crate::optim::parallel::Job;
use crate::sys::shared_slice::SharedSlice;
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::{Command, Lane, LaneEvent, Work};
use spillway_planner::interleave::{GpuGrads, Rates, Shape, TransferDtype};

const SIZES: [u64; 9] = [1000, 1000, 1, 777, 0, 1000, 333, 1000, 64];
const STEPS: u64 = 100;

pub(super) struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn float(&mut self) -> f32 {
        (self.next() % 2001) as f32 / 1000.0 - 1.0
    }

    pub fn plan(&mut self, count: usize) -> Plan {
        let placement =
            |choice| [Placement::Cpu, Placement::Gpu, Placement::Gpu, Placement::Resident][choice as usize];
        match self.next() % 6 {
            0 => Plan::cpu(count),
            1 => Plan::of(vec![Placement::Gpu; count]),
            _ => Plan::of((0..count).map(|_| placement(self.next() % 4)).collect()),
        }
    }
}

/// The arrays of the test, shared with the backend. The test uses an array only when the backend has finished with it.
pub(super) struct Model {
    pub states: Vec<[Arc<SharedSlice>; 3]>,
    pub grads: Vec<Arc<SharedSlice>>,
    pub copies: Vec<Arc<SharedSlice>>,
}

impl Model {
    fn new(grad: Dtype, copy: Dtype) -> Model {
        Model::of(&SIZES, grad, copy)
    }

    pub fn of(sizes: &[u64], grad: Dtype, copy: Dtype) -> Model {
        let mut random = Random(7);
        let zeros = |dtype, len: &u64| Arc::new(SharedSlice::zeroed(dtype, *len as usize).unwrap());
        let mut model = Model { states: Vec::new(), grads: Vec::new(), copies: Vec::new() };
        for len in sizes {
            let states = [0; 3].map(|_| zeros(Dtype::F32, len));
            fill(&states[2], || random.float());
            model.states.push(states);
            model.grads.push(zeros(grad, len));
            model.copies.push(zeros(copy, len));
        }
        model
    }

    pub fn lend(&self) -> Vec<Subgroup> {
        let of = |index: usize| Subgroup {
            states: self.states[index].each_ref().map(Arc::clone),
            grad: Arc::clone(&self.grads[index]),
            copy: Some(Arc::clone(&self.copies[index])),
        };
        (0..self.states.len()).map(of).collect()
    }

    /// The reference update: one call per subgroup, on the CPU.
    pub fn step(&self, rules: &[AdamRule]) {
        for (index, rule) in rules.iter().enumerate() {
            let [mut m, mut v, mut p] = self.states[index].each_ref().map(|state| state.write().unwrap());
            let (grad, mut copy) = (self.grads[index].read().unwrap(), self.copies[index].write().unwrap());
            let states =
                States { param: p.floats(), exp_avg: Some(m.floats()), exp_avg_sq: Some(v.floats()) };
            let tensor = Tensor::new(states, grad.floats(), Some(copy.floats())).unwrap();
            optim::step(&mut [Job { optimizer: *rule, tensor }], false).unwrap();
        }
    }

    pub fn gradients(&self, step: u64) {
        let mut random = Random(1000 + step);
        self.grads.iter().for_each(|grad| fill(grad, || random.float()));
    }

    pub fn copies(&self) -> Vec<Vec<u32>> {
        self.copies.iter().map(|copy| bits(copy)).collect()
    }

    pub fn states(&self) -> Vec<Vec<u32>> {
        self.states.iter().flatten().map(|state| bits(state)).collect()
    }
}

fn fill(lent: &SharedSlice, mut value: impl FnMut() -> f32) {
    match lent.write().unwrap().floats() {
        FloatsMut::F32(floats) => floats.iter_mut().for_each(|float| *float = value()),
        FloatsMut::F16(floats) => floats.iter_mut().for_each(|float| *float = f16::from_f32(value())),
        FloatsMut::Bf16(floats) => floats.iter_mut().for_each(|float| *float = bf16::from_f32(value())),
    }
}

pub(super) fn bits(lent: &SharedSlice) -> Vec<u32> {
    match lent.read().unwrap().floats() {
        Floats::F32(floats) => floats.iter().map(|float| float.to_bits()).collect(),
        Floats::F16(floats) => floats.iter().map(|float| u32::from(float.to_bits())).collect(),
        Floats::Bf16(floats) => floats.iter().map(|float| u32::from(float.to_bits())).collect(),
    }
}

/// Rules with a different learning rate for each subgroup; decay, bias correction and scale as in training.
pub(super) fn rules(count: usize, step: u64) -> Vec<AdamRule> {
    let rule = |index: usize| {
        let lr = 1e-3 * (index + 1) as f64;
        AdamOptions { step, lr, weight_decay: 0.01, grad_scale: 0.25, ..Default::default() }.rule().unwrap()
    };
    (0..count).map(rule).collect()
}

fn shape(transfer_dtype: TransferDtype, gpu_grads: GpuGrads, slots: usize) -> Shape {
    Shape { sizes: SIZES.to_vec(), chunk: 300, slots, transfer_dtype, gpu_grads }
}

fn train(shape: Shape, grad: Dtype, copy: Dtype, seed: u64) {
    let (plain, model) = (Model::new(grad, copy), Model::new(grad, copy));
    let engine =
        InterleavedUpdate::new(shape.clone(), Box::new(Host::new(&shape, model.lend()).unwrap())).unwrap();
    let mut random = Random(seed);
    for step in 1..=STEPS {
        engine.set_plan(random.plan(SIZES.len())).unwrap();
        plain.gradients(step);
        model.gradients(step);
        plain.step(&rules(SIZES.len(), step));
        (0..SIZES.len()).rev().for_each(|subgroup| engine.gradient(subgroup, None).unwrap());
        engine.begin(rules(SIZES.len(), step), None).unwrap();
        engine.finish(Reader::Caller).unwrap();
        assert!(plain.copies() == model.copies(), "{shape:?}: parameters of step {step}");
        if step % 10 == 0 {
            engine.set_plan(Plan::cpu(SIZES.len())).unwrap();
            engine.drain().unwrap();
            assert!(engine.away().is_empty());
            assert!(plain.states() == model.states(), "{shape:?}: states of step {step}");
        }
    }
    assert!(!engine.ran().is_empty());
}

/// 100 steps, each with a new plan: all wires, all places of gradients, one to three slots, every type of gradient and
/// copy. Residents are added and removed; flushes of one step overlap the next step.
#[test]
fn a_hundred_steps_with_changing_plans_have_the_bits_of_the_all_cpu_run() {
    let types = [(Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F16), (Dtype::F32, Dtype::Bf16)];
    let mut round = 0;
    for transfer_dtype in [TransferDtype::F32, TransferDtype::Native, TransferDtype::Delivered] {
        for gpu_grads in [GpuGrads::Kept, GpuGrads::Fetched] {
            let (grad, copy) = types[round % types.len()];
            round += 1;
            train(shape(transfer_dtype, gpu_grads, 1 + round % 3), grad, copy, round as u64);
        }
    }
}

/// A host backend that skips flushes: shows that the test above would detect a schedule that loses a state.
struct Forgetful(Host);

impl Backend for Forgetful {
    fn play(&self, command: Command, stream: Stream) -> Result<()> {
        match command {
            Command::Run(_, Work::Flush { subgroup: 3, .. }) => Ok(()),
            other => self.0.play(other, stream),
        }
    }

    fn begin(&self, rules: Arc<[AdamRule]>) -> Result<()> {
        self.0.begin(rules)
    }

    fn reached(&self, event: LaneEvent) -> Result<bool> {
        self.0.reached(event)
    }

    fn timings(&self) -> Vec<super::super::Timing> {
        self.0.timings()
    }
}

#[test]
fn a_state_that_is_lost_shows_in_the_bits() {
    let shape = shape(TransferDtype::F32, GpuGrads::Kept, 2);
    let (plain, model) = (Model::new(Dtype::Bf16, Dtype::Bf16), Model::new(Dtype::Bf16, Dtype::Bf16));
    let engine =
        InterleavedUpdate::new(shape.clone(), Box::new(Forgetful(Host::new(&shape, model.lend()).unwrap())))
            .unwrap();
    engine.set_plan(Plan::of(vec![Placement::Gpu; SIZES.len()])).unwrap();
    for step in 1..=2 {
        plain.gradients(step);
        model.gradients(step);
        plain.step(&rules(SIZES.len(), step));
        (0..SIZES.len()).for_each(|subgroup| engine.gradient(subgroup, None).unwrap());
        engine.begin(rules(SIZES.len(), step), None).unwrap();
        engine.finish(Reader::Caller).unwrap();
        assert_eq!(plain.copies() == model.copies(), step == 1);
    }
}

/// A device that fails in the middle of a step, in this way.
struct Breaking(Host, fn() -> Result<()>);

impl Backend for Breaking {
    fn play(&self, command: Command, stream: Stream) -> Result<()> {
        match command {
            Command::Run(_, Work::CpuStep { subgroup: 5, .. }) => self.1(),
            other => self.0.play(other, stream),
        }
    }

    fn begin(&self, rules: Arc<[AdamRule]>) -> Result<()> {
        self.0.begin(rules)
    }

    fn reached(&self, event: LaneEvent) -> Result<bool> {
        self.0.reached(event)
    }

    fn timings(&self) -> Vec<super::super::Timing> {
        self.0.timings()
    }
}

/// A device whose step of one subgroup on the CPU waits for a word, and that can refuse the framework's stream.
struct Stubborn {
    host: Host,
    goes_on: Mutex<Receiver<()>>,
    refuses: Arc<AtomicBool>,
}

impl Stubborn {
    fn new(shape: &Shape, model: &Model) -> (Stubborn, Sender<()>, Arc<AtomicBool>) {
        let ((word, goes_on), refuses) = (channel(), Arc::<AtomicBool>::default());
        let host = Host::new(shape, model.lend()).unwrap();
        (Stubborn { host, goes_on: Mutex::new(goes_on), refuses: Arc::clone(&refuses) }, word, refuses)
    }
}

impl Backend for Stubborn {
    fn play(&self, command: Command, stream: Stream) -> Result<()> {
        match command {
            Command::Run(_, Work::CpuStep { subgroup: 2, .. }) => {
                self.goes_on.lock().unwrap().recv().unwrap()
            }
            Command::Record(Lane::Model, _) if self.refuses.load(Ordering::Relaxed) => {
                return Err(Error::invalid("stream", "is being captured"));
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

    fn timings(&self) -> Vec<super::super::Timing> {
        self.host.timings()
    }
}

/// A second begin is refused while the first step runs, and the rest of that step has its own coefficients.
#[test]
fn a_refused_begin_leaves_the_coefficients_of_the_step_in_flight() {
    let shape = shape(TransferDtype::Native, GpuGrads::Kept, 2);
    let (plain, model) = (Model::new(Dtype::Bf16, Dtype::Bf16), Model::new(Dtype::Bf16, Dtype::Bf16));
    let (backend, word, _) = Stubborn::new(&shape, &model);
    let engine = InterleavedUpdate::new(shape, Box::new(backend)).unwrap();
    plain.gradients(1);
    model.gradients(1);
    plain.step(&rules(SIZES.len(), 1));
    (0..SIZES.len()).for_each(|subgroup| engine.gradient(subgroup, None).unwrap());
    engine.begin(rules(SIZES.len(), 1), None).unwrap();
    assert!(matches!(engine.begin(rules(SIZES.len(), 2), None), Err(Error::Busy(_))));
    assert!(matches!(engine.set_plan(Plan::cpu(SIZES.len())), Err(Error::Busy(_))));
    word.send(()).unwrap();
    engine.finish(Reader::Caller).unwrap();
    assert!(plain.states() == model.states() && plain.copies() == model.copies());
}

/// A call on a stream that the driver refuses, as during a capture, is an error of that call alone.
#[test]
fn a_refused_stream_changes_nothing() {
    let shape = shape(TransferDtype::Native, GpuGrads::Kept, 2);
    let (plain, model) = (Model::new(Dtype::Bf16, Dtype::Bf16), Model::new(Dtype::Bf16, Dtype::Bf16));
    let (backend, word, refuses) = Stubborn::new(&shape, &model);
    let engine = InterleavedUpdate::new(shape, Box::new(backend)).unwrap();
    let refused = |call: &dyn Fn() -> Result<()>| {
        refuses.store(true, Ordering::Relaxed);
        assert!(matches!(call(), Err(Error::InvalidArgument { .. })));
        refuses.store(false, Ordering::Relaxed);
    };
    plain.gradients(1);
    model.gradients(1);
    plain.step(&rules(SIZES.len(), 1));
    refused(&|| engine.gradient(0, None));
    refused(&|| engine.params_free(0, None));
    engine.set_plan(mixed_plan()).unwrap();
    (0..SIZES.len()).for_each(|subgroup| engine.gradient(subgroup, None).unwrap());
    refused(&|| engine.begin(rules(SIZES.len(), 1), None));
    engine.params_free(0, None).unwrap();
    engine.begin(rules(SIZES.len(), 1), None).unwrap();
    word.send(()).unwrap();
    engine.finish(Reader::Caller).unwrap();
    assert!(plain.copies() == model.copies());
}

/// A plan with every placement, and the subgroup of [`Stubborn`] on the CPU.
fn mixed_plan() -> Plan {
    let placements = [Placement::Gpu, Placement::Resident, Placement::Cpu];
    Plan::of((0..SIZES.len()).map(|subgroup| placements[subgroup % 3]).collect())
}

#[test]
fn a_failure_ends_every_wait_and_names_what_is_not_home() {
    let shape = shape(TransferDtype::Native, GpuGrads::Kept, 2);
    let model = Model::new(Dtype::Bf16, Dtype::Bf16);
    let breaks = || Err(Error::Unsupported("it broke".into()));
    let backend = Breaking(Host::new(&shape, model.lend()).unwrap(), breaks);
    let engine = InterleavedUpdate::new(shape.clone(), Box::new(backend)).unwrap();
    let mut placements = vec![Placement::Cpu; SIZES.len()];
    (placements[0], placements[8]) = (Placement::Gpu, Placement::Resident);
    engine.set_plan(Plan::of(placements)).unwrap();
    (0..SIZES.len()).for_each(|subgroup| engine.gradient(subgroup, None).unwrap());
    engine.begin(vec![rules(SIZES.len(), 1)[0]], None).unwrap();
    let failed = engine.finish(Reader::Caller).unwrap_err();
    assert!(failed.to_string().contains("it broke"), "{failed}");
    assert!(engine.publish(7, Reader::Caller).is_err() && engine.gradient(0, None).is_err());
    let away = engine.away();
    assert!([5, 7, 8].iter().all(|subgroup| away.contains(subgroup)) && !away.contains(&1), "{away:?}");
}

#[test]
fn a_panic_in_an_update_is_an_internal_error_with_its_words() {
    let shape = shape(TransferDtype::Native, GpuGrads::Kept, 2);
    let model = Model::new(Dtype::Bf16, Dtype::Bf16);
    let backend = Breaking(Host::new(&shape, model.lend()).unwrap(), || panic!("a bug"));
    let engine = InterleavedUpdate::new(shape.clone(), Box::new(backend)).unwrap();
    (0..SIZES.len()).for_each(|subgroup| engine.gradient(subgroup, None).unwrap());
    engine.begin(vec![rules(SIZES.len(), 1)[0]], None).unwrap();
    let failed = engine.finish(Reader::Caller).unwrap_err();
    assert!(matches!(&failed, Error::Internal(words) if words.contains("a bug")), "{failed:?}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let shape = shape(TransferDtype::F32, GpuGrads::Kept, 2);
    let model = Model::new(Dtype::Bf16, Dtype::Bf16);
    let mut short = model.lend();
    short.pop();
    assert!(Host::new(&shape, short).is_err());
    let mut mixed = model.lend();
    mixed[3].copy = None;
    assert!(Host::new(&shape, mixed).is_err());
    let mut swapped = model.lend();
    swapped.swap(0, 3);
    assert!(Host::new(&shape, swapped).is_err());
    let engine =
        InterleavedUpdate::new(shape.clone(), Box::new(Host::new(&shape, model.lend()).unwrap())).unwrap();
    assert!(engine.begin(rules(SIZES.len(), 1), None).is_err() && engine.publish(9, Reader::Caller).is_err());
    (0..SIZES.len()).for_each(|subgroup| engine.gradient(subgroup, None).unwrap());
    assert!(engine.begin(rules(SIZES.len(), 1)[..2].to_vec(), None).is_err());
    engine.begin(rules(SIZES.len(), 1), None).unwrap();
    engine.finish(Reader::Stream(None)).unwrap();
}

/// Wrong initial rates are corrected by the timings of steps. Plans follow the rates, and no bit of the result changes.
#[test]
fn plans_that_follow_the_timings_have_the_bits_too() {
    let shape = shape(TransferDtype::Native, GpuGrads::Kept, 2);
    let (plain, model) = (Model::new(Dtype::Bf16, Dtype::Bf16), Model::new(Dtype::Bf16, Dtype::Bf16));
    let engine =
        InterleavedUpdate::new(shape.clone(), Box::new(Host::new(&shape, model.lend()).unwrap())).unwrap();
    assert!(engine.replan(0.0).is_err());
    let rate = 1e9;
    let rates = Rates {
        cpu: rate,
        downscale: f64::INFINITY,
        gpu: rate,
        h2d: 20.0 * rate,
        d2h: 20.0 * rate,
        cast: f64::INFINITY,
        dram: f64::INFINITY,
        duplex: true,
    };
    engine.calibrate(rates).unwrap();
    assert!(engine.replan(0.0).unwrap());
    assert!(engine.plan().count_on(Placement::Gpu) > 0);
    for step in 1..=10 {
        plain.gradients(step);
        model.gradients(step);
        plain.step(&rules(SIZES.len(), step));
        (0..SIZES.len()).for_each(|subgroup| engine.gradient(subgroup, None).unwrap());
        engine.begin(rules(SIZES.len(), step), None).unwrap();
        engine.finish(Reader::Caller).unwrap();
        assert!(plain.copies() == model.copies());
        assert!(!engine.ran().is_empty());
        engine.replan(0.0).unwrap();
    }
}
