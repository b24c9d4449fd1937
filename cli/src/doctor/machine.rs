//! Checks of the machine: kernel, threads, memory, NUMA, GPUs.
#![forbid(unsafe_code)]

use std::sync::Arc;

use spillway::dtype::{Floats, FloatsMut};
use spillway::error::{Error, Result};
use spillway::gpu::device::Device;
use spillway::gpu::driver::Driver;
use spillway::gpu::kernels::Kernels;
use spillway::kernel::{Kernel, States, Tensor};
use spillway::optim;
use spillway::optim::adam::AdamOptions;
use spillway::optim::parallel::{Job, step_on};
use spillway::pool::region::{Backing, Region};
use spillway::sys::memory::{PageKind, lock_limit};
use spillway::sys::threads;
use spillway::sys::topology::{NodeKind, Root, Topology};

use super::finding::{Finding, Verdict};

/// Enough for one GPU's staging buffers, and to test huge pages.
const POOL_BYTES: usize = 64 << 20;
/// Not a multiple of any vector length, so that the remainder loops run too.
const ELEMENTS: usize = 10_007;

pub fn findings() -> Vec<Finding> {
    let mut findings = vec![kernel(), workers()];
    findings.extend(memory());
    let topology = Topology::read(&Root::live());
    findings.push(nodes(&topology));
    findings.extend(gpus(&topology));
    findings
}

fn kernel() -> Finding {
    const CHECK: &str = "kernel";
    let kernel = match optim::kernel() {
        Ok(kernel) => kernel,
        Err(error) => {
            let names: Vec<&str> = Kernel::all().map(Kernel::name).collect();
            let fix = format!("unset SPILLWAY_KERNEL, or set it to one of {}", names.join(", "));
            return Finding::new(CHECK, Verdict::Fails, error.to_string()).fix(fix);
        }
    };
    let name = kernel.name();
    let same = Kernel::named("scalar")
        .map_err(Error::from)
        .and_then(|scalar| Ok(stepped(kernel)? == stepped(scalar)?));
    let best = Kernel::all().next().unwrap_or(kernel);
    match same {
        Err(error) => Finding::new(CHECK, Verdict::Fails, format!("{name}: {error}")),
        Ok(false) => Finding::new(
            CHECK,
            Verdict::Fails,
            format!("results of {name} differ from those of the scalar kernel"),
        )
        .fix(
            "the processor or its emulator computes wrong results: set SPILLWAY_KERNEL=scalar, and report \
             the defect",
        ),
        Ok(true) if best.name() != name => Finding::new(
            CHECK,
            Verdict::Worse,
            format!("{name}, forced by SPILLWAY_KERNEL; bit-identical to the scalar kernel"),
        )
        .fix(format!("unset SPILLWAY_KERNEL to use {}", best.name())),
        Ok(true) => Finding::ok(CHECK, format!("{name}; bit-identical to the scalar kernel")),
    }
}

/// The bit patterns of the states after three steps.
fn stepped(kernel: Kernel) -> Result<Vec<u32>> {
    let ramp = |scale: f32| (0..ELEMENTS).map(|i| ((i % 1021) as f32 - 510.0) * scale).collect::<Vec<f32>>();
    let (mut param, grad) = (ramp(1e-3), ramp(1e-5));
    let (mut exp_avg, mut exp_avg_sq) = (vec![0.0; ELEMENTS], vec![0.0; ELEMENTS]);
    for step in 1..=3 {
        let states = States {
            param: FloatsMut::F32(&mut param),
            exp_avg: Some(FloatsMut::F32(&mut exp_avg)),
            exp_avg_sq: Some(FloatsMut::F32(&mut exp_avg_sq)),
        };
        let optimizer = AdamOptions { weight_decay: 0.01, step, ..Default::default() }.rule()?;
        let tensor = Tensor::new(states, Floats::F32(&grad), None)?;
        step_on(kernel, &mut [Job { optimizer, tensor }], false)?;
    }
    Ok([param, exp_avg, exp_avg_sq].concat().into_iter().map(f32::to_bits).collect())
}

fn workers() -> Finding {
    match threads::decide() {
        Ok((count, reason)) => Finding::ok("threads", format!("{count}: {reason}")),
        Err(error) => Finding::new("threads", Verdict::Fails, error.to_string())
            .fix("unset SPILLWAY_NUM_THREADS and LOCAL_WORLD_SIZE, or set them to numbers of at least 1"),
    }
}

fn memory() -> [Finding; 2] {
    let region = match Region::open(POOL_BYTES, Backing::default()) {
        Ok(region) => region,
        Err(error) => {
            let failed = |check| Finding::new(check, Verdict::Fails, error.to_string());
            return [failed("pages"), failed("pinned memory")];
        }
    };
    let pages = match region.kind() {
        PageKind::Reserved => Finding::ok("pages", "2 MiB, reserved"),
        PageKind::Transparent => Finding::ok("pages", "2 MiB, transparent"),
        PageKind::Base => Finding::new(
            "pages",
            Verdict::Worse,
            "4 KiB: I/O takes many times the CPU time of 2 MiB pages",
        )
        .fix(
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; if it is set already, memory is \
             fragmented",
        ),
    };
    let limit = lock_limit().map_or("unlimited".to_string(), |bytes| format!("{} KiB", bytes >> 10));
    let pinned = match region.locked() {
        true if lock_limit().is_some_and(|bytes| bytes < POOL_BYTES as u64) => {
            Finding::ok("pinned memory", format!("{} MiB locked: no limit for this user", POOL_BYTES >> 20))
        }
        true => Finding::ok("pinned memory", format!("{} MiB locked; the limit is {limit}", POOL_BYTES >> 20)),
        false => Finding::new("pinned memory", Verdict::Worse, format!("not locked; the limit is {limit}"))
            .fix("raise the limit: ulimit -l unlimited, memlock in limits.conf, --ulimit memlock=-1 in a container"),
    };
    region.retire();
    [pages, pinned]
}

fn nodes(topology: &Topology) -> Finding {
    let places: Vec<u32> =
        topology.nodes.iter().filter(|node| node.cpus.meets(&topology.allowed)).map(|node| node.id).collect();
    let memory = |kind| topology.nodes.iter().filter(|node| node.kind == kind).count();
    let mut found = match places.len() {
        1 => format!("this process runs on node {} of {}", places[0], topology.nodes.len()),
        count => {
            format!("this process runs on {count} nodes: its memory may be on another node than its threads")
        }
    };
    for (kind, words) in [
        (NodeKind::Gpu, "of GPU memory"),
        (NodeKind::HighBandwidth, "of high bandwidth"),
        (NodeKind::Cxl, "behind CXL"),
    ] {
        if memory(kind) > 0 {
            found = format!("{found}; {} nodes {words}", memory(kind));
        }
    }
    match places.len() {
        0 | 1 => Finding::ok("NUMA", found),
        _ => Finding::new("NUMA", Verdict::Worse, found)
            .fix("bind each rank to the processors of its GPU's node: spillway topo prints the commands"),
    }
}

fn gpus(topology: &Topology) -> Vec<Finding> {
    let found = Driver::get().and_then(|driver| {
        let count = driver.device_count()?;
        Ok((0..count).map(|ordinal| gpu(&driver, ordinal, topology)).collect::<Vec<_>>())
    });
    found.unwrap_or_else(|error| vec![Finding::new("GPU", Verdict::None, error.to_string())])
}

/// Opens one GPU and compiles the kernels for it.
fn gpu(driver: &Arc<Driver>, ordinal: u32, topology: &Topology) -> Finding {
    let tried = Device::open(Arc::clone(driver), ordinal).and_then(|device| {
        let info = device.info()?;
        Kernels::load(&device).map(|_| info)
    });
    match tried {
        Err(error) => Finding::new("GPU", Verdict::Fails, format!("{ordinal}: {error}")),
        Ok(info) => {
            let address = info.pci.parse().ok();
            let device = topology.devices.iter().find(|device| Some(device.pci) == address);
            let node = device.and_then(|device| device.node).map_or("?".to_string(), |node| node.to_string());
            let (free, all) = (info.free_bytes >> 30, info.memory_bytes >> 30);
            let words =
                format!("{ordinal}: {}, {free} of {all} GiB free, {}, NUMA node {node}", info.name, info.pci);
            Finding::ok("GPU", format!("{words}; the kernels were loaded"))
        }
    }
}
