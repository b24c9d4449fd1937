//! Command lines that bind ranks.
#![forbid(unsafe_code)]

use std::fmt::Write;

use spillway::gpu::machine::Machine;
use spillway::sys::bitmap::Bitmap;
use spillway::sys::topology::placement::{Rank, Scope};

/// How launchers bind the ranks.
#[derive(serde::Serialize)]
pub struct Launch {
    /// The command prefix of each rank.
    numactl: Vec<String>,
    /// The command of DeepSpeed's launcher, if its own division of a list of cores gives these ranks.
    deepspeed: Option<String>,
    /// The command of torchrun, which finds the nodes of GPUs itself.
    torchrun: Option<String>,
    /// Variables for every rank.
    environment: Vec<String>,
}

impl Launch {
    pub fn new(machine: &Machine, ranks: &[Rank], scope: Scope) -> Launch {
        let gpus = machine.visible.gpus.len();
        let count = ranks.len();
        let deepspeed = core_list(machine, ranks).map(|list| {
            let gpus = if gpus == 0 { String::new() } else { format!(" --num_gpus {count}") };
            format!("deepspeed{gpus} --bind_cores_to_rank --bind_core_list {list} train.py")
        });
        let torchrun = (gpus >= count).then(|| {
            let binding = if scope == Scope::Package { "socket" } else { "node" };
            format!("torchrun --nproc-per-node {count} --numa-binding {binding} train.py")
        });
        let trainer = |rank: &Rank| machine.topology.cores_in(&rank.trainer).len();
        let mut environment = vec![format!("CUDA_DEVICE_ORDER=PCI_BUS_ID"); usize::from(gpus > 0)];
        environment.extend(ranks.iter().map(trainer).min().map(|cores| format!("OMP_NUM_THREADS={cores}")));
        Launch { numactl: ranks.iter().map(numactl).collect(), deepspeed, torchrun, environment }
    }

    pub fn text(&self) -> String {
        let mut text = String::from("\nlaunch\n");
        for (rank, line) in self.numactl.iter().enumerate() {
            let _ = writeln!(text, "  rank {rank}: {line} python train.py");
        }
        let none = "no: its division of a core list does not give these ranks";
        let _ = writeln!(text, "  DeepSpeed: {}", self.deepspeed.as_deref().unwrap_or(none));
        if let Some(line) = &self.torchrun {
            let _ = writeln!(text, "  torch: {line}");
        }
        let _ = writeln!(text, "  environment: {}", self.environment.join(" "));
        text
    }
}

fn numactl(rank: &Rank) -> String {
    let memory = rank.node.map_or_else(String::new, |node| format!(" --preferred={node}"));
    format!("numactl --physcpubind={}{memory}", rank.cpus)
}

/// The list of cores that DeepSpeed's launcher divides into these ranks. It takes the list in ascending order, and gives
/// each rank the same number of its entries. Each core is named by its first processor.
fn core_list(machine: &Machine, ranks: &[Rank]) -> Option<Bitmap> {
    let firsts = |rank: &Rank| -> Vec<u32> {
        machine.topology.cores_in(&rank.cpus).iter().filter_map(Bitmap::first).collect()
    };
    let wanted: Vec<u32> = ranks.iter().flat_map(firsts).collect();
    let is_even = ranks.iter().all(|rank| firsts(rank).len() * ranks.len() == wanted.len());
    (is_even && wanted.is_sorted_by(|one, two| one < two)).then(|| wanted.into_iter().collect())
}
