//! Ranks on nodes: each rank gets processors of the node of its GPU (SuperOffload section 4.7), divided into those of
//! the trainer and those of the optimizer's workers.
//!
//! Invariants:
//! - Processors of one core stay together.
//! - The ranks of a node share its cores evenly, in the order of their numbers. Two ranks get the same core only if there
//!   are more ranks than cores.
//! - A rank gets only processors that this process may use.
#![forbid(unsafe_code)]

use serde::Serialize;

use super::Topology;
use crate::error::{Error, Result};
use crate::sys::bitmap::Bitmap;

/// Most ranks on a machine; a larger number is taken for a mistake.
const MOST_RANKS: u32 = 4096;

/// Where the processors of a rank may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// On the node of its GPU.
    Node,
    /// On all nodes of that node's package.
    Package,
}

/// GPU, node and processors of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rank {
    /// Number of the rank on this machine.
    pub rank: u32,
    /// Ordinal of its GPU among the visible ones.
    pub gpu: Option<u32>,
    /// Node of its memory: the node of its GPU. `None` if the firmware does not state it.
    pub node: Option<u32>,
    /// All processors of the rank.
    pub cpus: Bitmap,
    /// Those of the trainer.
    pub trainer: Bitmap,
    /// Those of the optimizer's workers.
    pub workers: Bitmap,
    /// Number of cores of the workers.
    pub worker_cores: u32,
}

/// Places the ranks of this machine. `gpus` has the node of each visible GPU; rank r uses GPU r, and begins again at GPU 0
/// if there are more ranks. `share` is the part of the cores that the workers get, as in [`split`].
pub fn place(
    topology: &Topology,
    gpus: &[Option<u32>],
    ranks: u32,
    scope: Scope,
    share: f64,
) -> Result<Vec<Rank>> {
    if ranks == 0 || ranks > MOST_RANKS {
        return Err(Error::invalid("ranks", format!("is {ranks}, but must be from 1 to {MOST_RANKS}")));
    }
    check(share)?;
    let gpu = |rank: u32| (!gpus.is_empty()).then(|| rank % gpus.len() as u32);
    let nodes: Vec<Option<u32>> = match gpus.is_empty() {
        true => spread(topology, ranks),
        false => (0..ranks).map(|rank| gpus[rank as usize % gpus.len()]).collect(),
    };
    let domains: Vec<Bitmap> = nodes.iter().map(|node| domain(topology, *node, scope)).collect();
    let mut placed = Vec::new();
    for (rank, node) in (0..ranks).zip(&nodes) {
        let domain = &domains[rank as usize];
        let sharing: Vec<usize> = (0..domains.len()).filter(|other| domains[*other] == *domain).collect();
        let at = sharing.iter().position(|other| *other == rank as usize).unwrap_or(0);
        let cpus = part(&topology.cores_in(domain), at, sharing.len());
        let (trainer, workers) = split(topology, &cpus, share)?;
        let worker_cores = topology.cores_in(&workers).len() as u32;
        placed.push(Rank { rank, gpu: gpu(rank), node: *node, cpus, trainer, workers, worker_cores });
    }
    Ok(placed)
}

/// Divides processors into those of the trainer and those of the optimizer's workers, by whole cores: the first
/// floor((1 - share) * cores) cores are the trainer's, as in DeepSpeed's `cpuadam_cores_perc`. Below a share of 1 the
/// trainer keeps at least one core, and the workers always get one. With a single core both use it.
pub fn split(topology: &Topology, cpus: &Bitmap, share: f64) -> Result<(Bitmap, Bitmap)> {
    check(share)?;
    let cores = topology.cores_in(cpus);
    let all = |cores: &[Bitmap]| cores.iter().fold(Bitmap::new(), |all, core| all.or(core));
    if cores.len() < 2 {
        return Ok((cpus.clone(), cpus.clone()));
    }
    let least = usize::from(share < 1.0);
    let at = (((1.0 - share) * cores.len() as f64) as usize).clamp(least, cores.len() - 1);
    Ok((all(&cores[..at]), all(&cores[at..])))
}

fn check(share: f64) -> Result<()> {
    match share > 0.0 && share <= 1.0 {
        true => Ok(()),
        false => Err(Error::invalid("share", format!("is {share}, but must be above 0 and at most 1"))),
    }
}

/// Without GPUs: the node of each rank, in equal consecutive parts over the nodes with usable processors.
fn spread(topology: &Topology, ranks: u32) -> Vec<Option<u32>> {
    let usable: Vec<u32> =
        topology.nodes.iter().filter(|node| node.cpus.meets(&topology.allowed)).map(|node| node.id).collect();
    let of = |rank: u32| usable.get(rank as usize * usable.len() / ranks as usize).copied();
    (0..ranks).map(of).collect()
}

/// The usable processors of a node or its package; all usable ones if there are none there.
fn domain(topology: &Topology, node: Option<u32>, scope: Scope) -> Bitmap {
    let found = topology.nodes.iter().find(|own| Some(own.id) == node).map_or_else(Bitmap::new, |node| {
        let packages = topology.packages.iter().filter(|package| package.cpus.meets(&node.near_cpus));
        match scope {
            Scope::Node => node.near_cpus.clone(),
            Scope::Package => packages.fold(Bitmap::new(), |all, package| all.or(&package.cpus)),
        }
    });
    let usable = found.and(&topology.allowed);
    if usable.is_empty() { topology.allowed.clone() } else { usable }
}

/// The `at`-th of `of` equal parts of the cores, at least one core.
fn part(cores: &[Bitmap], at: usize, of: usize) -> Bitmap {
    let edge = |at: usize| at * cores.len() / of;
    let (from, to) = (edge(at), edge(at + 1).max(edge(at) + 1).min(cores.len()));
    cores[from.min(to)..to].iter().fold(Bitmap::new(), |all, core| all.or(core))
}
