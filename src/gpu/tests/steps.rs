//! Steps of many tensors, in order with the framework's stream whatever happens.

use std::sync::Arc;

use super::sample::adam_rule;
use super::{device, foreign};
use crate::dtype::Dtype;
use crate::gpu::device::Device;
use crate::gpu::kernels::{DeviceFloats, DeviceStates, DeviceTensor, Kernels};
use crate::gpu::memory::{DeviceMemory, HostSpan, Registry};
use crate::gpu::steps::{Job, Steps};
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
            host: Registry::new(&device).host(block, "block").unwrap(),
            address: block.address(),
            kernels,
            device,
        };
        fixture.write();
        fixture
    }

    /// The framework overwrites every array.
    fn write(&self) {
        self.arrays.iter().for_each(|array| self.framework.upload(&self.host, array.span()).unwrap());
    }

    fn jobs(&self) -> Vec<Job> {
        let floats = |array: &DeviceMemory| DeviceFloats::new(array.span(), Dtype::F32, "array").unwrap();
        let job = |arrays: &[DeviceMemory]| {
            let [param, exp_avg, exp_avg_sq, grad] = [0, 1, 2, 3].map(|index| floats(&arrays[index]));
            let states = DeviceStates { param, exp_avg, exp_avg_sq };
            let tensor = DeviceTensor { states, shadow: None, grad, param_copy: None };
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

/// The driver refuses the second tensor. What the framework queues next still comes after the step of the first.
#[test]
fn a_step_that_fails_in_the_middle_is_over_before_what_the_framework_queues_next() {
    for squares in [false, true] {
        let fixture = Fixture::new(30, 3);
        // With sums, each tensor has two launches.
        let second = if squares { 2 } else { 1 };
        fakecuda::with(30, |gpu| gpu.faults.push(("cuLaunchKernel", second, 1)));
        fixture.steps.adam(&fixture.jobs(), foreign(&fixture.framework), squares).unwrap_err();
        fixture.write();
        fixture.framework.synchronize().unwrap();
        fakecuda::with(30, |gpu| assert_eq!(gpu.races(), [""; 0]));
        fixture.steps.adam(&fixture.jobs(), foreign(&fixture.framework), squares).unwrap();
    }
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
