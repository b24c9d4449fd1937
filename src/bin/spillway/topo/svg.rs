//! The machine as an SVG: a column for each package, a box for each node, and the devices and ranks of the node in it.
#![forbid(unsafe_code)]

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;
use spillway::gpu::machine::Machine;
use spillway::sys::topology::{Node, NodeKind};

use super::{Placed, text};

/// Pixels.
const LINE: i32 = 20;
const GAP: i32 = 10;
const LETTER: i32 = 7;
const FONT: (&str, u32) = ("sans-serif", 13);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A box with a title and lines.
struct Block {
    kind: NodeKind,
    lines: Vec<String>,
}

impl Block {
    fn height(&self) -> i32 {
        self.lines.len() as i32 * LINE + GAP
    }
}

/// The text of the SVG.
pub fn svg(machine: &Machine, ranks: &[Placed]) -> Result<String, String> {
    let mut text = String::new();
    draw(machine, ranks, &mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

fn draw(machine: &Machine, ranks: &[Placed], out: &mut String) -> Result<(), Box<dyn Error>> {
    let topology = &machine.topology;
    let mut columns: Vec<(String, Vec<Block>)> = Vec::new();
    let mut rest: Vec<&Node> = topology.nodes.iter().filter(|node| node.kind != NodeKind::Empty).collect();
    for package in &topology.packages {
        let (own, others): (Vec<&Node>, Vec<&Node>) =
            rest.into_iter().partition(|node| node.near_cpus.meets(&package.cpus));
        rest = others;
        let title = format!("package {}: processors {}", package.id, package.cpus);
        columns.push((title, own.into_iter().map(|node| block(machine, node, ranks)).collect()));
    }
    if !rest.is_empty() {
        columns.push((
            "elsewhere".to_string(),
            rest.into_iter().map(|node| block(machine, node, ranks)).collect(),
        ));
    }
    let longest = |(title, blocks): &(String, Vec<Block>)| {
        let lines = blocks.iter().flat_map(|block| &block.lines).map(|line| line.chars().count());
        lines.chain([title.chars().count()]).max().unwrap_or(0) as i32 * LETTER + 4 * GAP
    };
    let widths: Vec<i32> = columns.iter().map(longest).collect();
    let tall =
        |(_, blocks): &(String, Vec<Block>)| blocks.iter().map(|block| block.height() + GAP).sum::<i32>();
    let height = columns.iter().map(tall).max().unwrap_or(0) + LINE + 4 * GAP;
    let width = widths.iter().map(|width| width + GAP).sum::<i32>() + GAP;
    let area = SVGBackend::with_string(out, (width as u32, height as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut x = GAP;
    for ((title, blocks), width) in columns.iter().zip(widths) {
        area.draw(&Rectangle::new([(x, GAP), (x + width, height - GAP)], BLACK.stroke_width(1)))?;
        write(&area, title, (x + GAP, GAP + 4))?;
        let mut y = GAP + LINE + GAP;
        for block in blocks {
            let corners = [(x + GAP, y), (x + width - GAP, y + block.height())];
            area.draw(&Rectangle::new(corners, color(block.kind).filled()))?;
            area.draw(&Rectangle::new(corners, BLACK.stroke_width(1)))?;
            for (at, line) in block.lines.iter().enumerate() {
                write(&area, line, (x + 2 * GAP, y + GAP / 2 + at as i32 * LINE + 2))?;
            }
            y += block.height() + GAP;
        }
        x += width + GAP;
    }
    area.present()?;
    Ok(())
}

fn write(area: &Area, line: &str, at: (i32, i32)) -> Result<(), Box<dyn Error>> {
    area.draw_text(line, &FONT.into_text_style(area), at)?;
    Ok(())
}

fn block(machine: &Machine, node: &Node, ranks: &[Placed]) -> Block {
    let mut lines = vec![text::node_line(node)];
    let devices = machine.topology.devices.iter().filter(|device| device.node == Some(node.id));
    lines.extend(devices.map(|device| text::describe(machine, device)));
    for Placed { rank, .. } in ranks.iter().filter(|placed| placed.rank.node == Some(node.id)) {
        lines.push(format!("rank {}: trainer {}, workers {}", rank.rank, rank.trainer, rank.workers));
    }
    Block { kind: node.kind, lines }
}

fn color(kind: NodeKind) -> RGBColor {
    match kind {
        NodeKind::Dram => RGBColor(225, 235, 250),
        NodeKind::HighBandwidth | NodeKind::Gpu => RGBColor(225, 245, 220),
        NodeKind::Cxl | NodeKind::Slower | NodeKind::Persistent => RGBColor(250, 235, 215),
        NodeKind::Other | NodeKind::Empty => RGBColor(240, 240, 240),
    }
}
