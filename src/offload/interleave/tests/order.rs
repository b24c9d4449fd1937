//! Tests the schedule on every kind of step: no order is missing, and no wait is redundant.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use super::super::calls::Calls;
use super::super::machine::Machine;
use super::races::{Place, Races};
use spillway_planner::interleave::pieces;
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::{self, Edge, Lane, NUMBERED_EDGES, STATES};
use spillway_planner::interleave::{GpuGrads, Shape, TransferDtype};

const SUBGROUPS: usize = 8;

/// One way to run iterations, and the sequence of plans.
struct Scenario {
    shape: Shape,
    /// True if the framework reads a subgroup's parameters after it enqueued the gradient; false if before.
    reads_late: bool,
    plans: Vec<Plan>,
}

/// Every transfer dtype and place of gradients, both orders of reading, and one to three slots. The plans move
/// subgroups from each placement to each other placement, and include plans in which all subgroups have the same
/// placement.
fn scenarios() -> Vec<Scenario> {
    let even = |gpu, residents| Plan::even(SUBGROUPS, gpu, residents).unwrap();
    let last_alone = || {
        let mut placements = vec![Placement::Cpu; SUBGROUPS];
        placements[SUBGROUPS - 1] = Placement::Gpu;
        Plan::of(placements)
    };
    let plans = || {
        vec![
            even(4, 0),
            even(8, 0),
            last_alone(),
            even(0, 0),
            even(3, 2),
            even(8, 0),
            even(0, 8),
            even(2, 5),
            Plan::stride(SUBGROUPS, 3, 2).unwrap(),
            even(0, 0),
            even(5, 0),
        ]
    };
    let mut scenarios = Vec::new();
    for transfer_dtype in [TransferDtype::F32, TransferDtype::Native, TransferDtype::Delivered] {
        for gpu_grads in [GpuGrads::Kept, GpuGrads::Fetched] {
            for slots in 1..=3 {
                for reads_late in [false, true] {
                    let shape = Shape {
                        transfer_dtype,
                        gpu_grads,
                        slots,
                        chunk: 30,
                        ..Shape::uniform(SUBGROUPS, 100)
                    };
                    scenarios.push(Scenario { shape, reads_late, plans: plans() });
                }
            }
        }
    }
    scenarios
}

/// Runs all iterations through the checker. At the end it reads the states, as a checkpoint would.
fn run(scenario: &Scenario, dropped: Option<(Edge, Lane)>) -> Races {
    let mut races = Races::new(&scenario.shape);
    races.dropped = dropped;
    let calls = Calls::new(Machine::new(scenario.shape.clone()).unwrap());
    for plan in &scenario.plans {
        calls.set_plan(plan.clone(), Ok, &mut |command| races.play(command)).unwrap();
        forward_and_backward(scenario, &calls, &mut races);
        calls.begin(|| Ok(()), &mut |command| races.play(command)).unwrap();
        // Two threads enqueue the two parts, in any order.
        if scenario.reads_late {
            gpu_part(&mut calls.machine(), &mut races);
        }
        cpu_part(&mut calls.machine(), &mut races);
        gpu_part(&mut calls.machine(), &mut races);
        races.follow(Lane::Caller, Lane::Cpu);
        for subgroup in 0..SUBGROUPS {
            schedule::publish(subgroup, Lane::Model, &mut |command| races.play(command)).unwrap();
        }
    }
    let plan = calls.machine().plan().clone();
    for subgroup in (0..SUBGROUPS).filter(|subgroup| plan.placement(*subgroup) != Placement::Resident) {
        schedule::drain(subgroup, &mut |command| races.play(command)).unwrap();
        races.touch(Lane::Caller, &STATES.map(|state| Place::HostState(subgroup, state)), &[]);
    }
    races
}

fn forward_and_backward(scenario: &Scenario, calls: &Calls, races: &mut Races) {
    for subgroup in 0..SUBGROUPS {
        races.touch(Lane::Model, &[Place::DeviceParam(subgroup)], &[]);
    }
    for subgroup in 0..SUBGROUPS {
        let made = races.made(subgroup, calls.machine().plan().placement(subgroup) == Placement::Cpu);
        let free = |races: &mut Races| {
            races.touch(Lane::Model, &[Place::DeviceParam(subgroup)], &[]);
            calls.params_free(subgroup, &mut |command| races.play(command)).unwrap();
        };
        if !scenario.reads_late {
            free(races);
        }
        races.touch(Lane::Model, &[], &[made]);
        calls.gradient(subgroup, &mut |command| races.play(command)).unwrap();
        if scenario.reads_late {
            free(races);
        }
    }
}

/// Enqueues the GPU's part without the waits for room: the schedule's order must not depend on them.
fn gpu_part(machine: &mut Machine, races: &mut Races) {
    let shape = machine.shape().clone();
    while let Some((piece, _)) = machine.next_gpu(false) {
        pieces::enqueue(&shape, piece, &mut |command| races.play(command)).unwrap();
        machine.enqueued(piece, Ok(())).unwrap();
    }
}

fn cpu_part(machine: &mut Machine, races: &mut Races) {
    races.follow(Lane::Cpu, Lane::Caller);
    races.issuer = Lane::Cpu;
    while let Some((nth, subgroup)) = machine.next_cpu() {
        schedule::cpu_part(nth, subgroup, &mut |command| races.play(command)).unwrap();
        machine.stepped(subgroup, Ok(())).unwrap();
    }
    races.issuer = Lane::Caller;
}

#[test]
fn every_access_is_ordered() {
    for scenario in scenarios() {
        let found = run(&scenario, None).found;
        assert!(found.is_empty(), "{:?} {}: {found:?}", scenario.shape, scenario.reads_late);
    }
}

/// Leaves each wait of each lane out in turn; at least one scenario must detect that.
#[test]
fn every_edge_that_is_left_out_is_found() {
    let scenarios = scenarios();
    let seen: BTreeSet<_> = scenarios.iter().flat_map(|scenario| run(scenario, None).seen).collect();
    let edges = NUMBERED_EDGES.into_iter().chain([
        Edge::GradHomeBeforeFetch,
        Edge::SettledBeforeStep,
        Edge::ReadyBeforeEvict,
        Edge::HomeBeforeRead,
    ]);
    let mut left_out = 0;
    for edge in edges {
        let lanes = Lane::ALL.into_iter().filter(|lane| seen.contains(&(edge as u32, *lane as usize)));
        let before = left_out;
        for lane in lanes {
            let found = scenarios.iter().filter(|one| !run(one, Some((edge, lane))).found.is_empty()).count();
            assert!(found > 0, "{edge:?} on {lane:?} is not missed by anything");
            left_out += 1;
        }
        assert!(left_out > before, "{edge:?} is waited for nowhere");
    }
    assert_eq!(left_out, 21);
}

#[test]
fn calls_out_of_order_are_refused_and_change_nothing() {
    let emitted = std::cell::Cell::new(0);
    let emit = &mut |_| {
        emitted.set(emitted.get() + 1);
        Ok(())
    };
    let calls = Calls::new(Machine::new(Shape::uniform(2, 10)).unwrap());
    assert!(calls.begin(|| Ok(()), emit).is_err());
    assert!(calls.gradient(2, emit).is_err());
    assert!(calls.set_plan(Plan::cpu(3), Ok, emit).is_err());
    assert_eq!(emitted.get(), 0);
    calls.gradient(1, emit).unwrap();
    let so_far = emitted.get();
    assert!(calls.gradient(1, emit).is_err());
    assert!(calls.set_plan(Plan::cpu(2), Ok, emit).is_err());
    assert!(calls.begin(|| Ok(()), emit).is_err());
    assert_eq!(emitted.get(), so_far);
    calls.gradient(0, emit).unwrap();
    assert_eq!(calls.begin(|| Ok(()), emit).unwrap(), 2);
    assert!(calls.machine().is_stepping(0) && calls.gradient(0, emit).is_err());
    let mut machine = calls.machine();
    assert_eq!(
        (machine.next_cpu(), machine.next_cpu(), machine.next_cpu()),
        (Some((0, 0)), Some((1, 1)), None)
    );
    machine.stepped(0, Ok(())).unwrap();
    assert!(!machine.is_stepping(0) && machine.is_stepping(1));
    machine.stepped(1, Ok(())).unwrap();
    assert!(!machine.is_stepping(1));
    drop(machine);
    calls.gradient(0, emit).unwrap();
}

#[test]
fn a_failure_stands() {
    use crate::error::Error;
    let broken = |command| match command {
        schedule::Command::Record(Lane::Model, _) => Ok(()),
        _ => Err(Error::Unsupported("the device is gone".into())),
    };
    let calls = Calls::new(Machine::new(Shape::uniform(1, 10)).unwrap());
    assert!(calls.gradient(0, &mut |command| broken(command)).is_err());
    let message = calls.begin(|| Ok(()), &mut |_| Ok(())).unwrap_err().to_string();
    assert!(message.contains("the device is gone"));
    assert!(calls.machine().check(0).is_err());
    assert!(calls.set_plan(Plan::cpu(1), Ok, &mut |_| Ok(())).is_err());
}

/// The plan says where states are, until all of them are where the new one has them.
#[test]
fn no_command_of_a_call_is_emitted_under_the_lock_and_residents_move_under_the_old_plan() {
    let calls = Calls::new(Machine::new(Shape::uniform(2, 10)).unwrap());
    let emitted = std::cell::Cell::new(0);
    let resident = |subgroup| calls.machine().plan().placement(subgroup) == Placement::Resident;
    let before = std::cell::Cell::new(false);
    let emit = &mut |_| {
        emitted.set(emitted.get() + 1);
        assert_eq!(resident(1), before.get());
        Ok(())
    };
    let more = |than: usize| emitted.get() > than;
    calls.set_plan(Plan::even(2, 0, 1).unwrap(), Ok, emit).unwrap();
    assert!(more(0) && resident(1));
    before.set(true);
    let so_far = emitted.get();
    calls
        .set_plan(
            Plan::cpu(2),
            |plan| {
                assert!(resident(1));
                Ok(plan)
            },
            emit,
        )
        .unwrap();
    assert!(more(so_far) && !resident(1));
    before.set(false);
    for subgroup in [0, 1] {
        let so_far = emitted.get();
        calls.gradient(subgroup, emit).unwrap();
        assert!(more(so_far));
    }
    let so_far = emitted.get();
    calls.params_free(0, emit).unwrap();
    assert!(more(so_far));
    let so_far = emitted.get();
    let asked = || {
        assert!(!calls.machine().is_stepping(0));
        Ok(())
    };
    calls.begin(asked, emit).unwrap();
    assert!(more(so_far) && calls.machine().is_stepping(0));
}
