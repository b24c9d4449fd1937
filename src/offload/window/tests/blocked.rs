//! A call that the driver blocks, because its queues are full, keeps no other call waiting.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::device::{Desk, Dropped, homes};
use super::tier::{on_tier, open, put};
use super::{memory, seen, unit, values};
use crate::error::{Error, Result};
use crate::gpu::tests::{fill, foreign, until, while_blocked};
use crate::offload::window::device::{Device, Gpu, Host, Mark, Reader, Source};
use crate::offload::window::engine::{Unit, Window};
use crate::pool::region::Backing;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::sync::{Lock, Signal, deadline_after};
use crate::tier::options::PathLocation;

const BYTES: usize = 5000;
const UNITS: usize = 5;

#[test]
fn statistics_and_other_units_do_not_wait_while_the_driver_blocks_a_call() {
    const ORDINAL: u32 = 79;
    let desk = Desk::new(ORDINAL);
    let (_homes, units) = homes(BYTES, UNITS);
    let window = desk.window(&units, 3, Dropped::Nothing);
    let reader = Some(foreign(&desk.streams[0]));
    let enter = |number| {
        window.enter(number, reader, None).unwrap();
    };
    let others = |window: &Window, uses: u64| {
        assert_eq!(window.stats().uses, uses);
        window.begin();
        window.changed(4).unwrap();
    };
    // The copy, its event, and each later call of the driver in turn.
    for space in 0..3 {
        let number = space + 1;
        fill(ORDINAL, &desk.streams[1], space);
        while_blocked(ORDINAL, || enter(number), || others(&window, 3 * space as u64));
        // The wait for the copy of a unit that is there.
        fill(ORDINAL, &desk.streams[1], 0);
        while_blocked(ORDINAL, || enter(number), || others(&window, 3 * space as u64 + 1));
        desk.read(&window, number, BYTES, 1).unwrap();
        for _ in 0..2 {
            fill(ORDINAL, &desk.streams[1], 0);
            let leave = || window.leave(number, reader).unwrap();
            while_blocked(ORDINAL, leave, || others(&window, 3 * space as u64 + 3));
        }
    }
    desk.synchronize();
    assert_eq!(desk.races(), 0);
}

/// The driver has locks of its own, which a query may wait for.
#[test]
fn statistics_do_not_wait_while_the_driver_blocks_a_query_of_marks() {
    const ORDINAL: u32 = 80;
    let desk = Desk::new(ORDINAL);
    let home = memory(BYTES, 0, 0);
    let window = desk.window(&[unit(&home, BYTES, true)], 1, Dropped::Nothing);
    (0..8).for_each(|_| drop(desk.read(&window, 0, BYTES, 0).unwrap()));
    let reader = Some(foreign(&desk.streams[0]));
    window.enter(0, reader, None).unwrap();
    fakecuda::with(ORDINAL, |gpu| (gpu.stalled, gpu.held) = (true, vec!["cuEventQuery"]));
    let leave = || window.leave(0, reader).unwrap();
    while_blocked(ORDINAL, leave, || assert_eq!(window.stats().uses, 9));
    desk.synchronize();
    assert_eq!(desk.races(), 0);
}

#[test]
fn a_use_has_its_limit_while_the_driver_blocks_the_thread_that_reads_a_tier() {
    const ORDINAL: u32 = 81;
    let (desk, tier) = (Desk::new(ORDINAL), open(PathLocation::Memory(None), None));
    let units = [on_tier(put(&tier, 0, 0)), on_tier(put(&tier, 1, 0))];
    let bytes = units[0].bytes as usize;
    let gpu =
        |layout| -> Result<Box<dyn Device>> { Ok(Box::new(Gpu::new(&desk.device, &desk.registry, layout)?)) };
    let window = Window::open(&units, 2, Some(Arc::clone(&tier)), gpu).unwrap();
    desk.read(&window, 0, bytes, 0).unwrap();
    fill(ORDINAL, &desk.streams[1], 0);
    let reader = Some(foreign(&desk.streams[0]));
    let late = |limit| {
        let late = window.enter(1, reader, Some(limit)).unwrap_err();
        assert!(matches!(late, Error::Timeout(_)), "{late}");
    };
    late(Duration::ZERO);
    while_blocked(
        ORDINAL,
        || {
            window.enter(1, reader, None).unwrap();
        },
        || {
            late(Duration::from_millis(1));
            assert_eq!(window.stats().uses, 1);
        },
    );
    window.leave(1, reader).unwrap();
    let read = desk.read(&window, 1, bytes, 0).unwrap();
    desk.synchronize();
    assert!(read.span().to_vec() == values(bytes, 1, 0) && desk.races() == 0);
}

/// Host memory whose copies wait at a gate.
#[derive(Debug)]
struct Gated {
    host: Host,
    gate: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    /// Copies that have passed, that may pass, and that wait.
    copies: Lock<(usize, usize, usize)>,
    opened: Signal,
}

impl Gate {
    fn open(&self, copies: usize) {
        self.copies.lock().1 = copies;
        self.opened.notify_all();
    }

    fn pass(&self) {
        self.copies.lock().2 += 1;
        let closed = |copies: &mut (usize, usize, usize)| copies.0 == copies.1;
        let end = deadline_after(Some(Duration::from_secs(60)));
        let mut copies = self.opened.wait_while(self.copies.lock(), end, closed);
        copies.0 += 1;
        copies.2 -= 1;
    }
}

impl Device for Gated {
    fn address(&self, place: usize) -> u64 {
        self.host.address(place)
    }

    fn source(&self, memory: &TransferBuffer, argument: &'static str) -> Result<Source> {
        self.host.source(memory, argument)
    }

    fn fill(&self, place: usize, from: &Source, after: &[Mark]) -> Result<Mark> {
        self.gate.pass();
        self.host.fill(place, from, after)
    }

    fn order(&self, copy: &Mark, reader: Reader) -> Result<()> {
        self.host.order(copy, reader)
    }

    fn mark(&self, reader: Reader) -> Result<Mark> {
        self.host.mark(reader)
    }

    fn finish(&self) -> Result<()> {
        self.host.finish()
    }

    fn backing(&self) -> Backing {
        self.host.backing()
    }
}

/// The copy of unit 1, ahead of its use, waits; its slot goes to unit 2. Then unit 0 is used again.
#[test]
fn a_slot_that_is_given_away_while_its_copy_is_enqueued_gets_the_copies_in_order() {
    let gate = Arc::new(Gate::default());
    let (homes, units) = homes(BYTES, 4);
    let gated = |layout| -> Result<Box<dyn Device>> {
        Ok(Box::new(Gated { host: Host::new(layout)?, gate: Arc::clone(&gate) }))
    };
    let window = Window::open(&units, 2, None, gated).unwrap();
    let used = |number| {
        assert_eq!(seen(window.enter(number, None, None).unwrap(), BYTES), values(BYTES, number, 0));
    };
    gate.open(4);
    for number in 0..4 {
        used(number);
        window.leave(number, None).unwrap();
    }
    window.begin();
    gate.open(5);
    let is_open = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| used(0));
        until(|| matches!(*gate.copies.lock(), (5, 5, 1)));
        let other = scope.spawn(|| used(2));
        // The use of unit 2 has its slot; its copy is left to the thread that enqueues that of unit 1.
        until(|| window.stats().late == 6);
        let changed = scope.spawn(|| {
            window.changed(1).unwrap();
            assert!(is_open.load(Ordering::Relaxed), "the copy of unit 1 reads its home");
            homes[1].span().write(&values(BYTES, 1, 1));
        });
        used(0);
        window.leave(0, None).unwrap();
        assert!(!other.is_finished() && !changed.is_finished());
        is_open.store(true, Ordering::Relaxed);
        gate.open(usize::MAX);
    });
    [0, 2].into_iter().for_each(|number| window.leave(number, None).unwrap());
    assert_eq!(seen(window.enter(1, None, None).unwrap(), BYTES), values(BYTES, 1, 1));
    window.leave(1, None).unwrap();
    // The last use looks ahead to unit 2.
    assert_eq!((window.stats().fetches, window.stats().uses), (9, 8));
}

#[test]
fn threads_with_streams_of_their_own_use_a_window_of_a_device_in_order() {
    let desk = Desk::new(82);
    let (_homes, units): (_, Vec<Unit>) = homes(BYTES, UNITS);
    for slots in [2, 3, 4] {
        let window = desk.window(&units, slots, Dropped::Nothing);
        thread::scope(|scope| {
            for on in 0..2 {
                let (desk, window) = (&desk, &window);
                scope.spawn(move || {
                    for round in 0..100 {
                        let number = (round * (on + 1) + on) % UNITS;
                        let read = desk.read(window, number, BYTES, on).unwrap();
                        if round % 5 == on {
                            desk.streams[on].synchronize().unwrap();
                            assert!(read.span().to_vec() == values(BYTES, number, 0));
                        }
                    }
                });
            }
        });
        assert_eq!(window.stats().uses, 200);
    }
    desk.synchronize();
    assert_eq!(desk.races(), 0);
}
