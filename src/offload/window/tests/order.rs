//! The rule alone. A checker with vector clocks performs what it says: one stream of copies, and two of readers.
#![forbid(unsafe_code)]

use crate::error::Error;
use crate::offload::window::order::{Fill, Order};

const STREAMS: usize = 3;
const COPIES: usize = 0;
type Clock = [u64; STREAMS];

/// A wait that is left out.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Dropped {
    Nothing,
    /// A copy does not wait for the readers before it.
    Readers,
    /// A reader does not wait for the copy.
    Copy,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    /// Unit and version that the last copy wrote, and its time.
    value: (usize, u64),
    written: u64,
    /// Streams and times of reads.
    reads: Vec<(usize, u64)>,
}

/// A window whose device only checks the order of its work.
#[derive(Debug, Clone)]
struct Checked {
    order: Order<Clock>,
    dropped: Dropped,
    clocks: [Clock; STREAMS],
    slots: Vec<Slot>,
    /// For each unit: its version, the end of its last copy, and the streams of its users.
    units: Vec<(u64, Clock, Vec<usize>)>,
    /// Missing order.
    found: usize,
    fills: Vec<usize>,
}

fn merge(into: &mut Clock, from: &Clock) {
    into.iter_mut().zip(from).for_each(|(into, from)| *into = (*into).max(*from));
}

impl Checked {
    fn new(slots: usize, stays: &[bool], dropped: Dropped) -> Checked {
        let places = slots + stays.iter().filter(|stays| **stays).count();
        Checked {
            order: Order::new(slots, stays),
            dropped,
            clocks: [[0; STREAMS]; STREAMS],
            slots: vec![Slot::default(); places],
            units: vec![(0, [0; STREAMS], Vec::new()); stays.len()],
            found: 0,
            fills: Vec::new(),
        }
    }

    fn fill(&mut self, Fill { unit, place }: Fill) {
        self.fills.push(unit);
        let mut clock = self.clocks[COPIES];
        let marks = self.order.take_marks(place);
        if self.dropped != Dropped::Readers {
            marks.iter().for_each(|mark| merge(&mut clock, mark));
        }
        clock[COPIES] += 1;
        let slot = &mut self.slots[place];
        self.found += slot.reads.iter().filter(|(stream, time)| clock[*stream] < *time).count();
        *slot = Slot { value: (unit, self.units[unit].0), written: clock[COPIES], reads: Vec::new() };
        self.units[unit].1 = clock;
        self.clocks[COPIES] = clock;
    }

    /// A read of a unit's place, with the values of this version.
    fn read(&mut self, unit: usize, stream: usize) {
        let place = self.order.place(unit).expect("a unit in use has a place");
        self.clocks[stream][stream] += 1;
        let clock = self.clocks[stream];
        let slot = &mut self.slots[place];
        assert_eq!(slot.value.0, unit, "another unit's values");
        self.found += usize::from(clock[COPIES] < slot.written);
        slot.reads.push((stream, clock[stream]));
    }

    fn enter(&mut self, unit: usize, stream: usize) -> bool {
        let before = self.order.clone();
        let Ok(fill) = self.order.enter(unit) else {
            assert_eq!(format!("{:?}", self.order), format!("{before:?}"), "a refused use changes nothing");
            return false;
        };
        if let Some(fill) = fill {
            self.fill(fill);
        }
        for fill in self.order.ahead() {
            self.fill(fill);
        }
        if self.dropped != Dropped::Copy {
            let copied = self.units[unit].1;
            merge(&mut self.clocks[stream], &copied);
        }
        self.read(unit, stream);
        let place = self.order.place(unit).expect("a unit in use has a place");
        assert_eq!(self.slots[place].value.1, self.units[unit].0, "an old version");
        self.units[unit].2.push(stream);
        true
    }

    fn leave(&mut self, unit: usize, which: usize) -> bool {
        if which >= self.units[unit].2.len() {
            return false;
        }
        let stream = self.units[unit].2.remove(which);
        self.read(unit, stream);
        self.order.leave(unit, self.clocks[stream], |_| false).unwrap();
        for fill in self.order.ahead() {
            self.fill(fill);
        }
        true
    }

    fn changed(&mut self, unit: usize) {
        self.units[unit].0 += 1;
        self.order.changed(unit).unwrap();
    }

    /// One pass over units, each released before the next use.
    fn pass(&mut self, units: &[usize]) -> Vec<usize> {
        self.fills.clear();
        for unit in units {
            assert!(self.enter(*unit, 1) && self.leave(*unit, 0));
        }
        self.fills.clone()
    }

    /// Every order of `depth` further calls; returns the places where order was missing, and the number of calls.
    fn explore(&self, depth: usize) -> (usize, usize) {
        let (mut found, mut calls) = (self.found, 1);
        if depth == 0 {
            return (found, calls);
        }
        let units = self.units.len();
        for unit in 0..units {
            for choice in 0..5 {
                let mut next = self.clone();
                let valid = match choice {
                    0 | 1 => next.enter(unit, 1 + choice),
                    2 | 3 => next.leave(unit, choice - 2),
                    _ => {
                        next.changed(unit);
                        true
                    }
                };
                if valid {
                    let (more, done) = next.explore(depth - 1);
                    (found, calls) = (found + more, calls + done);
                }
            }
        }
        let mut next = self.clone();
        next.order.begin();
        let (more, done) = next.explore(depth - 1);
        (found + more, calls + done)
    }
}

const CONFIGURATIONS: [(usize, [bool; 3]); 4] =
    [(1, [false; 3]), (2, [false; 3]), (3, [false; 3]), (1, [false, true, false])];

#[test]
fn in_every_order_of_calls_copies_and_readers_wait_for_each_other_and_values_are_the_last() {
    for (slots, stays) in CONFIGURATIONS {
        let fresh = Checked::new(slots, &stays, Dropped::Nothing);
        let mut trained = fresh.clone();
        trained.pass(&[0, 1, 2, 1, 0]);
        trained.order.begin();
        for (start, depth) in [(fresh, 4), (trained, 4)] {
            let (found, calls) = start.explore(depth);
            assert!(found == 0 && calls > 1000, "{slots} slots: {found} of {calls}");
        }
    }
}

#[test]
fn a_wait_that_is_left_out_is_found() {
    for dropped in [Dropped::Readers, Dropped::Copy] {
        for (slots, stays) in CONFIGURATIONS {
            let mut window = Checked::new(slots, &stays, dropped);
            window.pass(&[0, 1, 2, 1, 0, 2]);
            window.changed(0);
            window.pass(&[0, 1, 2]);
            assert!(window.found > 0, "{dropped:?} {slots}");
        }
    }
}

#[test]
fn units_are_fetched_in_the_recorded_order_and_after_another_order_late_only() {
    let mut window = Checked::new(2, &[false; 4], Dropped::Nothing);
    let passes = [0, 1, 2, 3, 3, 2, 1, 0];
    assert_eq!(window.pass(&passes), [0, 1, 2, 3, 1, 0]);
    window.order.begin();
    // Units 0 and 1 are there; each use then starts the copy for the next one, in the same order.
    assert_eq!(window.pass(&passes), [2, 3, 1, 0]);
    window.order.begin();
    assert_eq!(window.pass(&[0]), [0; 0]);
    // A branch: unit 2 is late. What followed 0 and 2 is not known yet.
    assert!(window.enter(2, 1) && window.leave(2, 0));
    assert_eq!(window.fills, [2]);
    assert!(window.enter(3, 1) && window.leave(3, 0));
    assert_eq!(window.fills, [2, 3]);
}

#[test]
fn random_orders_take_no_more_memory_and_a_regular_order_after_them_is_learned() {
    let (mut window, mut rng) =
        (Checked::new(2, &[false; 20], Dropped::Nothing), fastrand::Rng::with_seed(1));
    let mut most = 0;
    for _ in 0..2000 {
        window.pass(&[rng.usize(..20)]);
        most = most.max(window.order.after.len());
    }
    assert_eq!(most, 160, "8 pairs for each of 20 units");
    let regular: Vec<usize> = (0..20).collect();
    for _ in 0..2 {
        window.order.begin();
        window.pass(&regular);
    }
    window.order.begin();
    assert_eq!(window.pass(&[0, 1, 2]).last(), Some(&3), "fetched before its use");
}

#[test]
fn a_unit_that_is_being_written_is_not_fetched_before_its_use_or_the_next_iteration() {
    let mut window = Checked::new(2, &[false; 3], Dropped::Nothing);
    window.pass(&[0, 1, 2, 0, 1, 2]);
    window.changed(0);
    window.changed(1);
    window.fills.clear();
    assert!(window.enter(0, 1) && window.leave(0, 0));
    assert_eq!(window.fills, [0], "unit 1 may be written now");
    window.order.begin();
    window.pass(&[0, 1, 2]);
    window.changed(1);
    window.order.begin();
    assert_eq!(window.pass(&[0]), [1]);
}

#[test]
fn slots_that_all_have_users_are_an_error_that_names_them() {
    let mut order = Order::<()>::new(2, &[false, false, false, true]);
    let filled = |order: &mut Order<()>, unit| order.enter(unit).unwrap().map(|fill| fill.place);
    assert_eq!(
        [filled(&mut order, 2), filled(&mut order, 0), filled(&mut order, 3)],
        [Some(0), Some(1), Some(2)]
    );
    assert_eq!(filled(&mut order, 2), None, "a second use");
    let error = order.enter(1).unwrap_err();
    let words = "unit 1 finds no slot: all 2 have users, which are those of units [0, 2]; release one of them, or open the \
                 window with more slots";
    assert_eq!(error, Error::Busy(words.to_string()));
    for _ in 0..2 {
        assert!(order.enter(1).is_err());
        order.leave(2, (), |()| true).unwrap();
    }
    assert_eq!(filled(&mut order, 1), Some(0));
    assert_eq!(order.leave(2, (), |()| true).unwrap_err().to_string(), "unit: 2 is not in use");
    assert_eq!(order.enter(4).unwrap_err().to_string(), "unit: is 4, but there are 4 units");
    order.changed(0).unwrap();
    assert!(
        order.enter(0).unwrap_err().to_string().contains("has changed while it is used; release every use")
    );
    order.leave(0, (), |()| true).unwrap();
    assert_eq!(filled(&mut order, 0), Some(1));
}

#[test]
fn marks_of_a_place_that_stays_full_are_forgotten_once_they_are_reached() {
    let mut order = Order::<usize>::new(1, &[false]);
    order.enter(0).unwrap();
    for time in 0..1000 {
        order.enter(0).unwrap();
        order.leave(0, time, |mark| *mark != 3).unwrap();
    }
    let marks = order.take_marks(0);
    assert!(marks.len() <= 10 && marks.contains(&3) && marks.contains(&999));
    // A copy that is not enqueued puts them back, before those of later readers.
    let later = [1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007];
    for time in later {
        order.enter(0).unwrap();
        order.leave(0, time, |_| false).unwrap();
    }
    order.keep_marks(0, marks.clone());
    assert_eq!(order.many_marks(0), [&marks[..], &later].concat());
    assert_eq!((order.take_marks(0).len(), order.many_marks(0).len()), (marks.len() + later.len(), 0));
}
