//! The GPU layer against the fake driver of ffi_tests/fakecuda. Each test uses its own device.

mod bits;
mod hang;
mod lists;
mod narrow;
mod queue;
#[path = "../../../kernels/tests/sample.rs"]
mod sample;
mod states;
mod steps;
mod transfer;
mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::Device;
use super::driver::Driver;
use super::memory::DeviceSpan;
use super::stream::{ForeignStream, GpuEvent, Stream};
use super::table::Table;
use crate::sys::span::Span;

/// The fake driver, built from its function table.
fn driver() -> Arc<Driver> {
    // SAFETY: the fake's functions have the names and signatures of the driver's.
    let table = unsafe { Table::resolve(fakecuda::symbol) }.unwrap();
    Arc::new(Driver::initialise(table, "fake").unwrap())
}

/// Fake GPU `ordinal`, which no other test uses.
pub(crate) fn device(ordinal: u32) -> Arc<Device> {
    fakecuda::with(ordinal, |gpu| gpu.reset());
    Device::open(driver(), ordinal).unwrap()
}

/// A test's stream as the framework would pass it. The test keeps it alive until the calls that use it are over.
pub(crate) fn foreign(stream: &Stream) -> ForeignStream {
    // SAFETY: a live stream, which the test keeps alive.
    unsafe { ForeignStream::new(stream.handle() as u64) }
}

/// Waits until another thread has made `condition` true.
pub(crate) fn until(condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "the condition does not become true");
        std::thread::yield_now();
    }
}

/// From now on no work of fake GPU `ordinal` ends, and a call that queues work blocks after `space` operations.
pub(crate) fn fill(ordinal: u32, stream: &Stream, space: usize) {
    stream.record(&GpuEvent::new(stream.device()).unwrap()).unwrap();
    fakecuda::with(ordinal, |gpu| (gpu.stalled, gpu.queues.limits.depth) = (true, gpu.queued() + space));
}

/// Runs `call` until fake GPU `ordinal`, which is stalled, blocks it. Meanwhile `others` returns. Then the GPU goes on.
pub(crate) fn while_blocked(ordinal: u32, call: impl FnOnce() + Send, others: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let blocked = scope.spawn(call);
        until(|| fakecuda::with(ordinal, |gpu| gpu.waiting == 1));
        let others = scope.spawn(others);
        let end = Instant::now() + Duration::from_secs(60);
        while !others.is_finished() && Instant::now() < end {
            std::thread::yield_now();
        }
        let returned = others.is_finished() && !blocked.is_finished();
        fakecuda::with(ordinal, |gpu| gpu.queues.limits.depth = 1024);
        fakecuda::resume(ordinal);
        others.join().unwrap();
        blocked.join().unwrap();
        assert!(returned, "a call waits for one that the driver blocks");
    });
}

/// Device memory of another part of the library, whose owner keeps it allocated.
pub(crate) fn span_at(address: u64, bytes: u64) -> DeviceSpan {
    // SAFETY: allocated for as long as the test uses the span.
    unsafe { DeviceSpan::new(address, bytes, "span") }.unwrap()
}

/// A copy of host memory of another part of the library, whose owner keeps it allocated.
pub(crate) fn bytes_at(address: u64, bytes: usize) -> Vec<u8> {
    // SAFETY: allocated, and unused, until the copy is made.
    unsafe { Span::new(address as *mut u8, bytes) }.unwrap().to_vec()
}
