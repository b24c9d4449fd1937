//! How a path is doing.
#![forbid(unsafe_code)]

/// How a path is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Reads and writes.
    Healthy,
    /// Reads only; what lies there moves when it is written next.
    Draining,
    /// A write or the whole path failed; reads are still tried.
    Failed,
    /// Not there since the tier was opened.
    Missing,
}
