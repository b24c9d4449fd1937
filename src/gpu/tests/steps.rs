//! Steps of many tensors, in order with the framework's stream whatever happens.

use std::sync::Arc;

use super::sample::adam_rule;
use super::{device, foreign, until};
use crate::dtype::Dtype;
use crate::gpu::device::Device;
use crate::gpu::kernels::{DeviceFloats, DeviceStates, DeviceTensor, Kernels};
use crate::gpu::list::Job;
use crate::gpu::memory::{DeviceMemory, HostSpan, Registry};
use crate::gpu::steps::Steps;
use crate::gpu::stream::Stream;
use crate::kernel::WeightDecay;
use crate::pool::pinned;
use crate::pool::region::Backing;

const BYTES: usize = 256;

/// A framework with a stream, and tensors of 64 elements that it has written.
struct Fixture {
    ordinal: u32,
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    steps: Arc<Steps>,
    framework: Stream,
    arrays: Vec<DeviceMemory>,
    gradient: DeviceMemory,
    host: HostSpan,
    address: usize,
}

impl Fixture {
    fn new(ordinal: u32, tensors: usize) -> Fixture {
        let device = device(ordinal);
        let kernels = Arc::new(Kernels::load(&device).unwrap());
        let block = pinned::alloc(BYTES, Backing::default()).unwrap();
        block.write(&[0; BYTES]);
        let fixture = Fixture {
            ordinal,
            steps: Arc::new(Steps::new(&device, &kernels).unwrap()),
            framework: Stream::new(&device).unwrap(),
            arrays: (0..4 * tensors).map(|_| DeviceMemory::new(&device, BYTES as u64).unwrap()).collect(),
            gradient: DeviceMemory::new(&device, BYTES as u64).unwrap(),
            host: Registry::new(&device).host(block, "block").unwrap(),
            address: block.address(),
            kernels,
            device,
        };
        fixture.framework.upload(&fixture.host, fixture.gradient.span()).unwrap();
        fixture.write();
        fixture
    }

    /// The framework overwrites every array.
    fn write(&self) {
        self.arrays.iter().for_each(|array| self.framework.upload(&self.host, array.span()).unwrap());
    }

    /// A gradient that nothing writes any more.
    fn complete(&self) -> DeviceFloats {
        DeviceFloats::new(self.gradient.span(), Dtype::F32, "gradient").unwrap()
    }

    fn jobs(&self) -> Vec<Job> {
        let floats = |array: &DeviceMemory| DeviceFloats::new(array.span(), Dtype::F32, "array").unwrap();
        let job = |arrays: &[DeviceMemory]| {
            let [param, exp_avg, exp_avg_sq, grad] = [0, 1, 2, 3].map(|index| floats(&arrays[index]));
            let states = DeviceStates { param, exp_avg, exp_avg_sq };
            let tensor = DeviceTensor::new(states, grad, None);
            Job { rule: adam_rule(WeightDecay::None), tensor }
        };
        self.arrays.chunks(4).map(job).collect()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.framework.synchronize().unwrap();
        pinned::free(self.address).unwrap();
    }
}

/// The driver refuses the second launch. What the framework queues next still comes after the step of the first.
#[test]
fn a_step_that_fails_in_the_middle_is_over_before_what_the_framework_queues_next() {
    for squares in [false, true] {
        let fixture = Fixture::new(30, 3);
        let mut jobs = fixture.jobs();
        // Each type has its own launch.
        let states = jobs[2].tensor.states;
        let half = |floats: DeviceFloats| DeviceFloats::new(floats.span(), Dtype::Bf16, "array").unwrap();
        let [param, exp_avg, exp_avg_sq] = [states.param, states.exp_avg, states.exp_avg_sq].map(half);
        jobs[2].tensor.states = DeviceStates { param, exp_avg, exp_avg_sq };
        jobs[2].tensor.grad = half(jobs[2].tensor.grad);
        fakecuda::with(30, |gpu| gpu.faults.push(("cuLaunchKernel", 1, 1)));
        fixture.steps.adam(&jobs, foreign(&fixture.framework), squares).unwrap_err();
        fakecuda::with(30, |gpu| assert_eq!(gpu.faults.len(), 0));
        fixture.write();
        fixture.framework.synchronize().unwrap();
        fakecuda::with(30, |gpu| assert_eq!(gpu.races(), [""; 0]));
        fixture.steps.adam(&jobs, foreign(&fixture.framework), squares).unwrap();
    }
}

/// The driver refuses the upload of the table. The next step does not take it for known.
#[test]
fn a_table_whose_upload_failed_is_uploaded_again() {
    let fixture = Fixture::new(57, 2);
    fakecuda::with(57, |gpu| gpu.faults.push(("cuMemcpyHtoDAsync_v2", 0, 1)));
    fixture.steps.adam(&fixture.jobs(), foreign(&fixture.framework), false).unwrap_err();
    fixture.steps.adam(&fixture.jobs(), foreign(&fixture.framework), false).unwrap();
    fixture.framework.synchronize().unwrap();
    fakecuda::with(57, |gpu| assert_eq!((gpu.races(), &gpu.queues.failures[..]), (&[][..], &[][..])));
}

#[test]
fn the_kernels_of_a_step_in_flight_stay_loaded() {
    let mut fixture = Fixture::new(31, 1);
    fixture.steps.adam(&fixture.jobs(), foreign(&fixture.framework), false).unwrap();
    let queued = |ordinal| fakecuda::with(ordinal, |gpu| gpu.queued_kernels());
    assert_eq!(queued(fixture.ordinal), 1);
    fixture.steps = Arc::new(Steps::new(&fixture.device, &fixture.kernels).unwrap());
    assert_eq!(queued(fixture.ordinal), 0);
}

#[test]
fn a_step_without_statistics_does_not_wait_for_one_that_waits_for_its_sums() {
    let fixture = Fixture::new(35, 2);
    let (first, second) = (fixture.jobs()[0], fixture.jobs()[1]);
    // The next one has the buffers of this one.
    fixture.steps.adam(&[first], foreign(&fixture.framework), true).unwrap();
    fakecuda::with(35, |gpu| gpu.stalled = true);
    std::thread::scope(|scope| {
        let stepped =
            scope.spawn(|| fixture.steps.adam(&[first], foreign(&fixture.framework), true).unwrap());
        until(|| fakecuda::with(35, |gpu| gpu.waiting == 1));
        fixture.steps.adam(&[second], foreign(&fixture.framework), false).unwrap();
        fakecuda::with(35, |gpu| assert_eq!(gpu.waiting, 1, "the other one still waits"));
        fakecuda::resume(35);
        stepped.join().unwrap();
    });
}

/// The thread of a speculation measures buckets of gradients that are complete, while the framework goes on.
#[test]
fn a_measurement_does_not_wait_for_what_the_framework_has_queued_since() {
    let fixture = Fixture::new(36, 1);
    let job = fixture.jobs()[0];
    fixture.framework.synchronize().unwrap();
    fixture.write();
    let queued = fakecuda::with(36, |gpu| gpu.queued());
    assert_eq!(queued, 4);
    // The framework may write the other arrays; the gradient belongs to the bucket.
    let own = Job { tensor: DeviceTensor { grad: fixture.complete(), ..job.tensor }, ..job };
    fixture.steps.measure(&[own]).unwrap();
    fakecuda::with(36, |gpu| assert_eq!(gpu.queued(), queued));
}

/// The driver may load the code of a kernel at its first launch.
#[test]
fn every_kernel_has_run_before_the_first_step() {
    let fixture = Fixture::new(37, 1);
    let launches = |gpu: &mut fakecuda::Gpu| gpu.calls.iter().filter(|c| **c == "cuLaunchKernel").count();
    let found = |gpu: &mut fakecuda::Gpu| gpu.calls.iter().filter(|c| **c == "cuModuleGetFunction").count();
    fakecuda::with(37, |gpu| assert_eq!((launches(gpu), gpu.queued_kernels()), (found(gpu), 0)));
    drop(fixture);
}
