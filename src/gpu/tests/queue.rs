//! Copy calls return at once, whatever is in the driver's queues and whatever the driver waits for.

use std::sync::Arc;
use std::time::Duration;

use fakecuda::capture::GLOBAL;

use super::transfer::{CHUNK, Fixture};
use super::{foreign, until};
use crate::dtype::Dtype;
use crate::error::{Error, GpuKind};
use crate::gpu::kernels::{DeviceFloats, Kernels};
use crate::gpu::lane::DEPTH;
use crate::gpu::memory::Lockable;
use crate::gpu::steps::Steps;
use crate::gpu::stream::Stream;
use crate::gpu::transfer::{After, Copy, Direction};
use crate::gpu::watch::Watches;
use crate::pool::pinned;
use crate::pool::region::Backing;

const BOTH: [Direction; 2] = [Direction::D2h, Direction::H2d];

/// A copy between equal types that waits for nothing.
fn copy(direction: Direction, device: DeviceFloats, host: impl Into<Lockable>) -> Copy {
    Copy { direction, device, host: host.into(), host_dtype: device.dtype(), after: After::Now }
}

fn calls(ordinal: u32, name: &str) -> usize {
    fakecuda::with(ordinal, |gpu| gpu.calls.iter().filter(|call| **call == name).count())
}

/// Nothing ends. Each thread fills its window, and waits; the driver has space for the framework.
#[test]
fn copies_that_wait_leave_space_in_the_driver() {
    const COPIES: usize = 1000;
    let mut fixture = Fixture::new(64);
    let (_memory, floats) = fixture.memory(Dtype::Bf16, 10);
    let host = fixture.pinned(&[0; 20]);
    fakecuda::with(64, |gpu| (gpu.stalled, gpu.queues.limits.depth) = (true, 2 * DEPTH + 1));
    let mut last = 0;
    for _ in 0..COPIES {
        for direction in BOTH {
            last = fixture.transfers.start(&copy(direction, floats, host.clone())).unwrap();
        }
    }
    until(|| fakecuda::with(64, |gpu| gpu.waiting == 2));
    fakecuda::with(64, |gpu| assert!(gpu.queued() <= 2 * DEPTH, "{}", gpu.queued()));
    assert_eq!((calls(64, "cuStreamSynchronize"), calls(64, "cuEventSynchronize")), (1, 2));
    // Without space in the queue of the driver this call of the program would not return.
    fixture.framework.record(&fixture.there).unwrap();
    assert!(matches!(fixture.transfers.wait(last, Some(Duration::ZERO)), Err(Error::Timeout(_))));
    fakecuda::resume(64);
    fixture.transfers.wait(last, None).unwrap();
    fixture.transfers.finish().unwrap();
    assert_eq!(calls(64, "cuMemcpyDtoHAsync_v2"), COPIES);
    fakecuda::with(64, |gpu| assert_eq!(gpu.queues.blocked, 0));
}

/// The framework has filled the driver's queue.
#[test]
fn a_call_waits_neither_for_space_in_the_driver_nor_for_the_other_direction() {
    let mut fixture = Fixture::new(65);
    let (_memory, floats) = fixture.memory(Dtype::Bf16, 10);
    let host = fixture.pinned(&[0; 20]);
    fixture.framework.record(&fixture.there).unwrap();
    fakecuda::with(65, |gpu| (gpu.stalled, gpu.queues.limits.depth) = (true, gpu.queued()));
    let tickets = BOTH.map(|direction| {
        let calls = [(); 3].map(|()| copy(direction, floats, host.clone()));
        calls.map(|copy| fixture.transfers.start(&copy).unwrap())
    });
    // Each thread, and nobody else.
    until(|| fakecuda::with(65, |gpu| gpu.waiting == 2));
    for ticket in tickets.as_flattened() {
        for timeout in [Duration::ZERO, Duration::from_millis(1)] {
            assert!(matches!(fixture.transfers.wait(*ticket, Some(timeout)), Err(Error::Timeout(_))));
        }
    }
    fakecuda::resume(65);
    tickets.as_flattened().iter().for_each(|ticket| fixture.transfers.wait(*ticket, None).unwrap());
}

/// cuMemHostRegister waits for the kernels that run.
#[test]
fn the_first_copy_of_memory_is_registered_by_the_thread_of_its_direction() {
    let mut fixture = Fixture::new(66);
    let (_memory, floats) = fixture.memory(Dtype::F32, CHUNK);
    let known = fixture.pinned(&[0; 4 * CHUNK]);
    // Larger than what shares a region.
    let fresh = pinned::alloc(32 << 20, Backing::default()).unwrap();
    fixture.blocks.push(fresh.address());
    fixture.framework.record(&fixture.there).unwrap();
    fakecuda::with(66, |gpu| gpu.stalled = true);
    let before = calls(66, "cuMemHostRegister_v2");
    let part = fresh.part(0, 40);
    let host = fixture.registry.lockable(part, "host").unwrap();
    let first = fixture.transfers.start(&copy(Direction::D2h, floats.part(0, 10), host)).unwrap();
    until(|| fakecuda::with(66, |gpu| gpu.waiting == 1));
    assert_eq!(calls(66, "cuMemHostRegister_v2") - before, 1);
    // Neither the other direction nor the registry waits for it.
    let other = fixture.transfers.start(&copy(Direction::H2d, floats, known)).unwrap();
    fixture.transfers.stream_wait(other, fixture.stream()).unwrap();
    fixture.registry.lockable(fresh, "host").unwrap();
    assert!(matches!(fixture.transfers.wait(first, Some(Duration::ZERO)), Err(Error::Timeout(_))));
    fakecuda::resume(66);
    fixture.transfers.wait(first, None).unwrap();
    assert_eq!(calls(66, "cuMemHostRegister_v2") - before, 1);
}

#[test]
fn a_copy_that_failed_is_the_result_of_its_waits_and_the_next_one_goes_on() {
    let mut fixture = Fixture::new(67);
    let (_memory, floats) = fixture.memory(Dtype::Bf16, 3 * CHUNK);
    let host = fixture.pinned(&[0; 6 * CHUNK]);
    // The second chunk of the first copy.
    fakecuda::with(67, |gpu| gpu.faults.push(("cuMemcpyDtoHAsync_v2", 1, 1)));
    let tickets =
        [(); 2].map(|()| fixture.transfers.start(&copy(Direction::D2h, floats, host.clone())).unwrap());
    for _ in 0..2 {
        let waited = fixture.transfers.wait(tickets[0], None);
        let ordered = fixture.transfers.stream_wait(tickets[0], fixture.stream());
        for failed in [waited, ordered] {
            assert!(matches!(failed, Err(Error::Gpu(error)) if error.kind == GpuKind::Refused));
        }
        fixture.transfers.finish().unwrap();
    }
    fixture.transfers.wait(tickets[1], None).unwrap();
    assert_eq!(fixture.races(), [""; 0]);
}

#[test]
fn a_copy_past_the_limit_is_refused() {
    let fixture = Fixture::new(68);
    let (_memory, floats) = fixture.memory(Dtype::Bf16, 1);
    let nothing = fixture.registry.lockable(crate::sys::span::Span::empty(), "host").unwrap();
    let empty = copy(Direction::D2h, floats.part(0, 0), nothing);
    fakecuda::with(68, |gpu| gpu.stalled = true);
    for _ in 0..1 << 16 {
        fixture.transfers.start(&empty).unwrap();
    }
    let refused = fixture.transfers.start(&empty).unwrap_err();
    assert!(matches!(refused, Error::LimitReached(_)), "{refused}");
    assert!(refused.to_string().contains("(0 of them); wait for a copy"), "{refused}");
    fakecuda::resume(68);
    fixture.transfers.finish().unwrap();
    fixture.transfers.start(&empty).unwrap();
}

/// Each wait for a failed copy returns its error, so that no wait makes room.
#[test]
fn if_all_copies_have_failed_the_refusal_says_to_close_the_gpu() {
    let mut fixture = Fixture::new(70);
    let (_memory, floats) = fixture.memory(Dtype::Bf16, 1);
    let host = fixture.pinned(&[0; 2]);
    let one = copy(Direction::D2h, floats, host);
    for _ in 0..1 << 16 {
        fakecuda::with(70, |gpu| gpu.faults.push(("cuMemcpyDtoHAsync_v2", 0, 1)));
        fixture.transfers.start(&one).unwrap();
    }
    fixture.transfers.finish().unwrap();
    let refused = fixture.transfers.start(&one).unwrap_err();
    assert!(refused.to_string().contains("(65536 of them); close the GPU and open it again"), "{refused}");
}

/// The framework may record its event again once the call has returned.
#[test]
fn a_copy_waits_for_the_event_as_it_was_at_the_call() {
    let mut fixture = Fixture::new(69);
    let (_memory, floats) = fixture.memory(Dtype::Bf16, 10);
    let host = fixture.pinned(&[0; 20]);
    let first = Copy { after: fixture.event(), ..copy(Direction::D2h, floats, host.clone()) };
    let ticket = fixture.transfers.start(&first).unwrap();
    // What the framework queues then waits for the copy, and its event with it.
    fixture.transfers.stream_wait(ticket, fixture.stream()).unwrap();
    fixture.framework.upload(&host, floats.span()).unwrap();
    let second = Copy { after: fixture.event(), ..first };
    let ticket = fixture.transfers.start(&second).unwrap();
    fixture.transfers.wait(ticket, None).unwrap();
    assert_eq!(fixture.races(), [""; 0]);
}

/// A graph would replay Spillway's events without Spillway's work.
#[test]
fn every_call_refuses_a_stream_in_capture_by_name_and_the_graph_stays_good() {
    let mut fixture = Fixture::new(74);
    let (_memory, floats) = fixture.memory(Dtype::Bf16, 10);
    let host = fixture.pinned(&[0; 20]);
    let kernels = Arc::new(Kernels::load(&fixture.device).unwrap());
    let (steps, watches) = (Steps::new(&fixture.device, &kernels).unwrap(), Watches::new(&fixture.device));
    let captured = Stream::new(&fixture.device).unwrap();
    let stream = foreign(&captured);
    let plain = copy(Direction::D2h, floats, host);
    let ticket = fixture.transfers.start(&plain).unwrap();
    fixture.transfers.wait(ticket, None).unwrap();
    let handle = captured.handle() as u64;
    fakecuda::with(74, |gpu| assert_eq!(gpu.begin_capture(handle, GLOBAL), 0));
    let refused = [
        fixture.transfers.start(&Copy { after: After::Stream(stream), ..plain }).map(drop),
        fixture.transfers.stream_wait(ticket, stream),
        watches.stream(stream).map(drop),
        steps.adam(&[], stream, false).map(drop),
        steps.adam(&[], stream, true).map(drop),
    ];
    for refused in refused {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.starts_with("stream: is being captured into a CUDA graph"), "{refused}");
    }
    fakecuda::with(74, |gpu| assert_eq!(gpu.end_capture(handle), 0));
}
