//! | file | proves |
//! |---|---|
//! | `papers` | the figures of SysX, and of the schedules that it compares with |
//! | `random` | random shapes: order, dependencies, engines, memory, closed forms |
#![forbid(unsafe_code)]

mod papers;
mod random;

use super::{Plan, Schedule, Shape, Unit, plan};

/// A shape without recomputation costs or transfer times, with two parameter slots.
fn shape(schedule: Schedule, devices: u32, micro_batches: u32, stages: u32, split: u32) -> Shape {
    Shape {
        schedule,
        devices,
        micro_batches,
        stages,
        split,
        slots: 2,
        recompute: true,
        early_checkpoints: true,
        async_optimizer: schedule == Schedule::Decoupled,
        latency: 0.0,
        seconds_per_byte: 0.0,
    }
}

/// A unit whose passes take these times.
fn passes(forward: f64, backward: f64) -> Unit {
    Unit { forward, backward, ..Unit::default() }
}

fn planned(shape: &Shape, unit: Unit) -> Plan {
    plan(shape, &[unit]).unwrap()
}
