//! Memory on a NUMA node.
//!
//! Invariant: no more is bound to a node than the node has room for. Pages of a bound mapping come from that node alone, so
//! the system would end a process when the node is full, although other nodes have memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::span::Span;
use super::topology::Root;

/// The part of a node that the kernel may keep for itself: its watermarks are below both.
const KEPT_SHARE: u64 = 16;
const MOST_KEPT: u64 = 256 << 20;

/// Binds the pages of a mapping to a node. Pages that exist stay where they are. An error, and no change, if the node has
/// no room for `absent` bytes, which have no page yet.
pub fn bind(span: Span, node: u32, absent: u64) -> io::Result<()> {
    if let Some(room) = room(&Root::live(), node).filter(|room| *room < absent) {
        let (need, room) = (absent >> 20, room >> 20);
        return Err(io::Error::other(format!("the node has room for {room} MiB, but {need} are needed")));
    }
    bind_reserved(span, node)
}

/// Binds pages that the administrator has reserved; they are not part of the node's room.
pub fn bind_reserved(span: Span, node: u32) -> io::Result<()> {
    const MPOL_BIND: libc::c_long = 2;
    set_policy(span.as_ptr().cast(), span.len(), MPOL_BIND, node)
}

/// Lets new pages of a file in memory (memfd) come from a node while it has some, and from others then.
pub fn prefer(file: &File, node: u32) -> io::Result<()> {
    const MPOL_PREFERRED: libc::c_long = 1;
    /// Address space of the mapping, which lasts for the call only. A file in memory is not longer.
    const LONGEST: usize = 1 << 40;
    // SAFETY: a new mapping at an address of the kernel's choice. Nothing accesses it.
    let mapped = unsafe {
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), LONGEST, libc::PROT_NONE, flags, file.as_raw_fd(), 0)
    };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // The kernel keeps the policy of a shared mapping with the file.
    let outcome = set_policy(mapped, LONGEST, MPOL_PREFERRED, node);
    // SAFETY: the mapping of this call, to which nothing refers.
    unsafe { libc::munmap(mapped, LONGEST) };
    outcome
}

fn set_policy(start: *const libc::c_void, len: usize, policy: libc::c_long, node: u32) -> io::Result<()> {
    const MAX_NODES: usize = 1024;
    if node as usize >= MAX_NODES {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut mask = [0_u64; MAX_NODES / 64];
    mask[node as usize / 64] = 1 << (node % 64);
    // SAFETY: the callers pass a mapped range, and the mask has MAX_NODES bits; mbind counts one bit more than it reads.
    let outcome =
        unsafe { libc::syscall(libc::SYS_mbind, start, len, policy, mask.as_ptr(), MAX_NODES + 1, 0) };
    match outcome {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Bytes that a node can give: free memory and pages of files. `None` if the system does not say.
fn room(root: &Root, node: u32) -> Option<u64> {
    let text = root.text(&format!("sys/devices/system/node/node{node}/meminfo"))?;
    // "Node 0 MemFree:  1234 kB"
    let value = |name: &str| {
        let mut lines = text.lines().map(|line| line.split_whitespace().skip(2));
        lines.find_map(|mut words| (words.next()? == name).then(|| words.next()?.parse::<u64>().ok())?)
    };
    let files = ["Active(file):", "Inactive(file):"].iter().filter_map(|name| value(name));
    let most = files.fold(value("MemFree:")?, u64::saturating_add).saturating_mul(1024);
    let all = value("MemTotal:")?.saturating_mul(1024);
    Some(most.saturating_sub((all / KEPT_SHARE).min(MOST_KEPT)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::Mapping;

    #[test]
    fn room_is_free_memory_and_pages_of_files_without_what_the_kernel_keeps() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let node = folder.path().join("sys/devices/system/node/node3");
        std::fs::create_dir_all(&node).unwrap();
        let write = |text: &str| std::fs::write(node.join("meminfo"), text).unwrap();
        write(
            "Node 3 MemTotal:       1600 kB\nNode 3 MemFree:        700 kB\nNode 3 Active(file):    20 kB\n\
             Node 3 Inactive(file):   30 kB\nNode 3 Active:           999 kB\n",
        );
        assert_eq!(room(&root, 3), Some(650 << 10));
        write("Node 3 MemTotal: 16777216 kB\nNode 3 MemFree: 1048576 kB\n");
        assert_eq!(room(&root, 3), Some(768 << 20));
        write("Node 3 MemTotal: 1600 kB\nNode 3 MemFree: 7 kB\n");
        assert_eq!(room(&root, 3), Some(0));
        for text in ["", "Node 3 MemFree: x kB", "Node 3"] {
            write(text);
            assert_eq!(room(&root, 3), None, "{text}");
        }
        assert_eq!(room(&root, 4), None);
    }

    #[test]
    fn a_file_in_memory_prefers_a_node_that_there_is() {
        let file = crate::sys::file::in_memory().unwrap();
        // A kernel without NUMA refuses every node.
        if prefer(&file, 0).is_ok() {
            assert!(prefer(&file, 5000).is_err());
        }
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 8192], 4096).unwrap();
    }

    /// The process would be ended when it touches the pages.
    #[test]
    fn a_mapping_that_is_larger_than_its_node_is_not_bound() {
        let Some(room) = room(&Root::live(), 0) else { return };
        let mapping = Mapping::untouched(room as usize + (1 << 30)).unwrap();
        assert!(bind(mapping.span(), 0, 0).is_ok());
        let error = bind(mapping.span(), 0, mapping.span().len() as u64).unwrap_err().to_string();
        assert!(error.starts_with("the node has room for "), "{error}");
    }
}
