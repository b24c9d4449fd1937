//! Transfers in flight between buffers and the tier, and the placement of the next writes.
//!
//! Invariants:
//! - The end of every started transfer is reported exactly once.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::time::{Duration, Instant};

use super::encoding::{self, Encoding, Master};
use super::options::SwapOptions;
use super::placement::{self, Flow, Observed, PathPlan, SubgroupPlacement};
use crate::error::{Error, IoKind, Result};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::tier::extent::Shape;
use crate::tier::store::PathFlow;
use crate::tier::{self, Health, PathReport, Tier};

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// Tier to buffer.
    Fetch,
    /// Buffer to tier.
    Flush,
}

/// A transfer that has ended.
#[derive(Debug)]
pub(super) struct EndedTransfer {
    pub(super) direction: Direction,
    pub(super) slot: usize,
    pub(super) outcome: Result<()>,
}

#[derive(Debug)]
struct Pending {
    ticket: u64,
    direction: Direction,
    slot: usize,
}

/// Versions of the states that the paths have room for: the committed one and the next one.
const VERSIONS: u64 = 2;

/// For each path, the number of consecutive blocks of an extent that it takes.
pub(super) type PathRuns = Vec<(u32, u32)>;

/// Placement units of one subgroup, in the order of its blocks.
#[derive(Debug)]
struct Pieces {
    units: Range<usize>,
    elements: u64,
}

/// What the paths need room for.
#[derive(Debug, Clone, Copy)]
struct Room {
    /// Bytes of all versions; each piece counts as much as the largest one.
    bytes: u64,
    /// Bytes of the largest piece.
    piece: u64,
}

impl Room {
    fn of(pieces: &[u64]) -> Room {
        let piece = pieces.iter().copied().max().unwrap_or(0);
        Room { bytes: piece.saturating_mul(pieces.len() as u64).saturating_mul(VERSIONS), piece }
    }

    /// The error if the paths lack it.
    fn lacks(&self, tier: &Tier) -> Error {
        let Room { bytes, piece } = self;
        let usable = tier.paths().into_iter().filter(|path| path.health == Health::Healthy);
        let more = bytes.saturating_sub(usable.map(|path| stored(&path)).sum());
        let context =
            format!("{VERSIONS} versions of the states take {bytes} bytes, in pieces of {piece} bytes");
        tier.no_room(more).context(context)
    }
}

/// Bytes of a path's data file in use.
fn stored(path: &PathReport) -> u64 {
    path.file_bytes.saturating_sub(path.free)
}

#[derive(Debug)]
pub(super) struct Traffic {
    usual: Encoding,
    placement: SubgroupPlacement,
    room: Room,
    pieces: Vec<Pieces>,
    pending: Vec<Pending>,
    /// Counters of each path at the last call of `observe_bandwidth`.
    seen: Vec<Observed>,
    pub(super) exposed: Duration,
}

impl Traffic {
    pub(super) fn new(tier: &Tier, options: &SwapOptions) -> Result<Traffic> {
        let paths = tier.paths();
        let speeds = match options.speeds.is_empty() {
            true => first_speeds(tier),
            false => options.speeds.clone(),
        };
        let seen = observed(tier);
        let plan = |(info, speed): (&PathReport, &f64)| PathPlan {
            speed: *speed,
            // On a resumed tier one version is already stored.
            capacity: stored(info).saturating_add(info.room) / VERSIONS,
        };
        let plans: Vec<PathPlan> = paths.iter().zip(&speeds).map(plan).collect();
        let block = tier.block_bytes();
        let mut pieces = Vec::new();
        let mut units = Vec::new();
        for elements in &options.subgroups {
            let shape = Shape::new(&encoding::streams(options.usual, *elements), block)?;
            let bytes = shape.bytes();
            let subgroups = options.subgroups.len() as u64;
            let unit = placement::unit_bytes(bytes, subgroups, paths.len() as u64, block);
            let count = bytes.checked_div(unit).unwrap_or(0).max(1) as usize;
            let first = units.len();
            units.extend((0..count).map(|_| bytes / count as u64));
            pieces.push(Pieces { units: first..units.len(), elements: *elements });
        }
        let room = Room::of(&units);
        let placement = SubgroupPlacement::new(&plans, options.ratio.as_deref(), units);
        let placement = placement.map_err(|error| match error {
            Error::LimitReached(_) => room.lacks(tier),
            other => other,
        })?;
        Ok(Traffic {
            usual: options.usual,
            placement,
            room,
            pieces,
            pending: Vec::new(),
            seen,
            exposed: Duration::ZERO,
        })
    }

    pub(super) fn load(&self) -> Vec<u64> {
        (0..self.seen.len()).map(|path| self.placement.load(path)).collect()
    }

    pub(super) fn moved(&self) -> u64 {
        self.placement.moved()
    }

    pub(super) fn idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// True while a transfer of a slot is in flight.
    pub(super) fn uses(&self, slot: usize) -> bool {
        self.pending.iter().any(|pending| pending.slot == slot)
    }

    /// Chooses the paths for a write of a subgroup with a full or split master. Errors: no healthy path has room.
    pub(super) fn place(&mut self, subgroup: usize, master: Master, tier: &Tier) -> Result<PathRuns> {
        let encoding = Encoding { master, ..self.usual };
        for (path, flow) in tier.flows().iter().enumerate() {
            self.placement.drain(path, flow.health != Health::Healthy);
        }
        let Pieces { units, elements } = &self.pieces[subgroup];
        let mut taken = vec![0u64; self.seen.len()];
        for unit in units.clone() {
            let path = self.placement.flush(unit).ok_or_else(|| self.room.lacks(tier))?;
            taken[path] += 1;
        }
        Ok(parts_of(&taken, &Shape::new(&encoding::streams(encoding, *elements), tier.block_bytes())?))
    }

    /// Starts a read of an extent into a slot.
    pub(super) fn read(
        &mut self,
        tier: &Tier,
        slot: usize,
        extent: u32,
        spans: &[TransferBuffer],
    ) -> Result<()> {
        let ticket = tier.read(extent, spans)?;
        self.pending.push(Pending { ticket, direction: Direction::Fetch, slot });
        Ok(())
    }

    /// Starts a write of an extent from a slot.
    pub(super) fn write(
        &mut self,
        tier: &Tier,
        slot: usize,
        extent: u32,
        spans: &[TransferBuffer],
        parts: PathRuns,
    ) -> Result<()> {
        let ticket = tier.write(extent, spans, &tier::ExtentPlacement::Striped(parts), None)?;
        self.pending.push(Pending { ticket, direction: Direction::Flush, slot });
        Ok(())
    }

    /// Transfers that have ended; with `wait`, at least one if any is in flight.
    pub(super) fn collect_ended(&mut self, tier: &Tier, wait: bool) -> Vec<EndedTransfer> {
        let began = Instant::now();
        let mut ended = Vec::new();
        while !self.pending.is_empty() {
            let events = tier.events();
            let mut index = 0;
            while index < self.pending.len() {
                let outcome = tier.wait(self.pending[index].ticket, Some(Duration::ZERO));
                match outcome {
                    Err(error) if error.io_kind() == Some(IoKind::Timeout) => index += 1,
                    outcome => {
                        let Pending { direction, slot, .. } = self.pending.swap_remove(index);
                        ended.push(EndedTransfer { direction, slot, outcome: outcome.map(drop) });
                        self.observe_bandwidth(tier);
                    }
                }
            }
            if !ended.is_empty() || !wait {
                break;
            }
            tier.wait_for_event(events);
        }
        if wait {
            self.exposed += began.elapsed();
        }
        ended
    }

    /// Reports the traffic of each path since the last call to the placement.
    fn observe_bandwidth(&mut self, tier: &Tier) {
        let since = |now: Flow, before: Flow| Flow {
            bytes: now.bytes.saturating_sub(before.bytes),
            busy: now.busy - before.busy,
        };
        for (path, now) in observed(tier).into_iter().enumerate() {
            let before = std::mem::replace(&mut self.seen[path], now);
            let (read, written) = (since(now.read, before.read), since(now.written, before.written));
            self.placement.observe(path, Observed { read, written, busy: now.busy - before.busy });
        }
    }

    pub(super) fn end_round(&mut self, tier: &Tier) {
        self.observe_bandwidth(tier);
        self.placement.end_round();
    }

    /// Ends a part of a fill, so that the first states show the speeds by which the others are divided.
    pub(super) fn end_part(&mut self) {
        self.placement.end_part();
    }
}

/// The traffic of each path since the tier was opened.
fn observed(tier: &Tier) -> Vec<Observed> {
    let of = |flow: &PathFlow| Observed {
        read: Flow { bytes: flow.traffic.read_bytes, busy: flow.traffic.reading.as_secs_f64() },
        written: Flow { bytes: flow.traffic.written_bytes, busy: flow.traffic.writing.as_secs_f64() },
        busy: flow.traffic.busy.as_secs_f64(),
    };
    tier.flows().iter().map(of).collect()
}

/// Speeds of paths that no transfer has shown yet. States that are stored already were divided by speed, so each path gets
/// its share as speed, and one without any the mean of the others. All speeds are equal without stored states. The values
/// are far below real ones: the first transfers replace all of them by what they show.
fn first_speeds(tier: &Tier) -> Vec<f64> {
    shares((0..tier.paths().len()).map(|path| tier.blocks_on(path as u32)).collect())
}

/// The blocks of each path as parts of their mean, 1 for a path without any.
fn shares(blocks: Vec<u64>) -> Vec<f64> {
    let used = blocks.iter().filter(|blocks| **blocks > 0).count();
    let mean = blocks.iter().sum::<u64>() as f64 / used.max(1) as f64;
    blocks.into_iter().map(|blocks| if blocks > 0 { blocks as f64 / mean } else { 1.0 }).collect()
}

/// Divides an extent among paths at block boundaries, as close as possible to the units that each path takes. The last
/// block of a stream may be short.
fn parts_of(taken: &[u64], shape: &Shape) -> PathRuns {
    let pieces = taken.iter().sum::<u64>().max(1);
    let bytes = shape.stored(0, shape.blocks());
    let (mut before, mut cut) = (0, 0);
    let parts = (0..).zip(taken).map(|(path, taken)| {
        before += taken;
        let wanted = (u128::from(bytes) * u128::from(before) / u128::from(pieces)) as u64;
        let end = shape.nearest(wanted);
        (path, end - std::mem::replace(&mut cut, end))
    });
    parts.filter(|(_, blocks)| *blocks > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::shares;

    #[test]
    fn speeds_are_at_first_as_stored_states_are_divided() {
        assert_eq!(shares(vec![0, 0]), [1.0, 1.0]);
        assert_eq!(shares(vec![30, 10]), [1.5, 0.5]);
        assert_eq!(shares(vec![30, 0, 10]), [1.5, 1.0, 0.5], "a path that is new");
    }
}
