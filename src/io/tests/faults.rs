//! The simulated disk: every fault is reported, and no other operation is affected.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::thread;

use super::*;
use crate::error::IoKind;
use crate::io::file::File;
use crate::io::plan::Alignment;
use crate::io::sim::{Crash, Disk, Faults, Sim};
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;

pub(super) const SECTOR_512: Alignment = Alignment { memory: 512, offset: 4096 };
const BLOCK: u64 = 16 << 10;

pub(super) fn options() -> Options {
    Options { block_bytes: BLOCK, depth: 4, ..Options::default() }
}

pub(super) fn engine(disk: &Disk, faults: Faults) -> Engine {
    Engine::open_simulated(options(), Sim::new(disk, faults)).unwrap()
}

pub(super) fn file(name: &str) -> Arc<File> {
    Arc::new(File::named(name, 1, Some(SECTOR_512)))
}

pub(super) fn buffers(bytes: usize, count: usize) -> Vec<Buffer> {
    Buffer::open_many(count, bytes, Backing { huge: false, lock: false, node: None }).unwrap()
}

/// The writes and reads of a small training step: unaligned tensors in two files.
struct Workload {
    _buffers: Vec<Buffer>,
    spans: Vec<Span>,
}

const TENSORS: usize = 6;
const TENSOR_BYTES: usize = 50_001;

impl Workload {
    fn new() -> Workload {
        let buffers = buffers(TENSOR_BYTES + 700, TENSORS);
        let part = |(n, buffer): (usize, &Buffer)| buffer.span().part(n * 100, TENSOR_BYTES);
        let spans = buffers.iter().enumerate().map(part).collect();
        Workload { _buffers: buffers, spans }
    }

    /// The outcomes of six writes and six reads after them. The data of the reads is checked.
    fn run(&self, engine: &Engine) -> Vec<crate::error::Result<u64>> {
        let place = |n: usize| (file(["even", "odd"][n % 2]), (n / 2 * (TENSOR_BYTES + 5000) + 77) as u64);
        let mut outcomes = Vec::new();
        for write in [true, false] {
            let handles: Vec<_> = self
                .spans
                .iter()
                .enumerate()
                .map(|(n, span)| {
                    let (file, offset) = place(n);
                    let bytes =
                        if write { pattern(n as u64, TENSOR_BYTES) } else { vec![0xEE; TENSOR_BYTES] };
                    span.write(&bytes);
                    let request = request(Target::File(file), offset, *span);
                    if write { engine.write(request) } else { engine.read(request) }
                })
                .collect();
            outcomes.extend(handles.into_iter().map(|handle| engine.wait(handle?, PATIENCE)));
        }
        for (n, span) in self.spans.iter().enumerate() {
            if outcomes[n].is_ok() && outcomes[TENSORS + n].is_ok() {
                assert!(span.to_vec() == pattern(n as u64, TENSOR_BYTES), "tensor {n} came back wrong");
            }
        }
        outcomes
    }
}

#[test]
fn failing_the_nth_request_for_every_n_fails_exactly_one_operation() {
    let workload = Workload::new();
    let clean = Disk::default();
    assert!(workload.run(&engine(&clean, Faults::default())).iter().all(Result::is_ok));
    let requests = clean.requests();
    assert!(requests > 40);
    for errno in [libc::EIO, libc::ENOSPC, libc::EROFS] {
        for nth in 0..requests {
            let disk = Disk::default();
            let faults =
                Faults { fail_nth: Some((nth, errno)), reorder: true, seed: nth, ..Faults::default() };
            let outcomes = workload.run(&engine(&disk, faults));
            let errors: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
            // A failed write leaves its file short, so that its read may fail as well.
            let own =
                errors.iter().filter(|error| error.to_string().contains(&format!("(errno {errno})"))).count();
            assert_eq!(own, 1, "request {nth}, errno {errno}: {errors:?}");
            let kind = if errno == libc::ENOSPC { IoKind::NoSpace } else { IoKind::Failed };
            assert!(errors.iter().any(|error| error.io_kind() == Some(kind)));
        }
    }
}

#[test]
fn passing_errors_and_short_transfers_do_not_fail_an_operation() {
    let workload = Workload::new();
    for seed in 0..60 {
        let disk = Disk::default();
        let faults = Faults {
            seed,
            reorder: true,
            short_permille: 300,
            error_permille: vec![(libc::EINTR, 200), (libc::EAGAIN, 100)],
            ..Faults::default()
        };
        let engine = engine(&disk, faults);
        let outcomes = workload.run(&engine);
        assert!(outcomes.iter().all(Result::is_ok), "seed {seed}: {outcomes:?}");
        let stats = engine.stats().unwrap();
        assert!(stats.resumed > 0 && stats.retried > 0, "seed {seed}: {stats:?}");
    }
}

#[test]
fn an_interruption_without_end_is_an_error_in_the_end() {
    let workload = Workload::new();
    let faults = Faults { error_permille: vec![(libc::EINTR, 1000)], ..Faults::default() };
    let outcomes = workload.run(&engine(&Disk::default(), faults));
    assert!(
        outcomes
            .iter()
            .all(|outcome| outcome.as_ref().is_err_and(|error| error.to_string().contains("in a row")))
    );
}

#[test]
fn every_alignment_at_sector_edges_matches_a_byte_exact_model() {
    let buffers = buffers(64 << 10, 1);
    let block = buffers[0].span();
    for need in
        [Alignment { memory: 4, offset: 4096 }, SECTOR_512, Alignment { memory: 4096, offset: 16_384 }]
    {
        let disk = Disk::default();
        let mut model = pattern(1, 60_000);
        disk.put("model", model.clone());
        let engine =
            engine(&disk, Faults { reorder: true, seed: 5, short_permille: 100, ..Faults::default() });
        let file = Arc::new(File::named("model", 1, Some(need)));
        let mut seed = 10;
        for offset in [0, 1, 4095, 4096, 4097, 8192, 16_383, 16_384, 16_385] {
            for address in [0, 1, 4, 512, 4095, 4096] {
                for len in [1, 4095, 4096, 4097, 16_384, 20_000, 36_865] {
                    let span = block.part(address, len);
                    let bytes = pattern(seed, len);
                    span.write(&bytes);
                    let handle =
                        engine.write(request(Target::File(Arc::clone(&file)), offset as u64, span)).unwrap();
                    engine.wait(handle, PATIENCE).unwrap();
                    model[offset..offset + len].copy_from_slice(&bytes);
                    span.write(&vec![0; len]);
                    let handle =
                        engine.read(request(Target::File(Arc::clone(&file)), offset as u64, span)).unwrap();
                    engine.wait(handle, PATIENCE).unwrap();
                    assert!(
                        span.to_vec() == bytes,
                        "{need:?} offset {offset} address {address} length {len}"
                    );
                    seed += 1;
                }
            }
        }
        assert!(disk.contents("model") == model);
        assert_eq!(file.buffered_reason(), None, "a request was not aligned");
    }
}

#[test]
fn neighbours_that_share_a_sector_do_not_lose_each_others_bytes() {
    let buffers = buffers(TENSOR_BYTES * 6, 1);
    let block = buffers[0].span();
    let all = pattern(3, TENSOR_BYTES * 6);
    for seed in 0..40 {
        let disk = Disk::default();
        let engine = engine(&disk, Faults { reorder: true, seed, ..Faults::default() });
        let file = file("packed");
        block.write(&all);
        for n in 0..6 {
            let span = block.part(n * TENSOR_BYTES, TENSOR_BYTES);
            engine.write(request(Target::File(Arc::clone(&file)), (n * TENSOR_BYTES) as u64, span)).unwrap();
        }
        assert_eq!(engine.wait_all(PATIENCE), Ok(6));
        assert!(disk.contents("packed") == all, "seed {seed}");
    }
}

#[test]
fn a_full_disk_and_a_truncated_file_are_named() {
    let workload = Workload::new();
    let disk = Disk::default();
    let faults = Faults { capacity: Some(120_000), ..Faults::default() };
    let outcomes = workload.run(&engine(&disk, faults));
    let full = |outcome: &crate::error::Result<u64>| {
        outcome.as_ref().is_err_and(|error| error.io_kind() == Some(IoKind::NoSpace))
    };
    assert!(outcomes[..TENSORS].iter().any(full) && outcomes[..TENSORS].iter().any(Result::is_ok));

    let disk = Disk::default();
    disk.put("cut", pattern(4, 100_000));
    let engine = engine(&disk, Faults { hang_nth: Some(3), ..Faults::default() });
    let buffers = buffers(100_000, 1);
    let block = buffers[0].span().part(0, 100_000);
    let handle = engine.read(request(Target::File(file("cut")), 0, block)).unwrap();
    while disk.requests() < 4 {
        thread::yield_now();
    }
    disk.truncate("cut", 30_000);
    disk.release();
    let error = engine.wait(handle, PATIENCE).unwrap_err();
    assert_eq!(error.io_kind(), Some(IoKind::ShortFile), "{error}");
}

#[test]
fn the_first_error_is_that_of_the_first_operation_also_after_the_numbers_of_handles_wrap() {
    let disk = Disk::default();
    let engine = engine(&disk, Faults { error_permille: vec![(libc::EIO, 1000)], ..Faults::default() });
    engine.shared.state.lock().generation = crate::io::operation::GENERATIONS - 1;
    let buffers = buffers(4096, 1);
    let block = buffers[0].span();
    for name in ["first", "second", "third"] {
        engine.write(request(Target::File(file(name)), 0, block)).unwrap();
    }
    let error = engine.wait_all(PATIENCE).unwrap_err().to_string();
    assert!(error.contains("first") && error.contains("2 more"), "{error}");
}

#[test]
fn a_wait_for_several_takes_no_outcome_if_one_was_taken_before() {
    let disk = Disk::default();
    let hung = Faults { hang_nth: Some(0), ..Faults::default() };
    let engine = engine(&disk, hung);
    let buffers = buffers(4096, 2);
    let (block, other) = (buffers[0].span(), buffers[1].span());
    let other_device = Arc::new(File::named("other", 2, Some(SECTOR_512)));
    let late =
        Request { deadline: Some(Duration::from_millis(1)), ..request(Target::File(file("late")), 0, block) };
    let late = engine.write(late).unwrap();
    assert_eq!(engine.wait(late, PATIENCE).unwrap_err().io_kind(), Some(IoKind::Deadline));
    let done = engine.write(request(Target::File(other_device), 0, other)).unwrap();
    assert!(engine.wait_many(&[done, late], PATIENCE).is_err());
    assert_eq!(engine.wait(done, PATIENCE), Ok(4096), "its outcome is still there");
    disk.release();
    engine.close(PATIENCE).unwrap();
}

#[test]
fn a_ring_without_workers_is_named_with_its_cure() {
    let engine = engine(
        &Disk::default(),
        Faults { error_permille: vec![(libc::ECANCELED, 1000)], ..Faults::default() },
    );
    let buffers = buffers(4096, 1);
    let block = buffers[0].span();
    let handle = engine.write(request(Target::File(file("a")), 0, block)).unwrap();
    let error = engine.wait(handle, PATIENCE).unwrap_err().to_string();
    assert!(error.contains("ulimit -u") && error.contains("SPILLWAY_IO=threads"), "{error}");
}

#[test]
fn errors_that_nobody_waited_for_are_named_at_close() {
    let disk = Disk::default();
    let engine = engine(&disk, Faults { error_permille: vec![(libc::EIO, 1000)], ..Faults::default() });
    let buffers = buffers(4096, 1);
    let block = buffers[0].span();
    engine.write(request(Target::File(file("lost")), 0, block)).unwrap();
    let error = engine.close(PATIENCE).unwrap_err();
    assert!(error.to_string().contains("lost") && error.to_string().contains("(errno 5)"), "{error}");
    assert!(engine.write(request(Target::File(file("lost")), 0, block)).is_err());
}

#[test]
fn what_was_synced_survives_every_crash_and_the_rest_meets_its_fate() {
    let buffers = buffers(40_960, 2);
    let (old, new) = (buffers[0].span(), buffers[1].span());
    old.write(&pattern(1, 40_960));
    new.write(&pattern(2, 40_960));
    let mut torn = 0;
    for seed in 0..20 {
        for crash in [Crash::Kept, Crash::Dropped, Crash::Torn] {
            let disk = Disk::default();
            let engine = engine(&disk, Faults { reorder: true, seed, ..Faults::default() });
            let target = || Target::File(file("step"));
            engine.write(request(target(), 0, old)).unwrap();
            engine.wait_all(PATIENCE).unwrap();
            engine.sync(target(), None).unwrap();
            engine.wait_all(PATIENCE).unwrap();
            engine.write(request(target(), 0, new)).unwrap();
            engine.wait_all(PATIENCE).unwrap();
            disk.crash(crash, seed + 1);
            let found = disk.contents("step");
            let (old, new) = (pattern(1, 40_960), pattern(2, 40_960));
            match crash {
                Crash::Kept => assert!(found == new),
                Crash::Dropped => assert!(found == old),
                Crash::Torn => {
                    let pairs = found.chunks(512).zip(old.chunks(512).zip(new.chunks(512)));
                    assert!(pairs.clone().all(|(found, (old, new))| found == old || found == new));
                    torn += usize::from(found != old && found != new);
                }
            }
        }
    }
    assert!(torn > 10);
}

#[test]
fn a_file_system_that_refuses_direct_transfers_gets_buffered_ones_and_the_reason_is_kept() {
    let disk = Disk::default();
    disk.put("refuses", pattern(9, 50_000));
    let engine = engine(&disk, Faults { fail_nth: Some((0, libc::EINVAL)), ..Faults::default() });
    let buffers = buffers(50_000, 1);
    let block = buffers[0].span();
    let file = file("refuses");
    for _ in 0..2 {
        let read = request(Target::File(Arc::clone(&file)), 0, block.part(0, 50_000));
        let handle = engine.read(read).unwrap();
        assert_eq!(engine.wait(handle, PATIENCE), Ok(50_000));
    }
    assert!(file.direct().is_none());
    assert!(engine.stats().unwrap().buffered_reason.contains("refused"));
}

#[test]
fn eight_threads_share_an_engine_and_each_gets_its_own_outcomes() {
    let disk = Disk::default();
    let engine = engine(&disk, Faults { reorder: true, seed: 11, short_permille: 50, ..Faults::default() });
    let buffers = buffers(30_000, 8);
    thread::scope(|scope| {
        for n in 0..8_u64 {
            let (engine, block) = (&engine, buffers[n as usize].span().part(0, 30_000));
            scope.spawn(move || {
                let name = format!("thread-{n}");
                for round in 0..30 {
                    block.write(&pattern(n * 100 + round, 30_000));
                    let handle = engine.write(request(Target::File(file(&name)), 5, block)).unwrap();
                    engine.wait(handle, PATIENCE).unwrap();
                    block.write(&[0; 30_000]);
                    let handle = engine.read(request(Target::File(file(&name)), 5, block)).unwrap();
                    engine.wait(handle, PATIENCE).unwrap();
                    assert!(block.to_vec() == pattern(n * 100 + round, 30_000));
                }
            });
        }
    });
}
