//! Engines that take turns with another process, which is a queue of its own here.
#![forbid(unsafe_code)]

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::*;
use crate::error::IoKind;
use crate::io::engine::Engine;
use crate::io::options::{Options, Request, Target};
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;

const LONG: Duration = Duration::from_secs(60);
const LARGE: usize = 2 * FREE_BYTES as usize;

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

/// Takes all turns; other tests may have them for a moment.
fn take(requests: &mut [TurnRequest]) {
    for request in requests {
        while !request.poll(LONG).unwrap() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn is_held(engine: &Engine, handle: u64) -> bool {
    let outcome = engine.wait(handle, Some(Duration::from_millis(20)));
    outcome.is_err_and(|error| error.io_kind() == Some(IoKind::Timeout))
}

#[test]
fn a_large_operation_waits_for_the_turn_and_the_device_counts_as_idle() {
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
    let held = more();
    assert!(is_held(&engine, held));
    others.iter_mut().for_each(TurnRequest::release);
    engine.wait_all(None).unwrap();
}

#[test]
fn who_gives_up_leaves_the_queue() {
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
    let dir = tempfile::tempdir().unwrap();
    let (mut others, engine) = (other(dir.path(), 5), engine(5, Duration::from_millis(20)));
    let (path, memory) = (dir.path().join("file"), memory(LARGE));
    take(&mut others);
    for _ in 0..3 {
        let handle = start(&engine, &path, &memory, None);
        assert_eq!(engine.wait(handle, None).unwrap(), LARGE as u64);
    }
}

#[test]
fn a_close_and_a_caller_that_waits_for_all_operations_need_no_turn() {
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

/// A child of a fork takes turns of its own, and holds none of its parent's.
#[test]
fn a_forked_child_has_no_turn_of_its_parent() {
    let dir = tempfile::tempdir().unwrap();
    let mut others = other(dir.path(), 6);
    take(&mut others);
    let device = std::fs::metadata(dir.path()).unwrap().dev();
    assert!(crate::sys::fork::in_forked_child(|| {
        let mut own = TurnRequest::new(TurnQueue::join(device, "a file", 6, None).unwrap());
        !own.poll(LONG).unwrap()
    }));
}
