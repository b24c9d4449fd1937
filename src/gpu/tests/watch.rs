//! What the host watches stands for the framework's work as it was, whatever the framework does with its event.

use std::sync::Arc;

use super::{device, foreign};
use crate::gpu::memory::{DeviceMemory, Registry};
use crate::gpu::stream::{Event, ForeignEvent, Stream};
use crate::gpu::watch::Watches;
use crate::pool::pinned;
use crate::sys::event::{Question, Standing};

#[test]
fn an_event_may_go_at_once_and_streams_are_used_again() {
    let device = device(43);
    let (stream, watches) = (Stream::new(&device).unwrap(), Arc::new(Watches::new(&device)));
    let (memory, block) = (DeviceMemory::new(&device, 64).unwrap(), pinned::alloc(64).unwrap());
    let host = Registry::new(&device).host(block.part(0, 64), "block").unwrap();
    for kind in 0..4 {
        block.write(&[kind; 64]);
        stream.upload(&host, memory.span()).unwrap();
        let watch = match kind % 2 {
            0 => watches.stream(foreign(&stream)).unwrap(),
            _ => {
                let event = Event::new(&device).unwrap();
                stream.record(&event).unwrap();
                // SAFETY: alive during the call.
                watches.event(unsafe { ForeignEvent::new(event.address(), "event") }.unwrap()).unwrap()
            }
        };
        assert_eq!([watch.standing(), watch.standing()], [Standing::Pending, Standing::Ready]);
        drop(watch);
        fakecuda::with(43, |gpu| {
            assert_eq!(gpu.alive()[..2], [2, 1], "one stream and one event beside ours")
        });
    }
    // Two at a time need a stream each.
    let [first, second] = [0, 1].map(|_| watches.stream(foreign(&stream)).unwrap());
    fakecuda::with(43, |gpu| assert_eq!(gpu.alive()[0], 3));
    stream.synchronize().unwrap();
    assert_eq!(first.standing(), Standing::Ready);
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
    assert_eq!(watch.standing(), Standing::Broken("the GPU reports an error"));
    assert_eq!(watch.standing(), Standing::Broken("the GPU reports an error"));
    assert!(watches.stream(foreign(&stream)).is_err());
}
