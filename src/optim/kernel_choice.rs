//! The kernel that steps run on.
#![forbid(unsafe_code)]

use crate::environment;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::log;
use crate::sys::cancellation::NoCancellation;

/// The kernel of this process: the one that `SPILLWAY_KERNEL` names, else the fastest that the processor supports. The
/// choice is logged when it is made. Fails if `SPILLWAY_KERNEL` names an unknown or unsupported kernel.
pub fn kernel() -> Result<Kernel> {
    let variable = || environment::word("SPILLWAY_KERNEL").map_err(Error::from);
    Kernel::current(variable, |choice| {
        // A log function may reach a point of cancellation.
        let _no_cancellation = NoCancellation::enter();
        log::write(log::Level::Info, choice);
    })
}
