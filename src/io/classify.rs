//! Classifies each completion of a piece: done, retry, or failed.
#![forbid(unsafe_code)]

use std::io;

use super::backend::Action;
use super::counters::Counters;
use super::file::failure;
use super::operation::Operation;
use super::plan::Route;
use crate::error::{Error, IoError, IoKind};
use crate::sys::file;
use crate::sys::span::Span;

/// Most retries of a piece; a system that interrupts more often will not stop.
const MAX_TRIES: u32 = 64;

pub(super) enum PieceResult {
    Done,
    Retry,
    Failed(Error),
}

/// A piece submitted to the backend.
pub(super) struct InFlight {
    pub(super) owner: usize,
    /// Offset of the piece in the operation, in bytes.
    pub(super) at: u64,
    pub(super) span: Span,
    /// Bytes of the span already transferred.
    pub(super) done: usize,
    pub(super) route: Route,
    pub(super) bounce: Option<usize>,
    pub(super) tries: u32,
}

/// Classifies a result, which is the value that the system call would have returned, and counts the bytes moved.
pub(super) fn classify(
    op: &Operation,
    flight: &mut InFlight,
    result: i32,
    message: Option<Box<str>>,
    counters: &Counters,
) -> PieceResult {
    if result < 0 {
        return classify_errno(op, flight, -result, message, counters);
    }
    if !op.action.moves_bytes() {
        return PieceResult::Done;
    }
    let left = flight.span.len() - flight.done;
    let moved = result as usize;
    if moved > left {
        return PieceResult::Failed(broken(
            op,
            flight,
            format!("the system reported {moved} bytes for a request of {left}"),
        ));
    }
    flight.done += moved;
    match (moved, op.action) {
        _ if moved == left => PieceResult::Done,
        (0, Action::Read) => PieceResult::Failed(end_of_file(op, flight)),
        (0, _) => PieceResult::Failed(broken(op, flight, "the system wrote 0 bytes".to_string())),
        _ => {
            Counters::add(&counters.resumed, 1);
            resume(op, flight)
        }
    }
}

fn classify_errno(
    op: &Operation,
    flight: &mut InFlight,
    errno: i32,
    message: Option<Box<str>>,
    counters: &Counters,
) -> PieceResult {
    let transient = errno == libc::EINTR || errno == libc::EAGAIN;
    if transient && flight.tries < MAX_TRIES {
        flight.tries += 1;
        Counters::add(&counters.retried, 1);
        return PieceResult::Retry;
    }
    // The file system does not support allocation, so writes will extend the file.
    if matches!(op.action, Action::Allocate { .. }) && file::cannot_allocate(errno) {
        return PieceResult::Done;
    }
    let refused = errno == libc::EINVAL || errno == libc::EOPNOTSUPP;
    if refused && flight.route == Route::Direct && op.action.moves_bytes() {
        op.file.refuse_direct("the file system refused an aligned direct transfer".to_string());
        return reroute(op, flight);
    }
    let error = io::Error::from_raw_os_error(errno);
    let detail = match errno {
        _ if transient => format!("{MAX_TRIES} times in a row"),
        libc::ECANCELED => {
            "io_uring could not start a worker, as with a small limit of processes (ulimit -u); raise \
                            the limit, or set SPILLWAY_IO=threads"
                .to_string()
        }
        libc::EFAULT => "the buffer is not mapped, or not with the needed access".to_string(),
        _ => message.map_or_else(String::new, String::from),
    };
    let left = match op.action {
        Action::Allocate { bytes } => bytes,
        _ => (flight.span.len() - flight.done) as u64,
    };
    match failure(op.doing(), op.file.name(), op.offset + flight.at + flight.done as u64, left, &error) {
        Error::Io(inner) => PieceResult::Failed(IoError { detail, ..*inner }.into()),
        other => PieceResult::Failed(other),
    }
}

/// After a short transfer: continues, directly if the rest is still aligned.
fn resume(op: &Operation, flight: &mut InFlight) -> PieceResult {
    let aligned = op.file.direct().is_some_and(|alignment| {
        (flight.done as u64).is_multiple_of(alignment.offset)
            && (flight.done as u64).is_multiple_of(alignment.memory)
    });
    if flight.route == Route::Buffered || aligned {
        return PieceResult::Retry;
    }
    reroute(op, flight)
}

fn reroute(op: &Operation, flight: &mut InFlight) -> PieceResult {
    flight.route = Route::Buffered;
    match op.file.prepare(Route::Buffered) {
        Ok(()) => PieceResult::Retry,
        Err(error) => PieceResult::Failed(error),
    }
}

fn end_of_file(op: &Operation, flight: &InFlight) -> Error {
    let end = op.offset + flight.at + flight.done as u64;
    IoError::about(IoKind::ShortFile, op.doing(), op.file.name())
        .at(op.offset, op.span.len() as u64)
        .because(format!("the file ends at byte {end}"))
        .into()
}

fn broken(op: &Operation, flight: &InFlight, detail: String) -> Error {
    IoError::about(IoKind::Failed, op.doing(), op.file.name())
        .at(op.offset + flight.at, flight.span.len() as u64)
        .because(detail)
        .into()
}
