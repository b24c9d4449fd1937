//! A simulated disk for tests. It is seeded, so every failure can be reproduced.
//!
//! It delays, reorders and shortens requests, fails with any errno, hangs, fills up, and rejects unaligned requests. In
//! a crash, written but unsynced data is kept, dropped or torn, sector by sector. A [`Journal`] records the events of
//! disks, so one run yields the images of a crash at every point of it.
#![forbid(unsafe_code)]

mod disk;
mod faults;
mod journal;

use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use disk::{Crash, Disk, SECTOR};
pub use faults::{Faults, Stop};
pub use journal::{DiskEvent, Journal};

use super::backend::{Action, Backend, Completion, Piece, Sleep, Wake};
use super::plan::Route;
use faults::next;

/// The backend over a [`Disk`].
#[derive(Debug)]
pub struct Sim {
    disk: Disk,
    faults: Faults,
    random: u64,
    waiting: Vec<(Piece, Fate)>,
    /// Wakes of the disk that this backend has seen.
    seen: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Served,
    Failed(i32),
    Hung,
}

impl Sim {
    /// A backend that serves `disk` with `faults`.
    pub fn new(disk: &Disk, faults: Faults) -> Sim {
        disk.limit(faults.capacity);
        Sim {
            disk: disk.clone(),
            random: faults.seed.wrapping_mul(2) | 1,
            faults,
            waiting: Vec::new(),
            seen: 0,
        }
    }

    fn chance(&mut self, permille: u32) -> bool {
        next(&mut self.random) % 1000 < u64::from(permille)
    }

    fn fate(&mut self, number: u64) -> Fate {
        if self.faults.hang_nth == Some(number) {
            return Fate::Hung;
        }
        if let Some((_, errno)) = self.faults.fail_nth.filter(|(nth, _)| *nth == number) {
            return Fate::Failed(errno);
        }
        let errors = self.faults.error_permille.clone();
        let drawn = errors.into_iter().find(|(_, permille)| self.chance(*permille));
        drawn.map_or(Fate::Served, |(errno, _)| Fate::Failed(errno))
    }

    fn serve(&mut self, piece: &Piece) -> i32 {
        let len = piece.span.len();
        if !aligned(piece) {
            return -libc::EINVAL;
        }
        let short = len > 1 && piece.action.moves_bytes() && self.chance(self.faults.short_permille);
        let len = if short { 1 + next(&mut self.random) as usize % (len - 1) } else { len };
        let name = piece.file.name();
        let at = piece.offset as usize;
        match piece.action {
            Action::Read => {
                let there = self.disk.read(name, at, len);
                piece.span.write(&there);
                there.len() as i32
            }
            Action::Write => {
                if let Some(errno) = self.faults.refuse_writes {
                    return -errno;
                }
                let len = len.min(self.disk.room(name).saturating_sub(at));
                if len == 0 {
                    return -libc::ENOSPC;
                }
                let bytes = piece.span.part(0, len).to_vec();
                self.disk.serve(DiskEvent::Write { name: name.to_string(), at, bytes });
                len as i32
            }
            Action::Sync => {
                self.disk.serve(DiskEvent::Sync { name: name.to_string() });
                0
            }
            Action::Allocate { bytes } => match self.disk.allocate(name, piece.offset + bytes) {
                true => 0,
                false => -libc::ENOSPC,
            },
        }
    }

    /// Removes the next request to complete; `None` if none can.
    fn next_ready(&mut self) -> Option<(Piece, Fate)> {
        let released = self.disk.released();
        let ready: Vec<usize> =
            (0..self.waiting.len()).filter(|at| released || self.waiting[*at].1 != Fate::Hung).collect();
        let pick = match self.faults.reorder && !ready.is_empty() {
            true => next(&mut self.random) as usize % ready.len(),
            false => 0,
        };
        ready.get(pick).map(|at| self.waiting.remove(*at))
    }
}

impl Backend for Sim {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn push(&mut self, piece: Piece) {
        let stopped = self.disk.count_event(self.faults.stop);
        let fate = self.fate(self.disk.count_request());
        let fate = if stopped { Fate::Hung } else { fate };
        self.waiting.push((piece, fate));
    }

    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()> {
        loop {
            while let Some((piece, fate)) = self.next_ready() {
                let result = match fate {
                    Fate::Failed(errno) => -errno,
                    Fate::Served | Fate::Hung => self.serve(&piece),
                };
                done.push(Completion::of(piece.token, result));
                if self.faults.reorder && self.chance(500) {
                    break;
                }
            }
            if sleep.completions == 0 || !done.is_empty() {
                self.seen = self.disk.wakes();
                return Ok(());
            }
            if self.disk.wait_news(&mut self.seen, sleep.until) {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.disk.waker()
    }
}

/// True if the piece meets the file's alignment, which a device requires of direct requests.
fn aligned(piece: &Piece) -> bool {
    let alignment =
        piece.file.direct().filter(|_| piece.route == Route::Direct && piece.action.moves_bytes());
    alignment.is_none_or(|alignment| {
        (piece.span.address() as u64).is_multiple_of(alignment.memory)
            && piece.offset.is_multiple_of(alignment.offset)
            && (piece.span.len() as u64).is_multiple_of(alignment.offset)
    })
}

/// I/O timeout of a test in which one request hangs and all other calls must end in time, also on a busy machine.
pub fn short_io_timeout() -> Option<Duration> {
    // The tests for other processors run under emulation.
    Some(Duration::from_secs(if cfg!(target_arch = "x86_64") { 1 } else { 8 }))
}
