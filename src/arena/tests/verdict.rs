//! Verdicts: one outcome of each round for all processes.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::{AT_ONCE, SOON, again, kind, options};
use crate::arena::{Arena, Create, Verdict};
use crate::error::{ArenaKind, Error};
use crate::optim::StepStats;

/// Rounds of the random test.
const ROUNDS: u64 = 300;
/// Its rounds in `make test-long`.
const MANY_ROUNDS: u64 = 1500;
/// Rounds after which its processes wait for each other: none is further ahead of the others.
const PERIOD: usize = 3;

#[test]
fn all_processes_get_the_same_verdict() {
    let owner = Arena::create(&options()).unwrap();
    let others = [again(&owner), again(&owner)];
    let handles = [&owner, &others[0], &others[1]];
    let sums = [1.0, 1e16, 1.0];
    let stats = |sum_squares: f64| StepStats { nonfinite: !sum_squares.is_finite(), sum_squares };
    assert!(owner.post(0, 1, stats(1.0), false).is_err(), "it has not joined");
    for (process, handle) in (0..).zip(handles) {
        handle.join(process).unwrap();
        handle.join(process).unwrap();
    }
    assert!(matches!(owner.join(1), Err(Error::Busy(_))) && owner.join(3).is_err());
    for round in 1..5_u64 {
        for process in [2, 0, 1] {
            let late = owner.wait_verdict(round, AT_ONCE).unwrap_err();
            assert!(matches!(late, Error::Timeout(_)), "{late}");
            let sum = if round == 3 && process == 1 { f64::INFINITY } else { sums[process] };
            handles[process].post(process as u32, round, stats(sum), round == 2 && process > 0).unwrap();
            assert!(handles[process].post(process as u32, round, stats(sum), false).is_err(), "twice");
        }
        for handle in handles {
            let found = handle.wait_verdict(round, SOON).unwrap();
            assert_eq!(found.failed, if round == 2 { 2 } else { 0 });
            match round {
                3 => assert!(found.stats.nonfinite && found.stats.sum_squares.is_nan()),
                _ => assert_eq!(found.stats, stats((1.0 + 1e16) + 1.0)),
            }
        }
    }
    let forgotten = owner.wait_verdict(2, AT_ONCE).unwrap_err();
    assert_eq!(forgotten.arena_kind(), Some(ArenaKind::Forgotten), "a later round was decided");
    assert!(!forgotten.to_string().contains("written while it was read"), "{forgotten}");
    let [second, third] = others;
    second.post(1, 5, stats(1.0), false).unwrap();
    third.post(2, 5, stats(1.0), false).unwrap();
    drop(third);
    owner.post(0, 5, stats(1.0), false).unwrap();
    assert!(owner.wait_verdict(5, AT_ONCE).is_ok(), "it had posted before it ended");
    owner.post(0, 6, stats(1.0), false).unwrap();
    second.post(1, 6, stats(1.0), false).unwrap();
    let observer = again(&owner);
    let open = observer.wait_verdict(6, AT_ONCE).unwrap_err();
    assert!(
        matches!(&open, Error::Timeout(text) if text.contains("ended before it posted round 6")),
        "{open}"
    );
    assert!(matches!(owner.post(0, 7, stats(1.0), false), Err(Error::InvalidArgument { .. })), "6 is open");
    assert_eq!(kind(owner.wait_verdict(6, None)), ArenaKind::PeerEnded);
    let third = again(&owner);
    third.join(2).unwrap();
    third.post(2, 6, stats(1.0), false).unwrap();
    for handle in [&owner, &second, &third, &observer] {
        assert_eq!(kind(handle.wait_verdict(6, AT_ONCE)), ArenaKind::PeerEnded, "it stays aborted");
    }
    third.post(2, 7, stats(1.0), false).unwrap();
    drop(third);
    again(&owner).join(2).unwrap();
    owner.post(0, 7, stats(1.0), false).unwrap();
    second.post(1, 7, stats(1.0), false).unwrap();
    assert_eq!(kind(owner.wait_verdict(7, AT_ONCE)), ArenaKind::PeerEnded, "a new process took its place");
    for round in [0, 1 << 32] {
        assert!(matches!(owner.wait_verdict(round, AT_ONCE), Err(Error::InvalidArgument { .. })));
    }
    assert!(Arena::create(&Create { processes: 0, ..options() }).unwrap().wait_verdict(1, AT_ONCE).is_err());
}

#[test]
fn a_round_that_a_process_left_is_aborted_for_all_and_a_decided_one_for_nobody() {
    let first = Arena::create(&Create { processes: 2, ..options() }).unwrap();
    let (second, ended, stats) = (again(&first), again(&first), StepStats::default());
    first.join(0).unwrap();
    second.join(1).unwrap();
    assert!(ended.abort_round(0, 1).is_err(), "it has not joined");
    // A timeout leaves the round open; the abort does not.
    first.post(0, 1, stats, false).unwrap();
    assert!(matches!(first.wait_verdict(1, AT_ONCE), Err(Error::Timeout(_))));
    assert_eq!(first.abort_round(0, 1), Ok(None));
    second.post(1, 1, stats, false).unwrap();
    let text = second.wait_verdict(1, AT_ONCE).unwrap_err().to_string();
    assert!(text.contains("which joined as 0, left the round"), "{text}");
    assert_eq!(second.abort_round(1, 1), Ok(None));
    // A late abort follows the verdict.
    first.post(0, 2, stats, false).unwrap();
    second.post(1, 2, stats, true).unwrap();
    assert_eq!(first.abort_round(0, 2), Ok(Some(Verdict { stats, failed: 1 })));
    // A process that is alone for many rounds takes no verdict from another one.
    for round in 3..9 {
        first.post(0, round, StepStats { nonfinite: true, sum_squares: 7.0 }, false).unwrap();
        assert_eq!(first.abort_round(0, round), Ok(None));
    }
    assert_eq!(second.wait_verdict(2, AT_ONCE), Ok(Verdict { stats, failed: 1 }));
    for round in [3, 8] {
        assert_eq!(kind(second.wait_verdict(round, AT_ONCE)), ArenaKind::PeerEnded);
    }
    assert_eq!(second.abort_round(1, 2), Ok(Some(Verdict { stats, failed: 1 })));
    // A process that ends after its post does not abort.
    second.post(1, 9, stats, false).unwrap();
    drop(second);
    first.post(0, 9, stats, false).unwrap();
    assert!(first.wait_verdict(9, AT_ONCE).is_ok());
}

#[test]
fn an_observer_waits_for_the_process_that_takes_the_number_of_one_that_ended() {
    let first = Arena::create(&Create { processes: 2, ..options() }).unwrap();
    let (ended, observer, stats) = (again(&first), again(&first), StepStats::default());
    first.join(0).unwrap();
    ended.join(1).unwrap();
    drop(ended);
    first.post(0, 1, stats, false).unwrap();
    let open = observer.wait_verdict(1, Some(Duration::from_millis(1))).unwrap_err();
    assert!(matches!(&open, Error::Timeout(text) if text.contains("which joined as 1, ended")), "{open}");
    let second = joined(&first, 1);
    second.post(1, 1, stats, false).unwrap();
    for handle in [&observer, &first, &second] {
        assert_eq!(handle.wait_verdict(1, AT_ONCE), Ok(Verdict { stats, failed: 0 }));
    }
}

#[test]
fn an_aborted_round_names_the_process_that_left_a_later_one() {
    let first = Arena::create(&Create { processes: 2, ..options() }).unwrap();
    let (second, stats) = (again(&first), StepStats::default());
    first.join(0).unwrap();
    second.join(1).unwrap();
    first.post(0, 1, stats, false).unwrap();
    assert_eq!(second.abort_round(1, 5), Ok(None));
    let text = first.wait_verdict(1, AT_ONCE).unwrap_err().to_string();
    assert!(text.contains("which joined as 1, left round 5"), "{text}");
}

/// The outcome of each round that a process followed: the bits of the verdict, `None` for an aborted round.
type Followed = Vec<Option<u64>>;

/// One process of the random test. It waits, times out, leaves, ends and joins again as its random numbers say.
struct Process {
    number: u32,
    seed: u64,
    arena: Arena,
    followed: Followed,
}

impl Process {
    fn new(owner: &Arena, number: u32) -> Process {
        Process { number, seed: 77 + u64::from(number), arena: joined(owner, number), followed: Vec::new() }
    }

    fn chance(&mut self, of: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) % of
    }

    fn settle(&mut self, owner: &Arena, round: u64) {
        (0..self.chance(4)).for_each(|_| std::thread::yield_now());
        if self.chance(16) == 0 {
            self.arena = again(owner);
            self.arena = joined(owner, self.number);
        }
        if self.chance(8) > 0 {
            let stats = StepStats { nonfinite: false, sum_squares: (self.chance(1000) + 1) as f64 };
            self.arena.post(self.number, round, stats, false).unwrap();
        }
        let waited = match self.chance(3) {
            0 => self.arena.wait_verdict(round, AT_ONCE),
            1 => {
                let patience = Duration::from_micros(self.chance(300));
                self.arena.wait_verdict(round, Some(patience))
            }
            _ => Err(Error::Timeout(String::new())),
        };
        let verdict = match waited {
            Ok(verdict) => Some(verdict),
            Err(error) if error.arena_kind() == Some(ArenaKind::PeerEnded) => None,
            Err(Error::Timeout(_)) => self.arena.abort_round(self.number, round).unwrap(),
            Err(error) => panic!("{error}"),
        };
        self.followed.push(verdict.map(|verdict| verdict.stats.sum_squares.to_bits()));
    }
}

/// A handle that has joined. A child that another test forks has the lock of an earlier handle for a moment.
fn joined(owner: &Arena, process: u32) -> Arena {
    let arena = again(owner);
    loop {
        match arena.join(process) {
            Err(Error::Busy(_)) => std::thread::yield_now(),
            outcome => break outcome.unwrap(),
        }
    }
    arena
}

#[test]
fn all_processes_follow_one_outcome_in_every_interleaving() {
    let owner = Arena::create(&options()).unwrap();
    let mut processes = [0, 1, 2].map(|number| Process::new(&owner, number));
    let rounds = if sampled::long() { MANY_ROUNDS } else { ROUNDS };
    for first in (1..=rounds).step_by(PERIOD) {
        std::thread::scope(|scope| {
            for process in &mut processes {
                let owner = &owner;
                scope.spawn(move || {
                    (first..first + PERIOD as u64).for_each(|round| process.settle(owner, round))
                });
            }
        });
    }
    let [first, second, third] = processes.map(|process| process.followed);
    assert!(first.iter().any(Option::is_some) && first.iter().any(Option::is_none));
    for (((round, first), second), third) in (1..).zip(first).zip(second).zip(third) {
        assert!(first == second && first == third, "round {round}: {first:?}, {second:?}, {third:?}");
    }
}
