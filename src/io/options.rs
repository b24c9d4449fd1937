//! What an engine is opened with, and what an operation is asked with.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::file::File;
use crate::error::{Error, Result};
use crate::sys::memory::BASE_PAGE;
use crate::sys::span::Span;

/// Which backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// io_uring, or threads where it is not to be had.
    Auto,
    /// io_uring or an error.
    Uring,
    /// Threads.
    Threads,
}

/// Settings of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Which backend; the environment variable `SPILLWAY_IO` overrides it.
    pub backend: Choice,
    /// Pieces of reads under way at a time, and as many of writes; 0 is the profile's, or [`DEPTH`].
    pub depth: u32,
    /// Most bytes of a piece, rounded up to whole pages; 0 is the profile's for each file system, or [`BLOCK_BYTES`].
    pub block_bytes: u64,
    /// Most worker threads of the thread backend for reads, and as many for writes; 0 is the depth of a profile that asks for
    /// threads, or [`WORKERS`].
    pub workers: u32,
    /// Go past the page cache where the file system allows it.
    pub direct: bool,
    /// Give a write that extends its file its place on the device first.
    pub preallocate: bool,
    /// Permission bits of new files.
    pub file_mode: u32,
    /// Deadline of operations that bring none.
    pub deadline: Option<Duration>,
    /// Time without any progress after which all operations under way count as past their deadline. It fits a queue
    /// that a slow device takes long to work through, which a deadline does not.
    pub stall: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            backend: Choice::Auto,
            depth: 0,
            block_bytes: 0,
            workers: 0,
            direct: true,
            preallocate: true,
            file_mode: 0o600,
            deadline: None,
            stall: None,
        }
    }
}

/// Pieces of reads, and of writes, under way where nobody says otherwise.
pub const DEPTH: u32 = 32;
/// Bytes of a piece where nobody says otherwise.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// Worker threads where nobody says otherwise.
pub const WORKERS: u32 = 8;
/// Largest depth.
pub const MAX_DEPTH: u32 = 4096;
/// Largest piece; a completion's count is an i32.
pub const MAX_BLOCK: u64 = 1 << 30;
const MAX_WORKERS: u32 = 1024;
/// Bytes set aside for unaligned memory, as far as the depth needs them.
pub(super) const BOUNCE_BYTES: usize = 16 << 20;
/// Writes below this are not worth a call of their own for their place.
pub(super) const PREALLOCATE_FROM: usize = 256 << 10;

/// Where an operation goes.
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
    /// Where.
    pub target: Target<'a>,
    /// Byte of the file to begin at.
    pub offset: u64,
    /// The memory. It belongs to the engine until the operation is over.
    pub span: Span,
    /// Time that the operation may take, instead of the engine's.
    pub deadline: Option<Duration>,
}

pub(super) fn forced_backend() -> Result<Option<Choice>> {
    match std::env::var("SPILLWAY_IO") {
        Err(_) => Ok(None),
        Ok(text) => match text.trim() {
            "" => Ok(None),
            "uring" | "io_uring" => Ok(Some(Choice::Uring)),
            "threads" => Ok(Some(Choice::Threads)),
            other => {
                Err(Error::invalid("SPILLWAY_IO", format!("{other:?} is neither \"uring\" nor \"threads\"")))
            }
        },
    }
}

pub(super) fn checked(options: Options) -> Result<Options> {
    let range = |argument: &'static str, value: u64, limit: u64| match value {
        _ if value > limit => Err(Error::invalid(argument, format!("{value} is more than {limit}"))),
        _ => Ok(()),
    };
    range("options.depth", options.depth.into(), MAX_DEPTH.into())?;
    range("options.block_bytes", options.block_bytes, MAX_BLOCK)?;
    range("options.workers", options.workers.into(), MAX_WORKERS.into())?;
    if options.file_mode & !0o7777 != 0 {
        return Err(Error::invalid(
            "options.file_mode",
            format!("{:#o} has unknown bits", options.file_mode),
        ));
    }
    Ok(Options { block_bytes: options.block_bytes.next_multiple_of(BASE_PAGE as u64), ..options })
}
