//! Turns of the node's processes on a storage path (MLP-Offload section 3.1): one process at a time uses it.
//!
//! Invariants:
//! - At most one live process holds the turn of a path: it holds the file lock on `turn`.
//! - Turns go by ticket: who asks later comes later, so that nobody waits for more than one turn of each other process.
//! - The death of a holder or of a waiter is seen at once: its locks go with it. (A child of fork keeps the locks of a
//!   parent killed in its turn; the patience bounds that.)
//! - A turn is a courtesy between processes, never a condition for correct data: who has waited for its patience goes
//!   without one, and the log says so. Nothing here waits for longer.
//!
//! A path's line is a directory of small files on the node: `turn`; `desk` with the last ticket, locked to draw one;
//! `slot-N`, one for each process, locked while it lives, with its ticket in it (0: not waiting).
#![forbid(unsafe_code)]

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::log::{self, Level};

/// Most processes in one line.
const SLOTS: usize = 1024;
/// How often a waiter looks; a turn lasts for tens of milliseconds and more.
const LOOK: Duration = Duration::from_millis(1);

/// This process's place in the line of one path.
#[derive(Debug)]
pub struct Line {
    dir: PathBuf,
    name: String,
    slot: usize,
    mine: File,
    desk: File,
}

/// The right to use a path; ends when dropped.
#[derive(Debug)]
pub struct Turn {
    _lock: File,
}

/// Which path's turn came, and the turn; None if patience ran out first.
pub type Taken = (usize, Option<Turn>);

impl Line {
    /// Joins the line of the device that `path` is on. `node` is a directory that all processes of this node and user
    /// share; None takes the usual one.
    pub fn join(path: &Path, node: Option<&Path>) -> Result<Line> {
        let failed = |error: io::Error| Error::system("joining the turns on a path", &error);
        let about = fs::metadata(path).map_err(failed)?;
        let dir = match node {
            Some(node) => node.to_path_buf(),
            None => usual_directory().map_err(failed)?,
        };
        let dir = dir.join(format!("path-{:x}", about.dev()));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(failed)?;
        let desk = shared_file(&dir.join("desk")).map_err(failed)?;
        let (slot, mine) = free_slot(&dir).map_err(failed)?;
        Ok(Line { dir, name: path.display().to_string(), slot, mine, desk })
    }

    /// The turn, if it is free and nobody waits for it.
    pub fn try_take(&self) -> Result<Option<Turn>> {
        self.take_before(u64::MAX).map_err(waiting)
    }

    /// True if another live process waits for this path.
    pub fn others_wait(&self) -> Result<bool> {
        self.someone_before(u64::MAX).map_err(waiting)
    }

    /// Which line it is: the same for all paths on one device, in every process of the node.
    pub fn place(&self) -> &Path {
        &self.dir
    }

    /// Draws a ticket; `None` if the desk is taken until `end`.
    fn stand(&self, end: Instant) -> io::Result<Option<u64>> {
        loop {
            match self.desk.try_lock() {
                Ok(()) => break,
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) if Instant::now() >= end => return Ok(None),
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            }
        }
        let drawn = (|| {
            let ticket = ticket_in(&self.desk)? + 1;
            self.desk.write_all_at(&ticket.to_le_bytes(), 0)?;
            self.mine.write_all_at(&ticket.to_le_bytes(), 0)?;
            Ok(Some(ticket))
        })();
        self.desk.unlock()?;
        drawn
    }

    fn leave(&self) -> io::Result<()> {
        self.mine.write_all_at(&0u64.to_le_bytes(), 0)
    }

    fn take_before(&self, ticket: u64) -> io::Result<Option<Turn>> {
        if self.someone_before(ticket)? {
            return Ok(None);
        }
        let file = shared_file(&self.dir.join("turn"))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Turn { _lock: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn someone_before(&self, ticket: u64) -> io::Result<bool> {
        for slot in (0..SLOTS).filter(|slot| *slot != self.slot) {
            let file = match OpenOptions::new().read(true).open(slot_path(&self.dir, slot)) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => return Err(error),
            };
            let theirs = ticket_in(&file)?;
            if theirs == 0 || theirs > ticket {
                continue;
            }
            // A slot that can be locked belongs to nobody who lives.
            match file.try_lock_shared() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(true),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(false)
    }
}

/// Takes the first turn to be had: a free one in the order given, else the one that comes first, waiting in all lines at
/// once.
pub fn take_any(lines: &[&Line], patience: Duration) -> Result<Taken> {
    for (index, line) in lines.iter().enumerate() {
        if let Some(turn) = line.try_take()? {
            return Ok((index, Some(turn)));
        }
    }
    let taken = wait_in_all(lines, Instant::now() + patience);
    // All of them, also after an error: others wait for whoever stands in line.
    let left = lines.iter().map(|line| line.leave()).fold(Ok(()), io::Result::and);
    let taken = taken.and_then(|taken| left.map(|()| taken)).map_err(waiting)?;
    if taken.1.is_none() {
        let name = lines.first().map_or("no path", |line| &line.name);
        let words = format!("no turn on {name} within {:.1} s: going on without one", patience.as_secs_f64());
        log::write(Level::Warn, &words);
    }
    Ok(taken)
}

fn wait_in_all(lines: &[&Line], end: Instant) -> io::Result<Taken> {
    let tickets: Option<Vec<u64>> = lines.iter().map(|line| line.stand(end)).collect::<io::Result<_>>()?;
    tickets.map_or(Ok((0, None)), |tickets| wait_in(lines, &tickets, end))
}

fn wait_in(lines: &[&Line], tickets: &[u64], end: Instant) -> io::Result<Taken> {
    loop {
        for (index, (line, ticket)) in lines.iter().zip(tickets).enumerate() {
            if let Some(turn) = line.take_before(*ticket)? {
                return Ok((index, Some(turn)));
            }
        }
        if Instant::now() >= end {
            return Ok((0, None));
        }
        std::thread::sleep(LOOK);
    }
}

fn waiting(error: io::Error) -> Error {
    Error::system("waiting for a turn on a path", &error)
}

fn ticket_in(file: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => Ok(u64::from_le_bytes(bytes)),
        // A file just made.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        Err(error) => Err(error),
    }
}

fn free_slot(dir: &Path) -> io::Result<(usize, File)> {
    for slot in 0..SLOTS {
        let file = shared_file(&slot_path(dir, slot))?;
        match file.try_lock() {
            Ok(()) => {
                file.write_all_at(&0u64.to_le_bytes(), 0)?;
                return Ok((slot, file));
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::Error::other(format!("{SLOTS} processes are in line already")))
}

fn slot_path(dir: &Path, slot: usize) -> PathBuf {
    dir.join(format!("slot-{slot}"))
}

fn shared_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// In memory where the node has it: it is emptied at boot and belongs to this node alone.
fn usual_directory() -> io::Result<PathBuf> {
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    Ok(base.join(format!("spillway-turns-{}", fs::metadata("/proc/self")?.uid())))
}

#[cfg(test)]
mod tests;
