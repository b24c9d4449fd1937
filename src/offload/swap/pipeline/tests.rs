//! Random completion orders, checked with version numbers: every step sees the newest state; the traffic is as
//! specified.
#![forbid(unsafe_code)]

use super::*;

struct Run {
    pipeline: Pipeline,
    /// Version of each subgroup on the tier; `held` is the version in each slot.
    tier: Vec<u64>,
    held: Vec<u64>,
    under_way: Vec<Action>,
    random: fastrand::Rng,
}

impl Run {
    fn new(subgroups: usize, slots: usize, cached: usize) -> Run {
        let pipeline = Pipeline::new(subgroups, slots, cached).unwrap();
        let random = fastrand::Rng::with_seed(1);
        Run { pipeline, tier: vec![0; subgroups], held: vec![0; slots], under_way: Vec::new(), random }
    }

    fn finish_one(&mut self) {
        let pick = self.random.usize(..self.under_way.len());
        match self.under_way.swap_remove(pick) {
            Action::Fetch { subgroup, slot } => {
                self.held[slot] = self.tier[subgroup];
                self.pipeline.fetched(slot, true);
            }
            Action::Flush { subgroup, slot, .. } => {
                self.tier[subgroup] = self.held[slot];
                self.pipeline.flushed(slot, true);
            }
            other => panic!("{other:?} is no transfer"),
        }
    }

    /// Runs to `Done`; returns the stepped subgroups in order.
    fn drive(&mut self, version: u64) -> Vec<usize> {
        let mut stepped = Vec::new();
        loop {
            let action = self.pipeline.next_action();
            match action {
                Action::Fetch { .. } | Action::Flush { .. } => self.under_way.push(action),
                Action::Step { subgroup, slot } => {
                    assert_eq!(
                        self.held[slot],
                        version - 1,
                        "subgroup {subgroup} was stepped from an old state"
                    );
                    self.held[slot] = version;
                    self.pipeline.stepped(slot);
                    stepped.push(subgroup);
                }
                Action::Wait => {
                    assert!(!self.under_way.is_empty(), "waits for nothing");
                    self.finish_one();
                }
                Action::Done => break,
            }
            if !self.under_way.is_empty() && self.random.usize(..3) == 0 {
                self.finish_one();
            }
        }
        assert!(self.under_way.is_empty(), "done with a transfer under way");
        stepped
    }

    fn round(&mut self, version: u64) -> Vec<usize> {
        self.pipeline.begin().unwrap();
        self.drive(version)
    }
}

#[test]
fn every_subgroup_is_stepped_once_a_round_from_its_newest_state() {
    for (subgroups, slots, cached) in [
        (1, 1, 0),
        (1, 1, 1),
        (2, 2, 2),
        (5, 3, 0),
        (10, 5, 2),
        (10, 10, 7),
        (10, 12, 10),
        (33, 9, 6),
        (7, 40, 3),
    ] {
        let mut run = Run::new(subgroups, slots, cached);
        for version in 1..=20 {
            let mut stepped = run.round(version);
            stepped.sort_unstable();
            assert!(stepped.into_iter().eq(0..subgroups), "{subgroups} {slots} {cached}");
            if version % 7 == 0 {
                run.pipeline.flush_dirty().unwrap();
                run.drive(0);
                assert!(run.tier.iter().all(|on_tier| *on_tier == version), "settled, but {:?}", run.tier);
            }
        }
    }
}

#[test]
fn hits_and_traffic_are_exactly_what_the_cache_promises() {
    let (subgroups, cached, rounds) = (20u64, 6u64, 30u64);
    let mut run = Run::new(20, 9, 6);
    for version in 1..=rounds {
        run.round(version);
    }
    let expected = PipelineStats {
        rounds,
        hits: cached * (rounds - 1),
        fetched: subgroups * rounds - cached * (rounds - 1),
        flushed: (subgroups - cached) * rounds,
    };
    assert_eq!(run.pipeline.stats(), expected);
}

#[test]
fn settling_twice_writes_once() {
    let mut run = Run::new(8, 8, 5);
    run.round(1);
    let before = run.pipeline.stats().flushed;
    for _ in 0..2 {
        run.pipeline.flush_dirty().unwrap();
        run.drive(0);
    }
    assert_eq!(run.pipeline.stats().flushed - before, 5);
}

#[test]
fn what_is_forgotten_is_read_from_the_tier() {
    let mut run = Run::new(6, 6, 3);
    run.round(1);
    run.pipeline.flush_dirty().unwrap();
    run.drive(0);
    run.round(2);
    // As after a failed step: the tier still holds version 1 of cached subgroups, and older slots of written ones.
    run.pipeline.forget().unwrap();
    run.tier.fill(1);
    let mut stepped = run.round(2);
    stepped.sort_unstable();
    assert_eq!(stepped, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn failed_transfers_lose_nothing() {
    let mut pipeline = Pipeline::new(2, 2, 0).unwrap();
    pipeline.begin().unwrap();
    assert_eq!(pipeline.next_action(), Action::Fetch { subgroup: 0, slot: 0 });
    pipeline.fetched(0, false);
    assert_eq!(pipeline.next_action(), Action::Fetch { subgroup: 0, slot: 0 });
    pipeline.fetched(0, true);
    assert_eq!(pipeline.next_action(), Action::Fetch { subgroup: 1, slot: 1 });
    assert_eq!(pipeline.next_action(), Action::Step { subgroup: 0, slot: 0 });
    pipeline.stepped(0);
    assert_eq!(pipeline.next_action(), Action::Flush { subgroup: 0, slot: 0, keep: false });
    assert!(pipeline.forget().is_err() && pipeline.begin().is_err() && pipeline.flush_dirty().is_err());
    pipeline.flushed(0, false);
    assert_eq!(
        pipeline.next_action(),
        Action::Flush { subgroup: 0, slot: 0, keep: false },
        "the only copy is written again"
    );
}

#[test]
fn too_few_buffers_are_refused() {
    assert!(Pipeline::new(10, 2, 0).is_err());
    assert!(Pipeline::new(10, 6, 4).is_err());
    assert!(Pipeline::new(10, 9, 10).is_err());
    assert!(
        Pipeline::new(0, 0, 0)
            .is_ok_and(|mut none| none.begin().is_ok() && none.next_action() == Action::Done)
    );
}
