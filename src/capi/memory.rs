//! Pinned host memory.
//!
//! Transfers of the other headers take memory of any kind. Pinned memory avoids a copy through a bounce buffer: it is
//! page-aligned, locked as far as the system allows, and registered with io_uring and the GPU at its first use.
//!
//!     spw_pinned_options options = SPW_PINNED_OPTIONS_INIT;
//!     options.flags = SPW_PINNED_FLAG_BIND_NODE;
//!     options.node = 1;
//!     void *start;
//!     spw_pinned_alloc(&options, 64 << 20, &start);
//!     spw_pinned_free(start);

use std::ffi::c_void;

use crate::capi::prelude::*;
use crate::pool::pinned;
use crate::pool::region::Backing;
use crate::sys::memory;

/// Flags of an allocation, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_pinned_flag {
    /// Use base pages even if 2 MiB pages are available.
    SPW_PINNED_FLAG_NO_HUGE_PAGES = 1,
    /// Do not lock the memory (mlock).
    SPW_PINNED_FLAG_NO_LOCK = 2,
    /// Allocate the memory on NUMA node `node`. If the node is refused, or has less free memory than the allocation needs,
    /// the memory is anywhere, and one warning is logged.
    SPW_PINNED_FLAG_BIND_NODE = 4,
}

c_struct! { first 16;
/// Pages and place of an allocation. Zero is a good default for every field but struct_size.
pub struct spw_pinned_options {
    /// Sum of `spw_pinned_flag`. An allocation with a flag has its own mapping; others share mappings while they are small.
    pub flags: u32,
    /// NUMA node, used with SPW_PINNED_FLAG_BIND_NODE.
    pub node: u32,
    /// 0
    pub reserved: u32,
}
}

c_struct! { first 48;
/// Counters of the process's `spw_pinned_alloc` allocations.
pub struct spw_pinned_stats {
    /// 0
    pub reserved: u32,
    /// Live allocations.
    pub allocations: u64,
    /// Bytes of the live allocations.
    pub bytes: u64,
    /// Maximum of bytes so far.
    pub high_water: u64,
    /// Bytes mapped from the system for the allocations.
    pub mapped_bytes: u64,
    /// Mapped bytes that are locked.
    pub locked_bytes: u64,
    /// Bytes of memory of any kind that this process can still use without swap, as far as the system and a cgroup's limit
    /// say; 0: unknown.
    pub unused_bytes: u64,
}
}

/// Allocates `bytes` bytes of pinned memory, page-aligned, touched and not cleared, in 2 MiB pages where possible, locked as
/// far as `RLIMIT_MEMLOCK` allows. If huge pages, locking or the NUMA node are unavailable, the log gets one warning and
/// the call succeeds. Any thread may free an allocation. Memory that was registered with a GPU is not mapped in a forked
/// child, which must not touch it. `options` may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pinned_alloc(
    options: In<spw_pinned_options>,
    bytes: u64,
    start_out: Out<*mut c_void>,
) -> spw_status {
    guard(|| {
        start_out.required("start_out")?;
        let raw = options.read_optional("options")?;
        let backing = raw.map_or(Ok(Backing::default()), parse)?;
        let bytes =
            usize::try_from(bytes).map_err(|_| Error::invalid("bytes", "exceeds the address space"))?;
        start_out.put(pinned::alloc(bytes, backing)?.as_ptr().cast(), "start_out")
    })
}

fn parse(raw: spw_pinned_options) -> Result<Backing> {
    abi_struct::flags("options.flags", raw.flags, 7)?;
    abi_struct::zero("options.reserved", raw.reserved)?;
    let has = |flag: spw_pinned_flag| raw.flags & flag as u32 != 0;
    Ok(Backing {
        huge: !has(spw_pinned_flag::SPW_PINNED_FLAG_NO_HUGE_PAGES),
        lock: !has(spw_pinned_flag::SPW_PINNED_FLAG_NO_LOCK),
        node: has(spw_pinned_flag::SPW_PINNED_FLAG_BIND_NODE).then_some(raw.node),
    })
}

/// Frees an allocation of `spw_pinned_alloc`. Any other address, or an allocation freed before, is
/// SPW_ERR_INVALID_ARGUMENT. In a forked child an allocation of the parent is SPW_ERR_UNSUPPORTED. Memory of transfers in
/// flight is quarantined: it stays mapped until they end.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pinned_free(start: *mut c_void) -> spw_status {
    guard(|| pinned::free(start as usize))
}

/// Writes 1 if all `bytes` bytes at `start` lie in one live allocation, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pinned_contains(
    start: *const c_void,
    bytes: u64,
    contains_out: Out<u32>,
) -> spw_status {
    guard(|| {
        let contains = pinned::contains(start as usize, bytes as usize).into();
        contains_out.put(contains, "contains_out")
    })
}

/// Reads the counters of all allocations.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pinned_get_stats(stats_out: Out<spw_pinned_stats>) -> spw_status {
    guard(|| {
        let found = pinned::stats();
        let values = report!(spw_pinned_stats from found {
            allocations, bytes, high_water, mapped_bytes, locked_bytes
        } with {
            reserved: 0, unused_bytes: memory::unused_bytes().unwrap_or(0)
        });
        stats_out.write(&values, "stats_out")
    })
}
