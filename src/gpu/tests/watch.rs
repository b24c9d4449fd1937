//! A watch refers to the framework's work at the time of the call, even if the framework reuses or destroys its event. It
//! costs nothing while it is pending.

use std::sync::Arc;

use fakecuda::capture::{GLOBAL, THREAD_LOCAL};

use super::{device, foreign, until};
use crate::gpu::memory::{DeviceMemory, Registry};
use crate::gpu::stream::{ForeignEvent, GpuEvent, Stream};
use crate::gpu::watch::Watches;
use crate::pool::pinned;
use crate::pool::region::Backing;
use crate::sys::event::{Event, EventFd, Report, Status, poll};

/// The state of a watch once it is not pending.
fn outcome(report: &Arc<Report>) -> Status {
    let (waker, event) = (Arc::new(EventFd::new().unwrap()), Event::Reported(Arc::clone(report)));
    let now = || poll(&waker, &[&event], true).unwrap()[0];
    loop {
        match now() {
            Status::Pending => waker.clear(),
            other => return other,
        }
    }
}

#[test]
fn an_event_may_go_at_once_and_streams_and_marks_are_used_again() {
    let device = device(43);
    let (stream, watches) = (Stream::new(&device).unwrap(), Watches::new(&device));
    let (memory, block) =
        (DeviceMemory::new(&device, 64).unwrap(), pinned::alloc(64, Backing::default()).unwrap());
    let host = Registry::new(&device).host(block.part(0, 64), "block").unwrap();
    for kind in 0..6 {
        block.write(&[kind; 64]);
        stream.upload(&host, memory.span()).unwrap();
        let watch = match kind % 2 {
            0 => watches.stream(foreign(&stream)).unwrap(),
            _ => {
                let event = GpuEvent::new(&device).unwrap();
                stream.record(&event).unwrap();
                // SAFETY: the event is alive during the call.
                watches.event(unsafe { ForeignEvent::new(event.address(), "event") }.unwrap()).unwrap()
            }
        };
        assert_eq!(outcome(&watch), Status::Ready);
        let streams = if kind == 0 { 1 } else { 2 };
        fakecuda::with(43, |gpu| assert_eq!(gpu.alive()[..2], [streams, 1], "ours, and one of each at most"));
    }
    drop(watches);
    fakecuda::with(43, |gpu| assert_eq!(gpu.alive()[..2], [1, 0]));
    drop(host);
    pinned::free(block.address()).unwrap();
}

#[test]
fn pending_watches_cost_one_wait_in_the_driver_and_one_stream() {
    const WATCHES: usize = 200;
    let device = device(32);
    let (framework, watches) = (Stream::new(&device).unwrap(), Watches::new(&device));
    let events: Vec<GpuEvent> = (0..WATCHES).map(|_| GpuEvent::new(&device).unwrap()).collect();
    fakecuda::with(32, |gpu| gpu.stalled = true);
    let reports: Vec<Event> = events
        .iter()
        .map(|event| {
            framework.record(event).unwrap();
            // SAFETY: the events outlive the calls.
            let event = unsafe { ForeignEvent::new(event.address(), "event") }.unwrap();
            Event::Reported(watches.event(event).unwrap())
        })
        .collect();
    until(|| fakecuda::with(32, |gpu| gpu.waiting == 1));
    let (waker, reports) = (Arc::new(EventFd::new().unwrap()), reports.iter().collect::<Vec<_>>());
    let calls = || fakecuda::with(32, |gpu| gpu.calls.len());
    let before = calls();
    (0..100).for_each(|_| assert_eq!(poll(&waker, &reports, false).unwrap(), [Status::Pending; WATCHES]));
    assert_eq!(calls() - before, 0);
    fakecuda::with(32, |gpu| assert_eq!((gpu.alive()[0], gpu.waiting), (2, 1)));
    fakecuda::resume(32);
    while poll(&waker, &reports, true).unwrap().contains(&Status::Pending) {
        waker.clear();
    }
    let waits = |call: &&&str| **call == "cuEventSynchronize";
    fakecuda::with(32, |gpu| assert_eq!(gpu.calls.iter().filter(waits).count(), WATCHES));
}

#[test]
fn a_watch_that_is_pending_does_not_delay_the_end_of_its_watches() {
    let device = device(33);
    let (framework, watches) = (Stream::new(&device).unwrap(), Watches::new(&device));
    let event = GpuEvent::new(&device).unwrap();
    fakecuda::with(33, |gpu| gpu.stalled = true);
    framework.record(&event).unwrap();
    let watch = watches.stream(foreign(&framework)).unwrap();
    until(|| fakecuda::with(33, |gpu| gpu.waiting == 1));
    drop(watches);
    fakecuda::resume(33);
    assert_eq!(outcome(&watch), Status::Ready, "its owner still has it");
}

#[test]
fn a_lost_context_breaks_the_watch() {
    let device = device(44);
    let (stream, watches) = (Stream::new(&device).unwrap(), Watches::new(&device));
    fakecuda::with(44, |gpu| gpu.faults.push(("cuEventSynchronize", 0, 700)));
    let watch = watches.stream(foreign(&stream)).unwrap();
    assert_eq!(outcome(&watch), Status::Broken("the GPU reported an error"));
    assert!(watches.stream(foreign(&stream)).is_err());
}

/// The framework captures a graph while the thread of the watches waits and while Spillway calls run on the capturing
/// thread.
#[test]
fn a_capture_of_the_framework_is_not_broken_by_any_call_of_ours() {
    let device = device(46);
    let (stream, captured) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let watches = Watches::new(&device);
    let handle = captured.handle() as u64;
    for mode in [GLOBAL, THREAD_LOCAL] {
        fakecuda::with(46, |gpu| assert_eq!(gpu.begin_capture(handle, mode), 0));
        let watch = watches.stream(foreign(&stream)).unwrap();
        assert_eq!(outcome(&watch), Status::Ready);
        drop(DeviceMemory::new(&device, 64).unwrap());
        stream.synchronize().unwrap();
        fakecuda::with(46, |gpu| assert_eq!(gpu.end_capture(handle), 0));
    }
}

#[test]
fn an_event_that_was_recorded_under_capture_is_refused() {
    let device = device(47);
    let captured = Stream::new(&device).unwrap();
    let (watches, event) = (Watches::new(&device), GpuEvent::new(&device).unwrap());
    // SAFETY: the event is alive until the end of the test.
    let foreign = unsafe { ForeignEvent::new(event.address(), "event") }.unwrap();
    let handle = captured.handle() as u64;
    fakecuda::with(47, |gpu| assert_eq!(gpu.begin_capture(handle, GLOBAL), 0));
    captured.record(&event).unwrap();
    let refused = watches.event(foreign).unwrap_err().to_string();
    assert!(refused.starts_with("event: was recorded in a stream that is being captured"), "{refused}");
    fakecuda::with(47, |gpu| gpu.end_capture(handle));
    captured.record(&event).unwrap();
    assert_eq!(outcome(&watches.event(foreign).unwrap()), Status::Ready);
}
