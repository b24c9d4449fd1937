//! Regions of an arena: their places, and how they are written and read.

use std::ffi::{c_char, c_void};

use crate::arena::RegionVersion;
use crate::capi::arena::open::spw_arena;
use crate::capi::prelude::*;

c_struct! { first 40;
/// A region of an arena.
pub struct spw_arena_region_info {
    /// 1 if a write has begun and has not ended, by a live writer or by one that ended; else 0.
    pub in_write: u32,
    /// Address in this process.
    pub address: *mut c_void,
    /// Offset in the arena, the same in every process.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// The step whose values the region holds; 0 for no step, before the first write.
    pub generation: u64,
}
}

c_struct! { first 24;
/// A region at the begin of a read.
pub struct spw_arena_snapshot {
    /// 0
    pub reserved: u32,
    /// The step whose values the region holds.
    pub generation: u64,
    /// For `spw_arena_read_validate`.
    pub sequence: u64,
}
}

/// Writes the index of the region of that name: its place in the list of the arena's options.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_find(
    arena: Option<&spw_arena>,
    name: In<c_char>,
    region_out: Out<u32>,
) -> spw_status {
    guard(|| {
        let arena = handle::get(arena)?;
        let region = arena.0.find(name.text("name")?)?;
        region_out.put(region, "region_out")
    })
}

/// Writes where a region is, its generation, and its name. `size` and `needed_out` as for every text output.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_get_region(
    arena: Option<&spw_arena>,
    region: u32,
    info_out: Out<spw_arena_region_info>,
    name_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let found = handle::get(arena)?.0.region(region)?;
        let values = report!(spw_arena_region_info from found {
            in_write, offset, generation
        } with {
            address: found.span.as_ptr().cast(), bytes: found.span.len() as u64
        });
        info_out.write(&values, "info_out")?;
        name_out.put_text(&found.name, size, needed_out)
    })
}

/// Begins to write a region as `generation`, which is above the present one. Readers wait until `spw_arena_write_end`.
/// `torn_out` (may be NULL) receives 1 if an earlier writer ended in the middle of a write, else 0. Every byte of a torn
/// region must be written.
///
/// A process that ends before `spw_arena_write_end` leaves the region torn: readers get SPW_ERR_ARENA_TORN, and another
/// process may write. SPW_ERR_BUSY while another handle or thread writes the region.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_write_begin(
    arena: Option<&spw_arena>,
    region: u32,
    generation: u64,
    torn_out: Out<u32>,
) -> spw_status {
    guard(|| {
        let torn = handle::get(arena)?.0.write_begin(region, generation)?;
        torn_out.put_optional(u32::from(torn));
        Ok(())
    })
}

/// Ends a write of `spw_arena_write_begin`: the region holds the whole of its new generation. Waiting readers of all
/// processes continue. SPW_ERR_INVALID_ARGUMENT if this handle does not write the region, or a stage has it.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_write_end(arena: Option<&spw_arena>, region: u32) -> spw_status {
    guard(|| handle::get(arena)?.0.write_end(region))
}

/// Ends a write without a new generation. `restored` 1: every byte is again as before `spw_arena_write_begin`, and the
/// earlier generation stays. 0, or if the region was torn before: the region is torn. Errors are those of
/// `spw_arena_write_end`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_write_abort(arena: Option<&spw_arena>, region: u32, restored: u32) -> spw_status {
    guard(|| {
        let restored = abi_struct::flag("restored", restored)?;
        handle::get(arena)?.0.write_abort(region, restored)
    })
}

/// Begins a read in place: waits until no writer is at work and the region has at least generation `at_least`, for up to
/// `timeout_ms` milliseconds (0: polls; negative: without limit). Data that is read at the region's address is valid
/// only after `spw_arena_read_validate` has returned SPW_OK for the snapshot.
///
/// - SPW_ERR_ARENA_TORN: the writer ended in the middle of a write.
/// - SPW_ERR_TIMEOUT: the message names the writer, or the generation.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_read_begin(
    arena: Option<&spw_arena>,
    region: u32,
    at_least: u64,
    timeout_ms: i64,
    snapshot_out: Out<spw_arena_snapshot>,
) -> spw_status {
    guard(|| {
        snapshot_out.required("snapshot_out")?;
        snapshot_out.check("snapshot_out")?;
        let seen = handle::get(arena)?.0.read_begin(region, at_least, timeout(timeout_ms))?;
        let RegionVersion { generation, sequence } = seen;
        let values = report!(spw_arena_snapshot with { reserved: 0, generation, sequence });
        snapshot_out.write(&values, "snapshot_out")
    })
}

/// Returns SPW_OK if the region was not written since the snapshot, else SPW_ERR_ARENA_CHANGED.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_read_validate(
    arena: Option<&spw_arena>,
    region: u32,
    snapshot: In<spw_arena_snapshot>,
) -> spw_status {
    guard(|| {
        let seen = snapshot.read("snapshot")?;
        let seen = RegionVersion { generation: seen.generation, sequence: seen.sequence };
        handle::get(arena)?.0.read_validate(region, seen)
    })
}

/// Copies `bytes` bytes from `offset` of a region to `to_out`, all of one generation, which is at least `at_least`.
/// Waits as `spw_arena_read_begin`. After an error the bytes at `to_out` are unspecified. `generation_out` may be NULL.
///
/// # Safety
/// `to_out` has room for `bytes` bytes outside the region. `generation_out` is NULL or points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_arena_read(
    arena: Option<&spw_arena>,
    region: u32,
    at_least: u64,
    offset: u64,
    to_out: *mut c_void,
    bytes: u64,
    timeout_ms: i64,
    generation_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let arena = handle::get(arena)?;
        let whole = arena.0.region(region)?.span.len() as u64;
        if bytes > whole {
            let reason = format!("is {bytes}, but the region has {whole} bytes");
            return Err(Error::invalid("bytes", reason));
        }
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let to = room(to_out, bytes)?;
            let generation = arena.0.copy(region, at_least, offset, to, timeout(timeout_ms))?;
            generation_out.put_optional(generation);
        }
        Ok(())
    })
}

/// The caller's memory.
///
/// # Safety
/// `to` is NULL or has room for `bytes` bytes, which no other code uses during `'a`.
unsafe fn room<'a>(to: *mut c_void, bytes: u64) -> Result<&'a mut [u8]> {
    if bytes == 0 {
        return Ok(&mut []);
    }
    if to.is_null() {
        return Err(Error::invalid("to_out", "is NULL"));
    }
    // SAFETY: not NULL, and `bytes` is at most the length of a mapping.
    Ok(unsafe { std::slice::from_raw_parts_mut(to.cast(), bytes as usize) })
}
