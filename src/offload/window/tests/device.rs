//! A window in host memory and on the fake CUDA driver: values, order, bytes, and errors of the driver.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::{memory, on_host, rounded, seen, unit, values};
use crate::error::{Error, GpuKind, Result};
use crate::gpu::device::Device as GpuDevice;
use crate::gpu::memory::{HostSpan, Registry};
use crate::gpu::stream::Stream;
use crate::gpu::tests::{device, foreign, span_at};
use crate::offload::window::device::{Device, Gpu, Layout, Mark, Reader, Source};
use crate::offload::window::engine::{Unit, Window};
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::sync::Lock;

const BYTES: usize = 5000;
const UNITS: usize = 5;
/// A forward and its backward.
const PASSES: [usize; 2 * UNITS] = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0];

pub(super) fn homes(bytes: usize, count: usize) -> (Vec<Buffer>, Vec<Unit>) {
    let homes: Vec<Buffer> = (0..count).map(|number| memory(bytes, number, 0)).collect();
    let units = homes.iter().map(|home| unit(home, bytes, false)).collect();
    (homes, units)
}

#[test]
fn in_host_memory_every_use_has_the_values_of_its_home_in_slots_times_the_largest_unit() {
    for slots in [1, 2, 3, UNITS, UNITS + 4] {
        let (homes, units) = homes(BYTES, UNITS);
        let window = on_host(&units, slots, None);
        for step in 0..3 {
            window.begin();
            for number in PASSES {
                let address = window.enter(number, None, None).unwrap();
                assert_eq!(address % 512, homes[0].span().address() as u64 % 512);
                assert_eq!(seen(address, BYTES), values(BYTES, number, step), "{slots} {step} {number}");
                window.leave(number, None).unwrap();
            }
            for (number, home) in homes.iter().enumerate() {
                window.changed(number).unwrap();
                home.span().write(&values(BYTES, number, step + 1));
            }
        }
        let (stats, slots) = (window.stats(), slots.min(UNITS) as u64);
        assert_eq!(stats.device_bytes, slots * rounded(BYTES));
        assert_eq!(stats.peak_bytes, slots * BYTES as u64);
        // In each step a forward fetches all units, and a backward those that are not there any more.
        assert_eq!(stats.fetches, 3 * (2 * UNITS as u64 - slots));
        assert_eq!((stats.fetched_bytes, stats.uses), (stats.fetches * BYTES as u64, 30));
        // The first step records the order. With one slot nothing is fetched ahead.
        let late = if slots == 1 { stats.fetches } else { 2 * UNITS as u64 - slots + 2 };
        assert_eq!(stats.late, late, "{slots}");
    }
}

#[test]
fn units_that_stay_and_units_without_bytes_need_no_slot() {
    let (sizes, homes) = ([1000, 0, 3000, 2000], [0, 1, 2, 3].map(|number| memory(4096, number, 0)));
    let units: Vec<Unit> = sizes
        .iter()
        .zip(&homes)
        .enumerate()
        .map(|(number, (bytes, home))| unit(home, *bytes, number == 2))
        .collect();
    let window = on_host(&units, 1, None);
    assert_eq!(window.stats().device_bytes, rounded(2000) + rounded(3000));
    for _ in 0..3 {
        let addresses = [1, 2, 3].map(|number| window.enter(number, None, None).unwrap());
        assert_eq!(seen(addresses[1], 3000), values(3000, 2, 0));
        assert!(matches!(window.enter(0, None, None), Err(Error::Busy(_))));
        [1, 2, 3].into_iter().for_each(|number| window.leave(number, None).unwrap());
        let address = window.enter(0, None, None).unwrap();
        assert_eq!(seen(address, 1000), values(1000, 0, 0));
        window.leave(0, None).unwrap();
    }
    assert_eq!((window.stats().fetches, window.stats().peak_bytes), (2 + 2 * 3, 2000));
    drop(on_host(&[], 2, None));
}

#[test]
fn two_threads_use_one_window() {
    let (homes, units) = homes(BYTES, 4);
    let window = on_host(&units, 3, None);
    thread::scope(|scope| {
        for first in 0..2 {
            let window = &window;
            scope.spawn(move || {
                for round in 0..300 {
                    let number = (first + round) % 4;
                    // If the other thread has said that the unit changes, its uses end first.
                    let address = loop {
                        match window.enter(number, None, None) {
                            Err(Error::Busy(_)) => thread::yield_now(),
                            outcome => break outcome.unwrap(),
                        }
                    };
                    assert_eq!(seen(address, BYTES), values(BYTES, number, 0));
                    if round % 7 == 0 {
                        window.changed(number).unwrap();
                    }
                    window.leave(number, None).unwrap();
                }
            });
        }
    });
    drop(homes);
}

/// A wait that is left out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Dropped {
    Nothing,
    Readers,
    Copy,
}

/// A GPU without one of the waits.
#[derive(Debug)]
struct Lossy(Gpu, Dropped);

impl Device for Lossy {
    fn address(&self, place: usize) -> u64 {
        self.0.address(place)
    }

    fn source(&self, memory: &TransferBuffer, argument: &'static str) -> Result<Source> {
        self.0.source(memory, argument)
    }

    fn fill(&self, place: usize, from: &Source, after: &[Mark]) -> Result<Mark> {
        self.0.fill(place, from, if self.1 == Dropped::Readers { &[] } else { after })
    }

    fn order(&self, copy: &Mark, reader: Reader) -> Result<()> {
        if self.1 == Dropped::Copy { Ok(()) } else { self.0.order(copy, reader) }
    }

    fn mark(&self, reader: Reader) -> Result<Mark> {
        self.0.mark(reader)
    }

    fn finish(&self) -> Result<()> {
        self.0.finish()
    }

    fn backing(&self) -> Backing {
        self.0.backing()
    }
}

/// A framework on a fake GPU, with two streams and a window.
pub(super) struct Desk {
    ordinal: u32,
    pub device: Arc<GpuDevice>,
    pub registry: Arc<Registry>,
    pub streams: [Stream; 2],
    /// Host memory of queued copies.
    held: Lock<Vec<HostSpan>>,
}

impl Desk {
    pub fn new(ordinal: u32) -> Desk {
        let device = device(ordinal);
        let streams = [Stream::new(&device).unwrap(), Stream::new(&device).unwrap()];
        Desk { ordinal, registry: Arc::new(Registry::new(&device)), streams, held: Lock::default(), device }
    }

    pub fn window(&self, units: &[Unit], slots: usize, dropped: Dropped) -> Window {
        let lossy = |layout: Layout| -> Result<Box<dyn Device>> {
            Ok(Box::new(Lossy(Gpu::new(&self.device, &self.registry, layout)?, dropped)))
        };
        Window::open(units, slots, None, lossy).unwrap()
    }

    /// Uses a unit on a stream, which copies it to the host. The stream's work stays queued.
    pub fn read(&self, window: &Window, number: usize, bytes: usize, on: usize) -> Result<HostSpan> {
        let reader = Some(foreign(&self.streams[on]));
        let address = window.enter(number, reader, None)?;
        let to = Buffer::open(bytes, Backing::default()).unwrap().transfer(0, bytes);
        let to = self.registry.host(to, "host").unwrap();
        self.held.lock().push(to.clone());
        self.streams[on].download(span_at(address, bytes as u64), &to)?;
        window.leave(number, reader)?;
        Ok(to)
    }

    pub fn synchronize(&self) {
        self.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    }

    pub fn races(&self) -> usize {
        fakecuda::with(self.ordinal, |gpu| {
            assert_eq!(gpu.pageable_copies, 0);
            gpu.races().len()
        })
    }
}

fn train(desk: &Desk, slots: usize, dropped: Dropped) -> (bool, usize, Window) {
    let (homes, units) = homes(BYTES, UNITS);
    let window = desk.window(&units, slots, dropped);
    let mut same = true;
    for step in 0..3 {
        window.begin();
        let order: &[usize] = if step == 2 { &[0, 3, 1, 1, 4, 0] } else { &PASSES };
        let read: Vec<_> = order
            .iter()
            .enumerate()
            .map(|(at, number)| (*number, desk.read(&window, *number, BYTES, at / 2 % 2).unwrap()))
            .collect();
        desk.synchronize();
        for (number, found) in read {
            same &= found.span().to_vec() == values(BYTES, number, step);
        }
        for (number, home) in homes.iter().enumerate() {
            window.changed(number).unwrap();
            let address = home.span().address() as u64;
            fakecuda::with(desk.ordinal, |gpu| gpu.host_access(address, BYTES as u64, true));
            home.span().write(&values(BYTES, number, step + 1));
        }
    }
    (same, desk.races(), window)
}

#[test]
fn on_a_device_readers_on_two_streams_see_their_units_and_no_slot_is_overwritten_before_them() {
    for slots in [1, 2, 3] {
        let desk = Desk::new(50);
        let before = fakecuda::with(50, |gpu| gpu.memory_used());
        let (same, races, window) = train(&desk, slots, Dropped::Nothing);
        assert!(same && races == 0, "{slots}: {races}");
        let used = fakecuda::with(50, |gpu| gpu.memory_used()) - before;
        assert_eq!((used, window.stats().device_bytes), (slots as u64 * rounded(BYTES), used));
        assert_eq!(window.stats().peak_bytes, (slots * BYTES) as u64);
        drop(window);
        assert_eq!(fakecuda::with(50, |gpu| gpu.memory_used()), before);
    }
}

#[test]
fn a_missing_wait_of_a_copy_or_of_a_reader_is_a_race() {
    for dropped in [Dropped::Readers, Dropped::Copy] {
        for slots in [1, 2, 3] {
            let (_, races, _window) = train(&Desk::new(51), slots, dropped);
            assert!(races > 0, "{dropped:?} {slots}");
        }
    }
}

#[test]
fn errors_of_the_driver_are_those_of_the_unit_and_a_later_use_tries_again() {
    let desk = Desk::new(52);
    let (_homes, units) = homes(BYTES, UNITS);
    let window = desk.window(&units, 2, Dropped::Nothing);
    let use_of = |number| desk.read(&window, number, BYTES, 0);
    for number in [0, 1, 2] {
        use_of(number).unwrap();
    }
    window.begin();
    let refuse = |call, after| fakecuda::with(52, |gpu| gpu.faults.push((call, after, 1)));
    let refused = |outcome: Result<HostSpan>| matches!(outcome, Err(Error::Gpu(error)) if error.kind == GpuKind::Refused);
    // The copy of unit 1, which the use of unit 0 begins, fails: that use does not.
    refuse("cuMemcpyHtoDAsync_v2", 1);
    use_of(0).unwrap();
    assert!(refused(use_of(1)));
    use_of(1).unwrap();
    refuse("cuMemcpyHtoDAsync_v2", 0);
    assert!(refused(use_of(3)));
    // A reader that cannot wait has no use.
    use_of(1).unwrap();
    refuse("cuStreamWaitEvent", 0);
    assert!(refused(use_of(1)));
    // A use whose end cannot be recorded is still to be released.
    let reader = Some(foreign(&desk.streams[0]));
    window.enter(1, reader, None).unwrap();
    refuse("cuEventRecord", 0);
    assert!(window.leave(1, reader).is_err());
    window.leave(1, reader).unwrap();
    assert!(window.leave(1, reader).is_err());
    let last = use_of(4).unwrap();
    desk.synchronize();
    assert_eq!((last.span().to_vec(), desk.races()), (values(BYTES, 4, 0), 0));

    fakecuda::with(52, |gpu| gpu.faults.push(("cuMemcpyHtoDAsync_v2", 0, 719)));
    for number in [2, 2, 0] {
        let outcome = use_of(number);
        assert!(matches!(outcome, Err(Error::Gpu(error)) if error.kind == GpuKind::Lost), "{number}");
    }
    window.begin();
    drop(window);
}

#[test]
fn what_a_device_cannot_hold_or_reach_is_refused() {
    let desk = Desk::new(53);
    let open = |units: &[Unit], slots| {
        Window::open(units, slots, None, |layout| {
            Ok(Box::new(Gpu::new(&desk.device, &desk.registry, layout)?))
        })
    };
    let (_homes, units) = homes(BYTES, 3);
    fakecuda::with(53, |gpu| gpu.queues.limits.memory_bytes = gpu.memory_used() + 2 * rounded(BYTES));
    assert!(matches!(open(&units, 3), Err(Error::Gpu(error)) if error.kind == GpuKind::OutOfMemory));
    drop(open(&units, 2).unwrap());
    let mut wrong = units.clone();
    wrong[1].bytes += 1;
    let error = open(&wrong, 2).unwrap_err().to_string();
    assert_eq!(error, "units[1].bytes: is 5001, but its memory has 5000 bytes");
    wrong[1].bytes = u64::MAX - 5;
    assert_eq!(open(&wrong, 2).unwrap_err().to_string(), "units: exceed the address space");
    assert!(desk.races() == 0);
}

/// The waits that have no limit of the caller's end, and what the device may still use stays.
#[test]
fn a_device_that_hangs_is_a_timeout_and_keeps_the_slots_and_what_copies_read() {
    const ORDINAL: u32 = 78;
    let desk = Desk::new(ORDINAL);
    desk.device.set_patience(Duration::from_millis(20));
    let (homes, units) = homes(BYTES, UNITS);
    let before = fakecuda::with(ORDINAL, |gpu| gpu.memory_used());
    let window = desk.window(&units, 2, Dropped::Nothing);
    fakecuda::with(ORDINAL, |gpu| gpu.stalled = true);
    let reader = Some(foreign(&desk.streams[0]));
    window.enter(0, reader, None).unwrap();
    window.leave(0, reader).unwrap();
    let late = window.changed(0).unwrap_err();
    assert!(matches!(late, Error::Timeout(_)), "{late}");
    let registered = fakecuda::with(ORDINAL, |gpu| gpu.alive()[4]);
    drop((window, units, homes));
    fakecuda::with(ORDINAL, |gpu| {
        assert_eq!((gpu.memory_used() - before, gpu.alive()[4]), (2 * rounded(BYTES), registered));
    });
    fakecuda::resume(ORDINAL);
    desk.synchronize();
    assert_eq!(desk.races(), 0);
}
