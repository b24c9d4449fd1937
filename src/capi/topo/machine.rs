//! The topology.

use std::ffi::{CString, c_char};

use crate::capi::prelude::*;
use crate::error::{Doing, Error, IoError};
use crate::gpu::machine::Machine;
use crate::gpu::visible::Ask;
use crate::sys::prefetch;
use crate::sys::topology::Root;

/// A node or an ordinal that is not known.
pub const SPW_TOPO_NONE: u32 = u32::MAX;

/// Flags of `spw_topo_open`, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_topo_flag {
    /// Load the CUDA driver to learn the order of the GPUs. Processes that are forked later cannot use CUDA. Without this
    /// flag a driver that this library has loaded is asked, else CUDA_VISIBLE_DEVICES and PCI tell the order.
    SPW_TOPO_FLAG_LOAD_DRIVER = 1,
}

/// Kind of a node's memory. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_topo_node_kind {
    /// Memory beside processors.
    SPW_TOPO_NODE_KIND_DRAM = 0,
    /// Memory without processors, faster than theirs (HBM).
    SPW_TOPO_NODE_KIND_HIGH_BANDWIDTH = 1,
    /// Memory behind a CXL link.
    SPW_TOPO_NODE_KIND_CXL = 2,
    /// Persistent memory.
    SPW_TOPO_NODE_KIND_PERSISTENT = 3,
    /// Memory of a GPU.
    SPW_TOPO_NODE_KIND_GPU = 4,
    /// Memory without processors, slower than theirs, of no known kind.
    SPW_TOPO_NODE_KIND_SLOWER = 5,
    /// Memory without processors of which nothing is known.
    SPW_TOPO_NODE_KIND_OTHER = 6,
    /// No memory.
    SPW_TOPO_NODE_KIND_EMPTY = 7,
}

c_struct! { first 16;
/// Source of the topology. Zero is a good default for every field but struct_size.
pub struct spw_topo_options {
    /// Sum of `spw_topo_flag`.
    pub flags: u32,
    /// Directory of a recorded tree, with `sys` and `proc` below it; NULL or "/": this machine.
    pub root: In<c_char>,
}
}

c_struct! { first 40;
/// Numbers of parts. The texts are valid until the topology is closed.
pub struct spw_topo_info {
    /// Online processors.
    pub processors: u32,
    /// Their cores.
    pub cores: u32,
    /// Packages.
    pub packages: u32,
    /// NUMA nodes, at least one.
    pub nodes: u32,
    /// GPUs that CUDA shows to this process.
    pub gpus: u32,
    /// NVMe drives.
    pub drives: u32,
    /// 1 if a launcher has bound this process: it may use fewer processors than its parent process.
    pub bound: u32,
    /// Processors that the calling thread of `spw_topo_open` may use.
    pub allowed: *const c_char,
}
}

c_struct! { first 64;
/// A NUMA node. The texts are valid until the topology is closed.
pub struct spw_topo_node {
    /// The system's number of the node.
    pub node: u32,
    /// An `spw_topo_node_kind`.
    pub kind: u32,
    /// 1 if this process may take memory from the node.
    pub allowed: u32,
    /// Bytes of memory; 0 if unknown.
    pub memory_bytes: u64,
    /// Bytes of a cache in front of the memory; 0 for none.
    pub memory_side_cache_bytes: u64,
    /// Read bandwidth from the nearest processors, in MB/s; 0 if unknown.
    pub read_bandwidth: u64,
    /// Read latency from the nearest processors, in nanoseconds; 0 if unknown.
    pub read_latency_ns: u64,
    /// Online processors of the node.
    pub cpus: *const c_char,
    /// Processors that reach the memory best.
    pub near_cpus: *const c_char,
}
}

c_struct! { first 32;
/// A GPU. The texts are valid until the topology is closed.
pub struct spw_topo_gpu {
    /// Node whose processors and memory are nearest; SPW_TOPO_NONE if the firmware does not state it.
    pub node: u32,
    /// Node that the GPU's own memory forms; SPW_TOPO_NONE for none.
    pub memory_node: u32,
    /// 0
    pub reserved: u32,
    /// PCI address, for example "0000:17:00.0"; empty if it is not known.
    pub pci: *const c_char,
    /// Processors of the node; empty if the node is not known.
    pub cpus: *const c_char,
}
}

/// A topology: a copy of what the system stated. A forked child may use its parent's.
pub struct spw_topo {
    pub(super) machine: Machine,
    allowed: CString,
    /// Processors and near processors of each node.
    nodes: Vec<[CString; 2]>,
    /// Address and processors of each visible GPU.
    gpus: Vec<[CString; 2]>,
}

handle!(spw_topo, "topo");

impl spw_topo {
    fn new(machine: Machine) -> spw_topo {
        // Lists and addresses contain no NUL.
        let text = |list: String| CString::new(list).unwrap_or_default();
        let topology = &machine.topology;
        let nodes =
            topology.nodes.iter().map(|node| [text(node.cpus.to_string()), text(node.near_cpus.to_string())]);
        let gpu = |ordinal: usize| {
            let pci = machine.visible.gpus[ordinal].map(|pci| pci.to_string());
            let node = machine.gpu_node(ordinal).and_then(|node| topology.node(node));
            [pci, node.map(|node| node.cpus.to_string())].map(|list| text(list.unwrap_or_default()))
        };
        spw_topo {
            allowed: text(topology.allowed.to_string()),
            nodes: nodes.collect(),
            gpus: (0..machine.visible.gpus.len()).map(gpu).collect(),
            machine,
        }
    }
}

/// Reads the topology. `options` NULL: this machine, without loading a driver. Properties that the system does not state
/// are unknown in the result. SPW_ERR_INVALID_ARGUMENT if `options.root` has no directory `sys`. Of this machine, only a
/// query of the GPU driver can fail.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_open(options: In<spw_topo_options>, topo_out: Out<*mut spw_topo>) -> spw_status {
    guard(|| {
        let raw = options.read_optional("options")?;
        let load = abi_struct::flags("options.flags", raw.map_or(0, |raw| raw.flags), 1)? != 0;
        let root = match raw.map(|raw| raw.root).filter(|root| !root.is_null()) {
            None => Root::live(),
            Some(root) => {
                Root::recorded(root.path("options.root")?).map_err(|error| error.within("options."))?
            }
        };
        let ask = if load { Ask::Load } else { Ask::Loaded };
        topo_out.open(|| Ok(spw_topo::new(Machine::read(root, ask)?)))
    })
}

/// Frees a topology.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_close(topo: Option<Box<spw_topo>>) -> spw_status {
    guard(|| handle::end(topo))
}

/// Writes the numbers of parts.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_get_info(topo: Option<&spw_topo>, info_out: Out<spw_topo_info>) -> spw_status {
    guard(|| {
        let topo = handle::get(topo)?;
        let topology = &topo.machine.topology;
        let values = report!(spw_topo_info from topology {
            bound
        } with {
            processors: topology.online.len() as u32, cores: topology.cores.len() as u32,
            packages: topology.packages.len() as u32, nodes: topology.nodes.len() as u32,
            gpus: topo.gpus.len() as u32, drives: topology.drives().count() as u32, allowed: topo.allowed.as_ptr()
        });
        info_out.write(&values, "info_out")
    })
}

/// Writes the node at `index`, which is below the number of nodes. Nodes are in ascending order of their numbers.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_get_node(
    topo: Option<&spw_topo>,
    index: u32,
    node_out: Out<spw_topo_node>,
) -> spw_status {
    guard(|| {
        let topo = handle::get(topo)?;
        let nodes = &topo.machine.topology.nodes;
        let (node, [cpus, near_cpus]) =
            nodes.get(index as usize).zip(topo.nodes.get(index as usize)).ok_or_else(|| {
                Error::invalid("index", format!("is {index}, but there are {} nodes", nodes.len()))
            })?;
        let values = report!(spw_topo_node from node {
            allowed, memory_bytes, memory_side_cache_bytes
        } with {
            node: node.id, kind: node.kind as u32, read_bandwidth: node.read_bandwidth.unwrap_or(0),
            read_latency_ns: node.read_latency.unwrap_or(0), cpus: cpus.as_ptr(),
            near_cpus: near_cpus.as_ptr()
        });
        node_out.write(&values, "node_out")
    })
}

/// Writes the GPU with a CUDA ordinal of this process.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_get_gpu(
    topo: Option<&spw_topo>,
    ordinal: u32,
    gpu_out: Out<spw_topo_gpu>,
) -> spw_status {
    guard(|| {
        let topo = handle::get(topo)?;
        let [pci, cpus] = topo.gpus.get(ordinal as usize).ok_or_else(|| {
            Error::invalid("ordinal", format!("is {ordinal}, but {} GPUs are visible", topo.gpus.len()))
        })?;
        let machine = &topo.machine;
        let device = machine.visible.device(&machine.topology, ordinal as usize);
        let values = report!(spw_topo_gpu with {
            node: device.and_then(|device| device.node).unwrap_or(SPW_TOPO_NONE),
            memory_node: device.and_then(|device| device.memory_node).unwrap_or(SPW_TOPO_NONE),
            reserved: 0, pci: pci.as_ptr(), cpus: cpus.as_ptr()
        });
        gpu_out.write(&values, "gpu_out")
    })
}

/// Writes the node of the drive that holds a file or directory. SPW_TOPO_NONE if several drives of different nodes hold
/// it, or if the node is not known. SPW_ERR_NOT_FOUND if the path does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_get_path_node(
    topo: Option<&spw_topo>,
    path: In<c_char>,
    node_out: Out<u32>,
) -> spw_status {
    guard(|| {
        let topo = handle::get(topo)?;
        node_out.required("node_out")?;
        let path = path.path("path")?;
        let node = topo
            .machine
            .path_node(path)
            .map_err(|error| IoError::of(&error, Doing::Opening, path.to_string_lossy()))?;
        node_out.put(node.unwrap_or(SPW_TOPO_NONE), "node_out")
    })
}

/// Writes everything as one JSON object, as `spillway topo --json` does without the ranks.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_get_json(
    topo: Option<&spw_topo>,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let topo = handle::get(topo)?;
        let text =
            serde_json::to_string(&topo.machine).map_err(|error| Error::Internal(error.to_string()))?;
        text_out.put_text(&text, size, needed_out)
    })
}

/// Begins to load the cache lines of `count` addresses into the caches of the calling thread's processor, and does not wait
/// for them. Call it shortly before the use of much memory whose addresses are known, and that the caches have lost since.
/// An address may be any number: one without memory has no effect, and no memory is read or changed.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_prefetch(addresses: In<u64>, count: u64) -> spw_status {
    guard_step(|| {
        prefetch::lines(addresses.array(count, "addresses")?);
        Ok(())
    })
}
