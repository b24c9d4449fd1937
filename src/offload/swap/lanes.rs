//! Turns on the paths, as transfers need them (MLP-Offload section 3.1).
//!
//! Invariants:
//! - In a round, what goes to a path waits at its gate until this process has its turn there, or its patience ran out.
//!   Other paths go on meanwhile: a subgroup's parts travel each in its own time.
//! - A turn lasts while nobody else waits; then for what has come to the gate by now, and it is given up when that is over.
//! - That depends on nothing but the path's own transfers: processes never wait for each other in a ring.
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::{Duration, Instant};

use super::SwapOptions;
use crate::error::Result;
use crate::io::object::is_address;
use crate::log::{self, Level};
use crate::tier::turn::{Claim, Line};
use crate::tier::{Health, Tier};

/// Paths on one device, which have one line.
#[derive(Debug)]
struct Lane {
    claim: Claim,
    paths: Vec<usize>,
}

#[derive(Debug)]
pub(super) struct Lanes {
    /// Of paths with turns; the others are open to all at any time.
    lanes: Vec<Lane>,
    looked: Option<Instant>,
}

/// How often the lines are looked at; a turn lasts for tens of milliseconds and more.
const LOOK: Duration = Duration::from_millis(1);

impl Lanes {
    pub(super) fn new(tier: &Tier, options: &SwapOptions) -> Result<Lanes> {
        let mut lines: Vec<(Line, Vec<usize>)> = Vec::new();
        for (path, info) in tier.paths().into_iter().enumerate() {
            // Memory is this process's alone, and a store serves everybody at once.
            let shared = !info.memory && !is_address(&info.name) && info.health != Health::Missing;
            if !options.exclusive || !shared {
                continue;
            }
            let line = match Line::join(Path::new(&info.name), None) {
                Ok(line) => line,
                // Turns are a courtesy: without them every process uses the path at any time.
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

    /// Begins a round.
    pub(super) fn begin(&mut self, tier: &Tier) {
        self.looked = None;
        self.lanes.iter().flat_map(|lane| &lane.paths).for_each(|path| tier.close_gate(*path));
    }

    /// Asks for turns that are wanted and gives up those that others wait for. To be called again and again in a round.
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

    /// Ends a round.
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
