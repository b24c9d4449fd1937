//! Random shapes against rules that are computed here again, without the code that makes the plans.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};

use super::super::closed;
use super::super::graph::{Kind, NONE, Operation};
use super::super::memory::{CATEGORIES, Category};
use super::*;

const SHAPES: usize = 1000;

struct Case {
    shape: Shape,
    units: Vec<Unit>,
    plan: Plan,
}

fn random_case(random: &mut fastrand::Rng) -> Case {
    let schedule = random
        .choice([Schedule::AllForwardAllBackward, Schedule::OneForwardOneBackward, Schedule::Decoupled])
        .expect("not empty");
    let devices = random.u32(1..=5);
    let (mut micro_batches, mut stages, split) = (random.u32(1..=9), random.u32(1..=12), random.u32(1..=3));
    if schedule == Schedule::OneForwardOneBackward {
        let chunks = random.u32(1..=3);
        stages = devices * chunks;
        micro_batches = if chunks > 1 { devices * random.u32(1..=3) } else { micro_batches };
    }
    let shape = Shape {
        slots: random.u32(1..=4),
        recompute: schedule == Schedule::Decoupled || random.bool(),
        early_checkpoints: random.bool(),
        async_optimizer: random.bool(),
        latency: random.choice([0.0, 0.1, 1.0]).expect("not empty"),
        seconds_per_byte: random.choice([0.0, 0.001]).expect("not empty"),
        ..super::shape(schedule, devices, micro_batches, stages, split)
    };
    let mut unit = || Unit {
        forward: random.u32(0..4).into(),
        backward: random.f64() * 3.0,
        recompute: random.u32(0..2).into(),
        fetch: random.f64(),
        offload: random.f64(),
        optimizer: random.f64() * 4.0,
        param_bytes: random.u64(0..100),
        grad_bytes: random.u64(0..100),
        activation_bytes: random.u64(0..1000),
        input_bytes: random.u64(0..50),
    };
    let count = shape.stages * shape.split;
    let units: Vec<Unit> = (0..count).map(|_| unit()).collect();
    let plan = plan(&shape, &units).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
    Case { shape, units, plan }
}

#[test]
fn a_thousand_random_shapes_keep_all_rules() {
    let mut random = fastrand::Rng::with_seed(20_260_101);
    let mut kinds = HashSet::new();
    for _ in 0..SHAPES {
        let case = random_case(&mut random);
        kinds.extend(case.plan.operations.iter().map(|operation| operation.kind));
        every_pass_is_computed_once(&case);
        operations_follow_their_dependencies(&case);
        data_reaches_every_pass(&case);
        engines_serve_one_operation_at_a_time(&case);
        parameters_are_present_for_every_pass(&case);
        memory_returns_to_zero(&case);
        memory_is_that_of_a_second_accounting(&case);
    }
    assert_eq!(kinds.len(), Kind::COUNT);
}

fn every_pass_is_computed_once(case: &Case) {
    let Case { shape, plan, .. } = case;
    let mut found = BTreeMap::new();
    for operation in &plan.operations {
        let key =
            (operation.kind, operation.first_unit, operation.units, operation.micro_batch, operation.device);
        *found.entry(key).or_insert(0_u32) += 1;
    }
    let (devices, split) = (shape.devices, shape.split);
    let fine = if shape.schedule == Schedule::Decoupled { 1 } else { split };
    let backward_stages = shape.stages * split / fine;
    let mut expected = 0;
    for stage in 0..shape.stages {
        for micro_batch in 0..shape.micro_batches {
            expected += 1;
            let key = (Kind::Forward, stage * split, split, micro_batch, stage % devices);
            assert_eq!(found.get(&key), Some(&1), "{shape:?}: {key:?}");
        }
    }
    for back in 0..backward_stages {
        let stage = backward_stages - 1 - back;
        let device = if fine == 1 && shape.schedule == Schedule::Decoupled {
            (shape.stages + back) % devices
        } else {
            stage % devices
        };
        for kind in [Kind::Offload, Kind::Optimize] {
            expected += 1;
            assert_eq!(
                found.get(&(kind, stage * fine, fine, NONE, device)),
                Some(&1),
                "{shape:?}: {kind:?} {stage}"
            );
        }
        for micro_batch in 0..shape.micro_batches {
            for kind in [Kind::Backward, Kind::Recompute] {
                if kind == Kind::Backward || shape.recompute {
                    expected += 1;
                    let key = (kind, stage * fine, fine, micro_batch, device);
                    assert_eq!(found.get(&key), Some(&1), "{shape:?}: {key:?}");
                }
            }
        }
    }
    let computed = |o: &&Operation| o.kind.is_compute() || matches!(o.kind, Kind::Offload | Kind::Optimize);
    assert_eq!(plan.operations.iter().filter(computed).count(), expected, "{shape:?}");
}

fn operations_follow_their_dependencies(case: &Case) {
    let mut positions = HashSet::new();
    for operation in &case.plan.operations {
        assert!(positions.insert(operation.begins) && positions.insert(operation.ends));
        assert!(operation.begins < operation.ends && operation.start <= operation.end);
        let range = operation.first_dependency as usize
            ..(operation.first_dependency + operation.dependencies) as usize;
        for before in &case.plan.dependencies[range] {
            let before = &case.plan.operations[*before as usize];
            if operation.kind.is_receive() {
                // A receipt begins and ends with its send.
                assert!(before.begins < operation.begins && before.ends < operation.ends);
                assert!(before.start == operation.start && before.end == operation.end);
            } else {
                assert!(before.ends < operation.begins && before.end <= operation.start, "{:?}", case.shape);
            }
        }
    }
    assert_eq!(positions.len(), case.plan.operations.len() * 2);
    for pair in case.plan.operations.windows(2) {
        assert!((pair[0].device, pair[0].begins) < (pair[1].device, pair[1].begins));
    }
}

/// Every pass begins after the data that it reads were made, and, on another device, were sent to this one.
fn data_reaches_every_pass(case: &Case) {
    let Case { shape, plan, .. } = case;
    let find: HashMap<_, _> =
        plan.operations.iter().map(|o| ((o.kind, o.first_unit, o.micro_batch), o)).collect();
    let fine = if shape.schedule == Schedule::Decoupled { 1 } else { shape.split };
    let total = shape.stages * shape.split;
    let reaches = |made: &Operation, read: &Operation, send: Kind, receive: Kind, unit: u32| {
        if made.device == read.device {
            assert!(made.ends < read.begins);
            return;
        }
        let (sent, received) =
            (find[&(send, unit, made.micro_batch)], find[&(receive, unit, made.micro_batch)]);
        assert_eq!((sent.device, sent.peer), (made.device, read.device));
        assert_eq!((received.device, received.peer), (read.device, made.device));
        assert!(made.ends < sent.begins && received.ends < read.begins && sent.bytes == received.bytes);
    };
    let mut messages = 0;
    for (index, operation) in plan.operations.iter().enumerate() {
        let (first, micro_batch) = (operation.first_unit, operation.micro_batch);
        let starts = match operation.kind {
            Kind::Recompute => true,
            Kind::Backward => !shape.recompute,
            _ => false,
        };
        if operation.kind == Kind::Forward && first > 0 {
            let made = find[&(Kind::Forward, first - shape.split, micro_batch)];
            reaches(made, operation, Kind::SendActivation, Kind::ReceiveActivation, first);
            messages += u64::from(made.device != operation.device);
        }
        if operation.kind == Kind::Backward && first + fine < total {
            let made = find[&(Kind::Backward, first + fine, micro_batch)];
            reaches(made, operation, Kind::SendGradient, Kind::ReceiveGradient, first);
            messages += u64::from(made.device != operation.device);
        }
        if starts {
            let made = find[&(Kind::Forward, first / shape.split * shape.split, micro_batch)];
            reaches(made, operation, Kind::SendCheckpoint, Kind::ReceiveCheckpoint, first);
            messages += u64::from(made.device != operation.device);
        }
        if operation.kind == Kind::Backward && shape.recompute {
            assert_eq!(
                plan.operations[..index].iter().rfind(|o| o.kind.is_compute()).map(|o| o.kind),
                Some(Kind::Recompute)
            );
        }
    }
    let sends = [Kind::SendActivation, Kind::SendGradient, Kind::SendCheckpoint];
    assert_eq!(
        sends.iter().map(|kind| plan.summary.counts[*kind as usize]).sum::<u64>(),
        messages,
        "{shape:?}"
    );
}

fn engines_serve_one_operation_at_a_time(case: &Case) {
    let engine = |kind: Kind| match kind {
        kind if kind.is_compute() => Some(0),
        Kind::Fetch => Some(1),
        Kind::Offload => Some(2),
        Kind::SendActivation | Kind::SendGradient | Kind::SendCheckpoint => Some(3),
        Kind::Optimize if !case.shape.async_optimizer => Some(4),
        _ => None,
    };
    let mut free = HashMap::new();
    for operation in &case.plan.operations {
        if let Some(engine) = engine(operation.kind) {
            let last = free.insert((operation.device, engine), (operation.ends, operation.end));
            let (position, time) = last.unwrap_or((0, 0.0));
            assert!(operation.begins >= position && operation.start >= time, "{:?}", case.shape);
            assert!((operation.end - operation.start - operation.seconds).abs() < 1e-9);
        }
    }
}

/// Before a pass, its parameters were fetched, and after that fetch no more sets than slots were fetched and used.
fn parameters_are_present_for_every_pass(case: &Case) {
    let most = |device: u32| {
        let mut sets: Vec<u64> = case
            .plan
            .operations
            .iter()
            .filter(|o| o.device == device && o.kind == Kind::Fetch)
            .map(|o| ((o.first_unit, o.units), o.bytes))
            .collect::<BTreeMap<_, _>>()
            .into_values()
            .collect();
        sets.sort_unstable();
        sets.iter().rev().take(case.shape.slots as usize).sum::<u64>()
    };
    for (device, found) in case.plan.summary.devices.iter().enumerate() {
        let peak = found.peaks[Category::Parameters as usize];
        assert!(peak <= most(device as u32), "{:?}", case.shape);
    }
    let mut fetched = HashMap::new();
    for operation in &case.plan.operations {
        let set = (operation.device, operation.first_unit, operation.units);
        if operation.kind == Kind::Fetch {
            fetched.insert(set, operation.ends);
        } else if operation.kind.is_compute() {
            let first = case.plan.operations.iter().find(|o| {
                o.kind == Kind::Fetch && (o.device, o.first_unit, o.units) == set && o.ends < operation.begins
            });
            assert!(first.is_some(), "{:?}", case.shape);
        }
    }
}

fn memory_returns_to_zero(case: &Case) {
    let mut resident = HashMap::new();
    let mut last = 0;
    for change in &case.plan.changes {
        let operation = &case.plan.operations[change.operation as usize];
        assert_eq!(change.device, operation.device);
        let position = if change.freed { operation.ends } else { operation.begins };
        assert!(position >= last && change.bytes > 0);
        last = position;
        let now = resident.entry((change.device, change.category)).or_insert(0_u64);
        *now = if change.freed { now.checked_sub(change.bytes).unwrap() } else { *now + change.bytes };
        assert_eq!(*now, change.resident);
    }
    assert!(resident.values().all(|bytes| *bytes == 0), "{:?}", case.shape);
}

/// The bytes of each category at the end of each pass, counted from what was computed, sent and read so far.
fn memory_is_that_of_a_second_accounting(case: &Case) {
    let Case { shape, units, plan } = case;
    let fine = if shape.schedule == Schedule::Decoupled { 1 } else { shape.split };
    let sum = |first: u32, count: u32, bytes: fn(&Unit) -> u64| -> u64 {
        units[first as usize..(first + count) as usize].iter().map(bytes).sum()
    };
    for device in 0..shape.devices {
        let own: Vec<&Operation> = plan.operations.iter().filter(|o| o.device == device).collect();
        for at in own.iter().filter(|o| o.kind == Kind::Backward) {
            let now = at.ends;
            let done = |o: &&&Operation, kind: Kind| o.kind == kind && o.ends < now;
            let begun = |o: &&&Operation, kind: Kind| o.kind == kind && o.begins < now;
            let gradients: u64 = (0..shape.stages * shape.split / fine)
                .map(|stage| stage * fine)
                .filter(|unit| own.iter().any(|o| begun(&o, Kind::Backward) && o.first_unit == *unit))
                .filter(|unit| !own.iter().any(|o| done(&o, Kind::Offload) && o.first_unit == *unit))
                .map(|unit| sum(unit, fine, |unit| unit.grad_bytes))
                .sum();
            let made = if shape.recompute { Kind::Recompute } else { Kind::Forward };
            let mut activations: u64 = own
                .iter()
                .filter(|o| begun(o, made))
                .map(|o| sum(o.first_unit, fine, |unit| unit.activation_bytes))
                .sum();
            activations -= own
                .iter()
                .filter(|o| o.kind == Kind::Backward && o.ends <= now)
                .map(|o| sum(o.first_unit, fine, |unit| unit.activation_bytes))
                .sum::<u64>();
            let resident = resident_at(plan, device, now);
            assert_eq!(resident[Category::Gradients as usize], gradients, "{shape:?}");
            if shape.recompute {
                assert_eq!(resident[Category::Activations as usize], activations, "{shape:?}");
            }
        }
    }
}

fn resident_at(plan: &Plan, device: u32, position: u32) -> [u64; CATEGORIES] {
    let mut found = [0; CATEGORIES];
    for change in plan.changes.iter().filter(|change| change.device == device) {
        let operation = &plan.operations[change.operation as usize];
        if (if change.freed { operation.ends } else { operation.begins }) <= position {
            found[change.category as usize] = change.resident;
        }
    }
    found
}

/// Equal units and no transfer times: the generated schedule takes the time of the closed form.
#[test]
fn random_uniform_shapes_take_the_time_of_the_closed_form() {
    let mut random = fastrand::Rng::with_seed(20_260_102);
    let mut compared = 0;
    for _ in 0..SHAPES {
        let schedule = random
            .choice([Schedule::AllForwardAllBackward, Schedule::OneForwardOneBackward, Schedule::Decoupled])
            .expect("not empty");
        let (devices, chunks, split) = (random.u32(1..=6), random.u32(1..=4), random.u32(1..=4));
        let micro_batches = match schedule {
            Schedule::OneForwardOneBackward if chunks > 1 => devices * random.u32(1..=3),
            _ => random.u32(1..=12),
        };
        let shape = super::shape(schedule, devices, micro_batches, devices * chunks, split);
        let (forward, backward) = (f64::from(random.u32(1..=8)), f64::from(random.u32(1..=24)));
        let fine = if schedule == Schedule::Decoupled { 1 } else { split };
        let unit = passes(forward, backward);
        let found = planned(&shape, unit).summary;
        let times = (forward * f64::from(split), backward * f64::from(fine));
        let Some(closed) = closed::passes(&shape, times.0, times.1) else {
            assert!(schedule == Schedule::Decoupled && times.1 < times.0);
            continue;
        };
        compared += 1;
        assert_eq!(found.passes_seconds, closed.passes_seconds, "{shape:?} {times:?}");
        let ratio = closed.bubble_ratio();
        assert!((found.passes_bubble_ratio - ratio).abs() < 1e-12, "{shape:?} {times:?}");
    }
    assert!(compared > SHAPES / 2, "{compared}");
}
