//! The interface between the driver and io_uring, worker threads, object stores or the simulation: pieces in,
//! completions out.
#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::file::File;
use super::plan::Route;
use crate::pool::region::Region;
use crate::sys::span::Span;

/// The operation of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
    /// Makes the written data of the file durable.
    Sync,
    /// Reserves device space for the bytes from the offset on.
    Allocate {
        /// Bytes to reserve.
        bytes: u64,
    },
}

/// Number of directions: reads, and all other actions. The directions do not compete for queue places.
pub const DIRECTIONS: usize = 2;

impl Action {
    /// The direction of the action: 0 for reads, 1 for everything else.
    pub fn direction(self) -> usize {
        usize::from(self != Action::Read)
    }

    /// True for reads and writes.
    pub fn moves_bytes(self) -> bool {
        matches!(self, Action::Read | Action::Write)
    }
}

/// One request to the kernel.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Identifies the piece in its completion.
    pub token: u64,
    /// The operation of the piece.
    pub action: Action,
    /// The file.
    pub file: Arc<File>,
    /// The descriptor of the file to use.
    pub route: Route,
    /// Byte offset in the file.
    pub offset: u64,
    /// The memory to fill or to write from.
    pub span: Span,
    /// The region that holds the memory, if this library owns it.
    pub region: Option<Arc<Region>>,
    /// True if many more pieces of this file follow.
    pub busy_file: bool,
}

/// The result of a piece: a byte count, or a negated errno.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// The token of the piece.
    pub token: u64,
    /// The value that the system call would have returned.
    pub result: i32,
    /// An explanation that accompanies an errno.
    pub message: Option<Box<str>>,
}

impl Completion {
    /// A completion with the value that a system call returned.
    pub fn of(token: u64, result: i32) -> Completion {
        Completion { token, result, message: None }
    }
}

/// When a [`Backend::wait`] returns: after a wake, at `until`, or with enough completions. It does not sleep for 0
/// completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sleep {
    /// Number of completions to wait for; a backend may return with fewer.
    pub completions: usize,
    /// When to return at the latest. io_uring before Linux 5.11 ignores it.
    pub until: Option<Instant>,
}

/// Interrupts a [`Backend::wait`] from another thread; if none is in progress, the next one returns early.
pub trait Wake: Send + Sync {
    /// Interrupts the wait.
    fn wake(&self);
}

/// A way to execute pieces. It lives on the driver's thread.
pub trait Backend {
    /// "io_uring", "threads", "s3" or "sim".
    fn name(&self) -> &'static str;

    /// Accepts a piece. The driver keeps at most 4 times its depth of pieces of each direction outstanding.
    fn push(&mut self, piece: Piece);

    /// Starts the pushed pieces, sleeps as `sleep` says, and appends the finished pieces to `done`. Interruptions are
    /// not errors; an error means that the backend is unusable.
    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()>;

    /// Releases resources of regions that have retired.
    fn trim(&mut self) {}

    /// A handle that interrupts [`Backend::wait`].
    fn waker(&self) -> Arc<dyn Wake>;
}
