//! The state machine of the interleaved update: the valid order of calls, and what each call changes.
//!
//! The order of calls in one iteration, see [`Calls`](super::calls::Calls):
//! 1. `set_plan`, if the plan changes.
//! 2. `gradient` for every subgroup, in any order.
//! 3. `begin`.
//! 4. The CPU's part and the GPU's part, each one subgroup at a time. Parameters are published as they become ready.
//!
//! Flushes may still be in flight when the gradients of the next iteration arrive. A call out of order returns an error
//! and changes nothing.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, VecDeque};

use crate::error::{Error, Result};
use spillway_planner::interleave::Shape;
use spillway_planner::interleave::pieces::{self, Due, Piece};
use spillway_planner::interleave::placements::{Placement, Plan};

/// The state machine of the calls of one rank.
#[derive(Debug)]
pub struct Machine {
    shape: Shape,
    plan: Plan,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// No gradient was announced since the last step.
    Idle,
    /// Some gradients were announced.
    Gathering(Vec<Announced>),
    /// A step is in flight. `waiting`: CPU subgroups that no thread has taken. `pieces`: pieces of the GPU's part
    /// that no thread has taken. `left`: subgroups that are not updated (CPU) or not enqueued (GPU) yet.
    Stepping { waiting: VecDeque<(usize, usize)>, pieces: VecDeque<Due>, left: BTreeSet<usize> },
    /// A command failed. The subgroups in `left` will never be stepped.
    Failed { error: Error, left: BTreeSet<usize> },
}

#[derive(Debug, Clone, Copy, Default)]
struct Announced {
    grad: bool,
    free: bool,
}

impl Machine {
    /// Starts with all subgroups on the CPU. Errors: the shape is invalid.
    pub fn new(shape: Shape) -> Result<Machine> {
        shape.check()?;
        let plan = Plan::cpu(shape.count());
        Ok(Machine { shape, plan, phase: Phase::Idle })
    }

    /// The subgroups and settings, which never change.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The plan of the next step, or of the step in flight.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// True from the begin of a step until the CPU has updated the subgroup or its piece is enqueued. After a failure it
    /// stays true for the subgroups that were left.
    pub fn is_stepping(&self, subgroup: usize) -> bool {
        match &self.phase {
            Phase::Stepping { left, .. } | Phase::Failed { left, .. } => left.contains(&subgroup),
            Phase::Idle | Phase::Gathering(_) => false,
        }
    }

    /// Returns Ok if the plan may change to this one now.
    pub fn may_set_plan(&self, plan: &Plan) -> Result<()> {
        match &self.phase {
            Phase::Failed { error, .. } => Err(error.clone()),
            Phase::Gathering(_) | Phase::Stepping { .. } => Err(Error::Busy(
                "the plan cannot change between the first gradient and the end of the step".into(),
            )),
            Phase::Idle if plan.count() != self.shape.count() => {
                let reason = format!("has {} subgroups, but there are {}", plan.count(), self.shape.count());
                Err(Error::invalid("plan", reason))
            }
            Phase::Idle => Ok(()),
        }
    }

    /// The plan of the next step, whose residents are moved.
    pub fn set_plan(&mut self, plan: Plan) {
        self.plan = plan;
    }

    /// Returns Ok if the gradient of a subgroup may be announced now.
    pub fn may_announce(&self, subgroup: usize) -> Result<()> {
        if self.announced(subgroup)?.grad {
            return Err(Error::invalid(
                "subgroup",
                format!("the gradient of subgroup {subgroup} was announced already"),
            ));
        }
        Ok(())
    }

    /// Returns Ok if the 16-bit parameters of a subgroup may be released now.
    pub fn may_free(&self, subgroup: usize) -> Result<()> {
        if self.announced(subgroup)?.free {
            return Err(Error::invalid(
                "subgroup",
                format!("the parameters of subgroup {subgroup} were released already"),
            ));
        }
        Ok(())
    }

    /// The framework has enqueued the gradient of a subgroup.
    pub fn gradient(&mut self, subgroup: usize) {
        self.announce(subgroup, |announced| announced.grad = true);
    }

    /// The framework no longer reads the 16-bit parameters of a subgroup.
    pub fn params_free(&mut self, subgroup: usize) {
        self.announce(subgroup, |announced| announced.free = true);
    }

    /// The subgroups whose parameters are not released, if a step may begin now. Errors: a gradient is missing; the last
    /// step is in flight (`Busy`).
    pub fn may_begin(&self) -> Result<Vec<usize>> {
        let announced = self.gathered()?;
        Ok((0..announced.len()).filter(|subgroup| !announced[*subgroup].free).collect())
    }

    /// Begins a step that may begin: `next_cpu` and `next_gpu` then return its parts.
    pub fn begin(&mut self) {
        let waiting: VecDeque<_> = self.plan.on(Placement::Cpu).enumerate().collect();
        let pieces = pieces::pieces(&self.shape, &self.plan).into();
        let left: BTreeSet<usize> = (0..self.shape.count()).collect();
        self.phase = if left.is_empty() { Phase::Idle } else { Phase::Stepping { waiting, pieces, left } };
    }

    /// What was announced of each subgroup, once every gradient was.
    fn gathered(&self) -> Result<&[Announced]> {
        let announced = match &self.phase {
            Phase::Gathering(announced) => announced,
            Phase::Idle if self.shape.count() == 0 => return Ok(&[]),
            Phase::Failed { error, .. } => return Err(error.clone()),
            Phase::Stepping { .. } => return Err(Error::Busy("the previous step is still in flight".into())),
            Phase::Idle => {
                return Err(Error::invalid(
                    "subgroups",
                    "no gradient was announced; announce that of each subgroup first",
                ));
            }
        };
        match announced.iter().position(|announced| !announced.grad) {
            None => Ok(announced),
            Some(missing) => {
                let reason = format!("the gradient of subgroup {missing} was not announced");
                Err(Error::invalid("subgroups", reason))
            }
        }
    }

    /// The next subgroup of the CPU's part, with its index within that part. The caller plays [`schedule::cpu_part`]
    /// and then calls [`Machine::stepped`], one subgroup at a time.
    pub fn next_cpu(&mut self) -> Option<(usize, usize)> {
        match &mut self.phase {
            Phase::Stepping { waiting, .. } => waiting.pop_front(),
            _ => None,
        }
    }

    /// The next piece of the GPU's part; with `at_once` only a piece that waits for no event. The caller plays
    /// [`pieces::room`] and [`pieces::enqueue`] and then calls [`Machine::enqueued`], one piece at a time.
    pub fn next_gpu(&mut self, at_once: bool) -> Option<Due> {
        match &mut self.phase {
            Phase::Stepping { pieces, .. } => match pieces.front() {
                Some((_, room)) if at_once && !room.is_empty() => None,
                _ => pieces.pop_front(),
            },
            _ => None,
        }
    }

    /// Number of pieces of the GPU's part that no thread has taken.
    pub fn pieces_left(&self) -> usize {
        match &self.phase {
            Phase::Stepping { pieces, .. } => pieces.len(),
            _ => 0,
        }
    }

    /// A piece of the GPU's part was enqueued; `outcome` says whether that failed.
    pub fn enqueued(&mut self, piece: Piece, outcome: Result<()>) -> Result<()> {
        match piece.completes() {
            Some(subgroup) => self.stepped(subgroup, outcome),
            None => self.keep(outcome),
        }
    }

    /// A CPU subgroup was updated, or a GPU subgroup was enqueued; `outcome` says whether that failed.
    pub fn stepped(&mut self, subgroup: usize, outcome: Result<()>) -> Result<()> {
        self.keep(outcome)?;
        if let Phase::Stepping { left, .. } = &mut self.phase {
            left.remove(&subgroup);
            if left.is_empty() {
                self.phase = Phase::Idle;
            }
        }
        Ok(())
    }

    /// Returns an error for a subgroup that does not exist, and always after a failure.
    pub fn check(&self, subgroup: usize) -> Result<()> {
        match &self.phase {
            Phase::Failed { error, .. } => Err(error.clone()),
            _ if subgroup < self.shape.count() => Ok(()),
            _ => {
                let reason = format!("is {subgroup}, but there are {} subgroups", self.shape.count());
                Err(Error::invalid("subgroup", reason))
            }
        }
    }

    /// What was announced of a subgroup since the last step.
    fn announced(&self, subgroup: usize) -> Result<Announced> {
        self.check(subgroup)?;
        match &self.phase {
            Phase::Idle => Ok(Announced::default()),
            Phase::Gathering(announced) => Ok(announced[subgroup]),
            Phase::Stepping { .. } | Phase::Failed { .. } => {
                Err(Error::Busy("the previous step is still in flight".into()))
            }
        }
    }

    fn announce(&mut self, subgroup: usize, change: impl FnOnce(&mut Announced)) {
        if let Phase::Idle = self.phase {
            self.phase = Phase::Gathering(vec![Announced::default(); self.shape.count()]);
        }
        if let Phase::Gathering(announced) = &mut self.phase {
            change(&mut announced[subgroup]);
        }
    }

    /// Keeps the first failure: a failing backend leaves its lanes in an unknown state, so every later call returns it.
    pub fn keep(&mut self, emitted: Result<()>) -> Result<()> {
        if let Err(error) = &emitted {
            let left = match std::mem::replace(&mut self.phase, Phase::Idle) {
                Phase::Stepping { left, .. } | Phase::Failed { left, .. } => left,
                Phase::Idle | Phase::Gathering(_) => BTreeSet::new(),
            };
            self.phase = Phase::Failed { error: error.clone(), left };
        }
        emitted
    }
}
