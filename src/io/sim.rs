//! A simulated disk for tests: seeded, so that every failure can be run again.
//!
//! It delays, reorders and shortens, fails with any errno, hangs, fills up, refuses what is not aligned, and crashes:
//! what was written but not synced is then kept, dropped or torn, sector by sector.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::backend::{Action, Backend, Completion, Piece, Sleep, Wake, doze};
use super::file::Route;

/// The unit that a crash keeps or loses.
pub const SECTOR: usize = 512;

/// What goes wrong, and how often.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Seed of every choice.
    pub seed: u64,
    /// Completions come in any order, some later than they could.
    pub reorder: bool,
    /// Out of a thousand transfers, so many stop early.
    pub short_permille: u32,
    /// Out of a thousand requests, so many fail with this errno.
    pub error_permille: Vec<(i32, u32)>,
    /// The request with this number, from 0, fails with this errno.
    pub fail_nth: Option<(u64, i32)>,
    /// The request with this number, from 0, does not come back before [`Disk::release`].
    pub hang_nth: Option<u64>,
    /// Bytes that fit on the disk.
    pub capacity: Option<u64>,
}

/// What a crash does to writes that were not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// All reached the disk.
    Kept,
    /// None did.
    Dropped,
    /// Any sectors of any of them did.
    Torn,
}

/// The disk. It outlives the engines on it.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    current: HashMap<String, Vec<u8>>,
    durable: HashMap<String, Vec<u8>>,
    unsynced: Vec<(String, usize, Vec<u8>)>,
    requests: u64,
    woken: bool,
    released: bool,
}

/// The backend over a [`Disk`].
#[derive(Debug)]
pub struct Sim {
    disk: Disk,
    faults: Faults,
    random: u64,
    waiting: Vec<(Piece, Fate)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Served,
    Failed(i32),
    Hung,
}

impl Disk {
    /// A file's bytes, as reads see them.
    pub fn contents(&self, name: &str) -> Vec<u8> {
        self.lock().current.get(name).cloned().unwrap_or_default()
    }

    /// Puts a file there, durably.
    pub fn put(&self, name: &str, bytes: Vec<u8>) {
        let mut state = self.lock();
        state.durable.insert(name.to_string(), bytes.clone());
        state.current.insert(name.to_string(), bytes);
    }

    /// Cuts a file off, durably, as another process might.
    pub fn truncate(&self, name: &str, len: usize) {
        let mut bytes = self.contents(name);
        bytes.truncate(len);
        self.put(name, bytes);
    }

    /// Requests seen so far.
    pub fn requests(&self) -> u64 {
        self.lock().requests
    }

    /// Lets hung requests go on.
    pub fn release(&self) {
        self.lock().released = true;
        self.inner.wake();
    }

    /// Power fails: what was synced stays, what was not meets its fate.
    pub fn crash(&self, crash: Crash, seed: u64) {
        let mut state = self.lock();
        let mut random = seed | 1;
        for (name, at, bytes) in std::mem::take(&mut state.unsynced) {
            let file = state.durable.entry(name).or_default();
            for (n, sector) in bytes.chunks(SECTOR).enumerate() {
                let stays = match crash {
                    Crash::Kept => true,
                    Crash::Dropped => false,
                    Crash::Torn => next(&mut random) & 1 == 0,
                };
                if stays {
                    put(file, at + n * SECTOR, sector);
                }
            }
        }
        state.current = state.durable.clone();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Inner {
    fn wake(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).woken = true;
        self.news.notify_all();
    }
}

impl Sim {
    /// A backend that treats `disk` with `faults`.
    pub fn new(disk: &Disk, faults: Faults) -> Sim {
        Sim { disk: disk.clone(), random: faults.seed.wrapping_mul(2) | 1, faults, waiting: Vec::new() }
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
        let short = len > 1 && piece.action != Action::Sync && self.chance(self.faults.short_permille);
        let len = if short { 1 + next(&mut self.random) as usize % (len - 1) } else { len };
        let mut state = self.disk.lock();
        let name = piece.file.name();
        let at = piece.offset as usize;
        match piece.action {
            Action::Read => {
                let file = state.current.entry(name.to_string()).or_default();
                let there = file.get(at..).unwrap_or_default();
                let there = &there[..there.len().min(len)];
                piece.span.write(there);
                there.len() as i32
            }
            Action::Write => {
                let others: usize = state
                    .current
                    .iter()
                    .filter(|(other, _)| *other != name)
                    .map(|(_, file)| file.len())
                    .sum();
                let own = state.current.get(name).map_or(0, Vec::len);
                let room =
                    self.faults.capacity.map_or(usize::MAX, |all| (all as usize).saturating_sub(others));
                let len = len.min(room.max(own).saturating_sub(at));
                if len == 0 {
                    return -libc::ENOSPC;
                }
                let bytes = piece.span.part(0, len).to_vec();
                put(state.current.entry(name.to_string()).or_default(), at, &bytes);
                state.unsynced.push((name.to_string(), at, bytes));
                len as i32
            }
            Action::Sync => {
                let (own, others) =
                    std::mem::take(&mut state.unsynced).into_iter().partition(|one| one.0 == name);
                state.unsynced = others;
                let own: Vec<(String, usize, Vec<u8>)> = own;
                let file = state.durable.entry(name.to_string()).or_default();
                own.into_iter().for_each(|(_, at, bytes)| put(file, at, &bytes));
                0
            }
        }
    }

    /// The next request that comes back, if any can.
    fn next_ready(&mut self) -> Option<(Piece, Fate)> {
        let released = self.disk.lock().released;
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
        let number = {
            let mut state = self.disk.lock();
            state.requests += 1;
            state.requests - 1
        };
        let fate = self.fate(number);
        self.waiting.push((piece, fate));
    }

    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()> {
        loop {
            while let Some((piece, fate)) = self.next_ready() {
                let result = match fate {
                    Fate::Failed(errno) => -errno,
                    Fate::Served | Fate::Hung => self.serve(&piece),
                };
                done.push(Completion { token: piece.token, result });
                if self.faults.reorder && self.chance(500) {
                    break;
                }
            }
            let disk = self.disk.clone();
            let mut state = disk.lock();
            if sleep.completions == 0 || !done.is_empty() || state.woken {
                state.woken = false;
                return Ok(());
            }
            if !doze(&disk.inner.news, state, sleep.until).1 {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.disk.inner) as Arc<dyn Wake>
    }
}

/// Direct requests have to meet the file's alignment, as on a device.
fn aligned(piece: &Piece) -> bool {
    let need = piece.file.direct().filter(|_| piece.route == Route::Direct && piece.action != Action::Sync);
    need.is_none_or(|need| {
        (piece.span.address() as u64).is_multiple_of(need.memory)
            && piece.offset.is_multiple_of(need.offset)
            && (piece.span.len() as u64).is_multiple_of(need.offset)
    })
}

fn put(file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[at..end].copy_from_slice(bytes);
}

fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random >> 11
}
