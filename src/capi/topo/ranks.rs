//! Processors of ranks, bound workers, and the nodes of pages.

use std::ffi::{c_char, c_void};

use super::machine::spw_topo;
use crate::capi::prelude::*;
use crate::sys::bitmap::Bitmap;
use crate::sys::topology::placement::{Rank, Scope, split};
use crate::sys::{binding, page_nodes, threads};

/// DeepSpeed's default of `cpuadam_cores_perc`.
const DEFAULT_SHARE: f64 = 0.8;

/// Where the processors of a rank may be. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_topo_scope {
    /// On the node of its GPU.
    SPW_TOPO_SCOPE_NODE = 0,
    /// On all nodes of that node's package.
    SPW_TOPO_SCOPE_PACKAGE = 1,
}

/// A set of a rank's processors. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_topo_cpus {
    /// All of them.
    SPW_TOPO_CPUS_ALL = 0,
    /// Those of the trainer.
    SPW_TOPO_CPUS_TRAINER = 1,
    /// Those of the optimizer's workers.
    SPW_TOPO_CPUS_WORKERS = 2,
}

c_struct! { first 24;
/// A rank of this machine. Zero is a good default for every field but struct_size.
pub struct spw_topo_rank_options {
    /// Number of ranks on this machine (`LOCAL_WORLD_SIZE`). 0: one rank with all processors that this process may use,
    /// as for a rank that its launcher has bound.
    pub ranks: u32,
    /// Number of the rank, below `ranks` (`LOCAL_RANK`). It uses the GPU with this ordinal.
    pub rank: u32,
    /// An `spw_topo_scope`.
    pub scope: u32,
    /// Share of the rank's cores for the workers, as DeepSpeed's `cpuadam_cores_perc`: the trainer gets the first
    /// floor((1 - share) * cores) cores, at least one unless the share is 1. 0: 0.8.
    pub share: f64,
}
}

c_struct! { first 40;
/// Pages of a range by their place.
pub struct spw_topo_pages {
    /// 0
    pub reserved: u32,
    /// Inspected pages: all, or 65536 in equal distances.
    pub sampled: u64,
    /// Of these: on the node.
    pub on_node: u64,
    /// On other nodes.
    pub elsewhere: u64,
    /// On no node: never touched, or swapped out.
    pub absent: u64,
}
}

/// Writes processors of a rank: of the node of its GPU, divided evenly among the ranks on that node (SuperOffload section
/// 4.7). A rank gets only processors that this process may use; cores are never divided. If the node of the GPU is not
/// known, all usable processors count as its node. A truncated list names wrong processors: compare `needed_out`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_get_rank_cpus(
    topo: Option<&spw_topo>,
    options: In<spw_topo_rank_options>,
    cpus: u32,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let topo = handle::get(topo)?;
        let raw = options.read("options")?;
        let found = place(topo, &raw).map_err(|error| error.within("options."))?;
        let lists = [&found.cpus, &found.trainer, &found.workers];
        let list = choice("cpus", cpus, "spw_topo_cpus", &lists)?;
        text_out.put_text(&list.to_string(), size, needed_out)
    })
}

fn place(topo: &spw_topo, raw: &spw_topo_rank_options) -> Result<Rank> {
    let share = if raw.share == 0.0 { DEFAULT_SHARE } else { raw.share };
    let scope = choice("scope", raw.scope, "spw_topo_scope", &[Scope::Node, Scope::Package])?;
    let topology = &topo.machine.topology;
    if raw.ranks == 0 {
        let (trainer, workers) = split(topology, &topology.allowed, share)?;
        let worker_cores = topology.cores_in(&workers).len() as u32;
        let cpus = topology.allowed.clone();
        return Ok(Rank { rank: 0, gpu: None, node: None, cpus, trainer, workers, worker_cores });
    }
    let mut ranks = topo.machine.place(raw.ranks, scope, share)?;
    if raw.rank >= raw.ranks {
        return Err(Error::invalid("rank", format!("is {}, but there are {} ranks", raw.rank, raw.ranks)));
    }
    Ok(ranks.swap_remove(raw.rank as usize))
}

/// Binds the worker threads of this library to processors: those of the thread pool, and threads of the library that
/// compute. The caller's threads and their affinity stay as they are. Work in flight finishes on its present workers.
///
/// Without a number from `spw_set_threads` or `SPILLWAY_NUM_THREADS`, there is a worker for each core of the set. OpenMP's
/// threads never take the place of bound workers. A process that is forked later keeps the binding.
///
/// SPW_ERR_INVALID_ARGUMENT if the list is empty, or names a processor that is offline or not in the process's cpuset.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_bind_workers(topo: Option<&spw_topo>, cpus: In<c_char>) -> spw_status {
    guard(|| {
        let topo = handle::get(topo)?;
        let text = cpus.text("cpus")?;
        let cpus = Bitmap::parse_list(text)
            .ok_or_else(|| Error::invalid("cpus", format!("{text:?} is not a list such as 0-3,8")))?;
        binding::bind(&cpus, topo.machine.topology.cores_in(&cpus).len())
    })
}

/// Undoes `spw_topo_bind_workers`: workers run where the thread that starts them may run.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_unbind_workers() -> spw_status {
    guard(|| {
        binding::unbind();
        Ok(())
    })
}

/// Writes the processors to which the workers are bound; an empty text if they are not bound.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_get_workers(text_out: Out<c_char>, size: u64, needed_out: Out<u64>) -> spw_status {
    guard(|| {
        let list = threads::binding().map_or_else(String::new, |binding| binding.cpus.to_string());
        text_out.put_text(&list, size, needed_out)
    })
}

/// Counts the pages of a range that are on a node, elsewhere, or not in memory. It does not touch the memory; addresses
/// without memory count as absent. SPW_ERR_UNSUPPORTED where the system has no move_pages.
#[unsafe(no_mangle)]
pub extern "C" fn spw_topo_get_pages(
    address: *const c_void,
    bytes: u64,
    node: u32,
    pages_out: Out<spw_topo_pages>,
) -> spw_status {
    guard(|| {
        pages_out.check("pages_out")?;
        let bytes =
            usize::try_from(bytes).map_err(|_| Error::invalid("bytes", "exceeds the address space"))?;
        let found = page_nodes::query(address as usize, bytes, node)?;
        let values = report!(spw_topo_pages from found {
            sampled, on_node, elsewhere, absent
        } with {
            reserved: 0
        });
        pages_out.write(&values, "pages_out")
    })
}
