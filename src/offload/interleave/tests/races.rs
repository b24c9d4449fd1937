//! A backend that runs no work: it only detects missing order, with vector clocks.
//!
//! - Every lane has a clock. An operation happens after its lane's past, after what the lane waited for, and after what
//!   the host thread that enqueued it had seen.
//! - Two operations on one place must be ordered if one of them writes. If they are not, the place and the lane are
//!   reported, whatever order they happen to run in.
//! - One wait can be left out, to test that its absence is detected.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap};

use crate::error::Result;
use spillway_planner::interleave::schedule::{Command, Edge, Lane, LaneEvent, STATES, StateArray, Work};
use spillway_planner::interleave::{GpuGrads, Shape, TransferDtype};

const LANES: usize = Lane::ALL.len();
type Clock = [u64; LANES];

/// A memory area that operations share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    HostState(usize, StateArray),
    HostGrad(usize),
    DeviceGrad(usize),
    DeviceParam(usize),
    Slot(usize, StateArray),
    SlotGrad(usize),
    Resident(usize, StateArray),
    Chunk(usize),
    Stage(usize),
}

#[derive(Debug, Default, Clone)]
struct History {
    /// Lane and time of the last write.
    written: Option<(Lane, u64)>,
    /// Time of each lane's last read since the last write.
    read: Clock,
}

/// The race checker.
pub struct Races {
    shape: Shape,
    clocks: [Clock; LANES],
    events: HashMap<LaneEvent, Clock>,
    places: HashMap<Place, History>,
    /// The host thread that enqueues commands now.
    pub issuer: Lane,
    /// The wait that is left out.
    pub dropped: Option<(Edge, Lane)>,
    /// The waits that were played.
    pub seen: BTreeSet<(u32, usize)>,
    /// Unordered accesses.
    pub found: Vec<String>,
}

impl Races {
    pub fn new(shape: &Shape) -> Races {
        Races {
            shape: shape.clone(),
            clocks: [[0; LANES]; LANES],
            events: HashMap::new(),
            places: HashMap::new(),
            issuer: Lane::Caller,
            dropped: None,
            seen: BTreeSet::new(),
            found: Vec::new(),
        }
    }

    /// Orders host thread `lane` after everything of `other` so far: as if `other` started it, or released a lock to
    /// it.
    pub fn follow(&mut self, lane: Lane, other: Lane) {
        let past = self.clocks[other as usize];
        join(&mut self.clocks[lane as usize], &past);
    }

    pub fn play(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Wait(lane, event, edge) => {
                self.seen.insert((edge as u32, lane as usize));
                if self.dropped != Some((edge, lane)) {
                    let past = self.events.get(&event).copied().unwrap_or_default();
                    join(&mut self.clocks[lane as usize], &past);
                }
            }
            Command::Record(lane, event) => {
                self.follow(lane, self.issuer);
                self.events.insert(event, self.clocks[lane as usize]);
            }
            Command::Run(lane, work) => {
                let (reads, writes) = self.touched(work);
                self.touch(lane, &reads, &writes);
            }
        }
        Ok(())
    }

    /// Checks an operation on a lane that reads and writes these places.
    pub fn touch(&mut self, lane: Lane, reads: &[Place], writes: &[Place]) {
        self.follow(lane, self.issuer);
        self.clocks[lane as usize][lane as usize] += 1;
        let clock = self.clocks[lane as usize];
        for (place, writes) in
            reads.iter().map(|place| (place, false)).chain(writes.iter().map(|p| (p, true)))
        {
            let history = self.places.entry(*place).or_default();
            let after_write = history.written.is_none_or(|(other, time)| clock[other as usize] >= time);
            let after_reads = !writes || (0..LANES).all(|other| clock[other] >= history.read[other]);
            if !after_write || !after_reads {
                self.found.push(format!("{place:?} on {lane:?}: {history:?}"));
            }
            match writes {
                true => *history = History { written: Some((lane, clock[lane as usize])), read: [0; LANES] },
                false => history.read[lane as usize] = clock[lane as usize],
            }
        }
    }

    /// The places that a piece of work reads and writes.
    fn touched(&self, work: Work) -> (Vec<Place>, Vec<Place>) {
        let all = |of: fn(usize, StateArray) -> Place, index| STATES.map(|state| of(index, state)).to_vec();
        match work {
            Work::Cast { subgroup, buffer, .. } => {
                (vec![Place::DeviceGrad(subgroup)], vec![Place::Chunk(buffer)])
            }
            Work::GradOut { subgroup, buffer, .. } => {
                let from = buffer.map_or(Place::DeviceGrad(subgroup), Place::Chunk);
                (vec![from], vec![Place::HostGrad(subgroup)])
            }
            Work::Prefetch { subgroup, slot, state, .. } => {
                (vec![Place::HostState(subgroup, state)], vec![Place::Slot(slot, state)])
            }
            Work::FetchGrad { subgroup, slot, .. } => {
                (vec![Place::HostGrad(subgroup)], vec![Place::SlotGrad(slot)])
            }
            Work::GpuStep { subgroup, slot } => {
                let grad = match self.shape.gpu_grads {
                    GpuGrads::Kept => Place::DeviceGrad(subgroup),
                    GpuGrads::Fetched => Place::SlotGrad(slot),
                };
                let mut writes = all(Place::Slot, slot);
                writes.push(Place::DeviceParam(subgroup));
                (vec![grad], writes)
            }
            Work::Flush { subgroup, slot, state, .. } => {
                (vec![Place::Slot(slot, state)], vec![Place::HostState(subgroup, state)])
            }
            Work::ResidentStep { subgroup } => {
                let mut writes = all(Place::Resident, subgroup);
                writes.push(Place::DeviceParam(subgroup));
                (vec![Place::DeviceGrad(subgroup)], writes)
            }
            Work::Admit { subgroup, state, .. } => {
                (vec![Place::HostState(subgroup, state)], vec![Place::Resident(subgroup, state)])
            }
            Work::Evict { subgroup, state, .. } => {
                (vec![Place::Resident(subgroup, state)], vec![Place::HostState(subgroup, state)])
            }
            Work::CpuStep { subgroup, stage } => {
                let mut writes = all(Place::HostState, subgroup);
                writes.push(Place::Stage(stage));
                (vec![Place::HostGrad(subgroup)], writes)
            }
            Work::Upload { subgroup, stage } => {
                (vec![Place::Stage(stage)], vec![Place::DeviceParam(subgroup)])
            }
        }
    }

    /// The place where the framework leaves a gradient.
    pub fn made(&self, subgroup: usize, on_cpu: bool) -> Place {
        match self.shape.transfer_dtype == TransferDtype::Delivered
            && (on_cpu || self.shape.gpu_grads == GpuGrads::Fetched)
        {
            true => Place::HostGrad(subgroup),
            false => Place::DeviceGrad(subgroup),
        }
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}
