//! Processors and memory nodes that this process may use: its cgroups, and the affinity of the calling thread.
#![forbid(unsafe_code)]

use std::path::{Component, Path};

use super::sysfs::Root;
use crate::sys::bitmap::Bitmap;
use crate::sys::cpuset::widest;

/// Processors and memory nodes that a process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Allowed {
    /// Online processors of the cgroup's cpuset.
    pub cpuset: Bitmap,
    /// Those that the affinity of the calling thread allows too.
    pub cpus: Bitmap,
    /// Memory nodes; `None` if nothing limits them.
    pub nodes: Option<Bitmap>,
}

pub(super) fn read(root: &Root, online: &Bitmap) -> Allowed {
    let (cpus, nodes) = group_sets(root);
    let mut cpuset = cpus.map_or_else(|| online.clone(), |cpus| cpus.and(online));
    // A cpuset that names no online processor is not that of this tree.
    if cpuset.is_empty() {
        cpuset = online.clone();
    }
    let status = ["proc/thread-self/status", "proc/self/status"].iter().find_map(|path| root.text(path));
    let listed = |name: &str| {
        let line = status.as_deref()?.lines().find_map(|line| line.strip_prefix(name))?;
        Bitmap::parse_list(line)
    };
    let (affinity, mems) = (listed("Cpus_allowed_list:"), listed("Mems_allowed_list:"));
    if let Some(widest) = root.is_live().then(widest).flatten() {
        cpuset = cpuset.and(&widest);
    }
    let cpus = affinity.map(|affinity| affinity.and(&cpuset)).filter(|cpus| !cpus.is_empty());
    let nodes = match (nodes, mems) {
        (Some(one), Some(two)) => Some(one.and(&two)),
        (one, two) => one.or(two),
    };
    Allowed {
        cpus: cpus.unwrap_or_else(|| cpuset.clone()),
        cpuset,
        nodes: nodes.filter(|nodes| !nodes.is_empty()),
    }
}

/// Processors and memory nodes of the process's cpuset, as far as a mounted cgroup file system shows it.
fn group_sets(root: &Root) -> (Option<Bitmap>, Option<Bitmap>) {
    let mounts = root.text("proc/mounts").unwrap_or_default();
    let groups = root.text("proc/self/cgroup").unwrap_or_default();
    // Lines "HIERARCHY:CONTROLLERS:PATH"; version 2 has no controllers there.
    let line = |wanted: fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            wanted(controllers).then_some(path)
        })
    };
    let (v2, v1) = (line(str::is_empty), line(|list| list.split(',').any(|name| name == "cpuset")));
    // The path alone.
    let old = root.text("proc/self/cpuset");
    for mount in mounts.lines() {
        let mut words = mount.split_whitespace().skip(1);
        let (Some(point), Some(kind), Some(options)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let option = |name: &str| options.split(',').any(|option| option == name);
        let (path, prefix) = match kind {
            "cgroup2" => (v2.or(old.as_deref()), "cpuset."),
            "cgroup" if option("cpuset") => {
                (v1.or(old.as_deref()), if option("noprefix") { "" } else { "cpuset." })
            }
            "cpuset" => (v1.or(old.as_deref()), ""),
            _ => continue,
        };
        let Some(group) = path.and_then(|path| below(point, path.trim())) else { continue };
        let list = |name: &str| {
            let of = |end: &str| {
                root.list(&format!("{group}/{prefix}{name}{end}")).filter(|list| !list.is_empty())
            };
            of(".effective").or_else(|| of(""))
        };
        let found = (list("cpus"), list("mems"));
        if found.0.is_some() || found.1.is_some() {
            return found;
        }
    }
    (None, None)
}

/// The path of a group below a mount, relative to the root. `None` if a part of it is "..".
fn below(mount: &str, group: &str) -> Option<String> {
    let path = format!("{}/{}", mount.trim_matches('/'), group.trim_matches('/'));
    let is_plain = Path::new(&path).components().all(|part| matches!(part, Component::Normal(_)));
    is_plain.then_some(path)
}
