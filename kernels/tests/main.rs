//! Tests every kernel that this processor supports from outside the crate, so that the kernels are compiled once for
//! their tests and for all users of the crate.

mod accumulate;
mod bounds;
mod codes;
mod pack;
mod publish;
mod reference;
mod sample;
mod select;
mod split;
mod squares;
mod stochastic;
mod stream;
#[cfg(target_arch = "aarch64")]
mod sve;
mod take;
mod undo;

use sampled::Sample;
use spillway_kernels::Kernel;

/// Every kernel of this processor, or those that SPILLWAY_TEST_KERNELS names. An emulator would take minutes to repeat
/// the kernels that were already tested on a real processor.
fn kernels() -> Vec<Kernel> {
    match std::env::var("SPILLWAY_TEST_KERNELS") {
        Ok(names) => names.split(", ").map(|name| Kernel::named(name).unwrap()).collect(),
        Err(_) => Kernel::all().collect(),
    }
}

/// True on an emulated processor, which is about fifty times slower.
fn emulated() -> bool {
    std::env::var_os("SPILLWAY_TEST_EMULATOR").is_some()
}

/// The cases; on an emulated processor a random quarter of them, except in `make test-long`.
fn cases<T>(sample: &mut Sample, cases: impl IntoIterator<Item = T>) -> Vec<T> {
    let cases: Vec<T> = cases.into_iter().collect();
    let count = if emulated() { cases.len().div_ceil(4) } else { cases.len() };
    sample.of(count, cases)
}
