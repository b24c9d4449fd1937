//! A watch refers to the framework's work at the time of the call, even if the framework reuses or destroys its event.

use std::sync::Arc;

use fakecuda::capture::{GLOBAL, THREAD_LOCAL};

use super::{device, foreign};
use crate::gpu::memory::{DeviceMemory, Registry};
use crate::gpu::stream::{ForeignEvent, GpuEvent, Stream};
use crate::gpu::watch::Watches;
use crate::pool::pinned;
use crate::pool::region::Backing;
use crate::sys::event::{PollSource, Status};

#[test]
fn an_event_may_go_at_once_and_streams_are_used_again() {
    let device = device(43);
    let (stream, watches) = (Stream::new(&device).unwrap(), Arc::new(Watches::new(&device)));
    let (memory, block) =
        (DeviceMemory::new(&device, 64).unwrap(), pinned::alloc(64, Backing::default()).unwrap());
    let host = Registry::new(&device).host(block.part(0, 64), "block").unwrap();
    for kind in 0..4 {
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
        assert_eq!([watch.status(), watch.status()], [Status::Pending, Status::Ready]);
        drop(watch);
        fakecuda::with(43, |gpu| {
            assert_eq!(gpu.alive()[..2], [2, 1], "one stream and one event beside ours")
        });
    }
    // Two watches at a time need one stream each.
    let [first, second] = [0, 1].map(|_| watches.stream(foreign(&stream)).unwrap());
    fakecuda::with(43, |gpu| assert_eq!(gpu.alive()[0], 3));
    stream.synchronize().unwrap();
    assert_eq!(first.status(), Status::Ready);
    drop((first, second));
    drop(host);
    pinned::free(block.address()).unwrap();
}

#[test]
fn a_lost_context_breaks_the_watch() {
    let device = device(44);
    let (stream, watches) = (Stream::new(&device).unwrap(), Arc::new(Watches::new(&device)));
    let watch = watches.stream(foreign(&stream)).unwrap();
    fakecuda::with(44, |gpu| gpu.faults.push(("cuEventQuery", 0, 700)));
    assert_eq!(watch.status(), Status::Broken("the GPU reported an error"));
    assert_eq!(watch.status(), Status::Broken("the GPU reported an error"));
    assert!(watches.stream(foreign(&stream)).is_err());
}

/// The framework captures a graph while a Spillway thread polls and while Spillway calls run on the capturing thread.
#[test]
fn a_capture_of_the_framework_is_not_broken_by_any_call_of_ours() {
    let device = device(46);
    let (stream, captured) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let watches = Arc::new(Watches::new(&device));
    let handle = captured.handle() as u64;
    for mode in [GLOBAL, THREAD_LOCAL] {
        let watch = watches.stream(foreign(&stream)).unwrap();
        fakecuda::with(46, |gpu| assert_eq!(gpu.begin_capture(handle, mode), 0));
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(watch.status(), Status::Pending));
        });
        assert_eq!(watch.status(), Status::Ready);
        drop(DeviceMemory::new(&device, 64).unwrap());
        stream.synchronize().unwrap();
        fakecuda::with(46, |gpu| assert_eq!(gpu.end_capture(handle), 0));
    }
}

#[test]
fn an_event_that_was_recorded_under_capture_is_refused() {
    let device = device(47);
    let captured = Stream::new(&device).unwrap();
    let (watches, event) = (Arc::new(Watches::new(&device)), GpuEvent::new(&device).unwrap());
    // SAFETY: the event is alive until the end of the test.
    let foreign = unsafe { ForeignEvent::new(event.address(), "event") }.unwrap();
    let handle = captured.handle() as u64;
    fakecuda::with(47, |gpu| assert_eq!(gpu.begin_capture(handle, GLOBAL), 0));
    captured.record(&event).unwrap();
    let refused = watches.event(foreign).unwrap_err().to_string();
    assert!(refused.starts_with("event: was recorded in a stream that is being captured"), "{refused}");
    fakecuda::with(47, |gpu| gpu.end_capture(handle));
    captured.record(&event).unwrap();
    let watch = watches.event(foreign).unwrap();
    assert_eq!([watch.status(), watch.status()], [Status::Pending, Status::Ready]);
}
