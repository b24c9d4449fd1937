//! The thread behind an engine.
//!
//! Invariants:
//! - At most `depth` pieces of reads are in flight, and at most `depth` of writes. Pieces of operations past their
//!   deadline do not count, so stuck pieces do not block healthy ones. The limit with them is `4 * depth` for each
//!   direction.
//! - Reads never wait for queue places or bounce blocks held by writes, nor writes for those of reads: a device may
//!   serve one direction while it delays the other.
//! - Every completion is classified. Bytes are counted, short transfers resume, and interruptions are retried a bounded
//!   number of times. After an error no further piece starts; the operation ends once all its pieces have returned.
//! - An operation that needs a turn (see `turns`) has no piece in flight before it has entered it, unless a caller waits for
//!   the end of all operations.
//! - An operation finishes, and its memory is released, only when none of its pieces is in the kernel.
#![forbid(unsafe_code)]

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slab::Slab;

use super::backend::{Action, Backend, Completion, DIRECTIONS, Piece, Sleep};
use super::classify::{InFlight, PieceResult, classify};
use super::counters::Counters;
use super::operation::{DriverLink, Operation};
use super::options::TurnOptions;
use super::plan::Route;
use super::plan::Splitter;
use super::turns::{FREE_BYTES, POLL_INTERVAL, Turns};
use crate::error::{Error, IoKind, Result};
use crate::sys::memory::Mapping;
use crate::sys::span::Span;

/// Retries without a pause, and the pause before each later one.
const QUICK_TRIES: u32 = 16;
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// Longest wait for several completions at once, and the fewest pieces in flight for which the driver waits like this.
const BATCH_WAIT: Duration = Duration::from_millis(4);
const BATCH_FROM: usize = 16;
/// A file gets a place in the ring's file table if at least this number of full pieces is left to start.
const BUSY_PIECES: u64 = 4;

pub(super) struct Driver {
    shared: Arc<DriverLink>,
    depth: usize,
    running: Slab<Running>,
    directions: [Pending; DIRECTIONS],
    in_flight: Slab<InFlight>,
    /// Pieces to start again, each at its time.
    retries: VecDeque<(Instant, usize)>,
    bounce: Bounce,
    failed_devices: HashSet<u64>,
    turns: Option<Turns>,
    /// True if operations wait for a turn.
    held: bool,
    /// True if the last sleep ended with completions.
    flowing: bool,
    /// Finished operations whose callers are not yet notified.
    finished: Vec<(Arc<Operation>, Result<u64>)>,
}

/// Reads, or all other operations.
#[derive(Default)]
struct Pending {
    /// Keys of `running` operations with pieces left to start, oldest first.
    order: VecDeque<usize>,
    /// Pieces in flight.
    in_flight: usize,
}

struct Running {
    op: Arc<Operation>,
    next: u64,
    in_flight: usize,
    /// The error at the lowest offset in the operation, with that offset.
    error: Option<(u64, Error)>,
    queued: bool,
    /// True if the operation has entered a turn.
    entered: bool,
}

/// Aligned memory for pieces whose own memory is not aligned.
pub(super) struct Bounce {
    memory: Mapping,
    block: usize,
    free: [Vec<usize>; DIRECTIONS],
}

impl Bounce {
    /// `count` blocks for each direction.
    pub(super) fn new(block: usize, count: usize) -> io::Result<Bounce> {
        let memory = Mapping::untouched(block * count * DIRECTIONS)?;
        let free =
            std::array::from_fn(|direction| (direction * count..(direction + 1) * count).rev().collect());
        Ok(Bounce { memory, block, free })
    }

    fn span(&self, index: usize, len: usize) -> Span {
        self.memory.span().part(index * self.block, len)
    }
}

impl Driver {
    pub(super) fn new(shared: Arc<DriverLink>, depth: usize, bounce: Bounce, turns: TurnOptions) -> Driver {
        Driver {
            shared,
            depth,
            running: Slab::new(),
            directions: Default::default(),
            in_flight: Slab::new(),
            retries: VecDeque::new(),
            bounce,
            failed_devices: HashSet::new(),
            turns: Turns::new(turns),
            held: false,
            flowing: false,
            finished: Vec::new(),
        }
    }

    /// Runs until the engine is closing and no operation is left, or until the backend fails.
    pub(super) fn run(&mut self, backend: &mut dyn Backend) -> io::Result<()> {
        let mut done = Vec::new();
        loop {
            let closing = self.take_inbox();
            if self.shared.trim.swap(false, Ordering::AcqRel) {
                backend.trim();
            }
            self.dispatch(backend);
            self.shared.finish(&mut self.finished);
            if closing && self.running.is_empty() {
                return Ok(());
            }
            let sleep = self.prepare_to_sleep();
            backend.wait(sleep, &mut done)?;
            self.shared.need_wakeup.store(false, Ordering::SeqCst);
            self.flowing = !done.is_empty();
            self.shared.progress.fetch_add(done.len() as u64, Ordering::Relaxed);
            done.drain(..).for_each(|completion| self.complete(completion));
            self.shared.finish(&mut self.finished);
            self.shared.turns.fetch_add(1, Ordering::Release);
        }
    }

    /// Ends all operations with `reason`, because the backend failed. Memory with pieces in flight is never released,
    /// since the kernel may still use it.
    pub(super) fn abandon(&mut self, reason: &str) {
        self.take_inbox();
        self.turns = None;
        let error = Error::System { what: "the I/O engine stopped", reason: reason.to_string() };
        for Running { op, in_flight, .. } in self.running.drain() {
            if in_flight > 0 {
                std::mem::forget(Arc::clone(&op));
            }
            self.finished.push((op, Err(error.clone())));
        }
        self.shared.finish(&mut self.finished);
    }

    fn take_inbox(&mut self) -> bool {
        let mut state = self.shared.state.lock();
        let arrived = std::mem::take(&mut state.inbox);
        if !self.failed_devices.is_empty() || !state.stuck.is_empty() {
            self.failed_devices = state.stuck.keys().copied().collect();
        }
        let closing = state.closing;
        drop(state);
        for op in arrived {
            let direction = op.action.direction();
            let running = Running { op, next: 0, in_flight: 0, error: None, queued: true, entered: false };
            let key = self.running.insert(running);
            self.directions[direction].order.push_back(key);
        }
        closing
    }

    /// How long to sleep. Before it returns it publishes whether a new operation should wake the driver, so no
    /// operation is missed.
    ///
    /// While completions flow and the queue is at least half full, the driver waits for a quarter of the queue at once.
    /// New operations wait as long. Both save one thread switch per piece; [`BATCH_WAIT`] bounds the delay when
    /// completions stop. A caller that replaces completed operations then keeps the queue between half and three
    /// quarters full.
    fn prepare_to_sleep(&mut self) -> Sleep {
        let active: [usize; DIRECTIONS] = std::array::from_fn(|direction| self.active(direction));
        let all: usize = active.iter().sum();
        let batch = self.flowing && all >= BATCH_FROM && all >= self.depth / 2;
        let need_wakeup = active.iter().any(|active| *active < self.depth) && !batch;
        self.shared.need_wakeup.store(need_wakeup, Ordering::SeqCst);
        let waits = self.held && self.in_flight.is_empty();
        if waits {
            // The device is not stalled: other processes use it.
            self.shared.progress.fetch_add(1, Ordering::Relaxed);
        }
        let (mut state, deadline, expired) = self.shared.expire(self.shared.state.lock(), Instant::now());
        state.busy.hold(waits);
        let waiting = need_wakeup && !state.inbox.is_empty();
        let retry = self.retries.iter().map(|(due, _)| *due).min();
        let due = retry.is_some_and(|due| due <= Instant::now());
        if waiting || expired || due {
            return Sleep { completions: 0, until: None };
        }
        drop(state);
        // io_uring before Linux 5.11 ignores `until`, and no completion would end the sleep.
        if waits || retry.is_some() && self.retries.len() == self.in_flight.len() {
            std::thread::sleep(if waits { POLL_INTERVAL } else { RETRY_PAUSE });
            return Sleep { completions: 0, until: None };
        }
        let batch_ends = batch.then(|| Instant::now() + BATCH_WAIT);
        let turn = self.held.then(|| Instant::now() + POLL_INTERVAL);
        Sleep {
            completions: if batch { self.depth / 4 } else { 1 },
            until: [deadline, batch_ends, retry, turn].into_iter().flatten().min(),
        }
    }

    /// Pieces of a direction in flight that count against the depth.
    fn active(&self, number: usize) -> usize {
        if self.failed_devices.is_empty() {
            return self.directions[number].in_flight;
        }
        let owners = self.in_flight.iter().map(|(_, flight)| &self.running[flight.owner].op);
        owners.filter(|op| op.action.direction() == number && !op.expired()).count()
    }

    fn dispatch(&mut self, backend: &mut dyn Backend) {
        let now = Instant::now();
        for _ in 0..self.retries.len() {
            match self.retries.pop_front() {
                Some((due, token)) if due <= now => self.start(token, backend),
                Some(later) => self.retries.push_back(later),
                None => {}
            }
        }
        self.leave_expired();
        self.turns.iter_mut().for_each(Turns::begin);
        (0..DIRECTIONS).for_each(|direction| self.dispatch_direction(direction, backend));
        self.held = self.turns.as_mut().is_some_and(Turns::end);
    }

    /// Operations past their deadline may never end, and keep no turn.
    fn leave_expired(&mut self) {
        let Some(turns) = self.turns.as_mut().filter(|_| !self.failed_devices.is_empty()) else { return };
        for (_, running) in self.running.iter_mut().filter(|(_, running)| running.op.expired()) {
            if std::mem::take(&mut running.entered) {
                turns.leave(&running.op.file);
            }
        }
    }

    fn dispatch_direction(&mut self, direction: usize, backend: &mut dyn Backend) {
        let hard_room = (4 * self.depth).saturating_sub(self.directions[direction].in_flight);
        let mut room = self.depth.saturating_sub(self.active(direction)).min(hard_room);
        let mut at = 0;
        while at < self.directions[direction].order.len() {
            let key = self.directions[direction].order[at];
            match self.dispatch_one(key, &mut room, backend) {
                Dispatch::AllStarted => {
                    self.directions[direction].order.remove(at);
                    self.running[key].queued = false;
                    self.finish_if_done(key);
                }
                Dispatch::NoRoom => return,
                Dispatch::NoBounce | Dispatch::NoTurn => at += 1,
            }
        }
    }

    fn dispatch_one(&mut self, key: usize, room: &mut usize, backend: &mut dyn Backend) -> Dispatch {
        loop {
            let running = &mut self.running[key];
            let op = &running.op;
            if running.error.is_none() {
                running.error =
                    self.failed_devices.contains(&op.device()).then(|| (0, op.refuse_failed_device()));
            }
            if op.expired() || running.error.is_some() || running.next == op.total() {
                return Dispatch::AllStarted;
            }
            if *room == 0 {
                return Dispatch::NoRoom;
            }
            let waits = |_: &&mut Turns| {
                !running.entered
                    && needs_turn(&running.op)
                    && self.shared.without_turns.load(Ordering::Relaxed) == 0
            };
            let turns = self.turns.as_mut().filter(waits);
            if let Some(turns) = turns {
                if !turns.enter(&running.op.file) {
                    return Dispatch::NoTurn;
                }
                running.entered = true;
            }
            if !running.op.start() {
                return Dispatch::AllStarted;
            }
            match self.split_next(key) {
                Ok(Some(token)) => {
                    *room -= 1;
                    self.directions[self.running[key].op.action.direction()].in_flight += 1;
                    self.start(token, backend);
                }
                Ok(None) => return Dispatch::NoBounce,
                Err(error) => self.running[key].error = Some((self.running[key].next, error)),
            }
        }
    }

    /// Creates the next piece of an operation; `None` if no bounce block is free for it.
    fn split_next(&mut self, key: usize) -> Result<Option<usize>> {
        let running = &mut self.running[key];
        let op = &running.op;
        let at = running.next;
        if !op.action.moves_bytes() {
            running.next = op.total();
            running.in_flight += 1;
            let flight = InFlight {
                owner: key,
                at,
                span: Span::empty(),
                done: 0,
                route: Route::Direct,
                bounce: None,
                tries: 0,
            };
            return Ok(Some(self.in_flight.insert(flight)));
        }
        let plan = splitter(op).piece_at(at, self.bounce.block as u64);
        op.file.prepare(plan.route)?;
        let len = plan.len as usize;
        let own = op.span.part(at as usize, len);
        let (span, bounce) = match plan.bounce {
            false => (own, None),
            true => match self.bounce.free[op.action.direction()].pop() {
                None => return Ok(None),
                Some(index) => (self.bounce.span(index, len), Some(index)),
            },
        };
        if bounce.is_some() && op.action == Action::Write {
            own.copy_to(span);
        }
        let counters = &self.shared.counters;
        Counters::add(&counters.pieces, 1);
        match (plan.route, bounce) {
            (Route::Buffered, _) => Counters::add(&counters.buffered_bytes, len as u64),
            (Route::Direct, None) => Counters::add(&counters.direct_bytes, len as u64),
            (Route::Direct, Some(_)) => {
                Counters::add(&counters.direct_bytes, len as u64);
                Counters::add(&counters.bounced_bytes, len as u64);
            }
        }
        running.next += len as u64;
        running.in_flight += 1;
        let flight = InFlight { owner: key, at, span, done: 0, route: plan.route, bounce, tries: 0 };
        Ok(Some(self.in_flight.insert(flight)))
    }

    fn start(&mut self, token: usize, backend: &mut dyn Backend) {
        let flight = &self.in_flight[token];
        let op = &self.running[flight.owner].op;
        let region = op.lease.region().filter(|_| flight.bounce.is_none()).map(Arc::clone);
        backend.push(Piece {
            token: token as u64,
            action: op.action,
            file: Arc::clone(&op.file),
            route: flight.route,
            offset: op.offset + flight.at + flight.done as u64,
            span: flight.span.part(flight.done, flight.span.len() - flight.done),
            region,
            busy_file: (op.total() - self.running[flight.owner].next) / op.piece >= BUSY_PIECES,
        });
    }

    fn complete(&mut self, Completion { token, result, message }: Completion) {
        let token = token as usize;
        let flight = &mut self.in_flight[token];
        match classify(&self.running[flight.owner].op, flight, result, message, &self.shared.counters) {
            PieceResult::Retry if self.running[self.in_flight[token].owner].op.expired() => {
                let late = past_deadline(&self.running[self.in_flight[token].owner].op);
                self.finish_piece(token, Some(late));
            }
            PieceResult::Retry => {
                let pause =
                    if self.in_flight[token].tries > QUICK_TRIES { RETRY_PAUSE } else { Duration::ZERO };
                self.retries.push_back((Instant::now() + pause, token));
            }
            PieceResult::Done => self.finish_piece(token, None),
            PieceResult::Failed(error) => self.finish_piece(token, Some(error)),
        }
    }

    /// Removes a finished piece from its operation.
    fn finish_piece(&mut self, token: usize, error: Option<Error>) {
        let flight = self.in_flight.remove(token);
        let running = &mut self.running[flight.owner];
        self.directions[running.op.action.direction()].in_flight -= 1;
        if let Some(index) = flight.bounce {
            let op = &running.op;
            if op.action == Action::Read && error.is_none() && !op.expired() {
                flight.span.copy_to(op.span.part(flight.at as usize, flight.span.len()));
            }
            self.bounce.free[running.op.action.direction()].push(index);
        }
        running.in_flight -= 1;
        if let Some(error) = error.filter(|_| running.error.as_ref().is_none_or(|(at, _)| flight.at < *at)) {
            running.error = Some((flight.at, error));
        }
        self.finish_if_done(flight.owner);
    }

    fn finish_if_done(&mut self, key: usize) {
        let running = &self.running[key];
        if running.in_flight > 0 || running.queued && !running.op.expired() && running.error.is_none() {
            return;
        }
        if running.queued {
            self.directions[running.op.action.direction()].order.retain(|queued| *queued != key);
        }
        let Running { op, next, error, entered, .. } = self.running.remove(key);
        if entered {
            self.turns.iter_mut().for_each(|turns| turns.leave(&op.file));
        }
        let outcome = match error {
            Some((_, error)) => Err(error),
            None if next < op.total() => Err(past_deadline(&op)),
            None => Ok(op.span.len() as u64),
        };
        self.finished.push((op, outcome));
    }
}

/// The outcome of an operation that ends after its deadline. Its caller got an error already.
fn past_deadline(op: &Operation) -> Error {
    op.error(IoKind::Deadline, "the deadline passed".to_string())
}

enum Dispatch {
    AllStarted,
    NoRoom,
    NoBounce,
    NoTurn,
}

fn needs_turn(op: &Operation) -> bool {
    op.action.moves_bytes() && op.total() > FREE_BYTES
}

pub(super) fn splitter(op: &Operation) -> Splitter {
    Splitter {
        offset: op.offset,
        address: op.span.address() as u64,
        len: op.span.len() as u64,
        direct: op.file.direct(),
        piece: op.piece,
    }
}
