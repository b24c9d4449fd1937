//! The calls of an iteration: what the state machine says about a call, and the commands that the call emits.
//!
//! Invariants:
//! - The lock of the state machine is not held while a command is emitted. A device whose queues are full blocks a call,
//!   but neither the threads of a step nor calls that only ask.
//! - Commands of two calls do not mix in a lane: the lock of the order is held from the check of a call to its last
//!   command. Only the calls of this file take it, and none of them is made while a step is enqueued.
//! - A call whose record on the framework's stream is refused changes nothing: this record comes before every change. The
//!   failure of another command is that of every later call.
//! - While the states of residents move, the plan is the old one.
#![forbid(unsafe_code)]

use super::machine::Machine;
use crate::error::{Error, Result};
use crate::sys::sync::{Guard, Lock};
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::{self, Command, Lane, LaneEvent, Sink};

/// The calls of one rank. Thread-safe.
#[derive(Debug)]
pub struct Calls {
    /// Taken before the state machine's.
    order: Lock<()>,
    machine: Lock<Machine>,
}

impl Calls {
    /// The calls of this state machine.
    pub fn new(machine: Machine) -> Calls {
        Calls { order: Lock::default(), machine: Lock::new(machine) }
    }

    /// The state machine, for a moment.
    pub fn machine(&self) -> Guard<'_, Machine> {
        self.machine.lock()
    }

    /// Changes the plan of the next step to what `accept` makes of it, moves the states of new and former residents, and
    /// returns the new plan. Errors: a gradient of the next step was announced, or a step is in flight (`Busy`).
    pub fn set_plan(
        &self,
        plan: Plan,
        accept: impl FnOnce(Plan) -> Result<Plan>,
        emit: &mut impl Sink<Error>,
    ) -> Result<Plan> {
        let _order = self.order.lock();
        let (shape, before) = {
            let machine = self.machine();
            machine.may_set_plan(&plan)?;
            (machine.shape().clone(), machine.plan().clone())
        };
        let plan = accept(plan)?;
        let emitted = schedule::change_residents(&shape, &before, &plan, emit);
        let mut machine = self.machine();
        machine.set_plan(plan.clone());
        machine.keep(emitted).map(|()| plan)
    }

    /// The framework has enqueued the gradient of a subgroup.
    pub fn gradient(&self, subgroup: usize, emit: &mut impl Sink<Error>) -> Result<()> {
        let _order = self.order.lock();
        self.machine().may_announce(subgroup)?;
        emit(Command::Record(Lane::Model, LaneEvent::Grad(subgroup)))?;
        let (shape, plan) = {
            let mut machine = self.machine();
            machine.gradient(subgroup);
            (machine.shape().clone(), machine.plan().clone())
        };
        let emitted = schedule::gradient_out(&shape, &plan, subgroup, emit);
        self.machine().keep(emitted)
    }

    /// The framework no longer reads the 16-bit parameters of a subgroup. [`Calls::begin`] implies this call for the
    /// remaining subgroups.
    pub fn params_free(&self, subgroup: usize, emit: &mut impl Sink<Error>) -> Result<()> {
        let _order = self.order.lock();
        self.machine().may_free(subgroup)?;
        emit(Command::Record(Lane::Model, LaneEvent::ParamFree(subgroup)))?;
        self.machine().params_free(subgroup);
        Ok(())
    }

    /// Begins a step, whose coefficients `prepare` sets: the state machine then gives its parts. Returns the number of
    /// subgroups of the CPU's part. Errors: a gradient is missing; the last step is in flight (`Busy`).
    pub fn begin(&self, prepare: impl FnOnce() -> Result<()>, emit: &mut impl Sink<Error>) -> Result<usize> {
        let _order = self.order.lock();
        let mut late = self.machine().may_begin()?.into_iter();
        // A step in flight still reads the coefficients of its own.
        prepare()?;
        late.try_for_each(|subgroup| emit(Command::Record(Lane::Model, LaneEvent::ParamFree(subgroup))))?;
        let mut machine = self.machine();
        machine.begin();
        Ok(machine.plan().count_on(Placement::Cpu))
    }
}
