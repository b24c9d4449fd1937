//! A GPU that hangs: waits without a limit of the caller's end with a timeout, and nothing is freed that it may still use.

use std::sync::Arc;
use std::time::Duration;

use super::sample::adam_rule;
use super::{device, foreign, until};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::gpu::kernels::{DeviceFloats, DeviceStates, DeviceTensor, Kernels};
use crate::gpu::list::Job;
use crate::gpu::memory::{DeviceMemory, Registry};
use crate::gpu::steps::Steps;
use crate::gpu::stream::{GpuEvent, Stream};
use crate::gpu::transfer::{After, Copy, Direction, Transfers};
use crate::kernel::WeightDecay;
use crate::pool::pinned;
use crate::pool::region::Backing;

const SHORT: Duration = Duration::from_millis(5);
const BYTES: u64 = 256;

fn times_out<T: std::fmt::Debug>(outcome: Result<T>) {
    let late = outcome.unwrap_err();
    assert!(
        matches!(&late, Error::Timeout(reason) if reason.contains("has not ended its work within")),
        "{late}"
    );
}

#[test]
fn copies_keep_their_memory_and_the_code_of_their_casts() {
    let device = device(71);
    let kernels = Arc::new(Kernels::load(&device).unwrap());
    let transfers = Transfers::new(&device, &kernels, 64).unwrap();
    let memory = DeviceMemory::new(&device, BYTES).unwrap();
    let block = pinned::alloc(2 * BYTES as usize, Backing::default()).unwrap();
    block.write(&[0; 2 * BYTES as usize]);
    let host = Registry::new(&device).lockable(block, "host").unwrap();
    let floats = DeviceFloats::new(memory.span(), Dtype::Bf16, "device").unwrap();
    let copy =
        Copy { direction: Direction::D2h, device: floats, host, host_dtype: Dtype::F32, after: After::Now };
    // The buffers, whose allocation is no part of this.
    transfers.start(&copy).unwrap();
    transfers.finish().unwrap();
    device.set_patience(SHORT);
    fakecuda::with(71, |gpu| gpu.stalled = true);
    let ticket = transfers.start(&copy).unwrap();
    times_out(transfers.wait_patiently(ticket));
    times_out(transfers.finish());
    drop((copy, kernels, transfers));
    let alive = |of: usize| fakecuda::with(71, |gpu| gpu.alive()[of]);
    assert_eq!((alive(2), alive(4)), (3, 1), "modules and registrations");
    pinned::free(block.address()).unwrap();
    assert_eq!(alive(4), 1, "the owner let go, and the copy did not");
    fakecuda::resume(71);
    until(|| fakecuda::with(71, |gpu| gpu.queued() == 0));
    fakecuda::with(71, |gpu| assert_eq!((gpu.races(), &gpu.queues.failures[..]), (&[][..], &[][..])));
}

#[test]
fn steps_keep_their_tables_and_their_code() {
    let device = device(72);
    let kernels = Arc::new(Kernels::load(&device).unwrap());
    let steps = Steps::new(&device, &kernels).unwrap();
    let framework = Stream::new(&device).unwrap();
    let arrays: Vec<_> = (0..8).map(|_| DeviceMemory::new(&device, BYTES).unwrap()).collect();
    let floats = |at: usize| DeviceFloats::new(arrays[at].span(), Dtype::F32, "array").unwrap();
    let job = |at: usize| {
        let states = DeviceStates { param: floats(at), exp_avg: floats(at + 1), exp_avg_sq: floats(at + 2) };
        let tensor = DeviceTensor::new(states, floats(at + 3), None);
        Job { rule: adam_rule(WeightDecay::None), tensor }
    };
    let jobs = [job(0), job(4)];
    steps.adam(&jobs, foreign(&framework), true).unwrap();
    let used = fakecuda::with(72, |gpu| gpu.memory_used());
    device.set_patience(SHORT);
    fakecuda::with(72, |gpu| gpu.stalled = true);
    times_out(steps.adam(&jobs, foreign(&framework), true));
    times_out(steps.measure(&jobs));
    times_out(steps.finish());
    drop((steps, kernels));
    fakecuda::with(72, |gpu| assert_eq!((gpu.alive()[2], gpu.memory_used()), (3, used)));
    fakecuda::resume(72);
    framework.synchronize().unwrap();
    fakecuda::with(72, |gpu| assert_eq!((gpu.races(), &gpu.queues.failures[..]), (&[][..], &[][..])));
}

/// One thread waits in the driver, however often a record is waited for; another record is another wait.
#[test]
fn a_wait_ends_at_its_limit_and_costs_one_call_while_it_is_pending() {
    let device = device(73);
    let (stream, event) = (Stream::new(&device).unwrap(), Arc::new(GpuEvent::new(&device).unwrap()));
    fakecuda::with(73, |gpu| gpu.stalled = true);
    stream.record(&event).unwrap();
    device.set_patience(SHORT);
    (0..5).for_each(|_| times_out(event.wait()));
    let calls =
        || fakecuda::with(73, |gpu| gpu.calls.iter().filter(|call| **call == "cuEventSynchronize").count());
    until(|| calls() == 1);
    stream.record(&event).unwrap();
    device.set_patience(Duration::from_secs(60));
    std::thread::scope(|scope| {
        // The wait for the earlier record must not end this one.
        let both =
            scope.spawn(|| event.wait_until(Some(std::time::Instant::now() + Duration::from_secs(60))));
        until(|| calls() == 2);
        fakecuda::resume(73);
        assert!(both.join().unwrap().unwrap());
    });
    event.wait().unwrap();
    event.wait().unwrap();
    assert_eq!(calls(), 2);
}
