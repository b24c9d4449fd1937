//! Turns on a storage path: only some processes of the node use the path at a time, by default one (MLP-Offload section
//! 3.2).
//!
//! Invariants:
//! - In a round, transfers to a path wait at the path's gate until this process has its turn, or its timeout passes.
//!   Other paths are not delayed: the parts of a subgroup travel independently.
//! - A process keeps its turn while no other process waits. When one does, this process closes the gate, finishes the
//!   transfers that have passed it, and gives the turn up.
//! - A turn depends only on the path's own transfers, so processes never wait for each other in a cycle.
//! - At most as many live processes hold a turn of a path as the path has turns: a holder has the file lock on one of
//!   the files `turn-N`. All processes pass the same number of turns; else a process never uses more than its own.
//! - Turns are granted in ticket order, so a process waits for at most one turn of each other process.
//! - The end of a turn unlocks its file, also while a child that was forked during the turn has the descriptor.
//! - The kernel releases the locks of a dead process, so its turn or its place in the queue ends at once. Exception: a
//!   forked child keeps the locks of a parent that is killed during its turn. The timeout bounds that wait.
//! - Turns never affect correctness. A process that waits longer than its timeout continues without a turn and logs a
//!   warning.
//! - The files are in a directory that belongs to this user, and every file there is checked (see
//!   `sys::private_files`): a file planted by another user is never written to. If another user owns the usual name,
//!   all processes use the next name.
//!
//! The queue of a path is a directory on the node with these files:
//!
//! | file | content |
//! |---|---|
//! | `turn-N` | empty; one per turn, locked by the process that has it |
//! | `desk` | the last ticket; locked while a ticket is drawn |
//! | `slot-N` | one per process, locked while the process lives; its ticket, or 0 if it is not waiting |
#![forbid(unsafe_code)]

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::store::Tier;
use super::volume::{POLL_INTERVAL, Turn, Volume};
use crate::environment;
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sys::fork::OpeningProcess;
use crate::sys::private_files::{self, GivenDirectory, OpenFlags, PrivateDirectory};
use crate::sys::sync::Lock;
use spillway_stores::is_address;

/// The turns of one process on the paths of a tier. Its drop opens all gates.
#[derive(Debug)]
pub struct PathArbiter {
    /// Devices whose paths have turns. Other paths are always open.
    devices: Vec<Arc<SharedDevice>>,
    opener: OpeningProcess,
}

/// The paths on one device, which share one queue of waiting processes.
#[derive(Debug)]
struct SharedDevice {
    me: Weak<SharedDevice>,
    volumes: Vec<Weak<Volume>>,
    turn: Lock<DeviceTurn>,
}

#[derive(Debug)]
struct DeviceTurn {
    /// `None` after an error of the queue: the paths are always open then.
    request: Option<TurnRequest>,
    last_poll: Option<Instant>,
}

impl PathArbiter {
    /// Joins the queues of the shared paths of `tier`, each of which up to `turns` processes use at once. A turn is awaited for
    /// at most `turn_timeout`. Without turns all paths are always open.
    pub fn new(tier: &Tier, turns: u32, turn_timeout: Duration) -> PathArbiter {
        let mut queues: Vec<(TurnQueue, Vec<Weak<Volume>>)> = Vec::new();
        for volume in tier.volumes.iter().flatten() {
            let name = volume.name();
            // Memory belongs to this process alone, and an object store serves all processes at once.
            if turns == 0 || !volume.lasts() || is_address(&name) {
                continue;
            }
            let queue = match TurnQueue::join(Path::new(&name), turns, None) {
                Ok(queue) => queue,
                // Turns only improve bandwidth: without them every process uses the path at any time.
                Err(error) => {
                    let message =
                        format!("{name} is used without taking turns with other processes: {error}");
                    log::write(Level::Warn, &message);
                    continue;
                }
            };
            match queues.iter_mut().find(|(known, _)| known.directory() == queue.directory()) {
                Some((_, volumes)) => volumes.push(Arc::downgrade(volume)),
                None => queues.push((queue, vec![Arc::downgrade(volume)])),
            }
        }
        let device = |(queue, volumes)| {
            let request = Some(TurnRequest::new(queue, turn_timeout));
            let turn = Lock::new(DeviceTurn { request, last_poll: None });
            Arc::new_cyclic(|me: &Weak<SharedDevice>| SharedDevice { me: Weak::clone(me), volumes, turn })
        };
        let devices = queues.into_iter().map(device).collect();
        PathArbiter { devices, opener: OpeningProcess::current() }
    }

    /// Begins a round: closes the gates of paths with turns.
    pub fn begin(&self) {
        for device in &self.devices {
            let mut turn = device.turn.lock();
            turn.last_poll = None;
            if turn.request.is_some() {
                device.close();
            }
        }
    }

    /// Requests turns that are needed, and gives up turns that other processes wait for. Call repeatedly in a round.
    pub fn poll(&self) {
        self.devices.iter().for_each(|device| device.poll());
    }

    /// Time until the next `poll` is useful; `None` if no path has turns.
    pub fn next_poll(&self) -> Option<Duration> {
        (!self.devices.is_empty()).then_some(POLL_INTERVAL)
    }

    /// Ends a round: opens all gates and gives all turns up.
    pub fn end(&self) {
        for device in &self.devices {
            let mut turn = device.turn.lock();
            device.open(false);
            turn.request.iter_mut().for_each(TurnRequest::release);
        }
    }
}

impl Drop for PathArbiter {
    fn drop(&mut self) {
        // A forked child must not take a lock that a thread of the parent may hold.
        if self.opener.is_current() {
            self.end();
        }
    }
}

impl Turn for SharedDevice {
    fn poll(&self) {
        // Another thread polls, or this one in a log callback.
        let Some(mut turn) = self.turn.try_lock() else { return };
        let DeviceTurn { request: Some(request), last_poll } = &mut *turn else { return };
        if last_poll.is_some_and(|last_poll| last_poll.elapsed() < POLL_INTERVAL) {
            return;
        }
        *last_poll = Some(Instant::now());
        if let Err(error) = self.advance(request) {
            log::write(Level::Warn, &format!("this process takes no more turns on a path: {error}"));
            turn.request = None;
            self.open(false);
        }
    }
}

impl SharedDevice {
    fn advance(&self, request: &mut TurnRequest) -> Result<()> {
        if request.granted() {
            if !request.others_wait()? {
                self.open(false);
                return Ok(());
            }
            self.close();
            if !self.present().all(|volume| volume.quiet()) {
                return Ok(());
            }
            request.release();
        }
        if self.present().any(|volume| volume.held_back()) && request.poll()? {
            self.open(true);
        }
        Ok(())
    }

    fn present(&self) -> impl Iterator<Item = Arc<Volume>> {
        self.volumes.iter().filter_map(Weak::upgrade)
    }

    fn close(&self) {
        self.present().for_each(|volume| volume.close_gate(Weak::clone(&self.me) as Weak<dyn Turn>));
    }

    /// Starts the held transfers. Later ones are held again if `closed`.
    fn open(&self, closed: bool) {
        self.present().for_each(|volume| volume.release_held(closed));
    }
}

/// Maximum number of processes in a queue.
const SLOTS: usize = 1024;
/// Number of directory names that are tried; other users may own some of them.
const NAMES: u32 = 4;

/// This process's slot in the queue of one path.
#[derive(Debug)]
pub struct TurnQueue {
    dir: PathBuf,
    files: PrivateDirectory,
    name: String,
    turns: u32,
    slot: usize,
    mine: File,
    tickets: File,
}

/// The turn on a device. Dropping it ends the turn.
#[derive(Debug)]
pub struct HeldTurn {
    lock: File,
    opener: OpeningProcess,
}

impl Drop for HeldTurn {
    fn drop(&mut self) {
        // To close the file would not end the turn while a child, forked during the turn, has the descriptor too.
        if self.opener.is_current()
            && let Err(error) = self.lock.unlock()
        {
            log::write(Level::Warn, &format!("cannot unlock the turn on a path: {error}"));
        }
    }
}

/// State of a process's request for a path.
#[derive(Debug)]
enum RequestState {
    /// The process does not request the path.
    Idle,
    /// The process waits. It has a ticket after it could lock the file `desk`.
    Waiting { ticket: Option<u64>, since: Instant },
    /// The process has the turn.
    Turn { _turn: HeldTurn },
    /// The timeout passed; the process uses the path without a turn.
    TimedOut,
}

/// A process's request to use a path. No method blocks.
#[derive(Debug)]
pub struct TurnRequest {
    queue: TurnQueue,
    timeout: Duration,
    state: RequestState,
}

impl TurnRequest {
    /// Creates an idle request. `timeout` is the longest wait for a turn.
    pub fn new(queue: TurnQueue, timeout: Duration) -> TurnRequest {
        TurnRequest { queue, timeout, state: RequestState::Idle }
    }

    /// Requests the path, or polls an earlier request. True if the process may use the path: it has the turn, or its
    /// timeout ran out. Call it every few milliseconds; turns go to processes in the order of their requests.
    pub fn poll(&mut self) -> Result<bool> {
        self.next().map_err(waiting)?;
        Ok(self.granted())
    }

    /// True from the grant of a request to [`TurnRequest::release`].
    pub fn granted(&self) -> bool {
        matches!(self.state, RequestState::Turn { .. } | RequestState::TimedOut)
    }

    /// True if another live process waits for the path.
    pub fn others_wait(&self) -> Result<bool> {
        self.queue.others_wait().map_err(waiting)
    }

    /// Ends the request: releases the turn or the ticket.
    pub fn release(&mut self) {
        let waited =
            matches!(std::mem::replace(&mut self.state, RequestState::Idle), RequestState::Waiting { .. });
        if waited && let Err(error) = self.queue.clear_ticket() {
            log::write(
                Level::Warn,
                &format!("cannot remove a ticket from the queue of {}: {error}", self.queue.name),
            );
        }
    }

    fn next(&mut self) -> io::Result<()> {
        let TurnRequest { queue, timeout, state } = self;
        let (taken, since) = match state {
            RequestState::Turn { .. } | RequestState::TimedOut => return Ok(()),
            RequestState::Idle => (queue.try_take(u64::MAX)?, Instant::now()),
            RequestState::Waiting { ticket: None, since } => (None, *since),
            RequestState::Waiting { ticket: Some(ticket), since } => (queue.try_take(*ticket)?, *since),
        };
        let waited = matches!(state, RequestState::Waiting { ticket: Some(_), .. });
        if taken.is_none() && since.elapsed() < *timeout {
            if !waited {
                *state = RequestState::Waiting { ticket: queue.draw_ticket()?, since };
            }
            return Ok(());
        }
        if waited {
            queue.clear_ticket()?;
        }
        if taken.is_none() {
            let message = format!("no turn on {} within {timeout:?}; continuing without one", queue.name);
            log::write(Level::Warn, &message);
        }
        *state = taken.map_or(RequestState::TimedOut, |turn| RequestState::Turn { _turn: turn });
        Ok(())
    }
}

impl TurnQueue {
    /// Joins the queue of the device that holds `path`, which `turns` processes use at a time. `node` is a directory that
    /// all processes of this user on the node share; `None` selects the default directory. Fails if 1024 processes are in
    /// the queue.
    pub fn join(path: &Path, turns: u32, node: Option<&Path>) -> Result<TurnQueue> {
        let failed = |error: io::Error| Error::system("joining the queue of a path", &error);
        let about = fs::metadata(path).map_err(failed)?;
        let (place, all) = match node {
            Some(node) => given_directory(node).map_err(failed)?,
            None => usual_directory(&usual_places(), private_files::user()).map_err(failed)?,
        };
        let queue = format!("path-{:x}", about.dev());
        let (dir, files) = (place.join(&queue), all.enter(&queue, true).map_err(failed)?);
        let tickets = shared_file(&files, "desk").map_err(failed)?;
        let (slot, mine) = free_slot(&files).map_err(failed)?;
        Ok(TurnQueue { dir, files, name: path.display().to_string(), turns, slot, mine, tickets })
    }

    fn others_wait(&self) -> io::Result<bool> {
        self.is_anyone_before(u64::MAX)
    }

    /// Directory of the queue: the same for all paths on one device, in every process of the node.
    pub fn directory(&self) -> &Path {
        &self.dir
    }

    /// Draws a ticket. `None` if another process holds the file `desk`.
    fn draw_ticket(&self) -> io::Result<Option<u64>> {
        match self.tickets.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => return Ok(None),
        }
        let drawn = (|| {
            let ticket = ticket_in(&self.tickets)? + 1;
            self.tickets.write_all_at(&ticket.to_le_bytes(), 0)?;
            self.mine.write_all_at(&ticket.to_le_bytes(), 0)?;
            Ok(Some(ticket))
        })();
        self.tickets.unlock()?;
        drawn
    }

    fn clear_ticket(&self) -> io::Result<()> {
        self.mine.write_all_at(&0u64.to_le_bytes(), 0)
    }

    fn try_take(&self, ticket: u64) -> io::Result<Option<HeldTurn>> {
        if self.is_anyone_before(ticket)? {
            return Ok(None);
        }
        for turn in 0..self.turns {
            let file = shared_file(&self.files, &format!("turn-{turn}"))?;
            match file.try_lock() {
                Ok(()) => return Ok(Some(HeldTurn { lock: file, opener: OpeningProcess::current() })),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    fn is_anyone_before(&self, ticket: u64) -> io::Result<bool> {
        for slot in (0..SLOTS).filter(|slot| *slot != self.slot) {
            let file =
                match self.files.open(&slot_name(slot), OpenFlags { read: true, ..OpenFlags::default() }) {
                    Ok(file) => file,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    Err(error) => return Err(error),
                };
            let theirs = ticket_in(&file)?;
            if theirs == 0 || theirs > ticket {
                continue;
            }
            // A slot that can be locked belongs to no live process.
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
        // The file was just created.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        Err(error) => Err(error),
    }
}

fn free_slot(files: &PrivateDirectory) -> io::Result<(usize, File)> {
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
    Err(io::Error::other(format!("{SLOTS} processes are in the queue already")))
}

fn slot_name(slot: usize) -> String {
    format!("slot-{slot}")
}

fn shared_file(files: &PrivateDirectory, name: &str) -> io::Result<File> {
    files.open(name, OpenFlags { read: true, write: true, make: true, direct: false })
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
                last = io::Error::new(error.kind(), format!("{}: {error}", place.display()));
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
                    log::write(
                        Level::Warn,
                        &format!("{} is not used for queues of paths: {error}", path.display()),
                    );
                    last = error;
                }
            }
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests;
