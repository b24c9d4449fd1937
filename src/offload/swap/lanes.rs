//! Turns on shared paths, taken when transfers need them (MLP-Offload section 3.1).
//!
//! Invariants:
//! - In a round, transfers to a path wait at the path's gate until this process has its turn, or its patience runs out.
//!   Other paths are not delayed: the parts of a subgroup travel independently.
//! - A process keeps its turn while no other process waits. When one does, this process closes the gate, finishes the
//!   transfers that have passed it, and gives the turn up.
//! - A turn depends only on the path's own transfers, so processes never wait for each other in a cycle.
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::{Duration, Instant};

use super::SwapOptions;
use crate::error::Result;
use crate::io::object::is_address;
use crate::log::{self, Level};
use crate::tier::turn::{Claim, Line};
use crate::tier::{Health, Tier};

/// The paths on one device, which share one line of waiting processes.
#[derive(Debug)]
struct Lane {
    claim: Claim,
    paths: Vec<usize>,
}

#[derive(Debug)]
pub(super) struct Lanes {
    /// Lanes of paths with turns. Other paths are always open.
    lanes: Vec<Lane>,
    looked: Option<Instant>,
}

/// Interval between checks of the lines; a turn lasts tens of milliseconds or more.
const LOOK: Duration = Duration::from_millis(1);

impl Lanes {
    pub(super) fn new(tier: &Tier, options: &SwapOptions) -> Result<Lanes> {
        let mut lines: Vec<(Line, Vec<usize>)> = Vec::new();
        for (path, info) in tier.paths().into_iter().enumerate() {
            // Memory belongs to this process alone, and an object store serves all processes at once.
            let shared = !info.memory && !is_address(&info.name) && info.health != Health::Missing;
            if !options.exclusive || !shared {
                continue;
            }
            let line = match Line::join(Path::new(&info.name), None) {
                Ok(line) => line,
                // Turns only improve bandwidth: without them every process uses the path at any time.
                Err(error) => {
                    log::write(Level::Warn, &format!("{} is used without turns: {error}", info.name));
                    continue;
                }
            };
            match lines.iter_mut().find(|(known, _)| known.place() == line.place()) {
                Some((_, paths)) => paths.push(path),
                None => lines.push((line, vec![path])),
            }
        }
        let lanes =
            lines.into_iter().map(|(line, paths)| Lane { claim: Claim::new(line, options.patience), paths });
        Ok(Lanes { lanes: lanes.collect(), looked: None })
    }

    /// Begins a round: closes the gates of paths with turns.
    pub(super) fn begin(&mut self, tier: &Tier) {
        self.looked = None;
        self.lanes.iter().flat_map(|lane| &lane.paths).for_each(|path| tier.close_gate(*path));
    }

    /// Requests turns that are needed, and gives up turns that other processes wait for. Call repeatedly in a round.
    pub(super) fn look(&mut self, tier: &Tier) {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK) {
            return;
        }
        self.looked = Some(Instant::now());
        self.lanes.retain_mut(|lane| match lane.look(tier) {
            Ok(()) => true,
            Err(error) => {
                log::write(Level::Warn, &format!("turns on a path end: {error}"));
                lane.open(tier);
                false
            }
        });
    }

    /// Ends a round: opens all gates and gives all turns up.
    pub(super) fn end(&mut self, tier: &Tier) {
        for lane in &mut self.lanes {
            lane.open(tier);
            lane.claim.give_up();
        }
    }
}

impl Lane {
    fn look(&mut self, tier: &Tier) -> Result<()> {
        if self.claim.granted() {
            if !self.claim.others_wait()? {
                self.open(tier);
                return Ok(());
            }
            self.paths.iter().for_each(|path| tier.close_gate(*path));
            if !self.paths.iter().all(|path| tier.quiet(*path)) {
                return Ok(());
            }
            self.claim.give_up();
        }
        if self.paths.iter().any(|path| tier.held_back(*path)) && self.claim.ask()? {
            self.paths.iter().for_each(|path| tier.let_through(*path));
        }
        Ok(())
    }

    fn open(&self, tier: &Tier) {
        self.paths.iter().for_each(|path| tier.open_gate(*path));
    }
}
