//! Settings of an engine, and the request for an operation.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::file::File;
use crate::environment;
use crate::error::{Error, Result};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::memory::BASE_PAGE;

/// The backend to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendChoice {
    /// io_uring, or threads where io_uring is unavailable.
    Auto,
    /// io_uring; an error if it is unavailable.
    Uring,
    /// Worker threads.
    Threads,
}

/// Settings of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// The backend; the environment variable `SPILLWAY_IO` overrides it.
    pub backend: BackendChoice,
    /// Most pieces of reads in flight, and likewise of writes; 0 takes the depth of the profile, or [`DEPTH`].
    pub depth: u32,
    /// Most bytes of a piece, rounded up to whole pages; 0 takes the profile's value for each file system, or
    /// [`BLOCK_BYTES`].
    pub block_bytes: u64,
    /// Most worker threads for reads, and likewise for writes; 0 takes the depth of a profile that selects threads, or
    /// [`WORKERS`]. Only for the thread backend.
    pub workers: u32,
    /// Use direct I/O where the file system allows it.
    pub direct: bool,
    /// Reserve device space before a write that extends its file.
    pub preallocate: bool,
    /// Time without any completion after which all operations in flight count as past their deadline. It suits a long
    /// queue on a slow device, which a deadline does not.
    pub io_timeout: Option<Duration>,
    /// Turns of processes on a device.
    pub turns: TurnOptions,
}

/// Turns of the processes of a user on a device, see [`turns`](super::turns).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurnOptions {
    /// Number of processes that use a device at a time; 0: any.
    pub most: u32,
    /// How long a process waits for its turn before it uses the device without one.
    pub timeout: Duration,
}

impl TurnOptions {
    /// No turns.
    pub const NONE: TurnOptions = TurnOptions::of(0);

    /// Turns of `most` processes, with the default timeout.
    pub const fn of(most: u32) -> TurnOptions {
        TurnOptions { most, timeout: Duration::from_secs(30) }
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            backend: BackendChoice::Auto,
            depth: 0,
            block_bytes: 0,
            workers: 0,
            direct: true,
            preallocate: true,
            io_timeout: None,
            turns: TurnOptions::NONE,
        }
    }
}

/// Default number of pieces in flight for reads, and for writes.
pub const DEPTH: u32 = 32;
/// Default bytes of a piece.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// Permission bits of new files.
pub(super) const FILE_MODE: u32 = 0o600;
/// Default number of worker threads for reads, and for writes.
pub const WORKERS: u32 = 8;
/// Largest depth.
pub const MAX_DEPTH: u32 = 4096;
/// Most bytes of a piece; a completion's byte count is an i32.
pub const MAX_BLOCK: u64 = 1 << 30;
const MAX_WORKERS: u32 = 1024;
/// Bytes of bounce blocks for unaligned memory, for each direction. A small depth uses fewer.
pub(super) const BOUNCE_BYTES: usize = 16 << 20;
/// Smaller writes are not preallocated: the extra call costs more than it saves.
pub(super) const PREALLOCATE_FROM: usize = 256 << 10;

/// The file of an operation.
#[derive(Debug, Clone)]
pub enum Target<'a> {
    /// A path, opened for the operation.
    Path(&'a Path),
    /// The caller's descriptor, duplicated for the operation.
    Descriptor(i32),
    /// A file that is open already.
    File(Arc<File>),
}

/// One operation to submit.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// The file.
    pub target: Target<'a>,
    /// Byte offset in the file.
    pub offset: u64,
    /// The memory. It belongs to the engine until the operation has finished.
    pub buffer: TransferBuffer,
    /// Time limit of the operation; `None`: no limit.
    pub deadline: Option<Duration>,
}

/// An option's value, or `other` if the value is 0.
pub fn given_or<T: Copy + Default + PartialEq>(given: T, other: T) -> T {
    if given == T::default() { other } else { given }
}

pub(super) fn forced_backend() -> Result<Option<BackendChoice>> {
    match environment::word("SPILLWAY_IO")?.as_deref() {
        None => Ok(None),
        Some("uring" | "io_uring") => Ok(Some(BackendChoice::Uring)),
        Some("threads") => Ok(Some(BackendChoice::Threads)),
        Some(other) => {
            Err(Error::invalid("SPILLWAY_IO", format!("{other:?} is neither \"uring\" nor \"threads\"")))
        }
    }
}

/// The number of `SPILLWAY_IO_TURNS`, for engines that are opened without turns; 0 if it is not set.
pub fn turns_of_environment() -> Result<u32> {
    let Some(text) = environment::word("SPILLWAY_IO_TURNS")? else { return Ok(0) };
    let wrong = |_| Error::invalid("SPILLWAY_IO_TURNS", format!("{text:?} is no number of processes"));
    text.parse().map_err(wrong)
}

pub(super) fn checked(options: Options) -> Result<Options> {
    let range = |argument: &'static str, value: u64, limit: u64| match value {
        _ if value > limit => Err(Error::invalid(argument, format!("is {value}, but the limit is {limit}"))),
        _ => Ok(()),
    };
    range("options.queue_depth", options.depth.into(), MAX_DEPTH.into())?;
    range("options.block_bytes", options.block_bytes, MAX_BLOCK)?;
    range("options.workers", options.workers.into(), MAX_WORKERS.into())?;
    Ok(Options { block_bytes: options.block_bytes.next_multiple_of(BASE_PAGE as u64), ..options })
}
