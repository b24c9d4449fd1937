//! Turns of the node's processes on a storage path (MLP-Offload section 3.1): one process at a time uses it.
//!
//! Invariants:
//! - At most one live process holds the turn of a path: it holds the file lock on `turn`.
//! - Turns go by ticket: who asks later comes later, so that nobody waits for more than one turn of each other process.
//! - The death of a holder or of a waiter is seen at once: its locks go with it. (A child of fork keeps the locks of a
//!   parent killed in its turn; the patience bounds that.)
//! - A turn is a courtesy between processes, never a condition for correct data: who has waited for its patience goes
//!   without one, and the log says so.
//!
//! - Lines lie in directories of this user alone, and every file there is checked (see `sys::own`): what another user
//!   planted is never written to. Where another user took the usual name, the next one is used, by all processes alike.
//!
//! A path's line is a directory of small files on the node: `turn`; `desk` with the last ticket, locked to draw one;
//! `slot-N`, one for each process, locked while it lives, with its ticket in it (0: not waiting).
#![forbid(unsafe_code)]

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sys::own::Want;
use crate::sys::own::{self, OwnDirectory};

/// Most processes in one line.
const SLOTS: usize = 1024;
/// Names of the usual directory that are tried: another user may have taken some.
const NAMES: u32 = 4;

/// This process's place in the line of one path.
#[derive(Debug)]
pub struct Line {
    dir: PathBuf,
    files: OwnDirectory,
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

/// How a process stands with a path.
#[derive(Debug)]
enum Standing {
    /// It does not want it.
    Apart,
    /// In line, with a ticket once the desk was free.
    Waiting { ticket: Option<u64>, since: Instant },
    /// Its turn.
    Turn { _turn: Turn },
    /// Patience ran out: it goes without.
    Without,
}

/// A process's wish to use a path. Nothing here blocks.
#[derive(Debug)]
pub struct Claim {
    line: Line,
    patience: Duration,
    standing: Standing,
}

impl Claim {
    /// No wish yet; `patience` is how long a later one is for a turn.
    pub fn new(line: Line, patience: Duration) -> Claim {
        Claim { line, patience, standing: Standing::Apart }
    }

    /// Asks for the path, or again after it was refused. True if it may be used: with the turn, or without if patience ran
    /// out. Asked every few milliseconds, the turn comes to whoever asked first.
    pub fn ask(&mut self) -> Result<bool> {
        self.next().map_err(waiting)?;
        Ok(self.granted())
    }

    /// True from a granted wish to [`Claim::give_up`].
    pub fn granted(&self) -> bool {
        matches!(self.standing, Standing::Turn { .. } | Standing::Without)
    }

    /// True if another live process waits for this path.
    pub fn others_wait(&self) -> Result<bool> {
        self.line.others_wait().map_err(waiting)
    }

    /// Ends the wish: turn and place in line are another's.
    pub fn give_up(&mut self) {
        let stood =
            matches!(std::mem::replace(&mut self.standing, Standing::Apart), Standing::Waiting { .. });
        if stood && let Err(error) = self.line.leave() {
            log::write(Level::Warn, &format!("a ticket for {} is left in its line: {error}", self.line.name));
        }
    }

    fn next(&mut self) -> io::Result<()> {
        let Claim { line, patience, standing } = self;
        let (taken, since) = match standing {
            Standing::Turn { .. } | Standing::Without => return Ok(()),
            Standing::Apart => (line.take_before(u64::MAX)?, Instant::now()),
            Standing::Waiting { ticket: None, since } => (None, *since),
            Standing::Waiting { ticket: Some(ticket), since } => (line.take_before(*ticket)?, *since),
        };
        let stood = matches!(standing, Standing::Waiting { ticket: Some(_), .. });
        if taken.is_none() && since.elapsed() < *patience {
            if !stood {
                *standing = Standing::Waiting { ticket: line.stand()?, since };
            }
            return Ok(());
        }
        if stood {
            line.leave()?;
        }
        if taken.is_none() {
            let words = format!(
                "no turn on {} within {:.1} s: going on without one",
                line.name,
                patience.as_secs_f64()
            );
            log::write(Level::Warn, &words);
        }
        *standing = taken.map_or(Standing::Without, |turn| Standing::Turn { _turn: turn });
        Ok(())
    }
}

impl Line {
    /// Joins the line of the device that `path` is on. `node` is a directory that all processes of this node and user
    /// share; None takes the usual one.
    pub fn join(path: &Path, node: Option<&Path>) -> Result<Line> {
        let failed = |error: io::Error| Error::system("joining the turns on a path", &error);
        let about = fs::metadata(path).map_err(failed)?;
        let (place, all) = match node {
            Some(node) => given_directory(node).map_err(failed)?,
            None => usual_directory(&usual_places(), own::user()).map_err(failed)?,
        };
        let line = format!("path-{:x}", about.dev());
        let (dir, files) = (place.join(&line), all.enter(&line, true).map_err(failed)?);
        let desk = shared_file(&files, "desk").map_err(failed)?;
        let (slot, mine) = free_slot(&files).map_err(failed)?;
        Ok(Line { dir, files, name: path.display().to_string(), slot, mine, desk })
    }

    fn others_wait(&self) -> io::Result<bool> {
        self.someone_before(u64::MAX)
    }

    /// Which line it is: the same for all paths on one device, in every process of the node.
    pub fn place(&self) -> &Path {
        &self.dir
    }

    /// Draws a ticket; `None` if somebody else does so now.
    fn stand(&self) -> io::Result<Option<u64>> {
        match self.desk.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => return Ok(None),
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
        let file = shared_file(&self.files, "turn")?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Turn { _lock: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn someone_before(&self, ticket: u64) -> io::Result<bool> {
        for slot in (0..SLOTS).filter(|slot| *slot != self.slot) {
            let file = match self.files.open(&slot_name(slot), Want { read: true, ..Want::default() }) {
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

fn free_slot(files: &OwnDirectory) -> io::Result<(usize, File)> {
    for slot in 0..SLOTS {
        let file = shared_file(files, &slot_name(slot))?;
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

fn slot_name(slot: usize) -> String {
    format!("slot-{slot}")
}

fn shared_file(files: &OwnDirectory, name: &str) -> io::Result<File> {
    files.open(name, Want { read: true, write: true, make: true, direct: false })
}

fn given_directory(node: &Path) -> io::Result<(PathBuf, OwnDirectory)> {
    DirBuilder::new().recursive(true).mode(0o700).create(node)?;
    Ok((node.to_path_buf(), OwnDirectory::given(node)?))
}

/// In memory where the node has it: it is emptied at boot and belongs to this node alone. Not XDG_RUNTIME_DIR at first:
/// processes of one user that were started in different ways do not all have it, and would stand in different lines.
fn usual_places() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    [base].into_iter().chain(runtime).collect()
}

/// The first directory of turns that is this user's alone, or can be made so.
fn usual_directory(places: &[PathBuf], user: u32) -> io::Result<(PathBuf, OwnDirectory)> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for place in places {
        let given = match OwnDirectory::given(place) {
            Ok(given) => given,
            Err(error) => {
                last = error;
                continue;
            }
        };
        for number in 0..NAMES {
            let suffix = if number == 0 { String::new() } else { format!("-{number}") };
            let name = format!("spillway-turns-{user}{suffix}");
            match given.enter(&name, true) {
                Ok(found) => return Ok((place.join(name), found)),
                Err(error) => {
                    let path = place.join(name);
                    log::write(Level::Warn, &format!("{} is not used for turns: {error}", path.display()));
                    last = error;
                }
            }
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests;
