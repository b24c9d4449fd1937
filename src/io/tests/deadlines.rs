//! Operations that hang: deadlines and timeouts release the caller; memory still in the system is quarantined.
#![forbid(unsafe_code)]

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use super::faults::{SECTOR_512, buffers, engine, file, options};
use super::*;
use crate::error::{Error, IoKind};
use crate::io::backend::{Backend, Completion, Piece, Sleep, Wake};
use crate::io::file::File;
use crate::io::sim::{Disk, Faults, Sim};
use crate::io::threads::Threads;
use crate::io::uring::Uring;
use crate::pool::buffer::Buffer;
use crate::pool::transfer_buffer::TransferBuffer;

#[test]
fn a_deadline_frees_the_caller_and_quarantines_buffer_and_device() {
    let disk = Disk::default();
    disk.put("stuck", pattern(5, 100_000));
    let engine = engine(&disk, Faults { hang_nth: Some(1), ..Faults::default() });
    let mine = buffers(100_000, 1);
    let span = mine[0].span().part(0, 100_000);
    let deadline = Some(Duration::from_millis(50));
    let request_with = |deadline| Request {
        target: Target::File(file("stuck")),
        offset: 0,
        buffer: TransferBuffer::at_address(span),
        deadline,
    };
    let handle = engine.read(request_with(deadline)).unwrap();
    let before = Instant::now();
    assert_eq!(engine.wait(handle, None).unwrap_err().io_kind(), Some(IoKind::Deadline));
    assert!(before.elapsed() < Duration::from_secs(20));
    assert_eq!(engine.stats().unwrap().stuck, 1);
    assert_eq!(engine.wait_all(PATIENCE), Ok(0));

    assert!(mine[0].in_transfer(), "the system may still write to the buffer");
    assert_eq!(engine.read(request_with(None)).unwrap_err().io_kind(), Some(IoKind::PathFailed));
    let other = Arc::new(File::named("elsewhere", 2, Some(SECTOR_512)));
    disk.put("elsewhere", pattern(6, 8192));
    let healthy = buffers(8192, 1);
    let handle = engine.read(request(Target::File(other), 0, healthy[0].span())).unwrap();
    assert_eq!(engine.wait(handle, PATIENCE), Ok(8192));

    disk.release();
    while engine.stats().unwrap().stuck > 0 {
        thread::yield_now();
    }
    assert!(!mine[0].in_transfer());
    let handle = engine.read(request_with(None)).unwrap();
    assert_eq!(engine.wait(handle, PATIENCE), Ok(100_000));
    engine.close(PATIENCE).unwrap();
}

#[test]
fn closing_with_a_stuck_operation_does_not_hang_and_a_wait_that_times_out_leaves_it_waitable() {
    let disk = Disk::default();
    disk.put("stuck", pattern(5, 100_000));
    let engine = engine(&disk, Faults { hang_nth: Some(0), ..Faults::default() });
    let buffers = buffers(4096, 2);
    let block = buffers[0].span();
    let handle = engine.read(request(Target::File(file("stuck")), 0, block)).unwrap();
    let short = Some(Duration::from_millis(20));
    assert_eq!(engine.wait(handle, short).unwrap_err().io_kind(), Some(IoKind::Timeout));
    assert_eq!(engine.wait_many(&[handle], short).unwrap_err().io_kind(), Some(IoKind::Timeout));
    assert_eq!(engine.wait_all(short).unwrap_err().io_kind(), Some(IoKind::Timeout));
    assert_eq!(engine.close(short).unwrap_err().io_kind(), Some(IoKind::Timeout));
    drop(engine);
    assert!(buffers[0].in_transfer());
    disk.release();
    while buffers[0].in_transfer() {
        thread::yield_now();
    }
}

/// A throttled device may delay one direction for long.
#[test]
fn reads_go_past_writes_that_wait_and_writes_past_reads() {
    let buffers = buffers(4096, 3);
    let blocks: Vec<Span> = buffers.iter().map(Buffer::span).collect();
    for writes_hang in [true, false] {
        let disk = Disk::default();
        disk.put("data", pattern(5, 3 * 4096));
        let sim = Sim::new(&disk, Faults { hang_nth: Some(0), ..Faults::default() });
        let engine = Engine::open_simulated(Options { depth: 1, ..options() }, sim).unwrap();
        let submit = |write: bool, number: usize| {
            let request = Request {
                offset: 4096 * number as u64,
                ..request(Target::File(file("data")), 0, blocks[number])
            };
            if write { engine.write(request) } else { engine.read(request) }.unwrap()
        };
        let hung = submit(writes_hang, 0);
        while disk.requests() < 1 {
            thread::yield_now();
        }
        let behind = submit(writes_hang, 1);
        assert_eq!(engine.wait(submit(!writes_hang, 2), PATIENCE), Ok(4096));
        assert_eq!(disk.requests(), 2, "one place for each direction");
        disk.release();
        assert_eq!((engine.wait(hung, PATIENCE), engine.wait(behind, PATIENCE)), (Ok(4096), Ok(4096)));
        engine.close(PATIENCE).unwrap();
    }
}

#[test]
fn a_deadline_is_noticed_although_nobody_waits() {
    let disk = Disk::default();
    disk.put("stuck", pattern(5, 4096));
    let buffers = buffers(4096, 3);
    let blocks: Vec<Span> = buffers.iter().map(Buffer::span).collect();
    // Depth 1, and the only piece hangs. The driver sleeps until its deadline when operations with earlier deadlines
    // arrive.
    let sim = Sim::new(&disk, Faults { hang_nth: Some(0), ..Faults::default() });
    let engine = Engine::open_simulated(Options { depth: 1, ..options() }, sim).unwrap();
    let submit = |span, milliseconds| {
        let deadline = Some(Duration::from_millis(milliseconds));
        engine
            .read(Request {
                target: Target::File(file("stuck")),
                offset: 0,
                buffer: TransferBuffer::at_address(span),
                deadline,
            })
            .unwrap()
    };
    let hung = submit(blocks[0], 3_600_000);
    let later = submit(blocks[1], 90);
    let sooner = submit(blocks[2], 30);
    while engine.stats().unwrap().pending > 1 {
        thread::yield_now();
    }
    assert_eq!(engine.stats().unwrap().failed, 2);
    assert_eq!(disk.requests(), 1, "what waited in the queue never started");
    for handle in [later, sooner] {
        assert_eq!(engine.wait(handle, PATIENCE).unwrap_err().io_kind(), Some(IoKind::Deadline));
    }
    disk.release();
    assert_eq!(engine.wait(hung, PATIENCE), Ok(4096));
    engine.close(PATIENCE).unwrap();
}

/// A backend that fails at once, and reports when its driver has abandoned all operations.
struct Lost {
    abandoned: mpsc::Sender<()>,
    go_on: mpsc::Receiver<()>,
}

impl Backend for Lost {
    fn name(&self) -> &'static str {
        "lost"
    }

    fn push(&mut self, _: Piece) {}

    fn wait(&mut self, _: Sleep, _: &mut Vec<Completion>) -> std::io::Result<()> {
        Err(std::io::Error::other("the device is gone"))
    }

    fn waker(&self) -> Arc<dyn Wake> {
        struct Deaf;
        impl Wake for Deaf {
            fn wake(&self) {}
        }
        Arc::new(Deaf)
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        self.abandoned.send(()).unwrap();
        self.go_on.recv().unwrap();
    }
}

#[test]
fn an_engine_that_is_lost_accepts_nothing_that_would_never_end() {
    let (abandoned, is_abandoned) = mpsc::channel();
    let (release, go_on) = mpsc::channel();
    let backend = Lost { abandoned, go_on };
    let make = move || Ok((Box::new(backend) as Box<dyn Backend>, String::new()));
    let engine = Engine::start(Options { depth: 1, ..options() }, None, make).unwrap();
    is_abandoned.recv().unwrap();
    let refused = engine.sync(Target::File(file("any")), None);
    release.send(()).unwrap();
    assert!(matches!(refused, Err(Error::System { .. })), "{refused:?}");
    assert!(engine.close(PATIENCE).is_ok());
}

#[test]
fn every_backend_wakes_up_when_the_time_is_over() {
    let mut done = Vec::new();
    let ring = Uring::open(4).ok().map(|ring| Box::new(ring) as Box<dyn Backend>);
    let others: [Box<dyn Backend>; 2] =
        [Box::new(Threads::new(1)), Box::new(Sim::new(&Disk::default(), Faults::default()))];
    for mut backend in others.into_iter().chain(ring) {
        let until = Instant::now() + Duration::from_millis(20);
        backend.wait(Sleep { completions: 1, until: Some(until) }, &mut done).unwrap();
        assert!(Instant::now() >= until && done.is_empty(), "{}", backend.name());
        backend.wait(Sleep { completions: 0, until: None }, &mut done).unwrap();
    }
}
