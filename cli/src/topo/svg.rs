//! The machine as an SVG: a column for each package, a box for each node, and the devices and ranks of the node in it.
#![forbid(unsafe_code)]

use spillway::gpu::machine::Machine;
use spillway::sys::topology::{Node, NodeKind};
use spillway_planner::picture::{BLACK, Color, Picture};

use super::placed::Placed;
use super::text;

/// Pixels.
const LINE: i32 = 20;
const GAP: i32 = 10;
const LETTER: i32 = 7;
const FONT: u32 = 13;

/// A package: its title and its nodes.
type Column = (String, Vec<Block>);

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
pub fn svg(machine: &Machine, ranks: &[Placed]) -> String {
    let columns = columns(machine, ranks);
    let longest = |(title, blocks): &Column| {
        let lines = blocks.iter().flat_map(|block| &block.lines).map(|line| line.chars().count());
        lines.chain([title.chars().count()]).max().unwrap_or(0) as i32 * LETTER + 4 * GAP
    };
    let widths: Vec<i32> = columns.iter().map(longest).collect();
    let tall = |(_, blocks): &Column| blocks.iter().map(|block| block.height() + GAP).sum::<i32>();
    let height = columns.iter().map(tall).max().unwrap_or(0) + LINE + 4 * GAP;
    let width = widths.iter().map(|width| width + GAP).sum::<i32>() + GAP;
    let mut picture = Picture::new(width as u32, height as u32);
    draw(&mut picture, &columns, &widths, height);
    picture.finish()
}

fn columns(machine: &Machine, ranks: &[Placed]) -> Vec<Column> {
    let topology = &machine.topology;
    let mut columns: Vec<Column> = Vec::new();
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
    columns
}

fn draw(picture: &mut Picture, columns: &[Column], widths: &[i32], height: i32) {
    let point = |x: i32, y: i32| (f64::from(x), f64::from(y));
    let mut x = GAP;
    for ((title, blocks), width) in columns.iter().zip(widths) {
        picture.frame(point(x, GAP), point(x + width, height - GAP), BLACK);
        picture.write(title, point(x + GAP, GAP + 4), FONT);
        let mut y = GAP + LINE + GAP;
        for block in blocks {
            let (from, to) = (point(x + GAP, y), point(x + width - GAP, y + block.height()));
            picture.fill(from, to, color(block.kind));
            picture.frame(from, to, BLACK);
            for (at, line) in block.lines.iter().enumerate() {
                picture.write(line, point(x + 2 * GAP, y + GAP / 2 + at as i32 * LINE), FONT);
            }
            y += block.height() + GAP;
        }
        x += width + GAP;
    }
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

fn color(kind: NodeKind) -> Color {
    match kind {
        NodeKind::Dram => [225, 235, 250],
        NodeKind::HighBandwidth | NodeKind::Gpu => [225, 245, 220],
        NodeKind::Cxl | NodeKind::Slower | NodeKind::Persistent => [250, 235, 215],
        NodeKind::Other | NodeKind::Empty => [240, 240, 240],
    }
}
