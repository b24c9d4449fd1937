//! The directories of this process's cgroups, as far as mounted cgroup file systems show them.
#![forbid(unsafe_code)]

use std::path::{Component, Path};

use super::sysfs::Root;

/// A cgroup of this process, in one hierarchy.
pub struct Group {
    /// The mount's directory, relative to the root.
    pub mount: String,
    /// The group's directory, relative to the root: the mount, or below it.
    pub path: String,
    /// True in a hierarchy of version 2.
    pub is_unified: bool,
    /// True if the names of files begin with the controller's name.
    pub has_prefix: bool,
}

/// The groups of this process that may limit `controller`, in the order of the mounts.
pub fn groups(root: &Root, controller: &str) -> Vec<Group> {
    let mounts = root.text("proc/mounts").unwrap_or_default();
    let groups = root.text("proc/self/cgroup").unwrap_or_default();
    // Lines "HIERARCHY:CONTROLLERS:PATH"; version 2 has no controllers there.
    let line = |wanted: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            wanted(controllers).then_some(path)
        })
    };
    let (v2, v1) =
        (line(&|list| list.is_empty()), line(&|list| list.split(',').any(|name| name == controller)));
    // The path alone; only the cpuset controller has such a file.
    let old = (controller == "cpuset").then(|| root.text("proc/self/cpuset")).flatten();
    let of_mount = |mount: &str| {
        let mut words = mount.split_whitespace().skip(1);
        let (point, kind, options) = (words.next()?, words.next()?, words.next()?);
        let option = |name: &str| options.split(',').any(|option| option == name);
        let (path, has_prefix) = match kind {
            "cgroup2" => (v2.or(old.as_deref()), true),
            "cgroup" if option(controller) => (v1.or(old.as_deref()), !option("noprefix")),
            "cpuset" if controller == "cpuset" => (v1.or(old.as_deref()), false),
            _ => return None,
        };
        let path = below(point, path?.trim())?;
        let mount = point.trim_matches('/').to_string();
        Some(Group { mount, path, is_unified: kind == "cgroup2", has_prefix })
    };
    mounts.lines().filter_map(of_mount).collect()
}

/// The path of a group below a mount, relative to the root. `None` if a part of it is "..".
fn below(mount: &str, group: &str) -> Option<String> {
    let path = format!("{}/{}", mount.trim_matches('/'), group.trim_matches('/'));
    let is_plain = Path::new(&path).components().all(|part| matches!(part, Component::Normal(_)));
    is_plain.then_some(path)
}
