//! Which path each unit of state lives on, and where it goes when it is flushed.
//!
//! A unit is a subgroup, or a chunk of one where subgroups are few. Rules:
//! - The first placement follows [`split`](super::split): proportional to speed or to the user's ratio, in balanced order.
//! - A unit moves only when it is flushed anyway. It goes where it is predicted to finish first, counting what is
//!   queued there and what lives there already; its own path keeps it unless another is ahead by more than [`MARGIN`].
//! - Speeds are re-estimated once a round (one update of all units) from bytes and busy time, smoothed, and only a change
//!   of more than [`DEADBAND`] is believed. Together these keep noise from moving anything. A change of more than
//!   [`SUDDEN`] is no noise: it is believed at once, within the round.
//! - A path that is drained gets nothing; what lives on it leaves with the next flush.
#![forbid(unsafe_code)]

use super::split;
use crate::error::{Error, Result};

/// How far ahead another path must be before a unit moves there.
const MARGIN: f64 = 0.02;
/// Least relative change of a speed that is believed.
const DEADBAND: f64 = 0.02;
/// Weight of the newest round in a speed.
const NEWEST: f64 = 0.5;
/// Relative change that is believed as it stands.
const SUDDEN: f64 = 0.25;
/// Part of a path's load that says enough about its speed to believe a sudden change within a round.
const SAMPLE: u64 = 16;
/// With this many units a path, one unit more or less is within the margin.
const UNITS_PER_PATH: u64 = 32;
/// Chunks are multiples of this: large enough for one operation at full speed.
const CHUNK_STEP: u64 = 1 << 20;

/// What is known of a path before the first round.
#[derive(Debug, Clone, Copy)]
pub struct PathPlan {
    /// Bytes per second, the smaller of reading and writing: a hint or a measurement.
    pub speed: f64,
    /// Most bytes that may live there.
    pub capacity: u64,
}

/// What a path did in a round.
#[derive(Debug, Clone, Copy, Default)]
pub struct Observed {
    /// Bytes read and written.
    pub bytes: u64,
    /// Seconds during which at least one of its operations was under way.
    pub busy: f64,
}

impl Observed {
    /// A state is read and written once a round: it moves at half the speed of its bytes.
    fn speed(&self) -> Option<f64> {
        let speed = self.bytes as f64 / 2.0 / self.busy;
        (self.bytes > 0 && speed.is_finite() && speed > 0.0).then_some(speed)
    }
}

#[derive(Debug)]
struct Path {
    speed: f64,
    smoothed: Option<f64>,
    capacity: u64,
    load: u64,
    round: Observed,
    drained: bool,
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

/// The size of a unit: the subgroup itself where there are many, else chunks, so that no path's share is off by more
/// than a unit in [`UNITS_PER_PATH`].
pub fn unit_bytes(subgroup_bytes: u64, subgroups: u64, paths: u64) -> u64 {
    let wanted = UNITS_PER_PATH * paths;
    if paths < 2 || subgroups >= wanted || subgroup_bytes == 0 {
        return subgroup_bytes;
    }
    let chunks = wanted.div_ceil(subgroups.max(1));
    subgroup_bytes.div_ceil(chunks).next_multiple_of(CHUNK_STEP).min(subgroup_bytes)
}

impl Placement {
    /// Places units of these sizes; `ratio`, if given, overrides the speeds.
    pub fn new(paths: &[PathPlan], ratio: Option<&[f64]>, bytes: Vec<u64>) -> Result<Placement> {
        let weights: Vec<f64> = match ratio {
            Some(ratio) => ratio.to_vec(),
            None => paths.iter().map(|path| path.speed).collect(),
        };
        split::check(&weights)?;
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
                round: Observed::default(),
                drained: false,
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

    /// Bytes per second that a path is believed to move.
    pub fn speed(&self, path: usize) -> f64 {
        self.paths[path].speed
    }

    /// Decides where a unit is flushed to, and makes that its home. `queued` are the bytes waiting at each path. None if
    /// no path that is in use has room.
    pub fn flush(&mut self, unit: usize, queued: &[u64]) -> Option<usize> {
        let (home, bytes) = (self.homes[unit], self.bytes[unit]);
        let finish = |index: usize| {
            let path = &self.paths[index];
            let lives = path.load + if index == home { 0 } else { bytes };
            (lives + queued[index]) as f64 / path.speed
        };
        let usable = |index: usize| {
            let path = &self.paths[index];
            !path.drained && path.speed > 0.0 && (index == home || path.load + bytes <= path.capacity)
        };
        let best =
            (0..self.paths.len()).filter(|i| usable(*i)).min_by(|a, b| finish(*a).total_cmp(&finish(*b)));
        let ahead = |best: usize| !self.fixed && finish(home) > finish(best) * (1.0 + MARGIN);
        let to = match best {
            Some(best) if !usable(home) || ahead(best) => best,
            Some(_) => home,
            None => return None,
        };
        self.rehome(unit, to);
        Some(to)
    }

    /// Records that a unit lives elsewhere than [`flush`](Placement::flush) said, after that path failed.
    pub fn rehome(&mut self, unit: usize, to: usize) {
        let (home, bytes) = (self.homes[unit], self.bytes[unit]);
        if to == home {
            return;
        }
        self.paths[home].load -= bytes;
        self.paths[to].load += bytes;
        self.homes[unit] = to;
        self.moved += 1;
    }

    /// The path to fetch from next: the one whose queue is done first, of those with units `left`.
    pub fn fetch_from(&self, left: &[usize], queued: &[u64]) -> Option<usize> {
        let idle_at = |index: &usize| queued[*index] as f64 / self.paths[*index].speed.max(f64::MIN_POSITIVE);
        (0..self.paths.len()).filter(|path| left[*path] > 0).min_by(|a, b| idle_at(a).total_cmp(&idle_at(b)))
    }

    /// Adds what a path did.
    pub fn observe(&mut self, path: usize, seen: Observed) {
        let fixed = self.fixed;
        let path = &mut self.paths[path];
        path.round.bytes += seen.bytes;
        path.round.busy += seen.busy;
        let enough = path.round.bytes > path.load / SAMPLE;
        if let Some(speed) = path.round.speed().filter(|_| enough && !fixed)
            && (speed / path.speed - 1.0).abs() > SUDDEN
        {
            path.speed = speed;
        }
    }

    /// Ends a round: speeds follow what was observed.
    pub fn end_round(&mut self) {
        for path in &mut self.paths {
            let Some(speed) = std::mem::take(&mut path.round).speed().filter(|_| !self.fixed) else {
                continue;
            };
            let smoothed = match path.smoothed {
                Some(before) if (speed / before - 1.0).abs() < SUDDEN => before + NEWEST * (speed - before),
                _ => speed,
            };
            path.smoothed = Some(smoothed);
            if (smoothed / path.speed - 1.0).abs() > DEADBAND {
                path.speed = smoothed;
            }
        }
    }

    /// Takes a path out of use, or back into it; what lives on it leaves as it is flushed.
    pub fn drain(&mut self, path: usize, drained: bool) {
        self.paths[path].drained = drained;
    }

    /// Seconds that the next round is predicted to take, from the slowest path's load.
    pub fn predicted_seconds(&self) -> f64 {
        self.paths
            .iter()
            .map(|path| if path.load == 0 { 0.0 } else { path.load as f64 / path.speed })
            .fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests;
