//! Health of a path.
#![forbid(unsafe_code)]

/// Health of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// The path serves reads and writes.
    Healthy,
    /// The path serves reads only. Its data moves to another path at the next write.
    Draining,
    /// A write or the whole path failed. Reads are still tried.
    Failed,
    /// The path was absent when the tier was opened.
    Missing,
}
