//! Decides which path stores each unit of optimizer state, and which path receives the unit at a flush.
//!
//! A unit is a part of a subgroup. A subgroup that is split over all paths moves at the combined bandwidth, and a few
//! buffers of host memory keep every path busy. Rules:
//! - The first placement follows [`spillway_planner::split`]: in proportion to the speeds or to the user's ratio, in
//!   balanced order.
//! - A unit changes its path only at a flush. Each path has a predicted finish time, which includes the bytes that this
//!   round already sent to the path. The unit goes to the path with the earliest finish time, but only if that time
//!   beats the unit's own path by more than one unit and `MARGIN`. So every section of a round, in either direction,
//!   has each path's share.
//! - Speeds are re-estimated once per round (one update of all units):
//!   - The path that was busy longest limited the round. Its speed is its bytes divided by its busy time.
//!   - For a path that finished earlier, that quotient is only an upper bound: a throttled path runs at device speed
//!     until it reaches its rate limit. Such a path gets more load than before until all paths finish together. The
//!     increase is small if its real speed is known, else up to a factor of two.
//! - Speeds are smoothed. Changes of at most `DEADBAND` are ignored, so that noise moves no unit. A slowdown of more
//!   than `SUDDEN` takes effect at once, within the round.
//! - A draining path receives no units. Its units leave it at their next flush.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use spillway_planner::split;

/// Minimal relative lead of another path's finish time before a unit moves there.
const MARGIN: f64 = 0.02;
/// Relative changes of a speed up to this value are ignored.
const DEADBAND: f64 = 0.03;
/// Weight of the newest round in a smoothed speed.
const NEWEST: f64 = 0.5;
/// Relative changes from this value on are not smoothed.
const SUDDEN: f64 = 0.25;
/// Within a round, a slowdown takes effect only after reads and writes together exceed 2/SAMPLE of the path's load.
const SAMPLE: u64 = 8;
/// A path limited the round if the longest busy time is at most this factor times the path's busy time.
const FULL: f64 = 1.01;
/// From [`FULL`] up to this factor, a path was nearly as busy as the busiest, and [`NUDGE`] raises its speed. Above
/// this factor, the path was idle.
const IDLE: f64 = 1.1;
/// Factor on the speed of a nearly busy path. Not above 1 + [`MARGIN`], so that units move only after some rounds.
const NUDGE: f64 = 1.02;
/// Maximal factor on the observed rate of an idle path, if that rate is near the path's known speed.
const GENTLY: f64 = 1.13;
/// Maximal factor if no speed is known, or if the observed rate exceeded the known speed by the factor [`PASSED`].
const BOLDLY: f64 = 2.0;
/// The burst of a throttled path after a pause raises the observed rate by less than this factor.
const PASSED: f64 = 1.2;
/// The gentle increase needs a round in which the path's load relative to its speed was at least this fraction of the
/// maximum over all paths. Load follows a new speed with delay: a unit moves at its flush, and is read from its new
/// path one round later.
const ASKED: f64 = 0.95;
/// Minimal seconds of observation for a speed, because devices, caches and throttles work in bursts.
const SPAN: f64 = 0.25;
/// Minimal units per round and path. One unit more or less is then within the margin.
const UNITS_PER_PATH: u64 = 32;
/// Minimal units per subgroup, unless blocks are too large for it. So the subgroup can follow the shares of the paths.
const UNITS_PER_SUBGROUP: u64 = 128;

/// Properties of a path before the first round.
#[derive(Debug, Clone, Copy)]
pub struct PathPlan {
    /// Bytes per second: the smaller of read and write bandwidth, as the caller knows it, or a share in any unit.
    pub speed: f64,
    /// Maximal bytes that the path may store.
    pub capacity: u64,
}

/// Transfers of a path in one direction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Flow {
    /// Bytes moved.
    pub bytes: u64,
    /// Seconds during which at least one operation was in flight.
    pub busy: f64,
}

/// Transfers of a path in both directions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Observed {
    /// Reads from the path.
    pub read: Flow,
    /// Writes to the path.
    pub written: Flow,
    /// Seconds during which at least one operation of either direction was in flight.
    pub busy: f64,
}

impl Flow {
    fn speed(self) -> Option<f64> {
        let speed = self.bytes as f64 / self.busy;
        (self.bytes > 0 && speed.is_finite() && speed > 0.0).then_some(speed)
    }

    fn add(&mut self, more: Flow) {
        self.bytes += more.bytes;
        self.busy += more.busy;
    }
}

impl Observed {
    /// Bytes of both directions per second of busy time.
    fn speed(&self) -> Option<f64> {
        Flow { bytes: self.bytes(), busy: self.busy }.speed()
    }

    /// Upper bound of the speed: the sum of the speeds of both directions.
    fn most(&self) -> Option<f64> {
        self.read.speed().into_iter().chain(self.written.speed()).reduce(|a, b| a + b)
    }

    fn bytes(&self) -> u64 {
        self.read.bytes + self.written.bytes
    }

    /// Upper bound of the speed: twice the faster direction, because a round begins with reads alone. `None` before the
    /// path moved more than `2 * sample` bytes and was busy for [`SPAN`] seconds.
    fn speed_at_most(&self, sample: u64) -> Option<f64> {
        let enough = self.busy >= SPAN && self.bytes() / 2 > sample;
        let both = self.read.speed().into_iter().chain(self.written.speed());
        both.max_by(f64::total_cmp).filter(|_| enough).map(|faster| 2.0 * faster)
    }

    fn add(&mut self, more: Observed) {
        self.read.add(more.read);
        self.written.add(more.written);
        self.busy += more.busy;
    }
}

#[derive(Debug)]
struct PathEstimate {
    speed: f64,
    smoothed: Option<f64>,
    capacity: u64,
    load: u64,
    /// Bytes flushed to the path in this round, since the speed of any path last changed.
    sent: u64,
    /// Transfers since the speed was last re-estimated; covers several rounds if they are short.
    seen: Observed,
    drained: bool,
    /// Known real speed: the speed in the last round that this path limited, or `did` if that is larger.
    known: Option<f64>,
    /// Bytes per second of round time when the path was last not limiting.
    did: f64,
}

impl PathEstimate {
    /// Seconds that the path needs for the observed bytes at its estimated speed.
    fn asked(&self) -> f64 {
        self.seen.bytes() as f64 / self.speed
    }

    /// Re-estimates the speed from the observed transfers. `longest` is the busy time of the busiest path, in seconds.
    /// `asked` is the maximum of [`PathEstimate::asked`] over all paths.
    fn learn(&mut self, longest: f64, asked: f64) {
        let part = self.asked() / asked;
        let seen = std::mem::take(&mut self.seen);
        let (Some(shown), Some(most)) = (seen.speed(), seen.most()) else { return };
        let idle = longest / seen.busy;
        if idle > FULL {
            self.smoothed = None;
            self.did = shown / idle;
            match idle > IDLE {
                true => self.raise(idle, part > ASKED),
                false => self.speed = (self.speed * NUDGE).clamp(shown, most.max(shown)),
            }
            return;
        }
        self.known = Some(shown.max(self.did));
        let smoothed = match self.smoothed {
            Some(before) if (shown / before - 1.0).abs() < SUDDEN => before + NEWEST * (shown - before),
            _ => shown,
        };
        self.smoothed = Some(smoothed);
        if (smoothed / self.speed - 1.0).abs() > DEADBAND {
            self.speed = smoothed;
        }
    }

    fn raise(&mut self, idle: f64, asked: bool) {
        let known = self.known.is_some_and(|known| self.did < known * PASSED);
        let more = self.did * if known { GENTLY } else { BOLDLY }.min(idle);
        if more > self.speed && (asked || !known) {
            self.speed = more;
        }
    }
}

/// The paths of all units. The home of a unit is the path that stores it.
#[derive(Debug)]
pub struct SubgroupPlacement {
    paths: Vec<PathEstimate>,
    bytes: Vec<u64>,
    homes: Vec<usize>,
    /// The user's ratio replaces the speeds, and is never re-estimated.
    fixed: bool,
    moved: u64,
}

/// Returns the size of a unit in bytes. A unit is a whole number of blocks, so small that the units of a subgroup and
/// of a round can follow the shares of the paths. With fewer than two paths, a unit is a whole subgroup. The units of a
/// subgroup on one path are transferred together.
pub fn unit_bytes(subgroup_bytes: u64, subgroups: u64, paths: u64, block_bytes: u64) -> u64 {
    if paths < 2 || subgroup_bytes == 0 {
        return subgroup_bytes;
    }
    let chunks = (UNITS_PER_PATH * paths).div_ceil(subgroups.max(1)).max(UNITS_PER_SUBGROUP);
    let blocks = subgroup_bytes / chunks / block_bytes;
    (blocks.max(1) * block_bytes).min(subgroup_bytes)
}

impl SubgroupPlacement {
    /// Places units of these sizes in bytes. `ratio`, if given, overrides the speeds. Fails for invalid speeds or
    /// ratios, or if the paths lack room for all units.
    pub fn new(paths: &[PathPlan], ratio: Option<&[f64]>, bytes: Vec<u64>) -> Result<SubgroupPlacement> {
        let weights: Vec<f64> = match ratio {
            Some(ratio) => ratio.to_vec(),
            None => paths.iter().map(|path| path.speed).collect(),
        };
        split::check(if ratio.is_some() { "ratio" } else { "speeds" }, &weights)?;
        if weights.len() != paths.len() {
            let reason = format!("has {} parts, but there are {} paths", weights.len(), paths.len());
            return Err(Error::invalid("ratio", reason));
        }
        let largest = bytes.iter().copied().max().unwrap_or(0).max(1);
        let room: Vec<usize> = paths.iter().map(|path| (path.capacity / largest) as usize).collect();
        let homes = split::balanced_order(&split::shares(bytes.len(), &weights, &room)?);
        let mut paths: Vec<PathEstimate> = paths
            .iter()
            .zip(&weights)
            .map(|(path, speed)| PathEstimate {
                speed: *speed,
                smoothed: None,
                capacity: path.capacity,
                load: 0,
                sent: 0,
                seen: Observed::default(),
                drained: false,
                known: None,
                did: 0.0,
            })
            .collect();
        for (home, bytes) in homes.iter().zip(&bytes) {
            paths[*home].load += bytes;
        }
        Ok(SubgroupPlacement { paths, bytes, homes, fixed: ratio.is_some(), moved: 0 })
    }

    /// The path that stores a unit.
    #[cfg(test)]
    pub fn home(&self, unit: usize) -> usize {
        self.homes[unit]
    }

    /// Bytes that a path stores.
    pub fn load(&self, path: usize) -> u64 {
        self.paths[path].load
    }

    /// Number of times that a unit changed its path.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Chooses the path for the flush of a unit, and makes it the unit's home. `None` if no usable path has room.
    pub fn flush(&mut self, unit: usize) -> Option<usize> {
        let (home, bytes) = (self.homes[unit], self.bytes[unit]);
        let finish = |index: usize| {
            let path = &self.paths[index];
            (path.sent + bytes) as f64 / path.speed
        };
        let usable = |index: usize| {
            let path = &self.paths[index];
            !path.drained && path.speed > 0.0 && (index == home || path.load + bytes <= path.capacity)
        };
        let best =
            (0..self.paths.len()).filter(|i| usable(*i)).min_by(|a, b| finish(*a).total_cmp(&finish(*b)));
        let one = bytes as f64 / self.paths[home].speed;
        let ahead = |best: usize| !self.fixed && finish(home) > finish(best) * (1.0 + MARGIN) + one;
        let to = match best {
            Some(best) if !usable(home) || ahead(best) => best,
            Some(_) => home,
            None => return None,
        };
        self.paths[to].sent += bytes;
        self.rehome(unit, to);
        Some(to)
    }

    fn rehome(&mut self, unit: usize, to: usize) {
        let (home, bytes) = (self.homes[unit], self.bytes[unit]);
        if to == home {
            return;
        }
        self.paths[home].load -= bytes;
        self.paths[to].load += bytes;
        self.homes[unit] = to;
        self.moved += 1;
    }

    /// Adds observed transfers of a path. Lowers its speed at once if the path became much slower.
    pub fn observe(&mut self, path: usize, seen: Observed) {
        let path = &mut self.paths[path];
        path.seen.add(seen);
        let sample = path.load / SAMPLE;
        let Some(most) = path.seen.speed_at_most(sample).filter(|_| !self.fixed) else { return };
        if most < path.speed * (1.0 - SUDDEN) {
            path.speed = most;
            self.count_anew();
        }
    }

    /// Ends a part of the first writes, if it was long enough to re-estimate the speeds.
    pub fn end_part(&mut self) {
        if self.longest() >= SPAN {
            self.end_round();
        }
    }

    fn longest(&self) -> f64 {
        self.paths.iter().map(|path| path.seen.busy).fold(0.0, f64::max)
    }

    /// Ends a round: re-estimates the speeds from the observed transfers. Rounds shorter than `SPAN` are combined.
    pub fn end_round(&mut self) {
        self.count_anew();
        let longest = self.longest();
        if self.fixed || longest < SPAN {
            return;
        }
        let asked = self.paths.iter().map(PathEstimate::asked).fold(0.0, f64::max);
        self.paths.iter_mut().for_each(|path| path.learn(longest, asked));
    }

    /// Resets the bytes sent on all paths. Otherwise, after a change of speed, a long run of units would go to one path
    /// to compensate for the past.
    fn count_anew(&mut self) {
        self.paths.iter_mut().for_each(|path| path.sent = 0);
    }

    /// Starts (`drained`) or ends the draining of a path. The units of a draining path leave it at their next flush.
    pub fn drain(&mut self, path: usize, drained: bool) {
        if self.paths[path].drained != drained {
            self.paths[path].drained = drained;
            self.count_anew();
        }
    }
}

#[cfg(test)]
mod tests;
