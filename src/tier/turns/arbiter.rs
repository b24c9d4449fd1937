//! Turns on shared paths, taken when transfers need them (MLP-Offload section 3.2).
//!
//! Invariants:
//! - In a round, transfers to a path wait at the path's gate until this process has its turn, or its timeout passes.
//!   Other paths are not delayed: the parts of a subgroup travel independently.
//! - A process keeps its turn while no other process waits. When one does, this process closes the gate, finishes the
//!   transfers that have passed it, and gives the turn up.
//! - A turn depends only on the path's own transfers, so processes never wait for each other in a cycle.
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::{Duration, Instant};

use super::queue::{TurnQueue, TurnRequest};
use crate::error::Result;
use crate::io::options::is_address;
use crate::log::{self, Level};
use crate::tier::health::Health;
use crate::tier::store::Tier;

/// The paths on one device, which share one queue of waiting processes.
#[derive(Debug)]
struct SharedDevice {
    request: TurnRequest,
    paths: Vec<usize>,
}

/// The turns of one process on the paths of a tier.
#[derive(Debug)]
pub struct PathArbiter {
    /// Devices whose paths have turns. Other paths are always open.
    devices: Vec<SharedDevice>,
    last_poll: Option<Instant>,
}

/// Interval between checks of the queues; a turn lasts tens of milliseconds or more.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

impl PathArbiter {
    /// Joins the queues of the shared paths of `tier`. A turn is awaited for at most `turn_timeout`.
    pub fn new(tier: &Tier, turn_timeout: Duration) -> Result<PathArbiter> {
        let mut queues: Vec<(TurnQueue, Vec<usize>)> = Vec::new();
        for (path, info) in tier.paths().into_iter().enumerate() {
            // Memory belongs to this process alone, and an object store serves all processes at once.
            let shared = !info.memory && !is_address(&info.name) && info.health != Health::Missing;
            if !shared {
                continue;
            }
            let queue = match TurnQueue::join(Path::new(&info.name), None) {
                Ok(queue) => queue,
                // Turns only improve bandwidth: without them every process uses the path at any time.
                Err(error) => {
                    log::write(
                        Level::Warn,
                        &format!("{} is used without taking turns with other processes: {error}", info.name),
                    );
                    continue;
                }
            };
            match queues.iter_mut().find(|(known, _)| known.directory() == queue.directory()) {
                Some((_, paths)) => paths.push(path),
                None => queues.push((queue, vec![path])),
            }
        }
        let devices = queues
            .into_iter()
            .map(|(queue, paths)| SharedDevice { request: TurnRequest::new(queue, turn_timeout), paths });
        Ok(PathArbiter { devices: devices.collect(), last_poll: None })
    }

    /// An arbiter without turns: all paths are always open.
    pub fn without_turns() -> PathArbiter {
        PathArbiter { devices: Vec::new(), last_poll: None }
    }

    /// Begins a round: closes the gates of paths with turns.
    pub fn begin(&mut self, tier: &Tier) {
        self.last_poll = None;
        self.devices.iter().flat_map(|device| &device.paths).for_each(|path| tier.close_gate(*path));
    }

    /// Requests turns that are needed, and gives up turns that other processes wait for. Call repeatedly in a round.
    pub fn poll(&mut self, tier: &Tier) {
        if self.last_poll.is_some_and(|last_poll| last_poll.elapsed() < POLL_INTERVAL) {
            return;
        }
        self.last_poll = Some(Instant::now());
        self.devices.retain_mut(|device| match device.poll(tier) {
            Ok(()) => true,
            Err(error) => {
                log::write(Level::Warn, &format!("this process takes no more turns on a path: {error}"));
                device.open(tier);
                false
            }
        });
    }

    /// Time until the next `poll` is useful; `None` if no path has turns.
    pub fn next_poll(&self) -> Option<Duration> {
        (!self.devices.is_empty()).then_some(POLL_INTERVAL)
    }

    /// Ends a round: opens all gates and gives all turns up.
    pub fn end(&mut self, tier: &Tier) {
        for device in &mut self.devices {
            device.open(tier);
            device.request.release();
        }
    }
}

impl SharedDevice {
    fn poll(&mut self, tier: &Tier) -> Result<()> {
        if self.request.granted() {
            if !self.request.others_wait()? {
                self.open(tier);
                return Ok(());
            }
            self.paths.iter().for_each(|path| tier.close_gate(*path));
            if !self.paths.iter().all(|path| tier.quiet(*path)) {
                return Ok(());
            }
            self.request.release();
        }
        if self.paths.iter().any(|path| tier.held_back(*path)) && self.request.poll()? {
            self.paths.iter().for_each(|path| tier.release_held(*path));
        }
        Ok(())
    }

    fn open(&self, tier: &Tier) {
        self.paths.iter().for_each(|path| tier.open_gate(*path));
    }
}
