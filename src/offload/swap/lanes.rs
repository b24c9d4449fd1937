//! Turns on the paths, as transfers need them.
//!
//! Invariants:
//! - A transfer runs on a path only with this process's turn there, or after its patience ran out.
//! - A turn is kept while transfers use it, and given up as soon as none does and somebody waits.
//! - Whoever waits for a turn has no transfer under way and holds turns of lower lanes only: processes never wait for
//!   each other in a ring.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

use super::SwapOptions;
use crate::error::Result;
use crate::io::object::is_address;
use crate::tier::Health;
use crate::tier::Tier;
use crate::tier::turn::{self, Line, Turn};

#[derive(Debug)]
struct Lane {
    /// None for a path without turns: no other process sees it, or all may use it at once.
    line: Option<Line>,
    turn: Option<Turn>,
    under_way: usize,
}

#[derive(Debug)]
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    /// The lane of each path: paths on one device share theirs.
    of: Vec<usize>,
    patience: Duration,
}

impl Lanes {
    pub(super) fn new(tier: &Tier, options: &SwapOptions) -> Result<Lanes> {
        let mut lines: Vec<(Option<Line>, usize)> = Vec::new();
        for (path, info) in tier.paths().into_iter().enumerate() {
            // A store serves everybody at once.
            let shared = !info.memory && !is_address(&info.name);
            let line = match options.exclusive && shared && info.health != Health::Missing {
                true => Some(Line::join(Path::new(&info.name), None)?),
                false => None,
            };
            lines.push((line, path));
        }
        // Every process has the same order, whatever the order of its paths.
        lines.sort_by(|(a, _), (b, _)| a.as_ref().map(Line::place).cmp(&b.as_ref().map(Line::place)));
        let mut lanes: Vec<Lane> = Vec::new();
        let mut of = vec![0; lines.len()];
        for (line, path) in lines {
            let same = lanes.last().is_some_and(|last| {
                last.line.as_ref().zip(line.as_ref()).is_some_and(|(a, b)| a.place() == b.place())
            });
            if !same {
                lanes.push(Lane { line, turn: None, under_way: 0 });
            }
            of[path] = lanes.len() - 1;
        }
        Ok(Lanes { lanes, of, patience: options.patience })
    }

    /// The place in `waiting` of the first subgroup whose paths this process may use at once; the first of all if none.
    pub(super) fn choose(&mut self, waiting: &VecDeque<usize>, paths: impl Fn(usize) -> Vec<usize>) -> usize {
        let free = |lanes: &mut Lanes, lane: usize| lanes.lanes[lane].have().unwrap_or(true);
        let mut looked: Vec<Option<bool>> = vec![None; self.lanes.len()];
        let place = waiting.iter().position(|subgroup| {
            paths(*subgroup)
                .into_iter()
                .map(|path| self.of[path])
                .collect::<Vec<_>>()
                .into_iter()
                .all(|lane| *looked[lane].get_or_insert_with(|| free(self, lane)))
        });
        place.unwrap_or(0)
    }

    /// Begins a transfer on these paths. False if transfers under way have to end first.
    pub(super) fn enter(&mut self, paths: &[usize]) -> Result<bool> {
        let busy = self.lanes.iter().any(|lane| lane.under_way > 0);
        let mut of: Vec<usize> = paths.iter().map(|path| self.of[*path]).collect();
        of.sort_unstable();
        for lane in &of {
            if self.lanes[*lane].have()? {
                continue;
            }
            if busy {
                return Ok(false);
            }
            let patience = self.patience;
            self.lanes[*lane..].iter_mut().for_each(|higher| higher.turn = None);
            let lane = &mut self.lanes[*lane];
            if let Some(line) = &lane.line {
                lane.turn = turn::take_any(&[line], patience)?.1;
            }
        }
        of.iter().for_each(|lane| self.lanes[*lane].under_way += 1);
        self.lanes.iter_mut().filter(|lane| lane.under_way == 0).for_each(|lane| lane.turn = None);
        Ok(true)
    }

    /// Ends a transfer on these paths.
    pub(super) fn leave(&mut self, paths: &[usize]) {
        for path in paths {
            let lane = &mut self.lanes[self.of[*path]];
            lane.under_way = lane.under_way.saturating_sub(1);
            let waited_for = || lane.line.as_ref().is_some_and(|line| line.others_wait().unwrap_or(true));
            if lane.under_way == 0 && waited_for() {
                lane.turn = None;
            }
        }
    }

    /// Gives up all turns.
    pub(super) fn release_all(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.turn = None);
    }
}

impl Lane {
    /// True if the turn is this process's, or can be had at once. A turn that others wait for begins few transfers.
    fn have(&mut self) -> Result<bool> {
        let Some(line) = &self.line else { return Ok(true) };
        if self.turn.is_some() {
            return Ok(self.under_way < LONGEST || !line.others_wait()?);
        }
        // After patience ran out, transfers run without a turn; they end before it is asked for again.
        if self.under_way == 0 {
            self.turn = line.try_take()?;
        }
        Ok(self.turn.is_some())
    }
}

/// Transfers that a turn may begin while others wait.
const LONGEST: usize = 2;
