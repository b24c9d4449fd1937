//! The node of the drive that holds a path.
//!
//! A block device may stand on others (partitions, RAID, LVM, dm-crypt). The node is known if all drives below have the
//! same one.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::devices::node_of;
use super::mounts;
use super::nodes::Node;
use super::sysfs::Root;

/// Most levels of devices on devices.
const MOST_DEPTH: usize = 16;

pub(super) fn node(root: &Root, nodes: &[Node], path: &Path) -> io::Result<Option<u32>> {
    let device = std::fs::metadata(path)?.dev();
    let (major, minor) = (libc::major(device), libc::minor(device));
    let block = match major {
        // Not a block device, as for btrfs and overlays: the mount may name one.
        0 => mounted_from(root, major, minor),
        _ => Some(format!("sys/dev/block/{major}:{minor}")),
    };
    let mut found = BTreeSet::new();
    if let Some(block) = block {
        drives(root, nodes, &block, MOST_DEPTH, &mut found);
    }
    Ok(if found.len() == 1 { found.pop_first().flatten() } else { None })
}

/// The folder in /sys of the block device that the mount with this device number names.
fn mounted_from(root: &Root, major: u32, minor: u32) -> Option<String> {
    let number = format!("{major}:{minor}");
    let source = mounts::all(root).into_iter().find(|mount| mount.number == number)?.source;
    let device = std::fs::metadata(source.starts_with("/dev/").then_some(source)?).ok()?.rdev();
    Some(format!("sys/dev/block/{}:{}", libc::major(device), libc::minor(device)))
}

/// Adds the nodes of all drives below a block device.
fn drives(root: &Root, nodes: &[Node], block: &str, depth: usize, found: &mut BTreeSet<Option<u32>>) {
    // A partition has no list of its own: that of the whole device is one level up.
    let below = ["slaves", "../slaves"].map(|list| format!("{block}/{list}"));
    let below = below.iter().map(|list| (list, root.names(list))).find(|(_, names)| !names.is_empty());
    match below {
        Some((list, names)) if depth > 0 => {
            names.iter().for_each(|name| drives(root, nodes, &format!("{list}/{name}"), depth - 1, found));
        }
        _ => drop(found.insert(node_of(root, block, nodes))),
    }
}
