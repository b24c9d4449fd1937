//! The placement on a clock that nobody waits for: paths are queues with a bandwidth that changes when the test says.
#![forbid(unsafe_code)]

use super::*;
use std::collections::VecDeque;

const MIB: u64 = 1 << 20;

/// One direction at a time, as a disk serves it.
struct SimPath {
    bandwidth: f64,
    queue: VecDeque<Transfer>,
    /// When the transfer at the head began, and when it will be done.
    head: Option<(f64, f64)>,
    queued: u64,
}

#[derive(Clone, Copy)]
enum Transfer {
    Fetch(usize),
    Flush,
}

/// Numbers that look random and are the same in every run.
struct Noise(u64);

impl Noise {
    /// Between -1 and 1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

struct Sim {
    now: f64,
    paths: Vec<SimPath>,
    noise: Noise,
    /// Relative spread of one transfer's time.
    spread: f64,
    /// Units in host memory at once.
    window: usize,
}

impl Sim {
    fn new(bandwidths: &[f64], spread: f64) -> Sim {
        let path = |bandwidth: &f64| SimPath {
            bandwidth: *bandwidth,
            queue: VecDeque::new(),
            head: None,
            queued: 0,
        };
        Sim { now: 0.0, paths: bandwidths.iter().map(path).collect(), noise: Noise(7), spread, window: 16 }
    }

    fn push(&mut self, path: usize, transfer: Transfer, bytes: u64) {
        self.paths[path].queue.push_back(transfer);
        self.paths[path].queued += bytes;
        self.start(path, bytes);
    }

    fn start(&mut self, path: usize, bytes: u64) {
        let noise = 1.0 + self.spread * self.noise.next();
        let path = &mut self.paths[path];
        if path.head.is_none() && !path.queue.is_empty() {
            path.head = Some((self.now, self.now + bytes as f64 / path.bandwidth * noise));
        }
    }

    /// One update of all units; the seconds it took.
    fn round(&mut self, placement: &mut Placement, unit: u64) -> f64 {
        let began = self.now;
        let mut homes: Vec<VecDeque<usize>> = vec![VecDeque::new(); self.paths.len()];
        for index in 0..placement.homes.len() {
            homes[placement.home(index)].push_back(index);
        }
        let mut in_memory = 0;
        loop {
            while in_memory < self.window {
                let left: Vec<usize> = homes.iter().map(VecDeque::len).collect();
                let Some(path) = placement.fetch_from(&left, &self.queued()) else { break };
                let index = homes[path].pop_front().unwrap();
                self.push(path, Transfer::Fetch(index), unit);
                in_memory += 1;
            }
            let next = (0..self.paths.len())
                .filter(|path| self.paths[*path].head.is_some())
                .min_by(|a, b| self.done_at(*a).total_cmp(&self.done_at(*b)));
            let Some(path) = next else { break };
            let (transfer, seen) = self.finish(path, unit);
            placement.observe(path, seen);
            match transfer {
                Transfer::Fetch(index) => {
                    let queued = self.queued();
                    let to = placement.flush(index, &queued).expect("a path with room");
                    self.push(to, Transfer::Flush, unit);
                }
                Transfer::Flush => in_memory -= 1,
            }
        }
        placement.end_round();
        self.now - began
    }

    fn done_at(&self, path: usize) -> f64 {
        self.paths[path].head.map_or(f64::INFINITY, |(_, done)| done)
    }

    fn finish(&mut self, index: usize, bytes: u64) -> (Transfer, Observed) {
        let path = &mut self.paths[index];
        let (began, done) = path.head.take().unwrap();
        self.now = done;
        path.queued -= bytes;
        let transfer = path.queue.pop_front().unwrap();
        self.start(index, bytes);
        (transfer, Observed { bytes, busy: done - began })
    }

    fn queued(&self) -> Vec<u64> {
        self.paths.iter().map(|path| path.queued).collect()
    }

    /// No schedule is faster than all paths busy from beginning to end.
    fn best(&self, units: usize, unit: u64) -> f64 {
        let together: f64 = self.paths.iter().map(|path| path.bandwidth).sum();
        2.0 * units as f64 * unit as f64 / together
    }
}

const UNITS: usize = 400;
const UNIT: u64 = 64 * MIB;
const GB: f64 = 1e9;

fn placed(speeds: &[f64]) -> Placement {
    let paths: Vec<PathPlan> =
        speeds.iter().map(|speed| PathPlan { speed: *speed, capacity: u64::MAX }).collect();
    Placement::new(&paths, None, vec![UNIT; UNITS]).unwrap()
}

fn run(sim: &mut Sim, placement: &mut Placement, rounds: usize) -> Vec<f64> {
    (0..rounds).map(|_| sim.round(placement, UNIT) / sim.best(UNITS, UNIT)).collect()
}

#[test]
fn steady_paths_finish_at_the_optimum_and_nothing_moves() {
    for speeds in [&[5.3 * GB, 3.6 * GB][..], &[7.0 * GB, 1.0 * GB, 0.5 * GB], &[2.0 * GB; 4]] {
        let mut sim = Sim::new(speeds, 0.10);
        let mut placement = placed(speeds);
        let ratios = run(&mut sim, &mut placement, 40);
        let worst = ratios.iter().copied().fold(0.0, f64::max);
        assert!(worst < 1.05, "{speeds:?}: {worst}");
        let flushes = (UNITS * 40) as f64;
        assert!((placement.moved() as f64) < 0.005 * flushes, "{speeds:?}: {} moves", placement.moved());
    }
}

#[test]
fn wrong_hints_are_corrected_in_few_rounds() {
    let mut sim = Sim::new(&[5.0 * GB, 1.0 * GB, 3.0 * GB], 0.05);
    let mut placement = placed(&[1.0 * GB, 1.0 * GB, 1.0 * GB]);
    let ratios = run(&mut sim, &mut placement, 12);
    assert!(ratios[0] > 1.5, "the hints should be wrong: {ratios:?}");
    assert!(ratios[3..].iter().all(|ratio| *ratio < 1.05), "{ratios:?}");
}

#[test]
fn a_path_that_slows_down_and_recovers_is_followed_without_flapping() {
    let speeds = [5.0 * GB, 4.0 * GB];
    let mut sim = Sim::new(&speeds, 0.10);
    let mut placement = placed(&speeds);
    run(&mut sim, &mut placement, 5);
    let settled = |sim: &mut Sim, placement: &mut Placement, what: &str| {
        let ratios = run(sim, placement, 8);
        assert!(ratios[3..].iter().all(|ratio| *ratio < 1.05), "{what}: {ratios:?}");
        let moved = placement.moved();
        run(sim, placement, 20);
        let later = placement.moved() - moved;
        assert!(later < (UNITS / 10) as u64, "{what}: {later} moves after it had settled");
    };
    for _ in 0..2 {
        sim.paths[1].bandwidth = 0.4 * GB;
        settled(&mut sim, &mut placement, "ten times slower");
        sim.paths[1].bandwidth = 4.0 * GB;
        settled(&mut sim, &mut placement, "recovered");
    }
}

#[test]
fn few_subgroups_are_cut_so_that_the_shares_come_out() {
    let unit = unit_bytes(1200 * MIB, 3, 2);
    let units = 3 * (1200 * MIB).div_ceil(unit) as usize;
    assert!(units >= 64 && unit.is_multiple_of(MIB), "{units} units of {unit}");
    let speeds = [5.3 * GB, 3.6 * GB];
    let paths: Vec<PathPlan> =
        speeds.iter().map(|speed| PathPlan { speed: *speed, capacity: u64::MAX }).collect();
    let mut placement = Placement::new(&paths, None, vec![unit; units]).unwrap();
    let mut sim = Sim::new(&speeds, 0.0);
    let took = sim.round(&mut placement, unit) / sim.best(units, unit);
    assert!(took < 1.05, "{took}");
    assert_eq!(unit_bytes(1200 * MIB, 100, 2), 1200 * MIB, "many subgroups stay whole");
    assert_eq!(unit_bytes(1200 * MIB, 3, 1), 1200 * MIB, "one path needs no chunks");
    assert_eq!(unit_bytes(100, 1, 4), 100, "a chunk is not larger than the subgroup");
}

#[test]
fn a_drained_path_is_empty_after_one_round_and_used_again_later() {
    let speeds = [2.0 * GB, 2.0 * GB, 2.0 * GB];
    let mut sim = Sim::new(&speeds, 0.0);
    let mut placement = placed(&speeds);
    placement.drain(1, true);
    run(&mut sim, &mut placement, 1);
    assert_eq!(placement.load(1), 0);
    placement.drain(1, false);
    let ratios = run(&mut sim, &mut placement, 4);
    assert!(ratios[3] < 1.05, "{ratios:?}");
}

#[test]
fn the_users_ratio_stands_whatever_is_observed() {
    let paths = [PathPlan { speed: 5.3, capacity: u64::MAX }, PathPlan { speed: 3.6, capacity: u64::MAX }];
    let mut placement = Placement::new(&paths, Some(&[2.0, 1.0]), vec![UNIT; 9]).unwrap();
    assert_eq!((placement.load(0) / UNIT, placement.load(1) / UNIT), (6, 3));
    let mut sim = Sim::new(&[1.0 * GB, 9.0 * GB], 0.0);
    for _ in 0..4 {
        sim.round(&mut placement, UNIT);
    }
    assert_eq!((placement.load(0) / UNIT, placement.moved()), (6, 0));
    assert!(Placement::new(&paths, Some(&[1.0]), vec![]).is_err());
}

#[test]
fn capacity_is_kept_and_no_room_at_all_is_said() {
    let paths = [PathPlan { speed: 9.0, capacity: 3 * UNIT }, PathPlan { speed: 1.0, capacity: 7 * UNIT }];
    let mut placement = Placement::new(&paths, None, vec![UNIT; 10]).unwrap();
    assert_eq!((placement.load(0), placement.load(1)), (3 * UNIT, 7 * UNIT));
    for unit in 0..10 {
        assert_eq!(placement.flush(unit, &[0, 0]), Some(placement.home(unit)));
    }
    placement.drain(0, true);
    let stuck = (0..10).find(|unit| placement.home(*unit) == 0).unwrap();
    assert_eq!(placement.flush(stuck, &[0, 0]), None);
    assert!(matches!(Placement::new(&paths, None, vec![UNIT; 11]), Err(Error::LimitReached(_))));
}

#[test]
fn paths_that_waver_from_round_to_round_move_almost_nothing() {
    let speeds = [5.3 * GB, 3.6 * GB, 2.0 * GB];
    let mut sim = Sim::new(&speeds, 0.10);
    let mut placement = placed(&speeds);
    for _ in 0..60 {
        for (path, speed) in speeds.iter().enumerate() {
            sim.paths[path].bandwidth = speed * (1.0 + 0.04 * sim.noise.next());
        }
        let ratio = sim.round(&mut placement, UNIT) / sim.best(UNITS, UNIT);
        assert!(ratio < 1.09, "{ratio}");
    }
    assert!(placement.moved() < UNITS as u64 * 60 / 200, "{} moves", placement.moved());
}
