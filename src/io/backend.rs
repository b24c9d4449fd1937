//! What the driver asks of io_uring, of threads, of object stores and of the simulation: take pieces, give completions.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, Condvar, MutexGuard, PoisonError};
use std::time::Instant;

use super::file::File;
use super::plan::Route;
use crate::pool::region::Region;
use crate::sys::span::Span;

/// What a piece does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
    /// What was written becomes durable.
    Sync,
    /// The bytes from the offset on get a place on the device.
    Allocate {
        /// How many.
        bytes: u64,
    },
}

/// Reads, and all other actions, do not wait for each other's places.
pub const LANES: usize = 2;

impl Action {
    /// The lane of the action, below [`LANES`].
    pub fn lane(self) -> usize {
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
    /// Comes back in the completion.
    pub token: u64,
    /// What to do.
    pub action: Action,
    /// On which file.
    pub file: Arc<File>,
    /// Through which of its descriptors.
    pub route: Route,
    /// Where in the file.
    pub offset: u64,
    /// The memory.
    pub span: Span,
    /// The region that holds the memory, if this library owns it.
    pub region: Option<Arc<Region>>,
    /// True if many pieces of this file follow.
    pub busy_file: bool,
}

/// What became of a piece: a count of bytes, or minus an errno.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// The piece's.
    pub token: u64,
    /// As the system call would have returned it.
    pub result: i32,
    /// What is known beside an errno.
    pub words: Option<Box<str>>,
}

impl Completion {
    /// What a system call returned.
    pub fn of(token: u64, result: i32) -> Completion {
        Completion { token, result, words: None }
    }
}

/// How long a [`Backend::wait`] sleeps: until a wake, `until`, or enough completions; not at all for 0 of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sleep {
    /// Completions worth waking up for; a backend may wake up for fewer.
    pub completions: usize,
    /// The end of it. An old kernel's io_uring does not look at the time.
    pub until: Option<Instant>,
}

/// Ends a [`Backend::wait`] from another thread, or makes the next one short.
pub trait Wake: Send + Sync {
    /// Does it.
    fn wake(&self);
}

/// A way to run pieces. Lives on the driver's thread.
pub trait Backend {
    /// "io_uring", "threads", "s3" or "sim".
    fn name(&self) -> &'static str;

    /// Accepts a piece. The driver never has more outstanding than it asked for at open.
    fn push(&mut self, piece: Piece);

    /// Starts what was pushed and adds finished pieces to `done`, after sleeping as `sleep` says.
    /// Interruptions are no error; an error means that the backend is lost.
    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()>;

    /// Lets go of what belongs to regions that are gone.
    fn trim(&mut self) {}

    /// The handle that wakes it.
    fn waker(&self) -> Arc<dyn Wake>;
}

/// Sleeps until there is news, at the longest until `until`. False if that has passed.
pub(super) fn doze<'a, T>(
    news: &Condvar,
    guard: MutexGuard<'a, T>,
    until: Option<Instant>,
) -> (MutexGuard<'a, T>, bool) {
    let Some(until) = until else {
        return (news.wait(guard).unwrap_or_else(PoisonError::into_inner), true);
    };
    let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
        return (guard, false);
    };
    let (guard, _) = news.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner);
    (guard, true)
}
