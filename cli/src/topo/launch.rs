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
    /// The command of DeepSpeed's launcher, if its own division of a list of cores gives these ranks, on these GPUs.
    deepspeed: Option<String>,
    /// Why there is no such command.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_deepspeed: Option<&'static str>,
    /// The command of torchrun, which finds the nodes of GPUs itself.
    torchrun: Option<String>,
    /// Variables for every rank.
    environment: Vec<String>,
}

impl Launch {
    /// `list`: the value of `CUDA_VISIBLE_DEVICES`.
    pub fn new(machine: &Machine, ranks: &[Rank], scope: Scope, list: Option<&str>) -> Launch {
        let gpus = machine.visible.gpus.len();
        let count = ranks.len();
        let deepspeed = core_list(machine, ranks)
            .ok_or("its division of a core list does not give these ranks")
            .and_then(|cores| {
                let command = deepspeed(&numbers(machine), machine.topology.gpus().len(), count, list)?;
                Ok(format!("{command} --bind_cores_to_rank --bind_core_list {cores} train.py"))
            });
        let torchrun = (gpus >= count).then(|| {
            let binding = if scope == Scope::Package { "socket" } else { "node" };
            format!("torchrun --nproc-per-node {count} --numa-binding {binding} train.py")
        });
        let trainer = |rank: &Rank| machine.topology.cores_in(&rank.trainer).len();
        let mut environment = vec![format!("CUDA_DEVICE_ORDER=PCI_BUS_ID"); usize::from(gpus > 0)];
        // With a share of 1 the trainer has no cores, and OpenMP needs at least one thread.
        let threads = ranks.iter().map(trainer).min().map(|cores| cores.max(1));
        environment.extend(threads.map(|threads| format!("OMP_NUM_THREADS={threads}")));
        let no_deepspeed = deepspeed.as_ref().err().copied();
        let deepspeed = deepspeed.ok();
        Launch {
            numactl: ranks.iter().map(numactl).collect(),
            deepspeed,
            no_deepspeed,
            torchrun,
            environment,
        }
    }

    pub fn text(&self) -> String {
        let mut text = String::from("\nlaunch\n");
        for (rank, line) in self.numactl.iter().enumerate() {
            let _ = writeln!(text, "  rank {rank}: {line} python train.py");
        }
        let _ = match (&self.deepspeed, self.no_deepspeed) {
            (Some(line), _) => writeln!(text, "  DeepSpeed: {line}"),
            (None, reason) => writeln!(text, "  DeepSpeed: no: {}", reason.unwrap_or_default()),
        };
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

/// The number of each visible GPU in the order of PCI addresses; `None` if it is not known.
fn numbers(machine: &Machine) -> Vec<Option<usize>> {
    let all = machine.topology.gpus();
    let number = |gpu: &Option<_>| all.iter().position(|device| Some(device.pci) == *gpu);
    machine.visible.gpus.iter().map(number).collect()
}

/// The beginning of DeepSpeed's command. Its launcher deletes `CUDA_VISIBLE_DEVICES`: with --num_gpus the ranks use the
/// first GPUs, with --include those of the list. `numbers`: those of the visible GPUs, of `gpus`.
fn deepspeed(
    numbers: &[Option<usize>],
    gpus: usize,
    ranks: usize,
    list: Option<&str>,
) -> std::result::Result<String, &'static str> {
    let is_limited = list.is_some_and(|list| !list.is_empty());
    let first = format!("deepspeed --num_gpus {ranks}");
    if numbers.is_empty() {
        return match is_limited && gpus > 0 {
            true => Err("its launcher ignores CUDA_VISIBLE_DEVICES, and would use GPUs"),
            false => Ok(first),
        };
    }
    let used = numbers.get(..ranks).ok_or("there are fewer visible GPUs than ranks")?;
    let known: Option<Vec<usize>> = used.iter().copied().collect();
    match known {
        None if is_limited => {
            Err("its launcher ignores CUDA_VISIBLE_DEVICES, and the numbers of the GPUs are unknown")
        }
        None => Ok(first),
        Some(used) if used.iter().copied().eq(0..ranks) => Ok(first),
        Some(used) if used.is_sorted_by(|one, two| one < two) => {
            let used: Vec<String> = used.iter().map(usize::to_string).collect();
            Ok(format!("env -u CUDA_VISIBLE_DEVICES deepspeed --include localhost:{}", used.join(",")))
        }
        Some(_) => {
            Err("its launcher takes GPUs in the order of their PCI addresses, and the ranks have another")
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What `deepspeed.launcher.runner` does with its arguments and with the variable.
    #[test]
    fn deepspeed_gets_the_gpus_of_the_ranks_or_no_command() {
        let of = |numbers: &[usize], ranks, list| {
            let numbers: Vec<Option<usize>> = numbers.iter().copied().map(Some).collect();
            deepspeed(&numbers, 4, ranks, list)
        };
        let first = |count: usize| Ok(format!("deepspeed --num_gpus {count}"));
        assert_eq!(of(&[0, 1, 2, 3], 4, None), first(4));
        assert_eq!(of(&[0, 1, 3], 2, Some("0,1,3")), first(2));
        let chosen = "env -u CUDA_VISIBLE_DEVICES deepspeed --include localhost:0,2";
        assert_eq!(of(&[0, 2], 2, Some("0,2")).as_deref(), Ok(chosen));
        assert!(of(&[1, 0], 2, Some("1,0")).unwrap_err().contains("order"));
        assert!(of(&[2, 2], 2, Some("2,2")).is_err());
        assert!(of(&[0, 1], 3, None).unwrap_err().contains("fewer"));
        // Without visible GPUs the ranks run on processors.
        assert_eq!(of(&[], 3, Some("")), first(3));
        assert_eq!(deepspeed(&[], 0, 3, Some("-1")), first(3));
        assert!(of(&[], 3, Some("-1")).unwrap_err().contains("CUDA_VISIBLE_DEVICES"));
        assert_eq!(deepspeed(&[None, None], 0, 2, None), first(2));
        assert!(deepspeed(&[None, None], 0, 2, Some("MIG-x")).unwrap_err().contains("unknown"));
    }
}
