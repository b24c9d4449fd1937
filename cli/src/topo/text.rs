//! The machine as text.
#![forbid(unsafe_code)]

use std::fmt::Write;

use spillway::gpu::machine::Machine;
use spillway::sys::topology::{Device, DeviceKind, Node, NodeKind};

use super::super::report::size;
use super::placed::Placed;

/// The machine as a tree: packages, their nodes, and the devices of each node.
pub fn machine(machine: &Machine) -> String {
    let topology = &machine.topology;
    let mut text = String::new();
    let (cores, online) = (topology.cores.len(), topology.online.len());
    let _ = writeln!(
        text,
        "{online} processors, {cores} cores, {} usable: {}",
        topology.allowed.len(),
        topology.allowed
    );
    let mut shown = vec![false; topology.nodes.len()];
    for package in &topology.packages {
        let _ = writeln!(text, "package {}: processors {}", package.id, package.cpus);
        for (node, shown) in topology.nodes.iter().zip(&mut shown) {
            if !*shown && node.near_cpus.meets(&package.cpus) {
                *shown = true;
                write_node(&mut text, machine, node);
            }
        }
    }
    for (node, shown) in topology.nodes.iter().zip(shown) {
        if !shown && node.kind != NodeKind::Empty {
            write_node(&mut text, machine, node);
        }
    }
    for device in topology.devices.iter().filter(|device| device.node.is_none()) {
        let _ = writeln!(text, "{}, node unknown", describe(machine, device));
    }
    text
}

fn write_node(text: &mut String, machine: &Machine, node: &Node) {
    let _ = writeln!(text, "  {}", node_line(node));
    for device in machine.topology.devices.iter().filter(|device| device.node == Some(node.id)) {
        let _ = writeln!(text, "    {}", describe(machine, device));
    }
}

/// A node in one line.
pub fn node_line(node: &Node) -> String {
    let kind = match node.kind {
        NodeKind::Dram => "DRAM",
        NodeKind::HighBandwidth => "high bandwidth",
        NodeKind::Cxl => "CXL",
        NodeKind::Persistent => "persistent memory",
        NodeKind::Gpu => "GPU memory",
        NodeKind::Slower => "slower memory",
        NodeKind::Other => "memory without processors",
        NodeKind::Empty => "no memory",
    };
    let mut line = format!("node {}: {}, {kind}", node.id, size(node.memory_bytes));
    if !node.cpus.is_empty() {
        let _ = write!(line, ", processors {}", node.cpus);
    }
    if node.memory_side_cache_bytes > 0 {
        let _ = write!(line, ", memory-side cache of {}", size(node.memory_side_cache_bytes));
    }
    if !node.allowed {
        line.push_str(", not allowed");
    }
    line
}

/// A device in a few words.
pub fn describe(machine: &Machine, device: &Device) -> String {
    let ordinals = machine.visible.gpus.iter().enumerate().filter(|(_, gpu)| **gpu == Some(device.pci));
    let ordinals: Vec<String> = ordinals.map(|(ordinal, _)| ordinal.to_string()).collect();
    let name =
        |otherwise: &str| if device.name.is_empty() { otherwise.to_string() } else { device.name.clone() };
    let words = match device.kind {
        DeviceKind::Nvme => name("NVMe drive"),
        _ if ordinals.is_empty() => format!("{}, not visible", name("GPU")),
        _ => format!("GPU {}: {}", ordinals.join(", "), name("GPU")),
    };
    match device.memory_node {
        Some(node) => format!("{words} at {}, its memory is node {node}", device.pci),
        None => format!("{words} at {}", device.pci),
    }
}

/// A line for each rank.
pub fn ranks(placed: &[Placed]) -> String {
    let mut text = String::from("\nranks\n");
    for Placed { rank, drives } in placed {
        let gpu = rank.gpu.map_or_else(String::new, |gpu| format!(" GPU {gpu},"));
        let node = rank.node.map_or_else(|| "node unknown".to_string(), |node| format!("node {node}"));
        let drives = if drives.is_empty() { String::new() } else { format!(", drives {}", drives.join(" ")) };
        let (trainer, workers) = (&rank.trainer, &rank.workers);
        let _ =
            writeln!(text, "  rank {}:{gpu} {node}, trainer {trainer}, workers {workers}{drives}", rank.rank);
    }
    text
}
