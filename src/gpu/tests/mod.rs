//! The GPU layer against the fake driver of ffi_tests/fakecuda. Each test has a device of its own.

mod bits;
#[path = "../../../kernels/tests/sample.rs"]
mod sample;
mod states;
mod transfer;
mod watch;

use std::sync::Arc;

use super::device::Device;
use super::driver::Driver;
use super::stream::{ForeignStream, Stream};
use super::table::Table;

/// The fake driver, by its functions.
fn driver() -> Arc<Driver> {
    // SAFETY: the fake's functions have the driver's names and signatures.
    let table = unsafe { Table::resolve(fakecuda::symbol) }.unwrap();
    Arc::new(Driver::initialise(table, "fake").unwrap())
}

/// Fake GPU `ordinal`, which no other test uses.
pub(crate) fn device(ordinal: u32) -> Arc<Device> {
    fakecuda::with(ordinal, |gpu| gpu.reset());
    Device::open(driver(), ordinal).unwrap()
}

/// A stream of a test, as the framework would pass it. The test keeps it until the calls it is given to are over.
pub(crate) fn foreign(stream: &Stream) -> ForeignStream {
    // SAFETY: a live stream, kept as said.
    unsafe { ForeignStream::new(stream.handle() as u64) }
}
