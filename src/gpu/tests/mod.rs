//! The GPU layer against the fake driver of ffi_tests/fakecuda. Each test uses its own device.

mod bits;
mod hang;
mod lists;
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
use super::stream::{ForeignStream, Stream};
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
