//! The kernel that this process steps with.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::kernel::Kernel;
use crate::log;

/// The one that `SPILLWAY_KERNEL` names, else the best that this processor has; the log hears of the choice once.
pub fn kernel() -> Result<Kernel> {
    Ok(Kernel::current(|choice| log::write(log::Level::Info, choice))?)
}
