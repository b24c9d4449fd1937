//! Which path each unit of state lives on, and where it goes when it is flushed.
//!
//! A unit is a part of a subgroup: cut over all paths, a subgroup moves at the speed of all of them together, and few
//! buffers of host memory keep every path busy. Rules:
//! - The first placement follows [`split`](super::split): proportional to speed or to the user's ratio, in balanced order.
//! - A unit moves only when it is flushed anyway. It goes where it is predicted to finish first, counting what the round
//!   has sent there already; its own path keeps it unless another is ahead by more than a unit and [`MARGIN`]. So every
//!   stretch of a round, not only its whole, has each path's share, whichever way round it is walked.
//! - Speeds are re-estimated once a round (one update of all units). The path that all others waited for showed what it
//!   can do: bytes over the time in which it was busy. Of one that was done before, this is no more than the most that
//!   it may do: what is limited by a rate, not by its device, answers at once as long as it is asked for less. It is
//!   given more than it did, little if it was known lately what it can do, up to twice as much if not, until all paths
//!   are done together.
//! - Speeds are smoothed, and only a change of more than [`DEADBAND`] is believed: noise moves nothing. A path that gets
//!   slower by more than [`SUDDEN`] is believed at once, within the round.
//! - A path that is drained gets nothing; what lives on it leaves with the next flush.
#![forbid(unsafe_code)]

use super::split;
use crate::error::{Error, Result};

/// How far ahead another path must be before a unit moves there.
const MARGIN: f64 = 0.02;
/// Least relative change of a speed that is believed.
const DEADBAND: f64 = 0.03;
/// Weight of the newest round in a speed.
const NEWEST: f64 = 0.5;
/// Relative change that is believed as it stands.
const SUDDEN: f64 = 0.25;
/// Part of a path's load that says enough about its speed to believe within a round that it got slower.
const SAMPLE: u64 = 8;
/// A path that was busy as long as the busiest one, but for this factor, is one that all waited for.
const FULL: f64 = 1.01;
/// Up to this factor a path was nearly as busy, and its speed is raised by [`NUDGE`]; beyond it, it was idle.
const IDLE: f64 = 1.1;
/// No more than [`MARGIN`]: it takes some rounds before anything moves.
const NUDGE: f64 = 1.02;
/// An idle path is given more than it did by this factor, as long as that is near what it is known to do.
const GENTLY: f64 = 1.13;
/// And by this one, if nothing is known or it did more than that by [`PASSED`].
const BOLDLY: f64 = 2.0;
/// What a throttle lets through after a pause is less than this.
const PASSED: f64 = 1.2;
/// Gently only after a round in which the path was asked for what its speed says, as far as the others were: units follow
/// a speed as they are flushed, and are read where they were a round before.
const ASKED: f64 = 0.95;
/// Seconds that say enough about a speed: devices, caches and throttles work in bursts.
const SPAN: f64 = 0.25;
/// Least units of a round for each path: one more or less is then within the margin.
const UNITS_PER_PATH: u64 = 32;
/// Least units of a subgroup, unless blocks are larger: so finely it follows the paths' shares.
const UNITS_PER_SUBGROUP: u64 = 128;

/// What is known of a path before the first round.
#[derive(Debug, Clone, Copy)]
pub struct PathPlan {
    /// Bytes per second, the smaller of reading and writing: a hint or a measurement.
    pub speed: f64,
    /// Most bytes that may live there.
    pub capacity: u64,
}

/// What a path did in one direction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Flow {
    /// Bytes moved.
    pub bytes: u64,
    /// Seconds during which at least one operation was under way.
    pub busy: f64,
}

/// What a path did in a round.
#[derive(Debug, Clone, Copy, Default)]
pub struct Observed {
    /// From the path.
    pub read: Flow,
    /// To the path.
    pub written: Flow,
    /// Seconds during which an operation of either direction was under way.
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
    /// Of both directions together.
    fn speed(&self) -> Option<f64> {
        Flow { bytes: self.bytes(), busy: self.busy }.speed()
    }

    /// What it cannot pass: both directions at once, each as fast as it was.
    fn most(&self) -> Option<f64> {
        self.read.speed().into_iter().chain(self.written.speed()).reduce(|a, b| a + b)
    }

    fn bytes(&self) -> u64 {
        self.read.bytes + self.written.bytes
    }

    /// What it cannot pass, after it moved more than `sample` bytes: a round begins with reading alone.
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
struct Path {
    speed: f64,
    smoothed: Option<f64>,
    capacity: u64,
    load: u64,
    /// Bytes flushed there in this round, since a speed last changed.
    sent: u64,
    /// Since its speed was last looked at, over several rounds if they are short.
    seen: Observed,
    drained: bool,
    /// What it showed when all waited for it, or did before.
    known: Option<f64>,
    /// What it did when it was last idle.
    did: f64,
}

impl Path {
    /// Seconds that this path needs, by its speed, for what it moved.
    fn asked(&self) -> f64 {
        self.seen.bytes() as f64 / self.speed
    }

    /// Believes what was seen in a time in which the busiest path was busy for `longest`; `asked` is the most that was
    /// asked of a path.
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

/// The homes of all units.
#[derive(Debug)]
pub struct Placement {
    paths: Vec<Path>,
    bytes: Vec<u64>,
    homes: Vec<usize>,
    /// The user's ratio stands instead of speeds, and is never re-estimated.
    fixed: bool,
    moved: u64,
}

/// The size of a unit: a part of a subgroup, so small that subgroups and rounds can follow the paths' shares, in whole
/// blocks. Units of one path move together.
pub fn unit_bytes(subgroup_bytes: u64, subgroups: u64, paths: u64, block_bytes: u64) -> u64 {
    if paths < 2 || subgroup_bytes == 0 {
        return subgroup_bytes;
    }
    let chunks = (UNITS_PER_PATH * paths).div_ceil(subgroups.max(1)).max(UNITS_PER_SUBGROUP);
    let blocks = subgroup_bytes / chunks / block_bytes;
    (blocks.max(1) * block_bytes).min(subgroup_bytes)
}

impl Placement {
    /// Places units of these sizes; `ratio`, if given, overrides the speeds.
    pub fn new(paths: &[PathPlan], ratio: Option<&[f64]>, bytes: Vec<u64>) -> Result<Placement> {
        let weights: Vec<f64> = match ratio {
            Some(ratio) => ratio.to_vec(),
            None => paths.iter().map(|path| path.speed).collect(),
        };
        split::check(if ratio.is_some() { "ratio" } else { "speeds" }, &weights)?;
        if weights.len() != paths.len() {
            let reason = format!("has {} parts for {} paths", weights.len(), paths.len());
            return Err(Error::invalid("ratio", reason));
        }
        let largest = bytes.iter().copied().max().unwrap_or(0).max(1);
        let room: Vec<usize> = paths.iter().map(|path| (path.capacity / largest) as usize).collect();
        let homes = split::balanced_order(&split::shares(bytes.len(), &weights, &room)?);
        let mut paths: Vec<Path> = paths
            .iter()
            .zip(&weights)
            .map(|(path, speed)| Path {
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
        Ok(Placement { paths, bytes, homes, fixed: ratio.is_some(), moved: 0 })
    }

    /// Where a unit lives.
    pub fn home(&self, unit: usize) -> usize {
        self.homes[unit]
    }

    /// Bytes that live on a path.
    pub fn load(&self, path: usize) -> u64 {
        self.paths[path].load
    }

    /// Units that changed their path so far.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Decides where a unit is flushed to, and makes that its home. None if no path that is in use has room.
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

    /// Adds what a path did.
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

    /// Ends a round: speeds follow what was observed. Short rounds are looked at together.
    pub fn end_round(&mut self) {
        self.count_anew();
        let longest = self.paths.iter().map(|path| path.seen.busy).fold(0.0, f64::max);
        if self.fixed || longest < SPAN {
            return;
        }
        let asked = self.paths.iter().map(Path::asked).fold(0.0, f64::max);
        self.paths.iter_mut().for_each(|path| path.learn(longest, asked));
    }

    /// What was sent under other speeds is not made up for: that would put all of a stretch on one path.
    fn count_anew(&mut self) {
        self.paths.iter_mut().for_each(|path| path.sent = 0);
    }

    /// Takes a path out of use, or back into it; what lives on it leaves as it is flushed.
    pub fn drain(&mut self, path: usize, drained: bool) {
        if self.paths[path].drained != drained {
            self.paths[path].drained = drained;
            self.count_anew();
        }
    }
}

#[cfg(test)]
mod tests;
