//! NUMA nodes: their processors, their memory and its kind.
//!
//! The kind of a node without processors comes from the first source that names it:
//!
//! | kind | source |
//! |---|---|
//! | GPU | `numa_status` of NVIDIA's driver |
//! | persistent, CXL | the parent of the DAX device that became the node, or a CXL memory device with this node |
//! | high bandwidth, slower | bandwidth and latency of the firmware's table (HMAT), beside the node of the processors |
//! | the same | the system's memory tiers |
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use serde::Serialize;

use super::sysfs::Root;
use crate::sys::bitmap::{Bitmap, LIMIT};

const NODE: &str = "sys/devices/system/node";
const TIERS: &str = "sys/devices/virtual/memory_tiering";
/// Bandwidth beside the memory of the processors from which on memory counts as fast. HBM has 3 to 10 times that of DDR.
const FASTER: f64 = 1.5;
/// Bandwidth and latency beside the memory of the processors from which on memory counts as slow.
const LESS_BANDWIDTH: f64 = 0.7;
const MORE_LATENCY: f64 = 1.4;

/// Kind of a node's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeKind {
    /// Memory beside processors.
    Dram,
    /// Memory without processors that is faster than that of the processors.
    HighBandwidth,
    /// Memory behind a CXL link.
    Cxl,
    /// Persistent memory.
    Persistent,
    /// Memory of a GPU.
    Gpu,
    /// Memory without processors that is slower, of no known kind.
    Slower,
    /// Memory without processors of which nothing is known.
    Other,
    /// No memory.
    Empty,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Node {
    /// The system's number.
    pub id: u32,
    /// Kind of the memory.
    pub kind: NodeKind,
    /// Online processors of the node.
    pub cpus: Bitmap,
    /// Processors that reach this memory best: those of the node, else those of its initiators, else of the nearest node.
    pub near_cpus: Bitmap,
    /// Bytes of memory; 0 if unknown.
    pub memory_bytes: u64,
    /// Size of a cache in front of the memory; 0 for none.
    pub memory_side_cache_bytes: u64,
    /// Read bandwidth from the nearest processors in MB/s, if the firmware states it.
    pub read_bandwidth: Option<u64>,
    /// Read latency from the nearest processors in nanoseconds, if the firmware states it.
    pub read_latency: Option<u64>,
    /// The system's memory tier.
    pub tier: Option<u32>,
    /// Distance to other nodes; 10 is local.
    pub distances: BTreeMap<u32, u32>,
    /// True if this process may take memory from the node.
    pub allowed: bool,
}

/// The nodes; one node with all processors where the system has no list of nodes. `gpus` are the nodes of GPU memory.
pub(super) fn read(root: &Root, online: &Bitmap, gpus: &[u32], allowed: Option<&Bitmap>) -> Vec<Node> {
    let ids: Vec<u32> = root.numbered(NODE, "node").iter().collect();
    if ids.is_empty() {
        return vec![only_node(root, online)];
    }
    let mut nodes: Vec<Node> = ids.iter().map(|id| plain(root, *id, &ids, online)).collect();
    let mut tiers = BTreeMap::new();
    for tier in root.numbered(TIERS, "memory_tier").iter() {
        let members = root.list(&format!("{TIERS}/memory_tier{tier}/nodelist"));
        tiers.extend(members.iter().flat_map(Bitmap::iter).map(|node| (node, tier)));
    }
    for node in &mut nodes {
        node.tier = tiers.get(&node.id).copied();
        node.allowed = allowed.is_none_or(|allowed| allowed.contains(node.id));
    }
    let beside = nodes.clone();
    let devices = Devices::read(root);
    for node in nodes.iter_mut().filter(|node| node.kind != NodeKind::Dram) {
        let near = near(root, node, &beside);
        node.near_cpus = near.iter().fold(Bitmap::new(), |all, near| all.or(&near.cpus));
        node.kind = kind(node, &near, gpus, &devices, &beside);
    }
    nodes
}

fn only_node(root: &Root, online: &Bitmap) -> Node {
    Node {
        id: 0,
        kind: NodeKind::Dram,
        cpus: online.clone(),
        near_cpus: online.clone(),
        memory_bytes: root.text("proc/meminfo").map_or(0, |text| memory(&text)),
        memory_side_cache_bytes: 0,
        read_bandwidth: None,
        read_latency: None,
        tier: None,
        distances: BTreeMap::new(),
        allowed: true,
    }
}

/// What the node's own files state. Its kind is [`NodeKind::Dram`] if it has processors, else still open.
fn plain(root: &Root, id: u32, ids: &[u32], online: &Bitmap) -> Node {
    let folder = format!("{NODE}/node{id}");
    let stated = root.mask(&format!("{folder}/cpumap")).or_else(|| root.list(&format!("{folder}/cpulist")));
    let stated = stated.unwrap_or_default();
    let cpus = stated.and(online);
    let distances = root.text(&format!("{folder}/distance")).unwrap_or_default();
    let distances = distances.split_whitespace().map_while(|distance| distance.parse().ok());
    let caches = root.names(&format!("{folder}/memory_side_cache"));
    let cache = |name: &String| root.number::<u64>(&format!("{folder}/memory_side_cache/{name}/size"));
    let access = ["access1", "access0"].map(|access| format!("{folder}/{access}/initiators"));
    let figure = |name: &str| access.iter().find_map(|access| root.number(&format!("{access}/{name}")));
    Node {
        id,
        kind: if stated.is_empty() { NodeKind::Other } else { NodeKind::Dram },
        near_cpus: cpus.clone(),
        cpus,
        memory_bytes: root.text(&format!("{folder}/meminfo")).map_or(0, |text| memory(&text)),
        memory_side_cache_bytes: caches.iter().filter_map(cache).sum(),
        read_bandwidth: figure("read_bandwidth").filter(|bandwidth| *bandwidth > 0),
        read_latency: figure("read_latency").filter(|latency| *latency > 0),
        tier: None,
        distances: ids.iter().copied().zip(distances).collect(),
        allowed: true,
    }
}

/// Bytes in the line "MemTotal:  N kB" of a meminfo.
fn memory(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.split_once("MemTotal:"));
    let number = line.and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0).saturating_mul(1024)
}

/// The nodes with the processors that reach a node without processors best.
fn near<'a>(root: &Root, node: &Node, nodes: &'a [Node]) -> Vec<&'a Node> {
    for access in ["access1", "access0"] {
        let initiators = root.numbered(&format!("{NODE}/node{}/{access}/initiators", node.id), "node");
        let found: Vec<&Node> =
            nodes.iter().filter(|other| initiators.contains(other.id) && !other.cpus.is_empty()).collect();
        if !found.is_empty() {
            return found;
        }
    }
    let distance = |other: &Node| node.distances.get(&other.id).copied().unwrap_or(u32::MAX);
    let with_cpus = || nodes.iter().filter(|other| !other.cpus.is_empty());
    let least = with_cpus().map(distance).min().unwrap_or(u32::MAX);
    with_cpus().filter(|other| distance(other) == least).collect()
}

fn kind(node: &Node, near: &[&Node], gpus: &[u32], devices: &Devices, nodes: &[Node]) -> NodeKind {
    if gpus.contains(&node.id) {
        return NodeKind::Gpu;
    }
    if node.memory_bytes == 0 {
        return NodeKind::Empty;
    }
    if devices.persistent.contains(node.id) {
        return NodeKind::Persistent;
    }
    if devices.cxl.contains(node.id) {
        return NodeKind::Cxl;
    }
    let ratio = |own: Option<u64>, of: fn(&Node) -> Option<u64>| {
        let other = near.iter().find_map(|near| of(near))?;
        Some(own? as f64 / other as f64)
    };
    let bandwidth = ratio(node.read_bandwidth, |node| node.read_bandwidth);
    let latency = ratio(node.read_latency, |node| node.read_latency);
    if bandwidth.is_some_and(|ratio| ratio >= FASTER) {
        return NodeKind::HighBandwidth;
    }
    if bandwidth.is_some_and(|ratio| ratio <= LESS_BANDWIDTH)
        || latency.is_some_and(|ratio| ratio >= MORE_LATENCY)
    {
        return NodeKind::Slower;
    }
    // A lower number is a faster tier.
    let usual = nodes.iter().filter(|node| node.kind == NodeKind::Dram).filter_map(|node| node.tier).min();
    match node.tier.zip(usual) {
        Some((own, usual)) if own < usual => NodeKind::HighBandwidth,
        Some((own, usual)) if own > usual => NodeKind::Slower,
        _ => NodeKind::Other,
    }
}

/// Nodes that came from memory devices.
struct Devices {
    persistent: Bitmap,
    cxl: Bitmap,
}

impl Devices {
    fn read(root: &Root) -> Devices {
        let mut found = Devices { persistent: Bitmap::new(), cxl: Bitmap::new() };
        const DAX: &str = "sys/bus/dax/devices";
        for name in root.names(DAX) {
            let target = root.number::<u32>(&format!("{DAX}/{name}/target_node")).filter(|id| *id < LIMIT);
            let (Some(target), Some(path)) = (target, root.resolved(&format!("{DAX}/{name}"))) else {
                continue;
            };
            let below = |prefix: &str| {
                path.components()
                    .any(|part| part.as_os_str().to_str().is_some_and(|part| part.starts_with(prefix)))
            };
            if below("ndbus") {
                found.persistent.insert(target);
            } else if below("dax_region") || below("cxl") {
                found.cxl.insert(target);
            }
        }
        // The firmware made this CXL memory a node; there is no DAX device.
        const CXL: &str = "sys/bus/cxl/devices";
        let devices = root.names(CXL).into_iter().filter(|name| name.starts_with("mem"));
        let nodes = devices.filter_map(|name| root.number::<u32>(&format!("{CXL}/{name}/numa_node")));
        nodes.for_each(|node| found.cxl.insert(node));
        found
    }
}
