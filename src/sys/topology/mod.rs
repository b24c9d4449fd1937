//! The topology of the machine: packages, cores, NUMA nodes, GPUs and drives, and what this process may use of
//! it. It is read from /sys and /proc below a root that tests can set.
//!
//! | file | content |
//! |---|---|
//! | `sysfs.rs` | files below the root |
//! | `processors.rs` | processors, packages, cores |
//! | `nodes.rs` | NUMA nodes and the kind of their memory |
//! | `devices.rs` | GPUs and NVMe drives, and their nodes |
//! | `allowed.rs` | processors and nodes of cgroups and affinity |
//! | `cgroups.rs` | directories of cgroups |
//! | `visible.rs` | `CUDA_VISIBLE_DEVICES` |
//! | `placement.rs` | processors for each rank, its trainer and its workers |
//! | `mounts.rs` | mounted file systems |
//! | `path.rs` | the node of the drive that holds a path |
//!
//! Invariants:
//! - Missing or malformed files make a part unknown, never an error: a container shows only parts of /sys. A root that a
//!   caller names must have a directory `sys`.
//! - Nothing is changed.
#![forbid(unsafe_code)]

mod allowed;
pub mod cgroups;
mod devices;
pub mod mounts;
mod nodes;
mod path;
pub mod placement;
mod processors;
mod sysfs;
#[cfg(test)]
mod tests;
pub mod visible;

use serde::Serialize;

pub use devices::{Device, DeviceKind, PciAddress};
pub use nodes::{Node, NodeKind};
pub use processors::Package;
pub use sysfs::Root;

use super::affinity;
use super::bitmap::Bitmap;

/// A machine, as one process sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Topology {
    /// Online processors.
    pub online: Bitmap,
    /// Online processors of the process's cpuset.
    pub cpuset: Bitmap,
    /// Those that the affinity of the calling thread allows too.
    pub allowed: Bitmap,
    /// True if these are fewer than those of the parent process: a launcher has bound this rank.
    pub bound: bool,
    /// Packages, in the order of their first processor.
    pub packages: Vec<Package>,
    /// Online processors of each core.
    pub cores: Vec<Bitmap>,
    /// NUMA nodes in ascending order, at least one.
    pub nodes: Vec<Node>,
    /// GPUs and NVMe drives in the order of their PCI addresses.
    pub devices: Vec<Device>,
}

impl Topology {
    /// Reads the topology below `root`.
    pub fn read(root: &Root) -> Topology {
        let processors = processors::read(root);
        let allowed = allowed::read(root, &processors.online);
        let mut devices = devices::read(root);
        let gpus = devices::memory_nodes(root);
        let ids: Vec<u32> = gpus.keys().copied().collect();
        let mut nodes = nodes::read(root, &processors.online, &ids, allowed.nodes.as_ref());
        // The processors beside a GPU are those that reach its memory best.
        for (id, gpu) in gpus {
            let beside = devices::node_of(root, &gpu, &nodes);
            let near = nodes.iter().find(|node| Some(node.id) == beside).map(|node| node.cpus.clone());
            if let (Some(near), Some(node)) = (near, nodes.iter_mut().find(|node| node.id == id)) {
                node.near_cpus = near;
            }
        }
        devices::place(root, &mut devices, &nodes);
        Topology {
            online: processors.online,
            cpuset: allowed.cpuset,
            allowed: allowed.cpus,
            bound: root.is_live() && affinity::is_narrower_than_parent(),
            packages: processors.packages,
            cores: processors.cores,
            nodes,
            devices,
        }
    }

    /// The GPUs that CUDA counts: NVIDIA's if there are some, else AMD's. In the order of their PCI addresses, as with
    /// `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    pub fn gpus(&self) -> Vec<&Device> {
        let of = |kind| self.devices.iter().filter(|device| device.kind == kind).collect::<Vec<&Device>>();
        let nvidia = of(DeviceKind::Nvidia);
        if nvidia.is_empty() { of(DeviceKind::Amd) } else { nvidia }
    }

    /// The drives.
    pub fn drives(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(|device| device.kind == DeviceKind::Nvme)
    }

    /// The node with this number.
    pub fn node(&self, id: u32) -> Option<&Node> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// The node to which memory for transfers of a device is bound. `None` if the device or its node is not known, or if
    /// there is one node.
    pub fn bindable_node(&self, pci: PciAddress) -> Option<u32> {
        let device = self.devices.iter().find(|device| device.pci == pci)?;
        device.node.filter(|_| self.nodes.len() > 1)
    }

    /// Cores with a processor in `cpus`, in the order of their first processor, cut to `cpus`.
    pub fn cores_in(&self, cpus: &Bitmap) -> Vec<Bitmap> {
        self.cores.iter().map(|core| core.and(cpus)).filter(|core| !core.is_empty()).collect()
    }

    /// The node of the drive that holds `path`. `None` if several drives do, or if the drive has no known node.
    pub fn node_of_path(&self, root: &Root, path: &std::path::Path) -> std::io::Result<Option<u32>> {
        path::node(root, &self.nodes, path)
    }
}
