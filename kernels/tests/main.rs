//! Every kernel that this processor has, seen from outside: in a program beside the crate, so that the kernels are compiled
//! once for their tests and for whoever links them.

mod bounds;
mod pack;
mod publish;
mod reference;
mod sample;
mod select;
mod squares;
mod stream;
#[cfg(target_arch = "aarch64")]
mod sve;
mod undo;

use spillway_kernels::Kernel;

/// Every kernel of this processor, or those that SPILLWAY_TEST_KERNELS names: an emulator takes minutes for those that it
/// ran on another processor already.
fn kernels() -> Vec<Kernel> {
    match std::env::var("SPILLWAY_TEST_KERNELS") {
        Ok(names) => names.split(", ").map(|name| Kernel::named(name).unwrap()).collect(),
        Err(_) => Kernel::all().collect(),
    }
}

/// True on an emulated processor, which takes fifty times as long.
fn emulated() -> bool {
    std::env::var_os("SPILLWAY_TEST_EMULATOR").is_some()
}
