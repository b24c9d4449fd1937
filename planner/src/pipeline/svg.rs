//! The timeline of a schedule as an SVG picture: a row of passes for each device, and below it rows for parameters (p),
//! gradients (g) and optimizer steps (o), if they take time.
#![forbid(unsafe_code)]

use super::Plan;
use super::graph::{Kind, Operation};
use crate::error::{Error, Result};
use crate::picture::{Anchor, Color, Picture};

/// Operations that a picture may have. More are too narrow to see.
const MAX_DRAWN: usize = 1 << 14;
const LEFT: f64 = 62.0;
const ROW: f64 = 22.0;
const LANE: f64 = 14.0;
/// Pixels of a letter.
const FONT: u32 = 9;
const ROOM: Color = [0xf0, 0xf0, 0xf0];
const FORWARD: [Color; 4] = [[0x4e, 0x79, 0xa7], [0xa0, 0xcb, 0xe8], [0x2f, 0x5d, 0x8a], [0x86, 0xb3, 0xd1]];
const BACKWARD: [Color; 4] = [[0xf1, 0xce, 0x63], [0xf2, 0x8e, 0x2b], [0xd4, 0xa0, 0x17], [0xb6, 0x67, 0x2b]];

/// Draws the plan with a width of `width` pixels.
pub fn draw(plan: &Plan, width: u32) -> Result<String> {
    if !(200..=20_000).contains(&width) {
        return Err(Error::invalid("width", format!("{width} is not between 200 and 20000")));
    }
    let drawn = |operation: &&Operation| row_of(operation.kind).is_some() && operation.seconds > 0.0;
    let operations: Vec<&Operation> = plan.operations.iter().filter(drawn).collect();
    if operations.len() > MAX_DRAWN {
        let reason = format!("has {} operations to draw, but the limit is {MAX_DRAWN}", operations.len());
        return Err(Error::invalid("plan", reason));
    }
    let lanes: Vec<usize> =
        (0..4).filter(|row| *row == 0 || operations.iter().any(|o| row_of(o.kind) == Some(*row))).collect();
    let tops = |device: u32| 8.0 + f64::from(device) * (ROW + LANE * (lanes.len() - 1) as f64 + 10.0);
    let span = if plan.summary.iteration_seconds > 0.0 { plan.summary.iteration_seconds } else { 1.0 };
    let scale = ((f64::from(width) - LEFT - 8.0) / span).min(f64::MAX);
    let height = tops(plan.shape.devices) + 4.0;
    let mut picture = Picture::new(width, height.round() as u32);
    for device in 0..plan.shape.devices {
        for (index, row) in lanes.iter().enumerate() {
            let (top, high) = place(tops(device), index);
            let label =
                if *row == 0 { format!("GPU {device}") } else { ["", "p", "g", "o"][*row].to_string() };
            picture.letters(&label, (LEFT - 6.0, top + high - 4.0), FONT, Anchor::End);
            picture.fill((LEFT, top), (LEFT + span * scale, top + high), ROOM);
        }
    }
    for operation in operations {
        let index = lanes.iter().position(|row| Some(*row) == row_of(operation.kind)).unwrap_or(0);
        let (top, high) = place(tops(operation.device), index);
        add(&mut picture, plan, operation, (top, high), scale);
    }
    Ok(picture.finish())
}

fn row_of(kind: Kind) -> Option<usize> {
    match kind {
        Kind::Forward | Kind::Backward | Kind::Recompute => Some(0),
        Kind::Fetch => Some(1),
        Kind::Offload => Some(2),
        Kind::Optimize => Some(3),
        _ => None,
    }
}

/// Top and height of a device's row.
fn place(top: f64, index: usize) -> (f64, f64) {
    match index {
        0 => (top, ROW - 2.0),
        _ => (top + ROW + LANE * (index - 1) as f64, LANE - 2.0),
    }
}

fn add(picture: &mut Picture, plan: &Plan, operation: &Operation, (top, high): (f64, f64), scale: f64) {
    let split = if operation.kind == Kind::Forward { plan.shape.split } else { plan.shape.backward_split() };
    let chunk = (operation.first_unit / split / plan.shape.devices) as usize % 4;
    let (letter, fill) = match operation.kind {
        Kind::Forward => ("f", FORWARD[chunk]),
        Kind::Backward => ("b", BACKWARD[chunk]),
        Kind::Recompute => ("r", [0xd0, 0xd0, 0xd0]),
        Kind::Fetch => ("p", [0x8c, 0xd1, 0x7d]),
        Kind::Offload => ("g", [0xff, 0x9d, 0xa7]),
        _ => ("o", [0x59, 0xa1, 0x4f]),
    };
    let (left, wide) = (LEFT + operation.start * scale, operation.seconds * scale);
    let first = operation.first_unit;
    let stage = match (operation.kind, plan.shape.split) {
        (Kind::Forward, split) => (first / split).to_string(),
        (_, 1) => first.to_string(),
        (_, split) if operation.units == 1 => format!("{},{}", first / split, first % split),
        (_, split) => (first / split).to_string(),
    };
    let micro_batch = match operation.kind.is_compute() {
        true => format!(", micro-batch {}", operation.micro_batch),
        false => String::new(),
    };
    let title = format!("{letter} {stage}{micro_batch}: {} to {}", operation.start, operation.end);
    let right = left + (wide - 0.6).max(0.2);
    picture.titled((left, top), (right, top + high), fill, &title);
    if wide > 7.0 * (1.0 + stage.len() as f64) {
        let middle = (left + wide / 2.0, top + high - 4.0);
        picture.letters(&format!("{letter}{stage}"), middle, FONT, Anchor::Middle);
    }
}
