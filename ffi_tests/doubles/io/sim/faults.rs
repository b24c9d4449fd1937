//! The faults of a simulated disk, and its random numbers.
#![forbid(unsafe_code)]

/// Faults to inject, and their rates.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Seed of all random choices.
    pub seed: u64,
    /// Completions arrive in random order, some with a delay.
    pub reorder: bool,
    /// Rate of short transfers, in 1/1000.
    pub short_permille: u32,
    /// Errnos to inject, each with its rate in 1/1000.
    pub error_permille: Vec<(i32, u32)>,
    /// Request number (from 0) that fails, with its errno.
    pub fail_nth: Option<(u64, i32)>,
    /// Number (from 0) of the request that hangs until `Disk::release`.
    pub hang_nth: Option<u64>,
    /// Writes fail with this errno, also of bytes that the disk holds: a full file system that writes to new blocks.
    pub refuse_writes: Option<i32>,
    /// Event of the disk that hangs until `Disk::release`.
    pub stop: Option<Stop>,
    /// Capacity of the disk in bytes.
    pub capacity: Option<u64>,
}

/// An event of a disk, or all events from it on, which hang until `Disk::release`. Events are the requests of its
/// engines and the other calls on its storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stop {
    /// Number of the event, from 0.
    pub at: u64,
    /// True if all later events hang too: the server of the files does not respond.
    pub all: bool,
}

impl Stop {
    pub(super) fn hits(self, event: u64) -> bool {
        if self.all { event >= self.at } else { event == self.at }
    }
}

/// The next number of a seeded sequence.
pub(super) fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random >> 11
}
