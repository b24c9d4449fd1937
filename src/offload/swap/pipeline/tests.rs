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

/// A verdict, and the number of arrivals before it.
#[derive(Debug, Clone, Copy)]
enum Judged {
    Keep(usize),
    Redo(usize),
    Skip(usize),
}

impl Judged {
    fn after(self) -> usize {
        match self {
            Judged::Keep(after) | Judged::Redo(after) | Judged::Skip(after) => after,
        }
    }
}

impl Run {
    /// One round beside the caller, with this order of arrival, to the end of its steps. `verdict`: it is speculative.
    fn beside(&mut self, version: u64, order: &[usize], verdict: Option<Judged>) {
        let expected: Vec<usize> = (0..order.len()).rev().collect();
        self.pipeline.begin_beside(&expected, verdict.is_some()).unwrap();
        let (mut arrived, mut decided, mut skipped) = (0, verdict.is_none(), false);
        let mut pinned = vec![None; order.len()];
        while !(decided && self.pipeline.is_stepped()) {
            let action = self.pipeline.next_action();
            let told = match verdict.filter(|verdict| !decided && verdict.after() == arrived) {
                Some(_) => true,
                None => arrived < order.len() && !skipped,
            };
            match action {
                Action::Flush { subgroup, .. } => {
                    if !decided {
                        pinned[subgroup] = Some(self.tier[subgroup]);
                    }
                    self.under_way.push(action);
                }
                Action::Fetch { .. } => self.under_way.push(action),
                Action::Step { subgroup, slot } => {
                    assert!(order[..arrived].contains(&subgroup), "{subgroup} has not arrived");
                    assert_eq!(self.held[slot], version - 1, "{subgroup} was stepped from another state");
                    assert!(decided || self.tier[subgroup] == version - 1, "{subgroup} has no way back");
                    if skipped {
                        self.pipeline.passed(slot);
                    } else {
                        self.held[slot] = version;
                        self.pipeline.stepped(slot);
                    }
                }
                Action::Wait | Action::Done if self.under_way.is_empty() => {
                    assert!(told, "waits for nothing")
                }
                Action::Wait | Action::Done => self.finish_one(),
            }
            let idle = matches!(action, Action::Wait | Action::Done) && self.under_way.is_empty();
            if told && (idle || self.random.usize(..3) == 0) {
                match verdict.filter(|verdict| !decided && verdict.after() == arrived) {
                    Some(verdict) => {
                        decided = true;
                        skipped = self.decide(verdict, &pinned);
                    }
                    None => {
                        self.pipeline.arrive(order[arrived]);
                        arrived += 1;
                    }
                }
            }
            if !self.under_way.is_empty() && self.random.usize(..3) == 0 {
                self.finish_one();
            }
        }
        while let flush @ Action::Flush { .. } = self.pipeline.next_action() {
            self.under_way.push(flush);
        }
    }

    /// Gives the verdict; true for a skip.
    fn decide(&mut self, verdict: Judged, pinned: &[Option<u64>]) -> bool {
        if let Judged::Keep(_) = verdict {
            self.pipeline.keep();
            return false;
        }
        while !self.under_way.is_empty() {
            self.finish_one();
        }
        self.tier.iter_mut().zip(pinned).for_each(|(now, before)| *now = before.unwrap_or(*now));
        match verdict {
            Judged::Skip(_) => self.pipeline.skip(|subgroup| subgroup.is_multiple_of(2)).unwrap(),
            _ => self.pipeline.redo().unwrap(),
        }
        matches!(verdict, Judged::Skip(_))
    }

    /// Writes everything; every subgroup then has this version.
    fn settle(&mut self, version: u64) {
        self.drive(0);
        self.pipeline.flush_dirty().unwrap();
        self.drive(0);
        assert!(
            self.tier.iter().all(|on_tier| *on_tier == version),
            "settled at {version}, but {:?}",
            self.tier
        );
    }
}

/// All orders of `0..count`.
fn orders(count: usize) -> Vec<Vec<usize>> {
    let Some(last) = count.checked_sub(1) else { return vec![Vec::new()] };
    let longer = |shorter: Vec<usize>| {
        (0..count).map(move |place| {
            let mut order = shorter.clone();
            order.insert(place, last);
            order
        })
    };
    orders(last).into_iter().flat_map(longer).collect()
}

/// Every order of arrival, with every verdict after every number of arrivals; the completions are random, and a round may
/// begin while the last one writes.
#[test]
fn every_order_of_arrival_and_every_verdict_lead_from_one_version_to_the_next() {
    for (subgroups, slots, cached) in [(1, 1, 0), (2, 2, 2), (3, 3, 0), (4, 4, 1), (4, 4, 4), (5, 4, 1)] {
        let judged = |after| [Judged::Keep(after), Judged::Redo(after), Judged::Skip(after)];
        let mut verdicts: Vec<Option<Judged>> = (0..=subgroups).flat_map(judged).map(Some).collect();
        verdicts.push(None);
        for (seed, order) in orders(subgroups).into_iter().enumerate() {
            for verdict in &verdicts {
                let mut run = Run::new(subgroups, slots, cached);
                run.random = fastrand::Rng::with_seed(seed as u64);
                run.round(1);
                let mut version = 1;
                for turn in 0..4 {
                    let verdict = verdict.filter(|_| turn != 2);
                    run.beside(version + 1, &order, verdict);
                    version += u64::from(!matches!(verdict, Some(Judged::Skip(_))));
                    if turn == 1 {
                        run.settle(version);
                    }
                }
                run.drive(0);
                run.round(version + 1);
                run.settle(version + 1);
            }
        }
    }
}

#[test]
fn a_static_set_of_cached_subgroups_has_the_hits_of_the_alternating_order() {
    let (subgroups, cached, rounds) = (20u64, 6u64, 30u64);
    let mut run = Run::new(20, 9, 6);
    for version in 1..=rounds {
        let mut order: Vec<usize> = (0..20).collect();
        run.random.shuffle(&mut order);
        run.beside(version, &order, None);
    }
    run.drive(0);
    let expected = PipelineStats {
        rounds,
        hits: cached * (rounds - 1),
        fetched: subgroups * rounds - cached * (rounds - 1),
        flushed: (subgroups - cached) * rounds,
    };
    assert_eq!(run.pipeline.stats(), expected);
}

#[test]
fn what_is_expected_is_fetched_before_it_arrives_except_into_the_last_slot() {
    let mut pipeline = Pipeline::new(4, 3, 0).unwrap();
    pipeline.begin_beside(&[3, 2, 1, 0], false).unwrap();
    assert_eq!(pipeline.next_action(), Action::Fetch { subgroup: 3, slot: 0 });
    assert_eq!(pipeline.next_action(), Action::Fetch { subgroup: 2, slot: 1 });
    assert_eq!(pipeline.next_action(), Action::Wait);
    assert!(pipeline.begin_beside(&[3, 2, 1, 0], false).is_err());
    pipeline.arrive(0);
    assert_eq!(pipeline.next_action(), Action::Fetch { subgroup: 0, slot: 2 });
    assert!(pipeline.redo().is_err() && pipeline.skip(|_| true).is_err(), "transfers are in flight");
}
