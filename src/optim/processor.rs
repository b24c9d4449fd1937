//! The kernel of this process.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::kernel::Kernel;
use crate::log;

/// Returns the kernel that `SPILLWAY_KERNEL` names, else the fastest that the processor supports. The choice is logged
/// when it is made. Fails if `SPILLWAY_KERNEL` names an unknown or unsupported kernel.
pub fn kernel() -> Result<Kernel> {
    Ok(Kernel::current(|choice| log::write(log::Level::Info, choice))?)
}
