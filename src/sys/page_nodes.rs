//! The NUMA nodes of pages, as move_pages reports them.

use std::io;

use crate::error::{Error, Result};

/// Most pages that one query looks at; of a larger range it looks at pages in equal distances.
const MOST_PAGES: usize = 1 << 16;
/// Pages per system call.
const BATCH: usize = 1 << 10;

/// Pages of a range by their place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageNodes {
    /// Inspected pages.
    pub sampled: u64,
    /// Of these: on the expected node.
    pub on_node: u64,
    /// On other nodes.
    pub elsewhere: u64,
    /// On no node: never touched, or swapped out.
    pub absent: u64,
}

/// Where the pages of `bytes` bytes from `address` are. The memory is not touched; an address without memory counts as
/// absent. [`Error::Unsupported`] if the system has no move_pages.
pub fn query(address: usize, bytes: usize, node: u32) -> Result<PageNodes> {
    // SAFETY: sysconf takes a constant and has no requirements.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1);
    let last =
        address.checked_add(bytes).ok_or_else(|| Error::invalid("bytes", "exceeds the address space"))?;
    let first = address / page;
    let pages = if bytes == 0 { 0 } else { (last - 1) / page - first + 1 };
    let samples = pages.min(MOST_PAGES);
    let at = |sample: usize| (first + (sample as u128 * pages as u128 / samples as u128) as usize) * page;
    let mut found = PageNodes { sampled: samples as u64, ..PageNodes::default() };
    let (mut addresses, mut places) = ([0_usize; BATCH], [0_i32; BATCH]);
    for from in (0..samples).step_by(BATCH) {
        let count = BATCH.min(samples - from);
        (0..count).for_each(|index| addresses[index] = at(from + index));
        // SAFETY: `count` addresses and places; without a list of nodes the call moves nothing, and only looks at page
        // tables.
        let outcome = unsafe {
            let none = std::ptr::null::<libc::c_int>();
            libc::syscall(libc::SYS_move_pages, 0, count, addresses.as_ptr(), none, places.as_mut_ptr(), 0)
        };
        if outcome != 0 {
            return Err(refused(&io::Error::last_os_error()));
        }
        for place in &places[..count] {
            match u32::try_from(*place) {
                Ok(place) if place == node => found.on_node += 1,
                Ok(_) => found.elsewhere += 1,
                Err(_) => found.absent += 1,
            }
        }
    }
    Ok(found)
}

fn refused(error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOSYS | libc::EPERM) => {
            Error::Unsupported(format!("the system has no move_pages: {error}"))
        }
        _ => Error::system("asking for the nodes of pages", error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{BASE_PAGE, Mapping, PageKind};

    /// Bound memory is on its node, untouched memory nowhere, and numa_maps says the same.
    #[test]
    fn bound_pages_are_where_numa_maps_says() {
        let Some(text) = std::fs::read_to_string("/proc/self/numa_maps").ok() else { return };
        let node =
            text.split_whitespace().find_map(|word| word.strip_prefix('N')?.split_once('=')?.0.parse().ok());
        let node: u32 = node.unwrap();
        let (mapping, refused) = Mapping::unpopulated(64 * BASE_PAGE, PageKind::Base, Some(node), 0).unwrap();
        mapping.populate(0, 64 * BASE_PAGE).unwrap();
        assert!(refused.is_none(), "{refused:?}");
        let (address, bytes) = (mapping.span().address(), mapping.span().len());
        let found = query(address + 1, bytes - 1, node).unwrap();
        assert_eq!((found.sampled, found.on_node, found.elsewhere), (64, 64, 0));
        assert_eq!(query(address, bytes, node + 1).unwrap().elsewhere, 64);
        let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
        let line = maps.lines().find(|line| line.starts_with(&format!("{address:x} "))).unwrap();
        assert!(line.contains(&format!("bind:{node}")) && line.contains(&format!("N{node}=64")), "{line}");
        let untouched = Mapping::untouched(BASE_PAGE * 200_000).unwrap();
        let found = query(untouched.span().address(), untouched.span().len(), node).unwrap();
        assert_eq!((found.sampled, found.absent), (MOST_PAGES as u64, MOST_PAGES as u64));
        assert_eq!(query(address, 0, node), Ok(PageNodes::default()));
        assert!(query(usize::MAX, 2, node).is_err());
    }
}
