//! Memory that the limits of this process's cgroups leave.
//!
//! | version | limit | used |
//! |---|---|---|
//! | 2 | `memory.max` | `memory.current` |
//! | 1 | `memory.limit_in_bytes` | `memory.usage_in_bytes` |
//!
//! Pages of files count as used there, but the kernel drops them when memory is needed. They count as free here, as in
//! `MemAvailable`.
#![forbid(unsafe_code)]

use super::topology::{Root, cgroups};

/// Bytes that the process's cgroups and their ancestors leave, as far as they are mounted; `None` without a limit.
pub fn room(root: &Root) -> Option<u64> {
    let mut least = None;
    for group in cgroups::groups(root, "memory") {
        let mut path = group.path.trim_end_matches('/');
        loop {
            let found = left(root, path, group.is_unified);
            least = [least, found].into_iter().flatten().min();
            // In a container the path may lead out of the mount, which then is the group itself.
            match path.rsplit_once('/') {
                Some((parent, _)) if parent.len() >= group.mount.len() => path = parent,
                _ => break,
            }
        }
    }
    least
}

/// Bytes that the limit of one group leaves.
fn left(root: &Root, group: &str, is_unified: bool) -> Option<u64> {
    let (limit, usage, prefix) = match is_unified {
        true => ("memory.max", "memory.current", ""),
        false => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    };
    // "max" is no limit.
    let limit: u64 = root.number(&format!("{group}/{limit}"))?;
    let usage: u64 = root.number(&format!("{group}/{usage}"))?;
    let text = root.text(&format!("{group}/memory.stat")).unwrap_or_default();
    let stat = |name: &str| {
        let values = text.lines().filter_map(|line| line.strip_prefix(prefix)?.strip_prefix(name));
        values.filter_map(|value| value.trim().parse::<u64>().ok()).next().unwrap_or(0)
    };
    let files = stat("inactive_file ").saturating_add(stat("active_file "));
    Some(limit.saturating_sub(usage.saturating_sub(files)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = Root::at(folder.path());
        (folder, root)
    }

    #[test]
    fn the_tightest_of_a_group_and_its_ancestors_counts() {
        let (folder, root) = tree(&[
            ("proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"),
            ("proc/self/cgroup", "0::/job/step\n"),
            ("sys/fs/cgroup/job/memory.max", "1000\n"),
            ("sys/fs/cgroup/job/memory.current", "700\n"),
            ("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 50\nactive_file 100\n"),
            ("sys/fs/cgroup/job/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job/step/memory.current", "600\n"),
        ]);
        assert_eq!(room(&root), Some(1000 - (700 - 150)));
        fs::write(folder.path().join("sys/fs/cgroup/job/step/memory.max"), "601\n").unwrap();
        assert_eq!(room(&root), Some(1));
        fs::write(folder.path().join("proc/self/cgroup"), "0::/../..\n").unwrap();
        assert_eq!(room(&root), None);
    }

    /// A container of version 1 shows its own group as the mount, and names the path outside.
    #[test]
    fn a_mount_that_is_the_group_itself_counts() {
        let (_folder, root) = tree(&[
            ("proc/mounts", "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"),
            ("proc/self/cgroup", "5:cpuset:/x\n4:memory:/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1200\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 300\n"),
        ]);
        assert_eq!(room(&root), Some(100));
    }
}
