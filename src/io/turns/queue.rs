//! The queue of the processes of a user for the turns of a device.
//!
//! Invariants:
//! - At most as many live processes hold a turn of a device as it has turns: a holder has the file lock on one of the files
//!   `turn-N`. All processes pass the same number of turns; else a process never uses more than its own.
//! - Turns are granted in ticket order, so a process waits for at most one turn of each other process.
//! - The end of a turn unlocks its file, also while a child that was forked during the turn has the descriptor.
//! - The kernel releases the locks of a dead process, so its turn or its place in the queue ends at once. A forked child
//!   closes the descriptors of its parent. A child of a raw clone keeps them, and the timeout bounds that wait.
//! - A process that waited for its timeout continues without a turn and logs a warning. It does not wait again behind the
//!   same turns or tickets: their holder was stopped, or has a long transfer.
//! - The files are in a directory that belongs to this user, and every file there is checked (see
//!   `sys::private_files`): a file planted by another user is never written to. If another user owns the usual name,
//!   all processes use the next name.
//!
//! The queue of a device is a directory on the node with these files:
//!
//! | file | content |
//! |---|---|
//! | `turn-N` | one per turn, locked by the process that has it; the number of its grant, 0 after its end |
//! | `desk` | the last ticket; locked while a ticket is drawn |
//! | `slot-N` | one per process, locked while the process lives; its ticket, or 0 if it is not waiting |
#![forbid(unsafe_code)]

use std::fs::{DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::environment;
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sys::fork_closed::ForkClosedFile;
use crate::sys::host;
use crate::sys::private_files::{self, GivenDirectory, OpenFlags, PrivateDirectory};

/// Maximum number of processes in a queue.
const SLOTS: usize = 1024;
/// Number of directory names that are tried; other users may own some of them.
const NAMES: u32 = 4;

/// This process's slot in the queue of one device.
#[derive(Debug)]
pub struct TurnQueue {
    #[cfg(test)]
    dir: PathBuf,
    files: PrivateDirectory,
    name: String,
    most: u32,
    /// The files of turns, opened as they are needed.
    turns: Vec<ForkClosedFile>,
    slot: usize,
    mine: ForkClosedFile,
    desk: File,
    /// The slots of other processes, by number, as far as they were there at the last look.
    slots: Vec<File>,
    /// The number of the last grant.
    grant: u64,
}

/// State of a process's request for a device.
#[derive(Debug)]
enum RequestState {
    /// The process does not request the device.
    Idle,
    /// The process waits. It has a ticket after it could lock the file `desk`.
    Waiting { ticket: Option<u64>, since: Instant },
    /// The process has the turn of this number.
    Turn(usize),
    /// The process uses the device without a turn.
    TimedOut,
}

/// What a request waits for.
#[derive(Debug)]
struct Ahead {
    /// The grant of each turn.
    grants: Vec<u64>,
    /// Slots and tickets of the processes before this one.
    tickets: Vec<(usize, u64)>,
}

/// A process's request to use a device. No method blocks.
#[derive(Debug)]
pub struct TurnRequest {
    queue: TurnQueue,
    state: RequestState,
    /// What the last request waited for when its timeout passed.
    stuck: Option<Ahead>,
    message: Option<String>,
}

impl TurnRequest {
    /// Creates an idle request.
    pub fn new(queue: TurnQueue) -> TurnRequest {
        TurnRequest { queue, state: RequestState::Idle, stuck: None, message: None }
    }

    /// Requests the device, or polls an earlier request. True if the process may use the device: it has the turn, or it has
    /// waited for `timeout`. Call it every few milliseconds; turns go to processes in the order of their requests.
    pub fn poll(&mut self, timeout: Duration) -> Result<bool> {
        self.next(timeout).map_err(failed(WAITING))?;
        Ok(self.granted())
    }

    /// True from the grant of a request to [`TurnRequest::release`].
    pub fn granted(&self) -> bool {
        matches!(self.state, RequestState::Turn(_) | RequestState::TimedOut)
    }

    /// True if the last wait ended with its timeout: no request waits again for what that one waited for.
    pub fn is_stuck(&self) -> bool {
        self.stuck.is_some()
    }

    /// True if another live process waits for the device.
    pub fn others_wait(&mut self) -> Result<bool> {
        Ok(!self.queue.waiting_before(u64::MAX).map_err(failed(WAITING))?.is_empty())
    }

    /// A warning for the log.
    pub fn take_message(&mut self) -> Option<String> {
        self.message.take()
    }

    /// Ends the request: releases the turn or the ticket.
    pub fn release(&mut self) {
        let done = match std::mem::replace(&mut self.state, RequestState::Idle) {
            RequestState::Waiting { .. } => self.queue.clear_ticket(),
            RequestState::Turn(turn) => self.queue.end_turn(turn),
            RequestState::Idle | RequestState::TimedOut => Ok(()),
        };
        if let Err(error) = done {
            let message = format!("cannot leave the queue for turns on {}: {error}", self.queue.name);
            self.message = Some(message);
        }
    }

    fn next(&mut self, timeout: Duration) -> io::Result<()> {
        let TurnRequest { queue, state, stuck, message } = self;
        let (ticket, since) = match state {
            RequestState::Turn(_) | RequestState::TimedOut => return Ok(()),
            RequestState::Idle => (Some(u64::MAX), Instant::now()),
            RequestState::Waiting { ticket, since } => (*ticket, *since),
        };
        let waited = matches!(state, RequestState::Waiting { ticket: Some(_), .. });
        let taken = ticket.map_or(Ok(None), |ticket| queue.try_take(ticket))?;
        if taken.is_some() {
            *stuck = None;
        } else {
            if let Some(before) = stuck {
                if !queue.ahead(u64::MAX)?.is_still(before) {
                    *stuck = None;
                }
            } else if since.elapsed() >= timeout {
                *stuck = Some(queue.ahead(ticket.unwrap_or(u64::MAX))?);
                *message = Some(format!(
                    "no turn on the device of {} within {timeout:?}: the process that has it is stopped, or has a \
                     long transfer; continuing without turns until it has given its turn up",
                    queue.name
                ));
            }
            if stuck.is_none() {
                if !waited {
                    *state = RequestState::Waiting { ticket: queue.draw_ticket()?, since };
                }
                return Ok(());
            }
        }
        if waited {
            queue.clear_ticket()?;
        }
        *state = taken.map_or(RequestState::TimedOut, RequestState::Turn);
        Ok(())
    }
}

impl Drop for TurnRequest {
    fn drop(&mut self) {
        // To close the file would not end the turn while a child of a raw clone has the descriptor too.
        self.release();
    }
}

impl Ahead {
    /// True if nothing of `before` has moved on: a process before this one still waits, or no turn ended.
    fn is_still(&self, before: &Ahead) -> bool {
        let turns = !self.grants.is_empty() && !self.grants.contains(&0) && self.grants == before.grants;
        turns || self.tickets.iter().any(|ticket| before.tickets.contains(ticket))
    }
}

impl TurnQueue {
    /// Joins the queue of a device, which `most` processes use at a time. `name` is a file there, for messages. `node` is a
    /// directory that all processes of this user on the node share; `None` selects the default directory. Fails if 1024
    /// processes are in the queue.
    pub fn join(device: u64, name: &str, most: u32, node: Option<&Path>) -> Result<TurnQueue> {
        let joined = || -> io::Result<TurnQueue> {
            let (place, all) = match node {
                Some(node) => given_directory(node)?,
                None => usual_directory(&usual_places(), private_files::user())?,
            };
            let queue = format!("path-{device:x}");
            let dir = place.join(&queue);
            let inside = |error| named(&dir, error);
            let files = all.enter(&queue, true).map_err(inside)?;
            let desk = shared_file(&files, "desk").map_err(|error| named(&dir.join("desk"), error))?;
            let (slot, mine) = free_slot(&files).map_err(inside)?;
            let (turns, slots, grant) = (Vec::new(), Vec::new(), host::random()? as u64);
            let name = name.to_string();
            Ok(TurnQueue {
                #[cfg(test)]
                dir: dir.clone(),
                files,
                name,
                most,
                turns,
                slot,
                mine,
                desk,
                slots,
                grant,
            })
        };
        joined().map_err(failed("joining the queue for turns on a device"))
    }

    /// Draws a ticket. `None` if another process holds the file `desk`.
    fn draw_ticket(&self) -> io::Result<Option<u64>> {
        match self.desk.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => return Ok(None),
        }
        let drawn = (|| {
            let ticket = number_in(&self.desk)? + 1;
            write_number(&self.desk, ticket)?;
            self.write_ticket(ticket)?;
            Ok(Some(ticket))
        })();
        self.desk.unlock()?;
        drawn
    }

    fn clear_ticket(&self) -> io::Result<()> {
        self.write_ticket(0)
    }

    fn write_ticket(&self, ticket: u64) -> io::Result<()> {
        self.mine.file().map_or(Ok(()), |mine| write_number(mine, ticket))
    }

    /// The number of a free turn, which this process has now. `None` if there is none, or a process with a lower ticket waits.
    fn try_take(&mut self, ticket: u64) -> io::Result<Option<usize>> {
        if !self.waiting_before(ticket)?.is_empty() {
            return Ok(None);
        }
        // More turns than slots are never taken.
        for turn in 0..(self.most as usize).min(SLOTS) {
            let Some(file) = self.turn(turn)? else { return Ok(None) };
            match file.try_lock() {
                Ok(()) => {
                    // 0 is the end of a turn.
                    let grant = self.grant.wrapping_add(1).max(1);
                    self.turn(turn)?.map_or(Ok(()), |file| write_number(file, grant))?;
                    self.grant = grant;
                    return Ok(Some(turn));
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    fn end_turn(&self, turn: usize) -> io::Result<()> {
        let Some(file) = self.turns.get(turn).and_then(ForkClosedFile::file) else { return Ok(()) };
        let written = write_number(file, 0);
        file.unlock().and(written)
    }

    /// The file of a turn; `None` in a forked child.
    fn turn(&mut self, turn: usize) -> io::Result<Option<&File>> {
        while self.turns.len() <= turn {
            let name = format!("turn-{}", self.turns.len());
            self.turns.push(ForkClosedFile::open(|| shared_file(&self.files, &name))?);
        }
        Ok(self.turns[turn].file())
    }

    /// Slots and tickets of the live processes that wait with a ticket below `ticket`.
    fn waiting_before(&mut self, ticket: u64) -> io::Result<Vec<(usize, u64)>> {
        let mut found = Vec::new();
        for slot in 0..SLOTS {
            if slot == self.slots.len() {
                let flags = OpenFlags { read: true, ..OpenFlags::default() };
                match self.files.open(&slot_name(slot), flags) {
                    Ok(file) => self.slots.push(file),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    Err(error) => return Err(error),
                }
            }
            let theirs = number_in(&self.slots[slot])?;
            if slot == self.slot || theirs == 0 || theirs >= ticket {
                continue;
            }
            // A slot that can be locked belongs to no live process.
            match self.slots[slot].try_lock_shared() {
                Ok(()) => self.slots[slot].unlock()?,
                Err(TryLockError::WouldBlock) => found.push((slot, theirs)),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(found)
    }

    fn ahead(&mut self, ticket: u64) -> io::Result<Ahead> {
        let tickets = self.waiting_before(ticket)?;
        let grants = self.turns.iter().filter_map(ForkClosedFile::file).map(number_in);
        Ok(Ahead { grants: grants.collect::<io::Result<_>>()?, tickets })
    }
}

/// What failed, for errors of a request.
const WAITING: &str = "waiting for a turn on a device";

fn failed(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::system(doing, &error)
}

fn number_in(file: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => Ok(u64::from_le_bytes(bytes)),
        // The file was just created.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        Err(error) => Err(error),
    }
}

fn write_number(file: &File, number: u64) -> io::Result<()> {
    file.write_all_at(&number.to_le_bytes(), 0)
}

fn free_slot(files: &PrivateDirectory) -> io::Result<(usize, ForkClosedFile)> {
    for slot in 0..SLOTS {
        let file = ForkClosedFile::open(|| shared_file(files, &slot_name(slot)))?;
        let Some(open) = file.file() else { continue };
        match open.try_lock() {
            Ok(()) => {
                write_number(open, 0)?;
                return Ok((slot, file));
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::Error::other(format!("{SLOTS} processes are in the queue already")))
}

fn slot_name(slot: usize) -> String {
    format!("slot-{slot}")
}

fn shared_file(files: &PrivateDirectory, name: &str) -> io::Result<File> {
    files.open(name, OpenFlags { read: true, write: true, make: true, direct: false })
}

/// The error of a file in `directory`, with that name.
fn named(directory: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", directory.display()))
}

fn given_directory(node: &Path) -> io::Result<(PathBuf, PrivateDirectory)> {
    DirBuilder::new().recursive(true).mode(0o700).create(node)?;
    Ok((node.to_path_buf(), GivenDirectory::open(node)?.into()))
}

/// Base directories for the queue. `SPILLWAY_TURNS_DIR` names the only one, which containers of one node may share. Without
/// it /dev/shm comes first: it is cleared at boot and local to the node. XDG_RUNTIME_DIR comes second: processes of one user
/// that were started in different ways may lack it, and would use different queues.
fn usual_places() -> Vec<PathBuf> {
    if let Some(given) = environment::path("SPILLWAY_TURNS_DIR") {
        return vec![given];
    }
    let runtime = environment::path("XDG_RUNTIME_DIR").filter(|path| path.is_absolute());
    let memory = Path::new("/dev/shm");
    let base = match memory.is_dir() {
        true => memory.to_path_buf(),
        false => environment::path("TMPDIR").unwrap_or_else(|| PathBuf::from("/tmp")),
    };
    [base].into_iter().chain(runtime).collect()
}

/// The first usable directory for turns that belongs to this user, or can be created so.
fn usual_directory(places: &[PathBuf], user: u32) -> io::Result<(PathBuf, PrivateDirectory)> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for place in places {
        let given = match GivenDirectory::open(place) {
            Ok(given) => given,
            Err(error) => {
                last = named(place, error);
                continue;
            }
        };
        for number in 0..NAMES {
            let suffix = if number == 0 { String::new() } else { format!("-{number}") };
            let name = format!("spillway-turns-{user}{suffix}");
            match given.enter(&name, true) {
                Ok(found) => return Ok((place.join(name), found)),
                Err(error) => {
                    let foreign = private_files::is_refusal(&error);
                    last = named(&place.join(name), error);
                    if !foreign {
                        break;
                    }
                    log::write(Level::Warn, &format!("not used for the queues of turns: {last}"));
                }
            }
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests;
