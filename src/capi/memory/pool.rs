//! Pinned memory: pools of equal blocks.
#![allow(non_camel_case_types)]

use std::ffi::c_void;

use crate::capi::abi_struct::{self, c_struct};
use crate::capi::base::spw_status;
use crate::capi::guard::guard;
use crate::capi::handle::{self, Handle};
use crate::capi::output::required;
use crate::error::{Error, Result};
use crate::pool::fixed::{Pool, PoolOptions};
use crate::pool::region::Backing;
use crate::sys::memory::PageKind;

/// Flags of a pool, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_pool_flag {
    /// Use base pages even if 2 MiB pages are available.
    SPW_POOL_FLAG_NO_HUGE_PAGES = 1,
    /// Do not lock the memory (mlock).
    SPW_POOL_FLAG_NO_LOCK = 2,
    /// Allocate the memory on NUMA node `node`. If the node is refused, or has less free memory than the pool needs, the
    /// memory is anywhere, and one warning is logged.
    SPW_POOL_FLAG_BIND_NODE = 4,
}

/// Kind of pages of a pool. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_page_kind {
    /// Base pages.
    SPW_PAGE_KIND_BASE = 0,
    /// Transparent 2 MiB pages.
    SPW_PAGE_KIND_TRANSPARENT = 1,
    /// 2 MiB pages that the administrator reserved (hugetlb).
    SPW_PAGE_KIND_RESERVED = 2,
}

c_struct! { first 32;
/// Size and placement of a pool. Zero is a good default for every field but struct_size, block_bytes and block_count.
pub struct spw_pool_options {
    /// `sizeof(spw_pool_options)`
    pub struct_size: u32,
    /// Sum of `spw_pool_flag`.
    pub flags: u32,
    /// Bytes of a block. Rounded up to whole pages.
    pub block_bytes: u64,
    /// Number of blocks.
    pub block_count: u64,
    /// NUMA node, used with SPW_POOL_FLAG_BIND_NODE.
    pub node: u32,
    /// 0
    pub reserved: u32,
}
}

c_struct! { first 64;
/// Counters of a pool.
pub struct spw_pool_stats {
    /// `sizeof(spw_pool_stats)`
    pub struct_size: u32,
    /// `spw_page_kind` of the memory.
    pub page_kind: u32,
    /// Bytes of a block, after rounding.
    pub block_bytes: u64,
    /// Number of blocks.
    pub block_count: u64,
    /// Allocated blocks.
    pub in_use: u64,
    /// Maximum of in_use so far.
    pub high_water: u64,
    /// Quarantined blocks: freed, but still in use by I/O or DMA in flight.
    pub quarantined: u64,
    /// Bytes of the pool.
    pub bytes: u64,
    /// Bytes of the pool that are locked.
    pub locked_bytes: u64,
}
}

/// A pool of pinned blocks of equal size.
pub struct spw_pool(Pool);

impl Handle for spw_pool {
    const NAME: &'static str = "pool";

    fn check_process(&self) -> Result<()> {
        self.0.check_process()
    }
}

/// Creates a pool. It allocates and touches all memory now, in 2 MiB pages where possible, and locks it as far as
/// `RLIMIT_MEMLOCK` allows. If huge pages, locking or the NUMA node are unavailable, the log gets one warning and the
/// call succeeds.
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes, `pool_out` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_open(
    options: *const spw_pool_options,
    pool_out: *mut *mut spw_pool,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { abi_struct::read(options, "options") }?;
        abi_struct::zero("options.reserved", raw.reserved)?;
        // SAFETY: the caller meets the callee's requirements.
        unsafe { handle::open(pool_out, || Ok(spw_pool(Pool::open(parse(&raw)?)?))) }
    })
}

/// Frees a pool. While blocks are allocated it is SPW_ERR_BUSY and the pool stays open. Quarantined blocks stay mapped
/// until their transfers end. After SPW_OK the handle is invalid.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pool_close(pool: Option<Box<spw_pool>>) -> spw_status {
    guard(|| {
        let Some(pool) = handle::close(pool) else { return Ok(()) };
        // The handle stays valid if the pool cannot be closed.
        pool.0.closable().inspect_err(|_| std::mem::forget(pool))
    })
}

/// Allocates a block, page-aligned and not cleared. SPW_ERR_LIMIT_REACHED if no block is free.
///
/// # Safety
/// `block_out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_alloc(pool: Option<&spw_pool>, block_out: *mut *mut c_void) -> spw_status {
    guard(|| {
        let pool = handle::get(pool)?;
        let block_out = required(block_out, "block_out")?;
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { block_out.write(pool.0.alloc()?.as_ptr().cast()) };
        Ok(())
    })
}

/// Frees a block. A block that is already free, or an address that is not the start of a block of this pool, is
/// SPW_ERR_INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pool_free(pool: Option<&spw_pool>, block: *mut c_void) -> spw_status {
    guard(|| handle::get(pool)?.0.free(block as usize))
}

/// Reads the counters of a pool.
///
/// # Safety
/// `stats_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_get_stats(
    pool: Option<&spw_pool>,
    stats_out: *mut spw_pool_stats,
) -> spw_status {
    guard(|| {
        let found = handle::get(pool)?.0.stats()?;
        let values = spw_pool_stats {
            struct_size: 0,
            page_kind: match found.kind {
                PageKind::Base => spw_page_kind::SPW_PAGE_KIND_BASE as u32,
                PageKind::Transparent => spw_page_kind::SPW_PAGE_KIND_TRANSPARENT as u32,
                PageKind::Reserved => spw_page_kind::SPW_PAGE_KIND_RESERVED as u32,
            },
            block_bytes: found.block_bytes as u64,
            block_count: found.block_count as u64,
            in_use: found.in_use as u64,
            high_water: found.high_water as u64,
            quarantined: found.quarantined as u64,
            bytes: found.bytes as u64,
            locked_bytes: found.locked_bytes as u64,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { abi_struct::write(&values, stats_out, "stats_out") }
    })
}

fn parse(raw: &spw_pool_options) -> Result<PoolOptions> {
    let has = |flag: spw_pool_flag| raw.flags & flag as u32 != 0;
    abi_struct::flags("options.flags", raw.flags, 7)?;
    let size = |argument: &'static str, value: u64| {
        usize::try_from(value).map_err(|_| Error::invalid(argument, "exceeds the address space"))
    };
    Ok(PoolOptions {
        block_bytes: size("options.block_bytes", raw.block_bytes)?,
        block_count: size("options.block_count", raw.block_count)?,
        backing: Backing {
            huge: !has(spw_pool_flag::SPW_POOL_FLAG_NO_HUGE_PAGES),
            lock: !has(spw_pool_flag::SPW_POOL_FLAG_NO_LOCK),
            node: has(spw_pool_flag::SPW_POOL_FLAG_BIND_NODE).then_some(raw.node),
        },
    })
}
