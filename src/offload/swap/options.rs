//! Settings of a tiered update.
#![forbid(unsafe_code)]

use super::encoding::Encoding;
use crate::pool::region::Backing;

/// Settings of a tiered update.
#[derive(Debug, Clone)]
pub struct SwapOptions {
    /// Number of elements of each subgroup.
    pub subgroups: Vec<u64>,
    /// Encoding in which state is stored: a split master needs the 16-bit copies at every step.
    pub usual: Encoding,
    /// Maximum bytes of host memory for state.
    pub host_memory: u64,
    /// Kind of memory to allocate.
    pub backing: Backing,
    /// Share of each path; `None`: derived from measured bandwidth.
    pub ratio: Option<Vec<f64>>,
    /// Initial bandwidth of each path, in bytes per second. Empty: as stored states are divided. The paths of a new tier are
    /// measured for a large state; for another one all are equal, until the first writes show them.
    pub speeds: Vec<f64>,
}
