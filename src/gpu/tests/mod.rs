//! The GPU layer against the fake driver of ffi_tests/fakecuda. Each test has a device of its own.

mod bits;
mod states;
mod transfer;

use std::sync::Arc;

use super::device::Device;
use super::driver::Driver;
use super::table::Table;

/// The fake driver, by its functions.
fn driver() -> Arc<Driver> {
    // SAFETY: the fake's functions have the driver's names and signatures.
    let table = unsafe { Table::resolve(fakecuda::symbol) }.unwrap();
    Arc::new(Driver::initialise(table, "fake").unwrap())
}

/// Fake GPU `ordinal`, which no other test uses.
fn device(ordinal: u32) -> Arc<Device> {
    fakecuda::with(ordinal, |gpu| gpu.reset());
    Device::open(driver(), ordinal).unwrap()
}
