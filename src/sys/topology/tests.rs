//! Machines as trees of files, written by these tests: superchips, CXL, HBM, a container, and broken ones.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use tempfile::TempDir;

use super::placement::{Scope, place, split};
use super::*;

struct Tree(TempDir);

impl Tree {
    fn new() -> Tree {
        Tree(tempfile::tempdir().unwrap())
    }

    fn file(&self, path: &str, text: impl std::fmt::Display) -> &Tree {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
        self
    }

    fn folder(&self, path: &str) -> &Tree {
        fs::create_dir_all(self.0.path().join(path)).unwrap();
        self
    }

    fn read(&self) -> Topology {
        Topology::read(&self.root())
    }

    fn root(&self) -> Root {
        Root::at(self.0.path())
    }

    /// Packages of `cores` cores each, whose processors follow each other. With `threads` 2 the second processors of all
    /// cores come after the first ones.
    fn processors(&self, packages: u32, cores: u32, threads: u32) -> &Tree {
        let all = packages * cores;
        self.file("sys/devices/system/cpu/online", format!("0-{}", all * threads - 1));
        for cpu in 0..all * threads {
            let (core, package) = (cpu % all, cpu % all / cores);
            let folder = format!("sys/devices/system/cpu/cpu{cpu}");
            self.folder(&folder);
            let siblings = (0..threads).map(|thread| core + thread * all).collect();
            let package_cpus = (0..all * threads).filter(|other| other % all / cores == package).collect();
            if threads > 1 {
                self.file(&format!("{folder}/topology/core_cpus"), mask(&siblings));
            }
            // The others state the same; only the first is read.
            if cpu % cores != 0 || cpu >= all {
                continue;
            }
            self.file(&format!("{folder}/topology/physical_package_id"), package);
            self.file(&format!("{folder}/topology/package_cpus"), mask(&package_cpus));
        }
        self
    }

    fn node(&self, id: u32, cpus: &str, gib: u64, distances: &str) -> &Tree {
        let folder = format!("sys/devices/system/node/node{id}");
        self.file(&format!("{folder}/cpumap"), mask(&Bitmap::parse_list(cpus).unwrap()));
        self.file(&format!("{folder}/meminfo"), format!("Node {id} MemTotal: {:>12} kB", gib << 20));
        self.file(&format!("{folder}/distance"), distances)
    }

    /// What the firmware says about the way from node `from` to the memory of a node.
    fn access(&self, node: u32, from: u32, bandwidth: u64, latency: u64) -> &Tree {
        let folder = format!("sys/devices/system/node/node{node}/access0/initiators");
        self.file(&format!("{folder}/read_bandwidth"), bandwidth);
        self.file(&format!("{folder}/read_latency"), latency).folder(&format!("{folder}/node{from}"))
    }

    fn pci(&self, address: &str, class: &str, vendor: &str, device: &str, node: i32) -> &Tree {
        let folder = format!("sys/bus/pci/devices/{address}");
        self.file(&format!("{folder}/class"), class).file(&format!("{folder}/vendor"), vendor);
        self.file(&format!("{folder}/device"), device).file(&format!("{folder}/numa_node"), node)
    }

    fn gpu(&self, address: &str, node: i32) -> &Tree {
        self.pci(address, "0x030200", "0x10de", "0x2342", node)
    }
}

fn mask(cpus: &Bitmap) -> String {
    let words = cpus.iter().last().map_or(1, |last| last / 32 + 1);
    let word =
        |at: u32| (0..32).filter(|bit| cpus.contains(at * 32 + bit)).fold(0_u32, |word, bit| word | 1 << bit);
    (0..words).rev().map(|at| format!("{:08x}", word(at))).collect::<Vec<String>>().join(",")
}

fn set(list: &str) -> Bitmap {
    Bitmap::parse_list(list).unwrap()
}

/// Four superchips: 72 cores each, a node of DDR and a node of GPU memory each, and the empty nodes that the driver keeps
/// for parts of GPUs.
fn superchips() -> Tree {
    let tree = Tree::new();
    tree.processors(4, 72, 1);
    for chip in 0..4_u32 {
        let cpus = format!("{}-{}", chip * 72, chip * 72 + 71);
        tree.node(
            chip,
            &cpus,
            480,
            &(0..4).map(|to| if to == chip { "10 " } else { "40 " }).collect::<String>(),
        );
        let address = format!("00{chip}9:01:00.0");
        tree.gpu(&address, chip as i32);
        let about = format!("proc/driver/nvidia/gpus/{address}");
        tree.file(&format!("{about}/numa_status"), format!("Node: {}\nStatus: online", 4 + 8 * chip));
        tree.file(
            &format!("{about}/information"),
            format!("Model: \t GH200\nGPU UUID: \t GPU-{chip}{chip}ab"),
        );
        tree.node(4 + 8 * chip, "", 96, "").node(5 + 8 * chip, "", 0, "");
        tree.pci(&format!("00{chip}4:01:00.0"), "0x010802", "0x144d", "0xa80a", chip as i32);
        tree.folder(&format!("sys/bus/pci/devices/00{chip}4:01:00.0/nvme/nvme{chip}"));
    }
    tree
}

fn nodes_of(topology: &Topology, gpus: &[&Device]) -> Vec<Option<u32>> {
    gpus.iter().map(|gpu| topology.node(gpu.node.unwrap()).map(|node| node.id)).collect()
}

/// SuperOffload section 4.7: "explicitly binds each process to specific cores to ensure optimal CPU-GPU affinity".
#[test]
fn on_superchips_each_rank_and_its_workers_get_the_cores_of_its_gpu() {
    let (tree, chips) = (superchips(), 4);
    let topology = tree.read();
    assert_eq!((topology.online.len(), topology.cores.len(), topology.packages.len()), (288, 288, 4));
    let gpus = nodes_of(&topology, &topology.gpus());
    assert_eq!(gpus, [Some(0), Some(1), Some(2), Some(3)]);
    for (chip, rank) in place(&topology, &gpus, chips, Scope::Node, 0.8).unwrap().iter().enumerate() {
        let first = chip as u32 * 72;
        assert_eq!((rank.node, rank.gpu), (Some(chip as u32), Some(chip as u32)));
        assert_eq!(rank.cpus, set(&format!("{first}-{}", first + 71)));
        assert_eq!(rank.cpus, topology.packages[chip].cpus);
        assert_eq!(rank.trainer, set(&format!("{first}-{}", first + 13)));
        assert_eq!((rank.workers.clone(), rank.worker_cores), (rank.cpus.minus(&rank.trainer), 58));
    }
    // The cores of SuperOffload's release page: 0-6 and 7-71.
    let page = place(&topology, &gpus, chips, Scope::Node, 0.9).unwrap();
    assert_eq!((page[0].trainer.to_string(), page[0].workers.to_string()), ("0-6".into(), "7-71".into()));
    // CUDA_VISIBLE_DEVICES=3,1
    let two = place(&topology, &[Some(3), Some(1)], 2, Scope::Node, 0.8).unwrap();
    assert_eq!((two[0].cpus.clone(), two[1].cpus.clone()), (set("216-287"), set("72-143")));
    // Eight ranks: two on each chip.
    let eight = place(&topology, &gpus, 8, Scope::Node, 1.0).unwrap();
    assert_eq!((eight[1].cpus.clone(), eight[5].cpus.clone()), (set("72-107"), set("108-143")));
    assert_eq!((eight[7].gpu, eight[7].workers.clone()), (Some(3), set("252-287")));
}

#[test]
fn memory_of_gpus_is_told_apart_and_devices_have_their_nodes() {
    let topology = superchips().read();
    let kinds: Vec<(u32, NodeKind)> = topology.nodes.iter().map(|node| (node.id, node.kind)).collect();
    assert_eq!(kinds[..6].iter().filter(|(_, kind)| *kind == NodeKind::Dram).count(), 4);
    assert_eq!(kinds[4..6], [(4, NodeKind::Gpu), (5, NodeKind::Empty)]);
    assert_eq!(
        topology.node(20).map(|node| (node.kind, node.near_cpus.clone())),
        Some((NodeKind::Gpu, set("144-215")))
    );
    let gpu = topology.gpus()[2];
    assert_eq!(
        (gpu.node, gpu.memory_node, gpu.name.as_str(), gpu.uuid.as_str()),
        (Some(2), Some(20), "GH200", "GPU-22ab")
    );
    let drives: Vec<_> = topology.drives().map(|drive| (drive.name.as_str(), drive.node)).collect();
    assert_eq!(drives[3], ("nvme3", Some(3)));
}

#[test]
fn cxl_memory_is_told_apart_by_its_device_and_by_its_speed() {
    let tree = Tree::new();
    tree.processors(2, 2, 2).node(0, "0-1,4-5", 256, "10 21 14 24 24").node(
        1,
        "2-3,6-7",
        256,
        "21 10 24 14 24",
    );
    for id in [2, 3, 4] {
        tree.node(id, "", 128, if id == 2 { "14 24 10 24 26" } else { "24 14 24 10 26" });
        tree.access(id, u32::from(id != 2), 30_000, 250);
    }
    tree.access(0, 0, 200_000, 90).access(1, 1, 200_000, 90);
    // A memory device of the firmware, a region that became a DAX device, and nothing but the speed.
    tree.file("sys/bus/cxl/devices/mem0/numa_node", 2);
    let dax = "sys/devices/platform/ACPI0017:00/root0/decoder0.0/region0/dax_region0/dax0.0";
    tree.file(&format!("{dax}/target_node"), 3).folder("sys/bus/dax/devices");
    symlink(tree.0.path().join(dax), tree.0.path().join("sys/bus/dax/devices/dax0.0")).unwrap();
    let topology = tree.read();
    let found: Vec<_> = topology.nodes.iter().map(|node| (node.kind, node.near_cpus.to_string())).collect();
    let (first, second) = ("0-1,4-5".to_string(), "2-3,6-7".to_string());
    assert_eq!(
        found,
        [
            (NodeKind::Dram, first.clone()),
            (NodeKind::Dram, second.clone()),
            (NodeKind::Cxl, first),
            (NodeKind::Cxl, second.clone()),
            (NodeKind::Slower, second),
        ]
    );
    assert_eq!(topology.cores_in(&set("0-3")), [set("0"), set("1"), set("2"), set("3")]);
    // Threads of a core stay together: 4 cores of 2 processors.
    let (trainer, workers) = split(&topology, &topology.online, 0.5).unwrap();
    assert_eq!((trainer, workers), (set("0-1,4-5"), set("2-3,6-7")));
}

#[test]
fn hbm_is_told_apart_by_bandwidth_or_by_the_memory_tiers() {
    for by_tiers in [false, true] {
        let tree = Tree::new();
        tree.processors(2, 4, 1).node(0, "0-3", 64, "10 21 13 23").node(1, "4-7", 64, "21 10 23 13");
        tree.node(2, "", 64, "13 23 10 23").node(3, "", 64, "23 13 23 10");
        if by_tiers {
            tree.file("sys/devices/virtual/memory_tiering/memory_tier4/nodelist", "0-1");
            tree.file("sys/devices/virtual/memory_tiering/memory_tier2/nodelist", "2-3");
        } else {
            for id in [0, 1] {
                tree.access(id, id, 200_000, 100).access(id + 2, id, 700_000, 110);
            }
        }
        tree.file("sys/devices/system/node/node0/memory_side_cache/index1/size", 64_u64 << 30);
        let topology = tree.read();
        let hbm = &topology.nodes[3];
        assert_eq!((hbm.kind, hbm.near_cpus.clone()), (NodeKind::HighBandwidth, set("4-7")), "{by_tiers}");
        assert_eq!(
            (hbm.tier, hbm.read_bandwidth),
            if by_tiers { (Some(2), None) } else { (None, Some(700_000)) }
        );
        assert_eq!(topology.nodes[0].memory_side_cache_bytes, 64 << 30);
        let ranks = place(&topology, &[], 2, Scope::Node, 0.8).unwrap();
        assert_eq!((ranks[1].node, ranks[1].cpus.clone(), ranks[1].gpu), (Some(1), set("4-7"), None));
    }
}

#[test]
fn a_container_uses_only_its_cpuset_and_affinity() {
    let tree = superchips();
    tree.file("proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0").file("proc/self/cgroup", "0::/job");
    tree.file("sys/fs/cgroup/job/cpuset.cpus.effective", "72-79,100-109,400");
    tree.file("sys/fs/cgroup/job/cpuset.mems.effective", "1");
    let topology = tree.read();
    assert_eq!(
        (topology.cpuset.clone(), topology.allowed.clone()),
        (set("72-79,100-109"), set("72-79,100-109"))
    );
    assert_eq!(
        topology.nodes.iter().filter(|node| node.allowed).map(|node| node.id).collect::<Vec<_>>(),
        [1]
    );
    tree.file("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-77\nMems_allowed_list:\t0-3");
    let topology = tree.read();
    assert_eq!((topology.cpuset.len(), topology.allowed.clone()), (18, set("72-77")));
    // The GPU of rank 0 is on node 0, of which nothing is usable.
    let ranks = place(&topology, &[Some(0), Some(1)], 2, Scope::Node, 0.5).unwrap();
    assert_eq!(ranks[0].cpus.or(&ranks[1].cpus), set("72-77"));
    assert!(!ranks[0].cpus.meets(&ranks[1].cpus));
    // A path that leaves the mount is not followed.
    tree.file("proc/self/cgroup", "0::/../../..").file("proc/self/status", "");
    assert_eq!(tree.read().allowed.len(), 288);
}

#[test]
fn a_root_that_a_caller_names_has_a_directory_sys() {
    let tree = Tree::new();
    let root = |path: &str| Root::recorded(tree.0.path().join(path));
    tree.file("file", "");
    for path in ["", "absent", "file"] {
        let error = root(path).unwrap_err().to_string();
        assert!(error.starts_with("root: ") && error.contains("has no directory sys; name"), "{error}");
    }
    tree.file("other/sys", "a file");
    assert!(root("other").is_err());
    tree.folder("sys");
    assert_eq!(root("").map(|root| root.is_live()), Ok(false));
    assert_eq!(Root::recorded("/").map(|root| root.is_live()), Ok(true));
}

#[test]
fn a_machine_without_a_list_of_nodes_is_one_node() {
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", "0-3").file("proc/meminfo", "MemTotal:  1024 kB");
    tree.gpu("0000:01:00.0", -1);
    let topology = tree.read();
    let [node] = &topology.nodes[..] else { panic!("{:?}", topology.nodes) };
    assert_eq!((node.cpus.clone(), node.memory_bytes, node.kind), (set("0-3"), 1 << 20, NodeKind::Dram));
    assert_eq!((topology.packages.len(), topology.cores.len()), (1, 4));
    assert_eq!(topology.gpus()[0].node, Some(0));
    let nothing = Tree::new().read();
    assert!(nothing.online.is_empty() && nothing.nodes.len() == 1);
    assert!(place(&nothing, &[], 3, Scope::Node, 0.8).unwrap().iter().all(|rank| rank.cpus.is_empty()));
}

#[test]
fn a_gpu_without_a_stated_node_takes_that_of_its_bridge_or_of_its_processors() {
    let tree = Tree::new();
    tree.processors(2, 2, 1).node(0, "0-1", 1, "10 20").node(1, "2-3", 1, "20 10");
    let bridge = "sys/devices/pci0000:80/0000:80:01.0";
    for (folder, stated) in [(bridge.to_string(), 1), (format!("{bridge}/0000:81:00.0"), -1)] {
        tree.file(&format!("{folder}/numa_node"), stated);
    }
    for (name, text) in [("class", "0x030000"), ("vendor", "0x10de"), ("device", "0x1")] {
        tree.file(&format!("{bridge}/0000:81:00.0/{name}"), text);
    }
    tree.gpu("0000:01:00.0", -1).gpu("0000:02:00.0", -1).gpu("0000:03:00.0", 77);
    tree.file("sys/bus/pci/devices/0000:02:00.0/local_cpus", "3")
        .file("sys/bus/pci/devices/0000:01:00.0/local_cpus", "f");
    symlink(
        tree.0.path().join(bridge).join("0000:81:00.0"),
        tree.0.path().join("sys/bus/pci/devices/0000:81:00.0"),
    )
    .unwrap();
    let topology = tree.read();
    let nodes: Vec<_> = topology.gpus().iter().map(|gpu| (gpu.pci.bus, gpu.node)).collect();
    assert_eq!(nodes, [(1, None), (2, Some(0)), (3, None), (0x81, Some(1))]);
    let ranks = place(&topology, &[None, Some(1)], 2, Scope::Node, 0.8).unwrap();
    assert_eq!((ranks[0].node, ranks[1].cpus.clone()), (None, set("2-3")));
}

#[test]
fn broken_files_make_a_part_unknown() {
    let tree = superchips();
    tree.file("sys/devices/system/cpu/cpu0/topology/core_cpus", "zz");
    tree.file("sys/devices/system/cpu/cpu1/topology/package_cpus", "0");
    tree.file("sys/devices/system/node/node0/distance", "10 x");
    tree.file("sys/devices/system/node/node4294967295/cpumap", "1")
        .file("sys/devices/system/node/nodeX/cpumap", "1");
    tree.file("sys/bus/pci/devices/0009:01:00.0/vendor", "0xfffffffff").gpu("zz:01:00.0", 0);
    tree.file("proc/driver/nvidia/gpus/0019:01:00.0/numa_status", "Node: -1");
    tree.file("sys/devices/system/node/node3/meminfo", "x".repeat(2 << 20));
    let fifo = tree.0.path().join("sys/devices/system/node/node2/meminfo");
    fs::remove_file(&fifo).unwrap();
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let topology = tree.read();
    assert_eq!((topology.online.len(), topology.gpus().len()), (288, 3));
    assert_eq!((topology.gpus()[0].node, topology.gpus()[0].memory_node), (Some(1), None));
    assert_eq!((topology.nodes[2].memory_bytes, topology.nodes[3].memory_bytes), (0, 0));
    let cores: usize = topology.cores.iter().map(Bitmap::len).sum();
    let packages: usize = topology.packages.iter().map(|package| package.cpus.len()).sum();
    assert_eq!((cores, packages), (288, 288));
}

#[test]
fn memory_for_transfers_is_bound_to_the_node_of_the_device_if_there_are_several() {
    let topology = superchips().read();
    for (chip, gpu) in topology.gpus().iter().enumerate() {
        assert_eq!(topology.bindable_node(gpu.pci), Some(chip as u32));
    }
    assert_eq!(topology.bindable_node("0000:ff:00.0".parse().unwrap()), None);
    let tree = Tree::new();
    tree.processors(1, 4, 1).node(0, "0-3", 1, "10").gpu("0000:01:00.0", 0);
    assert_eq!(tree.read().bindable_node("0000:01:00.0".parse().unwrap()), None);
}

#[test]
fn ranks_and_shares_out_of_range_are_refused_and_few_cores_are_shared() {
    let topology = superchips().read();
    for ranks in [0, 4097] {
        assert!(place(&topology, &[Some(0)], ranks, Scope::Node, 0.8).is_err());
    }
    for share in [0.0, -1.0, 1.1, f64::NAN, f64::INFINITY] {
        assert!(place(&topology, &[Some(0)], 1, Scope::Node, share).is_err(), "{share}");
    }
    let many = place(&topology, &[Some(0)], 100, Scope::Node, 0.8).unwrap();
    assert!(many.iter().all(|rank| rank.cpus.len() == 1
        && rank.cpus.is_subset(&set("0-71"))
        && rank.trainer == rank.workers));
    let package = place(&topology, &[Some(2)], 1, Scope::Package, 0.8).unwrap();
    assert_eq!(package[0].cpus, set("144-215"));
    let unknown = place(&topology, &[Some(99)], 1, Scope::Node, 0.8).unwrap();
    assert_eq!(unknown[0].cpus.len(), 288);
}

/// DeepSpeed: split_idx = int((1 - cpuadam_cores_perc) * num_cores); the trainer gets the cores before it.
#[test]
fn cores_are_divided_with_deepspeeds_arithmetic() {
    let topology = superchips().read();
    for cores in 2..=72_u32 {
        let cpus: Bitmap = (0..cores).collect();
        for share in [0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0] {
            let (trainer, workers) = split(&topology, &cpus, share).unwrap();
            let deepspeed = ((1.0 - share) * f64::from(cores)) as usize;
            let least = usize::from(share < 1.0);
            assert_eq!(trainer.len(), deepspeed.max(least).min(cores as usize - 1), "{cores} {share}");
            assert_eq!((trainer.or(&workers), trainer.meets(&workers)), (cpus.clone(), false));
        }
    }
}

#[test]
fn the_node_of_a_path_is_that_of_all_drives_below_it() {
    let tree = Tree::new();
    tree.processors(2, 2, 1).node(0, "0-1", 1, "10 20").node(1, "2-3", 1, "20 10");
    let found = |tree: &Tree, path: &Path| tree.read().node_of_path(&tree.root(), path);
    let path = tree.0.path();
    use std::os::unix::fs::MetadataExt;
    let device = fs::metadata(path).unwrap().dev();
    let block = format!("sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
    assert_eq!(found(&tree, path).unwrap(), None);
    assert!(found(&tree, &path.join("absent")).is_err());
    if libc::major(device) == 0 {
        return;
    }
    tree.file(&format!("{block}/numa_node"), 1);
    assert_eq!(found(&tree, path).unwrap(), Some(1));
    // RAID over two drives, of the same node and of two nodes.
    for (name, node) in [("a", 0), ("b", 0)] {
        tree.file(&format!("{block}/slaves/{name}/numa_node"), node);
    }
    assert_eq!(found(&tree, path).unwrap(), Some(0));
    tree.file(&format!("{block}/slaves/b/numa_node"), 1);
    assert_eq!(found(&tree, path).unwrap(), None);
}
