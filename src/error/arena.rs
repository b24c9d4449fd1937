//! Failures of arenas of shared memory.
#![forbid(unsafe_code)]

use std::fmt;

/// Kind of an arena failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArenaKind {
    /// A writer of the region ended in the middle of a write.
    Torn,
    /// The region was written while it was read.
    Changed,
    /// The outcome of the round is no longer known.
    Forgotten,
    /// A process that the call depends on has ended, or has left the round.
    PeerEnded,
    /// The memory is not an arena, or not one of a format that this version reads.
    Format,
    /// The memory belongs to another user, or is no regular file with one name.
    Foreign,
    /// An arena of this name exists.
    Exists,
    /// There is no arena of this name.
    Missing,
}

/// An arena failure and its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaError {
    /// Kind of the failure.
    pub kind: ArenaKind,
    /// The arena, and the region or the process.
    pub what: String,
    /// Why, and what to do.
    pub detail: String,
}

impl fmt::Display for ArenaError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self.kind {
            ArenaKind::Torn => "its writer ended in the middle of a write",
            ArenaKind::Changed => "written while it was read",
            ArenaKind::Forgotten => "a process went on without waiting for this round",
            ArenaKind::PeerEnded => "a process has ended or left",
            ArenaKind::Format => "not an arena that this version reads",
            ArenaKind::Foreign => "not a regular file of this user alone",
            ArenaKind::Exists => "exists already",
            ArenaKind::Missing => "does not exist",
        };
        write!(out, "{}: {words}: {}", self.what, self.detail)
    }
}
