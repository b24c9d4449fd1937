//! Engines that take turns with another process, which is a queue of its own here.
#![forbid(unsafe_code)]

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;
use crate::error::IoKind;
use crate::io::backend::{Backend, Completion, Piece, Sleep, Wake};
use crate::io::engine::Engine;
use crate::io::options::{Options, Request, Target};
use crate::io::sim::{Disk, Faults, Sim};
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;

const LONG: Duration = Duration::from_secs(60);
const LARGE: usize = 2 * FREE_BYTES as usize;

/// The tests share the queue of their device, so each runs alone: two that take some of its turns each would wait for each other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Another process at the device of `dir`. Each test has its own number of turns, so that its engines share no turn with
/// those of other tests of this process.
fn other(dir: &Path, most: u32) -> Vec<TurnRequest> {
    let device = std::fs::metadata(dir).unwrap().dev();
    (0..most).map(|_| TurnRequest::new(TurnQueue::join(device, "a file", most, None).unwrap())).collect()
}

fn engine(most: u32, timeout: Duration) -> Engine {
    engine_with(most, timeout, LONG)
}

fn engine_with(most: u32, timeout: Duration, io_timeout: Duration) -> Engine {
    let turns = TurnOptions { most, timeout };
    Engine::open(Options { io_timeout: Some(io_timeout), turns, ..Options::default() }).unwrap()
}

fn memory(bytes: usize) -> Buffer {
    Buffer::open(bytes, Backing { huge: false, lock: false, node: None }).unwrap()
}

fn start(engine: &Engine, path: &Path, memory: &Buffer, deadline: Option<Duration>) -> u64 {
    let buffer = memory.span().into();
    engine.write(Request { target: Target::Path(path), offset: 0, buffer, deadline }).unwrap()
}

/// Takes turns; another run of the tests may have them for a moment.
fn take(requests: &mut [TurnRequest]) {
    for request in requests {
        while !request.poll(LONG).unwrap() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(request.take_message(), None, "the wait ended without a turn");
    }
}

fn is_held(engine: &Engine, handle: u64) -> bool {
    let outcome = engine.wait(handle, Some(Duration::from_millis(20)));
    outcome.is_err_and(|error| error.io_kind() == Some(IoKind::Timeout))
}

#[test]
fn a_large_operation_waits_for_the_turn_and_the_device_counts_as_idle() {
    let _alone = alone();
    // In memory: writes to a busy disk take longer than the I/O timeout.
    let (dir, io_timeout) = (tempfile::tempdir_in("/dev/shm").unwrap(), Duration::from_secs(1));
    let (mut others, engines) = (other(dir.path(), 2), [0, 1].map(|_| engine_with(2, LONG, io_timeout)));
    take(&mut others);
    let buffers = [memory(LARGE), memory(LARGE)];
    let small = memory(FREE_BYTES as usize);
    let start_on = |number: usize| {
        start(&engines[number], &dir.path().join(format!("large-{number}")), &buffers[number], None)
    };
    let large = [start_on(0), start_on(1)];
    let free = start(&engines[0], &dir.path().join("small"), &small, None);
    engines[0].wait(free, None).unwrap();
    std::thread::sleep(io_timeout + Duration::from_millis(500));
    assert!(is_held(&engines[0], large[0]) && is_held(&engines[1], large[1]));
    let busy = || engines[0].traffic().unwrap().busy;
    let before = busy();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(busy(), before);
    others.iter_mut().for_each(TurnRequest::release);
    for (engine, handle) in engines.iter().zip(large) {
        assert_eq!(engine.wait(handle, None).unwrap(), LARGE as u64);
    }
    // Nobody is left in the turn: another process gets all turns at once.
    take(&mut others);
}

#[test]
fn a_process_that_never_rests_gives_its_turn_up() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (mut others, engine) = (other(dir.path(), 3), engine(3, LONG));
    let (path, memory) = (dir.path().join("file"), memory(LARGE));
    take(&mut others[..2]);
    let mut last = None;
    let mut more = || {
        let next = start(&engine, &path, &memory, None);
        // One operation is always in flight.
        if let Some(before) = last.replace(next) {
            engine.wait(before, Some(Duration::from_millis(1))).ok();
        }
        next
    };
    more();
    while !others[2].poll(LONG).unwrap() {
        more();
    }
    assert_eq!(others[2].take_message(), None, "the wait ended without a turn");
    let held = more();
    assert!(is_held(&engine, held));
    others.iter_mut().for_each(TurnRequest::release);
    engine.wait_all(None).unwrap();
}

#[test]
fn who_gives_up_leaves_the_queue() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (mut others, engine) = (other(dir.path(), 4), engine(4, LONG));
    let (path, memory) = (dir.path().join("file"), memory(LARGE));
    take(&mut others);
    let handle = start(&engine, &path, &memory, Some(Duration::from_millis(30)));
    let error = engine.wait(handle, None).unwrap_err();
    assert_eq!(error.io_kind(), Some(IoKind::Deadline));
    assert!(error.to_string().contains("before the operation started"), "{error}");
    while others[0].others_wait().unwrap() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_holder_that_never_moves_is_passed() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (mut others, engine) = (other(dir.path(), 5), engine(5, Duration::from_millis(20)));
    let (path, memory) = (dir.path().join("file"), memory(LARGE));
    take(&mut others);
    for _ in 0..3 {
        let handle = start(&engine, &path, &memory, None);
        assert_eq!(engine.wait(handle, None).unwrap(), LARGE as u64);
    }
}

/// The engines of a process have its turn together, and the last one that leaves it ends it.
#[test]
fn the_engines_of_a_process_share_its_turn() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let mut others = other(dir.path(), 7);
    take(&mut others[..6]);
    let device = std::fs::metadata(dir.path()).unwrap().dev();
    let [one, two] = [(); 2].map(|()| DeviceTurn::of(device, 7, "a file"));
    assert!(one.enter(LONG) && two.enter(LONG), "one turn is free");
    one.leave(1);
    assert!(!others[6].poll(LONG).unwrap(), "an operation is left in the turn");
    two.leave(1);
    take(&mut others[6..]);
}

#[test]
fn a_close_and_a_caller_that_waits_for_all_operations_need_no_turn() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (mut others, engine) = (other(dir.path(), 7), engine(7, LONG));
    let (path, memory) = (dir.path().join("file"), memory(LARGE));
    take(&mut others);
    let handle = start(&engine, &path, &memory, None);
    assert!(is_held(&engine, handle));
    let without_turns = engine.without_turns();
    assert_eq!(engine.wait(handle, None).unwrap(), LARGE as u64);
    drop(without_turns);
    let handle = start(&engine, &path, &memory, None);
    assert!(is_held(&engine, handle));
    engine.close(None).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), LARGE as u64);
}

/// The child gives up all that it has of the parent.
#[test]
fn a_forked_child_neither_has_nor_ends_the_turn_of_its_parent() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let mut others = other(dir.path(), 6);
    take(&mut others[..5]);
    let device = std::fs::metadata(dir.path()).unwrap().dev();
    let turn = DeviceTurn::of(device, 6, "a file");
    assert!(turn.enter(LONG));
    assert!(crate::sys::fork::in_forked_child(|| {
        turn.leave(1);
        let own = DeviceTurn::of(device, 6, "a file");
        !Arc::ptr_eq(&own, &turn) && !own.enter(LONG)
    }));
    assert!(!others[5].poll(LONG).unwrap(), "the child has ended the turn of its parent");
    turn.leave(1);
    take(&mut others[5..]);
}

#[test]
fn a_turn_that_another_process_waits_for_ends_after_its_share() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let mut others = other(dir.path(), 8);
    take(&mut others[..7]);
    let device = std::fs::metadata(dir.path()).unwrap().dev();
    let turn = DeviceTurn::of(device, 8, "a file");
    assert!(turn.enter(LONG) && !others[7].poll(LONG).unwrap());
    let enters = |granted: Instant, closing: Option<Instant>| {
        let mut state = turn.state.lock();
        (state.granted, state.polled, state.closing) = (Some(granted), None, closing);
        drop(state);
        turn.enter(Duration::from_millis(1))
    };
    let (past, later) = (Instant::now() - SHARE, Instant::now() + LONG);
    assert!(enters(later, None), "the share has not ended");
    assert!(!enters(past, None), "another process waits");
    assert!(turn.state.lock().closing.is_some());
    assert!(!enters(past, Some(later)), "operations are in the turn");
    assert!(enters(past, Some(past)), "operations that do not end are not waited for after the timeout");
    turn.leave(3);
    take(&mut others[7..]);
}

#[test]
fn the_queue_is_looked_at_once_in_an_interval() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let mut others = other(dir.path(), 9);
    take(&mut others);
    let device = std::fs::metadata(dir.path()).unwrap().dev();
    let turn = DeviceTurn::of(device, 9, "a file");
    assert!(!turn.enter(LONG));
    others.iter_mut().for_each(TurnRequest::release);
    turn.state.lock().polled = Some(Instant::now() + LONG);
    assert!(!turn.enter(LONG), "the last look was in this interval");
    turn.state.lock().polled = None;
    assert!(turn.enter(LONG));
    turn.leave(1);
}

/// Another process at the device of the simulated files.
fn other_at_simulated() -> TurnRequest {
    TurnRequest::new(TurnQueue::join(1, "a file", 1, None).unwrap())
}

fn read_simulated(engine: &Engine, memory: &Buffer, deadline: Option<Duration>) -> u64 {
    let file = Arc::new(File::named("file", 1, None));
    let buffer = memory.span().into();
    engine.read(Request { target: Target::File(file), offset: 0, buffer, deadline }).unwrap()
}

fn simulated() -> Options {
    Options { depth: 4, turns: TurnOptions { most: 1, timeout: LONG }, ..Options::default() }
}

#[test]
fn an_operation_that_is_past_its_deadline_keeps_no_turn() {
    let _alone = alone();
    let (mut other, memory, disk) = (other_at_simulated(), memory(LARGE), Disk::default());
    disk.put("file", vec![0; LARGE]);
    let sim = Sim::new(&disk, Faults { hang_nth: Some(0), ..Faults::default() });
    let engine = Engine::open_simulated(simulated(), sim).unwrap();
    let handle = read_simulated(&engine, &memory, Some(Duration::from_millis(30)));
    while disk.requests() < 1 {
        std::thread::yield_now();
    }
    assert!(!other.poll(LONG).unwrap(), "the operation has the turn");
    assert_eq!(engine.wait(handle, None).unwrap_err().io_kind(), Some(IoKind::Deadline));
    take(std::slice::from_mut(&mut other));
    other.release();
    disk.release();
    engine.close(None).ok();
}

/// A backend that fails while operations are in flight.
struct Lost {
    pushed: bool,
    fails: Arc<Mutex<bool>>,
}

impl Backend for Lost {
    fn name(&self) -> &'static str {
        "lost"
    }

    fn push(&mut self, _: Piece) {
        self.pushed = true;
    }

    fn wait(&mut self, _: Sleep, _: &mut Vec<Completion>) -> std::io::Result<()> {
        std::thread::sleep(Duration::from_millis(1));
        match self.pushed && *self.fails.lock().unwrap() {
            true => Err(std::io::Error::other("the device is gone")),
            false => Ok(()),
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        struct Polls;
        impl Wake for Polls {
            fn wake(&self) {}
        }
        Arc::new(Polls)
    }
}

/// The operations of the engine never end, so its memory is lost here.
#[test]
fn an_engine_that_is_lost_keeps_no_turn() {
    let _alone = alone();
    let (mut other, fails) = (other_at_simulated(), Arc::new(Mutex::new(false)));
    let backend = Lost { pushed: false, fails: Arc::clone(&fails) };
    let make = move || Ok((Box::new(backend) as Box<dyn Backend>, String::new()));
    let engine = Engine::start(simulated(), None, make).unwrap();
    let memory = std::mem::ManuallyDrop::new(memory(LARGE));
    let handle = read_simulated(&engine, &memory, None);
    assert!(is_held(&engine, handle));
    assert!(!other.poll(LONG).unwrap(), "the operation has the turn");
    *fails.lock().unwrap() = true;
    assert!(engine.wait(handle, None).is_err());
    take(std::slice::from_mut(&mut other));
}
