//! Pinned memory: pools of equal blocks, and single allocations.
#![allow(non_camel_case_types)]

use std::ffi::c_void;

use super::guard::guard;
use super::library::out;
use super::record::{self, Record};
use super::status::spw_status;
use crate::error::{Error, Result};
use crate::pool::fixed::{Pool, PoolOptions};
use crate::pool::pinned;
use crate::pool::region::Backing;
use crate::sys::memory::PageKind;

/// Flags of a pool, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_pool_flag {
    /// Use base pages even if 2 MiB pages are available.
    SPW_POOL_NO_HUGE_PAGES = 1,
    /// Do not lock the memory (mlock).
    SPW_POOL_NO_LOCK = 2,
    /// Allocate the memory on NUMA node `node`.
    SPW_POOL_BIND_NODE = 4,
}

/// Kind of pages of a pool. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_page_kind {
    /// Base pages.
    SPW_PAGES_BASE = 0,
    /// Transparent 2 MiB pages.
    SPW_PAGES_TRANSPARENT = 1,
    /// 2 MiB pages that the administrator reserved (hugetlb).
    SPW_PAGES_RESERVED = 2,
}

/// Size and placement of a pool. Zero is a good default for every field but struct_size, block_bytes and block_count.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_pool_options {
    /// `sizeof(spw_pool_options)`
    pub struct_size: u32,
    /// Sum of `spw_pool_flag`.
    pub flags: u32,
    /// Bytes of a block. Rounded up to whole pages.
    pub block_bytes: u64,
    /// Number of blocks.
    pub block_count: u64,
    /// NUMA node, used with SPW_POOL_BIND_NODE.
    pub node: u32,
    /// 0
    pub reserved: u32,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_pool_options {
    const FIRST_SIZE: usize = 32;
    const NAME: &'static str = "spw_pool_options";
}

/// Counters of a pool.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
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
    /// Bytes of registered buffers.
    pub foreign_bytes: u64,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_pool_stats {
    const FIRST_SIZE: usize = 72;
    const NAME: &'static str = "spw_pool_stats";
}

/// A pool of pinned blocks of equal size. Thread-safe: threads may use one pool concurrently.
pub struct spw_pool(Pool);

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
        let pool_out = out(pool_out, "pool_out")?;
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { record::read(options, "options") }?;
        record::zero("options.reserved", raw.reserved)?;
        let pool = Pool::open(parse(&raw)?)?;
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { pool_out.write(Box::into_raw(Box::new(spw_pool(pool)))) };
        Ok(())
    })
}

/// Frees a pool. While blocks are allocated it is SPW_ERR_BUSY and the pool stays open. Quarantined blocks stay mapped
/// until their transfers end.
///
/// # Safety
/// `pool` is NULL or came from `spw_pool_open`, and is not used again after SPW_OK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_close(pool: *mut spw_pool) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise.
        if let Some(open) = unsafe { pool.as_ref() } {
            if open.0.is_own() {
                open.0.closable()?;
            }
            // SAFETY: made by Box::into_raw in spw_pool_open, and given up by the caller.
            drop(unsafe { Box::from_raw(pool) });
        }
        Ok(())
    })
}

/// Allocates a block, page-aligned and not cleared. SPW_ERR_LIMIT_REACHED if no block is free.
///
/// # Safety
/// `pool` is an open pool, `block_out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_alloc(pool: *mut spw_pool, block_out: *mut *mut c_void) -> spw_status {
    guard(|| {
        let block_out = out(block_out, "block_out")?;
        // SAFETY: the caller's promise; the pointer was checked.
        unsafe { block_out.write(open(pool)?.alloc()?.as_ptr().cast()) };
        Ok(())
    })
}

/// Frees a block. A block that is already free, or an address that is not the start of a block of this pool, is
/// SPW_ERR_INVALID_ARGUMENT.
///
/// # Safety
/// `pool` is an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_free(pool: *mut spw_pool, block: *mut c_void) -> spw_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { open(pool) }?.free(block as usize))
}

/// Writes 1 if all `bytes` bytes at `start` lie in the pool or in one buffer registered with it, else 0.
///
/// # Safety
/// `pool` is an open pool, `contains_out` points to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_contains(
    pool: *const spw_pool,
    start: *const c_void,
    bytes: u64,
    contains_out: *mut u32,
) -> spw_status {
    guard(|| {
        let contains_out = out(contains_out, "contains_out")?;
        // SAFETY: the caller's promise; the pointer was checked.
        unsafe { contains_out.write(open(pool)?.contains(start as usize, bytes as usize)?.into()) };
        Ok(())
    })
}

/// Registers a buffer that the caller pinned, so that `spw_pool_contains` finds it. Transfers do not need it.
///
/// # Safety
/// `pool` is an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_register(
    pool: *mut spw_pool,
    start: *const c_void,
    bytes: u64,
) -> spw_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { open(pool) }?.register(start as usize, bytes as usize))
}

/// Unregisters the buffer that begins at `start`.
///
/// # Safety
/// `pool` is an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_unregister(pool: *mut spw_pool, start: *const c_void) -> spw_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { open(pool) }?.unregister(start as usize))
}

/// Reads the counters of a pool. Set `stats->struct_size` first.
///
/// # Safety
/// `pool` is an open pool, `stats` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pool_stats_get(pool: *const spw_pool, stats: *mut spw_pool_stats) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise.
        let found = unsafe { open(pool) }?.stats()?;
        let values = spw_pool_stats {
            struct_size: 0,
            page_kind: match found.kind {
                PageKind::Base => spw_page_kind::SPW_PAGES_BASE as u32,
                PageKind::Transparent => spw_page_kind::SPW_PAGES_TRANSPARENT as u32,
                PageKind::Reserved => spw_page_kind::SPW_PAGES_RESERVED as u32,
            },
            block_bytes: found.block_bytes as u64,
            block_count: found.block_count as u64,
            in_use: found.in_use as u64,
            high_water: found.high_water as u64,
            quarantined: found.quarantined as u64,
            bytes: found.bytes as u64,
            locked_bytes: found.locked_bytes as u64,
            foreign_bytes: found.foreign_bytes as u64,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { record::write(&values, stats, "stats") }
    })
}

/// Counters of the process's `spw_pinned_alloc` allocations.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_pinned_stats {
    /// `sizeof(spw_pinned_stats)`
    pub struct_size: u32,
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
}

// SAFETY: integers without padding.
unsafe impl Record for spw_pinned_stats {
    const FIRST_SIZE: usize = 48;
    const NAME: &'static str = "spw_pinned_stats";
}

/// Allocates `bytes` bytes of pinned memory, page-aligned, in 2 MiB pages where possible, locked as by `spw_pool_open`.
/// Small allocations share 2 MiB pages. Any thread may free an allocation. Memory that was registered with a GPU is not
/// mapped in a forked child, which must not touch it.
///
/// # Safety
/// `start_out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pinned_alloc(bytes: u64, start_out: *mut *mut c_void) -> spw_status {
    guard(|| {
        let start_out = out(start_out, "start_out")?;
        let bytes = usize::try_from(bytes).map_err(|_| Error::invalid("bytes", "pass the address space"))?;
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { start_out.write(pinned::alloc(bytes)?.as_ptr().cast()) };
        Ok(())
    })
}

/// Frees an allocation of `spw_pinned_alloc`. Any other address, or an allocation freed before, is
/// SPW_ERR_INVALID_ARGUMENT. Memory of transfers in flight is quarantined: it stays mapped until they end.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pinned_free(start: *mut c_void) -> spw_status {
    guard(|| pinned::free(start as usize))
}

/// Writes 1 if all `bytes` bytes at `start` lie in one live allocation, else 0.
///
/// # Safety
/// `contains_out` points to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pinned_contains(
    start: *const c_void,
    bytes: u64,
    contains_out: *mut u32,
) -> spw_status {
    guard(|| {
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe {
            out(contains_out, "contains_out")?.write(pinned::contains(start as usize, bytes as usize).into())
        };
        Ok(())
    })
}

/// Reads the counters of all allocations. Set `stats->struct_size` first.
///
/// # Safety
/// `stats` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pinned_stats_get(stats: *mut spw_pinned_stats) -> spw_status {
    guard(|| {
        let found = pinned::stats();
        let values = spw_pinned_stats {
            struct_size: 0,
            reserved: 0,
            allocations: found.allocations as u64,
            bytes: found.bytes as u64,
            high_water: found.high_water as u64,
            mapped_bytes: found.mapped_bytes as u64,
            locked_bytes: found.locked_bytes as u64,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { record::write(&values, stats, "stats") }
    })
}

unsafe fn open<'a>(pool: *const spw_pool) -> Result<&'a Pool> {
    // SAFETY: NULL, or an open pool by the caller's promise.
    unsafe { pool.as_ref() }.map(|pool| &pool.0).ok_or_else(|| Error::invalid("pool", "is NULL"))
}

fn parse(raw: &spw_pool_options) -> Result<PoolOptions> {
    let has = |flag: spw_pool_flag| raw.flags & flag as u32 != 0;
    if raw.flags > 7 {
        return Err(Error::invalid("options.flags", format!("{:#x} has unknown bits", raw.flags)));
    }
    let size = |argument: &'static str, value: u64| {
        usize::try_from(value).map_err(|_| Error::invalid(argument, "passes the address space"))
    };
    Ok(PoolOptions {
        block_bytes: size("options.block_bytes", raw.block_bytes)?,
        block_count: size("options.block_count", raw.block_count)?,
        backing: Backing {
            huge: !has(spw_pool_flag::SPW_POOL_NO_HUGE_PAGES),
            lock: !has(spw_pool_flag::SPW_POOL_NO_LOCK),
            node: has(spw_pool_flag::SPW_POOL_BIND_NODE).then_some(raw.node),
        },
    })
}
