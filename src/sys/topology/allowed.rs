//! Processors and memory nodes that this process may use: its cgroups, and the affinity of the calling thread.
#![forbid(unsafe_code)]

use super::cgroups::{Group, groups};
use super::sysfs::Root;
use crate::sys::binding::widest;
use crate::sys::bitmap::Bitmap;

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
    for Group { path: group, has_prefix, .. } in groups(root, "cpuset") {
        let prefix = if has_prefix { "cpuset." } else { "" };
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
