//! The callers' interface to an I/O engine.
//!
//! Invariants:
//! - Every accepted operation has exactly one outcome, which exactly one wait takes. A wait that times out takes none.
//!   A wait for several operations returns when all of them have finished, even if the first has failed. [`Engine::close`] returns the
//!   first error that no wait returned; dropping the engine logs it.
//! - A successful read filled every byte. A successful write handed every byte to the system.
//! - In a child made by fork, calls return errors; they never wait for threads that exist only in the parent.
#![forbid(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use spillway_stores::volume::{MAX_REQUESTS, OBJECT_BYTES, ObjectVolume, REQUESTS};

use super::backend::{Action, Backend};
use super::counters::{EngineStats, EngineTraffic};
use super::driver::{Bounce, Driver};
use super::file::File;
use super::object;
use super::open_files::OpenFiles;
use super::operation::{Admitted, DriverLink, EngineState, Entry, Operation, Phase, WaitEvent, taken};
use super::options::{
    BLOCK_BYTES, BOUNCE_BYTES, BackendChoice, FILE_MODE, Options, PREALLOCATE_FROM, Request, Target,
    TurnOptions, checked, forced_backend,
};
use super::piece_size::PieceSize;
use super::plan::{self, Route, Splitter};
use super::profile::{self, Profile, with_profile};
use super::threads::Threads;
use super::uring::Uring;
use crate::error::{Error, IoError, Result};
use crate::log::{self, Level};
use crate::pool::region;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::bell::Bell;
use crate::sys::file::Access;
use crate::sys::memory::BASE_PAGE;
use crate::sys::sync::Lock;
use crate::sys::{threads, try_vec};

/// While it lives, the operations of an engine begin without turns.
pub struct WithoutTurns(Arc<DriverLink>);

impl Drop for WithoutTurns {
    fn drop(&mut self) {
        self.0.without_turns.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An I/O engine: one queue, one driver thread.
pub struct Engine {
    options: Options,
    piece_size: PieceSize,
    pub(super) shared: Arc<DriverLink>,
    files: OpenFiles,
    backend: &'static str,
    backend_reason: String,
    buffered_reason: Lock<String>,
    /// Called by the pool when a region retires. Dropping the watcher deregisters it.
    _watcher: Arc<dyn Fn() + Send + Sync>,
}

type OpenedBackend = (Box<dyn Backend>, String);

impl Engine {
    /// Starts an engine with the current profile.
    pub fn open(options: Options) -> Result<Engine> {
        Engine::open_tuned(options, profile::current())
    }

    /// Starts an engine. `profile` supplies the settings that the options leave open.
    pub fn open_tuned(options: Options, profile: Option<Profile>) -> Result<Engine> {
        let backend = forced_backend()?.unwrap_or(options.backend);
        let options = with_profile(Options { backend, ..options }, profile.as_ref());
        let Options { backend, depth, workers, .. } = options;
        Engine::start(options, profile, move || make(backend, || Uring::open(depth), workers))
    }

    /// Starts an engine on files of an object store. Depth and block size default to values for object stores.
    pub fn open_volume(options: Options, volume: Arc<ObjectVolume>) -> Result<Engine> {
        let depth = super::options::given_or(options.depth, REQUESTS).min(MAX_REQUESTS);
        let block_bytes = super::options::given_or(options.block_bytes, OBJECT_BYTES);
        let options = Options { depth, workers: depth, block_bytes, ..options };
        Engine::start(options, None, move || {
            let serve: super::threads::Serve = Arc::new(move |piece| object::serve(&volume, piece));
            Ok((Box::new(Threads::serving("s3", depth as usize, serve)), String::new()))
        })
    }

    /// Starts an engine on a simulated backend.
    #[cfg(test)]
    pub fn open_simulated(options: Options, sim: super::sim::Sim) -> Result<Engine> {
        Engine::start(with_profile(options, None), None, move || {
            Ok((Box::new(sim) as Box<dyn Backend>, String::new()))
        })
    }

    /// Starts an engine on worker threads that call `before_write` before every write.
    #[cfg(test)]
    pub fn open_with_hook(
        options: Options,
        before_write: impl Fn() + Send + Sync + 'static,
    ) -> Result<Engine> {
        Engine::start(with_profile(options, None), None, move || {
            Ok((Box::new(Threads::with_hook(4, before_write)) as Box<dyn Backend>, String::new()))
        })
    }

    pub(super) fn start(
        options: Options,
        profile: Option<Profile>,
        make: impl FnOnce() -> Result<OpenedBackend> + Send + 'static,
    ) -> Result<Engine> {
        let options = checked(options)?;
        let (depth, turns) = (options.depth as usize, options.turns);
        let block = if options.block_bytes == 0 { BLOCK_BYTES } else { options.block_bytes } as usize;
        let blocks = (BOUNCE_BYTES / block).clamp(1, depth);
        let bounce =
            Bounce::new(block, blocks).map_err(|error| Error::system("allocating bounce buffers", &error))?;
        let shared = Arc::new(DriverLink::new(options.io_timeout));
        let (report, started) = mpsc::channel();
        let theirs = Arc::clone(&shared);
        threads::spawn_quiet("spillway-io", move || drive(theirs, (depth, turns), bounce, make, report))
            .map_err(|error| Error::system("starting the I/O thread", &error))?;
        let gone = || Error::System {
            what: "starting the I/O thread",
            reason: "the thread ended unexpectedly".to_string(),
        };
        let (backend, backend_reason) = started.recv().map_err(|_| gone())??;
        let watched = Arc::downgrade(&shared);
        let watcher: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            if let Some(shared) = watched.upgrade() {
                shared.trim.store(true, Ordering::Release);
                shared.wake();
            }
        });
        region::watch(&watcher);
        Ok(Engine {
            options,
            piece_size: PieceSize::new(options.block_bytes, profile),
            shared,
            files: OpenFiles::default(),
            backend,
            backend_reason,
            buffered_reason: Lock::default(),
            _watcher: watcher,
        })
    }

    /// Submits a read and returns its handle. Success of the operation means that every byte was filled.
    pub fn read(&self, request: Request) -> Result<u64> {
        self.submit(Action::Read, request)
    }

    /// Submits a write and returns its handle. The write creates a missing file and never truncates one.
    pub fn write(&self, request: Request) -> Result<u64> {
        self.submit(Action::Write, request)
    }

    /// Submits a sync and returns its handle. It makes those writes to the file durable that completed before the sync.
    pub fn sync(&self, target: Target, deadline: Option<Duration>) -> Result<u64> {
        self.submit(Action::Sync, Request { target, offset: 0, buffer: TransferBuffer::empty(), deadline })
    }

    /// Submits an allocation and returns its handle: bytes `from..end` of the file get device space. A file system
    /// without support for it is not an error. As for any operation, waits may have a timeout, and the I/O timeout
    /// applies. [`File::check_room`] tells beforehand whether the file may grow so far.
    pub fn allocate(&self, file: &Arc<File>, from: u64, end: u64) -> Result<u64> {
        let (target, bytes) = (Target::File(Arc::clone(file)), end.saturating_sub(from));
        let request = Request { target, offset: from, buffer: TransferBuffer::empty(), deadline: None };
        self.submit(Action::Allocate { bytes }, request)
    }

    fn submit(&self, action: Action, request: Request) -> Result<u64> {
        let Request { target, offset, buffer, deadline } = request;
        let span = buffer.span();
        let end = offset.checked_add(span.len() as u64).filter(|end| *end <= i64::MAX as u64);
        let end = end.ok_or_else(|| {
            Error::invalid("request.offset", format!("{offset} plus the length exceeds 2^63"))
        })?;
        let owned = matches!(target, Target::File(_));
        let file = self.target(action, target)?;
        let lease = buffer.lease();
        // Checked after the lease, which keeps the memory mapped: the kernel writes to addresses, whatever is mapped
        // there.
        if !span.is_mapped() {
            return Err(Error::invalid("request.buffer", "is memory that was freed"));
        }
        let op = Operation {
            handle: 0,
            action,
            piece: self.piece(&file, &buffer),
            offset,
            span,
            lease,
            submitted: Instant::now(),
            deadline: deadline.and_then(|time| Instant::now().checked_add(time)),
            expired: false.into(),
            started: false.into(),
            file,
        };
        let large = action == Action::Write && span.len() >= PREALLOCATE_FROM;
        if large && self.options.preallocate && op.file.may_end_before(end) {
            op.file.preallocate(offset, end)?;
        }
        let splitter = super::driver::splitter(&op);
        // For the caller's own open file the driver does this: a file system may not respond to an open.
        if !owned && action.moves_bytes() && Splitter::has_edges(&splitter) {
            op.file.prepare(Route::Buffered)?;
        }
        self.note_buffered(&op.file);
        self.enqueue(op)
    }

    fn enqueue(&self, op: Operation) -> Result<u64> {
        let mut state = self.shared.state.lock();
        if let Some(reason) = &state.lost {
            return Err(Error::System { what: "the I/O engine stopped", reason: reason.clone() });
        }
        if state.closing {
            return Err(Error::invalid("engine", "is closed"));
        }
        if !state.stuck.is_empty() && state.stuck.contains_key(&op.device()) {
            return Err(op.refuse_failed_device());
        }
        let (handle, admitted) = state.admit(|handle| Operation { handle, ..op });
        drop(state);
        let need_wakeup =
            admitted != Admitted::Finished && self.shared.need_wakeup.swap(false, Ordering::SeqCst);
        if need_wakeup || admitted == Admitted::Urgent {
            self.shared.wake();
        }
        Ok(handle)
    }

    fn target(&self, action: Action, target: Target) -> Result<Arc<File>> {
        let access = match action {
            Action::Read => Access::Read,
            Action::Write | Action::Sync | Action::Allocate { .. } => Access::Write { mode: FILE_MODE },
        };
        match target {
            Target::Path(path) => self.files.get(path, access, self.options.direct),
            Target::Descriptor(fd) => {
                File::of_descriptor(fd, format!("descriptor {fd}"), access).map(Arc::new)
            }
            Target::File(file) if access != Access::Read && !file.writable() => {
                Err(Error::invalid("request.file", format!("{} is open for reading only", file.name())))
            }
            Target::File(file) => Ok(file),
        }
    }

    fn piece(&self, file: &File, buffer: &TransferBuffer) -> u64 {
        let page = buffer.region().map_or(BASE_PAGE, |region| region.kind().bytes());
        let aligned = buffer.span().address().is_multiple_of(BASE_PAGE);
        let limits = file.limits().filter(|_| file.direct().is_some());
        plan::piece_bytes(self.piece_size.of(file), limits, page as u64, aligned)
    }

    fn note_buffered(&self, file: &File) {
        if file.direct().is_some() {
            return;
        }
        let reason = file.buffered_reason().unwrap_or_default();
        let mut last = self.buffered_reason.lock();
        if *last != reason {
            let message = format!("{} goes through the page cache: {reason}", file.name());
            *last = reason;
            // Released first: the log callback may use this engine.
            drop(last);
            log::write(Level::Info, &message);
        }
    }

    /// Rings `bell` whenever operations have got their outcome. An engine has one bell; a second call is an error.
    pub fn ring_at_outcomes(&self, bell: Arc<Bell>) -> Result<()> {
        let second = |_| Error::invalid("bell", "was set already");
        self.shared.bell.set(bell).map_err(second)
    }

    /// Bytes and busy time.
    pub fn traffic(&self) -> Result<EngineTraffic> {
        let counters = &self.shared.counters;
        let state = self.shared.state.lock();
        Ok(EngineTraffic {
            read_bytes: counters.read_bytes.load(Ordering::Relaxed),
            written_bytes: counters.written_bytes.load(Ordering::Relaxed),
            reading: state.busy.reading.total(),
            writing: state.busy.writing.total(),
            busy: state.busy.either.total(),
            pending: state.unfinished as u64,
        })
    }

    /// Statistics of the engine.
    pub fn stats(&self) -> Result<EngineStats> {
        let counters = &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let state = self.shared.state.lock();
        Ok(EngineStats {
            reads: get(&counters.reads),
            writes: get(&counters.writes),
            read_bytes: get(&counters.read_bytes),
            written_bytes: get(&counters.written_bytes),
            failed: get(&counters.failed),
            pieces: get(&counters.pieces),
            direct_bytes: get(&counters.direct_bytes),
            buffered_bytes: get(&counters.buffered_bytes),
            bounced_bytes: get(&counters.bounced_bytes),
            resumed: get(&counters.resumed),
            retried: get(&counters.retried),
            reading: state.busy.reading.total(),
            writing: state.busy.writing.total(),
            busy: state.busy.either.total(),
            pending: state.unfinished as u64,
            stuck: state.stuck.values().sum::<usize>() as u64,
            backend: self.backend,
            backend_reason: self.backend_reason.clone(),
            buffered_reason: self.buffered_reason.lock().clone(),
            depth: self.options.depth,
            block_bytes: self.piece_size.last(),
            profile: self.piece_size.profile(),
        })
    }

    /// The settings, after defaults and rounding.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Lets operations begin without turns until the drop of the result, for a caller that waits for the end of them all.
    pub fn without_turns(&self) -> WithoutTurns {
        self.end_turns();
        WithoutTurns(Arc::clone(&self.shared))
    }

    /// Lets operations begin without turns from now on.
    pub fn end_turns(&self) {
        // The driver looks every millisecond while it holds operations back.
        self.shared.without_turns.fetch_add(1, Ordering::Relaxed);
    }

    /// Closes the engine once all operations have finished, at the latest after `timeout`. They wait for no turns. Operations stuck in the
    /// system keep their memory, and the driver thread, until they return. Returns the timeout, or else the first error
    /// that no wait returned.
    pub fn close(&self, timeout: Option<Duration>) -> Result<()> {
        self.end_turns();
        let drained = self.wait_quiet(timeout);
        let mut state = self.shared.state.lock();
        state.closing = true;
        let unseen = state.take_all().into_iter().find_map(Result::err);
        drop(state);
        self.shared.wake();
        drained?;
        self.wait_until(None, |state| {
            Ok((!state.driver_gone && state.stuck.is_empty()).then_some(WaitEvent::DriverGone))
        })?;
        unseen.map_or(Ok(()), Err)
    }
}

impl Engine {
    /// Waits for one operation and returns its byte count or its error, once. `Timeout` leaves the operation in flight.
    pub fn wait(&self, handle: u64, timeout: Option<Duration>) -> Result<u64> {
        let mut outcome = None;
        self.wait_until(timeout, |state| {
            outcome = state.take(handle)?;
            Ok(outcome.is_none().then_some(WaitEvent::Outcome(handle)))
        })?;
        outcome.unwrap_or_else(|| Err(Error::invalid("handle", "has no outcome")))
    }

    /// Waits for all of `handles` and releases them; returns their byte counts, or the first error in the order of
    /// `handles`. `Timeout` leaves all operations as they are.
    pub fn wait_many(&self, handles: &[u64], timeout: Option<Duration>) -> Result<Vec<u64>> {
        check_distinct(handles)?;
        let (mut done, mut outcomes) = (0, try_vec::with_capacity("listing outcomes", handles.len())?);
        self.wait_until(timeout, |state| {
            while done < handles.len() {
                if matches!(state.entry(handles[done])?.phase, Phase::Pending) {
                    return Ok(Some(WaitEvent::Outcome(handles[done])));
                }
                done += 1;
            }
            // If another wait took one of them meanwhile, this wait takes none of the others.
            handles.iter().try_for_each(|handle| state.check_untaken(*handle))?;
            for handle in handles {
                outcomes.extend(state.take(*handle)?);
            }
            Ok(None)
        })?;
        collect(outcomes)
    }

    /// Waits for all operations and releases them; returns their number, or the first error. Returns 0 at once if there
    /// are none.
    pub fn wait_all(&self, timeout: Option<Duration>) -> Result<u64> {
        self.wait_quiet(timeout)?;
        let outcomes = self.shared.state.lock().take_all();
        Ok(collect(outcomes)?.len() as u64)
    }

    /// Waits until no operation is pending.
    fn wait_quiet(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait_until(timeout, |state| Ok((state.unfinished > 0).then_some(WaitEvent::Quiet)))
    }

    /// Waits until `missing` returns no event to wait for.
    pub(super) fn wait_until(
        &self,
        timeout: Option<Duration>,
        mut missing: impl FnMut(&mut EngineState) -> Result<Option<WaitEvent>>,
    ) -> Result<()> {
        let until = timeout.and_then(|time| Instant::now().checked_add(time));
        let mut state = self.shared.state.lock();
        loop {
            let (locked, next_deadline, expired) = self.shared.expire(state, Instant::now());
            state = locked;
            if expired {
                self.shared.wake();
            }
            let Some(event) = missing(&mut state)? else { return Ok(()) };
            if until.is_some_and(|until| Instant::now() >= until) {
                let pending = state.unfinished;
                return Err(IoError::wait_timeout(format!("{pending} operations are still in flight")));
            }
            let nearest = [until, next_deadline].into_iter().flatten().min();
            state = self.shared.await_event(state, event, nearest);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);
        if self.shared.state.lock().closing {
            return;
        }
        if let Err(error) = self.close(Some(CLOSE_TIMEOUT)) {
            log::write(Level::Error, &format!("closing an I/O engine failed: {error}"));
        }
    }
}

/// The driver thread.
fn drive(
    shared: Arc<DriverLink>,
    (depth, turns): (usize, TurnOptions),
    bounce: Bounce,
    make: impl FnOnce() -> Result<OpenedBackend>,
    report: mpsc::Sender<Result<(&'static str, String)>>,
) {
    let (mut backend, reason) = match make() {
        Ok(made) => made,
        Err(error) => {
            let _ = report.send(Err(error));
            return;
        }
    };
    let _ = shared.waker.set(backend.waker());
    let _ = report.send(Ok((backend.name(), reason)));
    let mut driver = Driver::new(Arc::clone(&shared), depth, bounce, turns);
    let run = std::panic::AssertUnwindSafe(|| driver.run(backend.as_mut()));
    let lost = match std::panic::catch_unwind(run) {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some("internal error in spillway, please report it".to_string()),
    };
    if let Some(reason) = &lost {
        log::write(Level::Error, &format!("the I/O engine stopped: {reason}"));
        // Before the inbox is drained: an operation accepted later would never finish.
        shared.mark_failed(reason);
        driver.abandon(reason);
        // The kernel may still write to the bounce blocks.
        std::mem::forget(driver);
    }
    drop(backend);
    shared.driver_ended();
}

fn make(
    choice: BackendChoice,
    uring: impl FnOnce() -> io::Result<Uring>,
    workers: u32,
) -> Result<(Box<dyn Backend>, String)> {
    let threads = || Box::new(Threads::new(workers as usize)) as Box<dyn Backend>;
    if choice == BackendChoice::Threads {
        return Ok((threads(), String::new()));
    }
    match uring() {
        Ok(ring) => Ok((Box::new(ring), String::new())),
        Err(error) if choice == BackendChoice::Uring => Err(Error::system("opening io_uring", &error)),
        Err(error) => {
            let reason =
                format!("io_uring is unavailable: {}", error.to_string().replace("os error", "errno"));
            log::write(Level::Info, &format!("{reason}; {workers} threads are used instead"));
            Ok((threads(), reason))
        }
    }
}

impl EngineState {
    /// All outcomes that no wait has taken, in the order of submission.
    fn take_all(&mut self) -> Vec<Result<u64>> {
        let is_done = |entry: &Entry| {
            matches!(entry.phase, Phase::Finished(_) | Phase::Expired { unread: Some(_), .. })
        };
        let entries = self.entries.iter().map(|(_, entry)| entry);
        let mut done: Vec<(u64, u64)> =
            entries.filter(|entry| is_done(entry)).map(|entry| (entry.number, entry.handle)).collect();
        done.sort_unstable();
        done.into_iter().filter_map(|(_, handle)| self.take(handle).ok().flatten()).collect()
    }

    /// Fails if a wait has taken the outcome.
    fn check_untaken(&mut self, handle: u64) -> Result<()> {
        match self.entry(handle)?.phase {
            Phase::Expired { unread: None, .. } => Err(taken(handle)),
            _ => Ok(()),
        }
    }
}

fn check_distinct(handles: &[u64]) -> Result<()> {
    let mut sorted = try_vec::with_capacity("copying the handles", handles.len())?;
    sorted.extend_from_slice(handles);
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::invalid("handles", format!("contain {:#x} twice", pair[0]))),
        None => Ok(()),
    }
}

/// The byte counts, or the first error with the number of further errors.
fn collect(outcomes: impl IntoIterator<Item = Result<u64>>) -> Result<Vec<u64>> {
    let (mut bytes, mut first, mut more) = (Vec::new(), None, 0);
    for outcome in outcomes {
        match outcome {
            Ok(count) => bytes.push(count),
            Err(error) if first.is_none() => first = Some(error),
            Err(_) => more += 1,
        }
    }
    match (first, more) {
        (None, _) => Ok(bytes),
        (Some(first), 0) => Err(first),
        (Some(first), more) => Err(first.context(format_args!("{more} more operations failed"))),
    }
}
