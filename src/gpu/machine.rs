//! The topology together with the GPUs that CUDA counts.
#![forbid(unsafe_code)]

use serde::Serialize;

use super::visible::{self, Ask, Visible};
use crate::error::Result;
use crate::sys::bitmap::Bitmap;
use crate::sys::topology::placement::{self, Rank, Scope};
use crate::sys::topology::{Root, Topology};

/// A machine and its visible GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Processors, nodes and devices.
    #[serde(flatten)]
    pub topology: Topology,
    /// The GPU behind each ordinal.
    pub visible: Visible,
    /// Where the topology was read.
    #[serde(skip)]
    root: Root,
}

impl Machine {
    /// Reads the machine. The driver of this machine is not asked about another one.
    pub fn read(root: Root, ask: Ask) -> Result<Machine> {
        let topology = Topology::read(&root);
        let visible = visible::find(&topology, if root.is_live() { ask } else { Ask::Never })?;
        Ok(Machine { topology, visible, root })
    }

    /// Places `ranks` ranks: see [`placement::place`].
    pub fn place(&self, ranks: u32, scope: Scope, share: f64) -> Result<Vec<Rank>> {
        placement::place(&self.topology, &self.visible.nodes(&self.topology), ranks, scope, share)
    }

    /// The node of the GPU with this ordinal; `None` if it is not known.
    pub fn gpu_node(&self, ordinal: usize) -> Option<u32> {
        self.visible.device(&self.topology, ordinal)?.node
    }

    /// The node of the drive that holds a path: see [`Topology::node_of_path`].
    pub fn path_node(&self, path: &std::path::Path) -> std::io::Result<Option<u32>> {
        self.topology.node_of_path(&self.root, path)
    }

    /// Names of the drives that the processors of `cpus` reach best: those on their nodes, else on their packages.
    pub fn drives_near(&self, cpus: &Bitmap) -> Vec<&str> {
        let topology = &self.topology;
        let package = |node: &Bitmap| {
            let meets = topology.packages.iter().filter(|package| package.cpus.meets(node));
            meets.fold(Bitmap::new(), |all, package| all.or(&package.cpus))
        };
        let near = |reach: &dyn Fn(&Bitmap) -> Bitmap| {
            let is_near =
                |node: u32| topology.node(node).is_some_and(|node| reach(&node.near_cpus).meets(cpus));
            let drives = topology.drives().filter(|drive| drive.node.is_some_and(is_near));
            drives.map(|drive| drive.name.as_str()).collect::<Vec<&str>>()
        };
        let on_node = near(&Bitmap::clone);
        if on_node.is_empty() { near(&package) } else { on_node }
    }
}
