//! Engines that take turns with another process, which is a queue of its own here.
#![forbid(unsafe_code)]

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;
use crate::error::IoKind;
use crate::io::engine::Engine;
use crate::io::options::{Options, Request, Target};
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
    let turns = TurnOptions { most, timeout };
    Engine::open(Options { io_timeout: Some(Duration::from_millis(200)), turns, ..Options::default() })
        .unwrap()
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
    let dir = tempfile::tempdir().unwrap();
    let (mut others, engines) = (other(dir.path(), 2), [engine(2, LONG), engine(2, LONG)]);
    take(&mut others);
    let buffers = [memory(LARGE), memory(LARGE)];
    let small = memory(FREE_BYTES as usize);
    let start_on = |number: usize| {
        start(&engines[number], &dir.path().join(format!("large-{number}")), &buffers[number], None)
    };
    let large = [start_on(0), start_on(1)];
    let free = start(&engines[0], &dir.path().join("small"), &small, None);
    engines[0].wait(free, None).unwrap();
    // The I/O timeout of the engine is shorter.
    std::thread::sleep(Duration::from_millis(600));
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
