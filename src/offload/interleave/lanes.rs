//! Host threads and events that behave like the streams and events of a device.
//!
//! Invariants:
//! - A lane runs its items in order, on its own thread.
//! - `record` increments an event's count when it is enqueued, and marks that count reached when the lane gets there. A
//!   wait is for the count at the time the wait was enqueued.
//! - After a failure the lanes run no more work, but still pass waits and records, so that no thread waits forever.
//!   Every wait on the host then returns the failure.
//! - Dropping the lanes blocks until all their threads have exited: the memory they work on may be freed afterwards.
//! - A forked child has none of the threads. Its calls return errors, and its drop does not wait.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::error::{Error, Result};
use crate::sys::sync::{Lock, Signal};
use crate::sys::threads;
use spillway_planner::interleave::schedule::{Lane, LaneEvent};

type Job = Box<dyn FnOnce() -> Result<()> + Send>;

enum Item {
    Wait(LaneEvent, u64),
    Record(LaneEvent),
    Run(Job),
}

/// How often an event was recorded: counted when enqueued (`recorded`) and when the lane got there (`reached`).
#[derive(Debug, Default, Clone, Copy)]
struct Marks {
    recorded: u64,
    reached: u64,
}

#[derive(Default)]
struct LaneState {
    events: HashMap<LaneEvent, Marks>,
    failed: Option<Error>,
    running: usize,
}

struct LaneBoard {
    state: Lock<LaneState>,
    changed: Signal,
}

/// Lanes with one thread each. The other lanes run on threads of the caller.
pub struct Lanes {
    shared: Arc<LaneBoard>,
    queues: Vec<Option<Sender<Item>>>,
}

impl Lanes {
    /// Starts a thread for each of `lanes`.
    pub fn start(lanes: &[Lane]) -> Result<Lanes> {
        let shared =
            Arc::new(LaneBoard { state: Lock::new(LaneState::default()), changed: Signal::default() });
        let mut started = Lanes { shared, queues: Lane::ALL.iter().map(|_| None).collect() };
        for lane in lanes {
            let (sender, receiver) = channel();
            let shared = Arc::clone(&started.shared);
            started.shared.state.lock().running += 1;
            let spawned = threads::spawn_quiet("spillway-lane", move || shared.serve(&receiver));
            if let Err(error) = spawned {
                started.shared.state.lock().running -= 1;
                return Err(Error::system("starting a thread of the interleaved update", &error));
            }
            started.queues[*lane as usize] = Some(sender);
        }
        Ok(started)
    }

    /// Enqueues work on a lane. On a lane of the caller the work runs within this call.
    pub fn run(&self, lane: Lane, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        match self.queue(lane) {
            Some(queue) => send(queue, Item::Run(Box::new(job))),
            None => {
                self.shared.state.lock().check_failure()?;
                let outcome = job();
                self.shared.fail(outcome.clone());
                outcome
            }
        }
    }

    /// Records the event behind everything enqueued on the lane.
    pub fn record(&self, lane: Lane, event: LaneEvent) -> Result<()> {
        let queue = self.queue(lane);
        self.shared.state.lock().events.entry(event).or_default().recorded += 1;
        match queue {
            Some(queue) => send(queue, Item::Record(event)),
            None => {
                self.shared.reach(event);
                Ok(())
            }
        }
    }

    /// Makes the lane wait for the event's last record. On a lane of the caller this call blocks.
    pub fn wait(&self, lane: Lane, event: LaneEvent) -> Result<()> {
        let queue = self.queue(lane);
        let recorded = self.shared.state.lock().events.get(&event).map_or(0, |marks| marks.recorded);
        match queue {
            Some(queue) => send(queue, Item::Wait(event, recorded)),
            None => self.shared.wait(event, recorded),
        }
    }

    /// True if the event's last record is reached.
    pub fn reached(&self, event: LaneEvent) -> Result<bool> {
        let state = self.shared.state.lock();
        state.check_failure()?;
        Ok(state.events.get(&event).is_none_or(|marks| marks.reached == marks.recorded))
    }

    fn queue(&self, lane: Lane) -> Option<&Sender<Item>> {
        self.queues[lane as usize].as_ref()
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.queues.clear();
        let mut state = self.shared.state.lock();
        while state.running > 0 {
            state = self.shared.changed.wait(state);
        }
    }
}

fn send(queue: &Sender<Item>, item: Item) -> Result<()> {
    queue.send(item).map_err(|_| Error::Busy("a thread of the interleaved update has ended".into()))
}

impl LaneState {
    fn check_failure(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }
}

impl LaneBoard {
    fn serve(&self, queue: &Receiver<Item>) {
        while let Ok(item) = queue.recv() {
            match item {
                // The failure is kept in `LaneState::failed`.
                Item::Wait(event, recorded) => drop(self.wait(event, recorded)),
                Item::Record(event) => self.reach(event),
                Item::Run(job) => {
                    if self.state.lock().check_failure().is_ok() {
                        let outcome = catch_unwind(AssertUnwindSafe(job));
                        self.fail(outcome.unwrap_or_else(|panic| Err(Error::of_panic(&*panic))));
                    }
                }
            }
        }
        self.state.lock().running -= 1;
        self.changed.notify_all();
    }

    fn wait(&self, event: LaneEvent, recorded: u64) -> Result<()> {
        let mut state = self.state.lock();
        loop {
            state.check_failure()?;
            if state.events.get(&event).map_or(0, |marks| marks.reached) >= recorded {
                return Ok(());
            }
            state = self.changed.wait(state);
        }
    }

    fn reach(&self, event: LaneEvent) {
        self.state.lock().events.entry(event).or_default().reached += 1;
        self.changed.notify_all();
    }

    fn fail(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.state.lock().failed.get_or_insert(error);
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn in_turn(turn: u32, expected: u32) -> Result<()> {
        if turn == expected { Ok(()) } else { Err(Error::Busy(format!("turn {turn} at {expected}"))) }
    }

    #[test]
    fn waits_hold_for_the_last_record_before_them_and_none_for_none() {
        let lanes = Lanes::start(&[Lane::H2d, Lane::Gpu]).unwrap();
        let count = Arc::new(AtomicU32::new(0));
        lanes.wait(Lane::Gpu, LaneEvent::Settled(0)).unwrap();
        for round in 0..100 {
            let (filled, used) = (Arc::clone(&count), Arc::clone(&count));
            let fill = move || in_turn(filled.fetch_add(1, Ordering::Relaxed), 2 * round);
            lanes.wait(Lane::H2d, LaneEvent::SlotDone(0)).unwrap();
            lanes.run(Lane::H2d, fill).unwrap();
            lanes.record(Lane::H2d, LaneEvent::Settled(0)).unwrap();
            lanes.wait(Lane::Gpu, LaneEvent::Settled(0)).unwrap();
            let step = move || in_turn(used.fetch_add(1, Ordering::Relaxed), 2 * round + 1);
            lanes.run(Lane::Gpu, step).unwrap();
            lanes.record(Lane::Gpu, LaneEvent::SlotDone(0)).unwrap();
        }
        lanes.wait(Lane::Caller, LaneEvent::SlotDone(0)).unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 200);
        assert!(lanes.reached(LaneEvent::SlotDone(0)).unwrap() && lanes.reached(LaneEvent::Home(7)).unwrap());
    }

    #[test]
    fn a_failure_reaches_every_wait_and_stops_all_work() {
        let lanes = Lanes::start(&[Lane::H2d, Lane::Gpu]).unwrap();
        lanes.run(Lane::H2d, || Err(Error::Unsupported("it broke".into()))).unwrap();
        lanes.record(Lane::H2d, LaneEvent::Settled(0)).unwrap();
        let failed = lanes.wait(Lane::Caller, LaneEvent::Settled(0)).unwrap_err();
        assert!(failed.to_string().contains("it broke"));
        lanes.run(Lane::Gpu, || unreachable!("nothing runs after a failure")).unwrap();
        lanes.record(Lane::Gpu, LaneEvent::SlotDone(0)).unwrap();
        assert!(
            lanes.wait(Lane::Cpu, LaneEvent::SlotDone(0)).is_err()
                && lanes.reached(LaneEvent::Home(0)).is_err()
        );
    }

    #[test]
    fn dropping_waits_for_the_work_and_a_panic_is_a_failure() {
        let done = Arc::new(AtomicU32::new(0));
        let lanes = Lanes::start(&[Lane::D2h]).unwrap();
        for _ in 0..50 {
            let done = Arc::clone(&done);
            let work = move || {
                std::thread::yield_now();
                done.fetch_add(1, Ordering::Relaxed);
                Ok(())
            };
            lanes.run(Lane::D2h, work).unwrap();
        }
        drop(lanes);
        assert_eq!(done.load(Ordering::Relaxed), 50);

        let lanes = Lanes::start(&[Lane::D2h]).unwrap();
        lanes.run(Lane::D2h, || std::panic::resume_unwind(Box::new("a bug"))).unwrap();
        lanes.record(Lane::D2h, LaneEvent::Home(0)).unwrap();
        assert!(lanes.wait(Lane::Caller, LaneEvent::Home(0)).is_err());
    }
}
