//! The virtual tier: contents, path health, verification.

use std::ffi::{c_char, c_void};

use super::open::spw_tier;
use crate::capi::prelude::*;
use crate::tier::Health;

/// Health of a path. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_health {
    /// The path is read and written.
    SPW_TIER_HEALTH_HEALTHY = 0,
    /// The path is only read. Extents on it move to another path with their next put.
    SPW_TIER_HEALTH_DRAINING = 1,
    /// A write or the whole path failed. Reads are still tried.
    SPW_TIER_HEALTH_FAILED = 2,
    /// The path was missing when the tier was opened.
    SPW_TIER_HEALTH_MISSING = 3,
}

c_struct! { first 40;
/// Result of an open.
pub struct spw_tier_opened_info {
    /// 1 if the open found a committed step, else 0.
    pub resumed: u32,
    /// That step.
    pub step: u64,
    /// Bytes of the payload of its commit.
    pub payload_bytes: u64,
    /// Number of missing paths.
    pub missing_paths: u64,
    /// Number of extents with a part on a missing path.
    pub lost_extents: u64,
}
}

c_struct! { first 40;
/// One extent of a tier.
pub struct spw_tier_extent_info {
    /// Its number.
    pub extent: u32,
    /// Bytes of all streams.
    pub bytes: u64,
    /// Version of the contents that reads return; 0 if the extent was never put.
    pub generation: u64,
    /// Number of streams.
    pub streams: u32,
    /// 1 if reads return the committed contents, else 0.
    pub committed: u32,
    /// 1 if a part was on a missing path, else 0.
    pub lost: u32,
    /// Number of blocks.
    pub blocks: u32,
}
}

c_struct! { first 80;
/// One path of a tier, and its traffic.
pub struct spw_tier_path_info {
    /// `spw_tier_health`
    pub health: u32,
    /// `spw_tier_path_kind`
    pub kind: u32,
    /// 0
    pub reserved: u32,
    /// Bytes read since the open.
    pub read_bytes: u64,
    /// Bytes written since the open, including headers and superblocks.
    pub written_bytes: u64,
    /// Nanoseconds with a read in flight.
    pub reading_ns: u64,
    /// Nanoseconds with a write or a sync in flight.
    pub writing_ns: u64,
    /// Bytes written since the tier was created (SSD wear).
    pub wear_bytes: u64,
    /// Length of the data file.
    pub file_bytes: u64,
    /// Free bytes in the data file.
    pub free_bytes: u64,
    /// Blocks of extents that are read from this path.
    pub blocks: u64,
}
}

c_struct! { first 40;
/// Counts of `spw_tier_verify`.
pub struct spw_tier_verify_info {
    /// 0
    pub reserved: u32,
    /// Extents read.
    pub extents: u64,
    /// Blocks read.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Blocks, headers and superblocks that are damaged, lost or unreadable.
    pub damaged: u64,
}
}

/// Reads the result of the open. `payload_out` (may be NULL) receives the first `payload_bytes` bytes of the commit's
/// payload.
///
/// # Safety
/// `info_out` points to a struct of `struct_size` bytes, `payload_out` is NULL or points to `payload_bytes`
/// writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_get_opened(
    tier: Option<&spw_tier>,
    info_out: Out<spw_tier_opened_info>,
    payload_out: *mut c_void,
    payload_bytes: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements; `payload_out` has room for `payload_bytes` bytes.
        unsafe {
            let found = handle::get(tier)?.0.opened();
            let values = report!(spw_tier_opened_info with {
                resumed: found.step.is_some().into(), step: found.step.unwrap_or(0),
                payload_bytes: found.payload.len() as u64, missing_paths: found.missing.len() as u64,
                lost_extents: found.lost.len() as u64
            });
            info_out.write(&values, "info_out")?;
            if !payload_out.is_null() {
                let bytes = found.payload.len().min(payload_bytes as usize);
                std::ptr::copy_nonoverlapping(found.payload.as_ptr(), payload_out.cast::<u8>(), bytes);
            }
        }
        Ok(())
    })
}

/// Reads the `index`-th extent, counted from 0; SPW_ERR_NOT_FOUND past the last. `name_out` receives its
/// name.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_get_extent(
    tier: Option<&spw_tier>,
    index: u64,
    info_out: Out<spw_tier_extent_info>,
    name_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let found = usize::try_from(index).ok().and_then(|index| tier.nth_extent(index));
        let found = found.ok_or_else(|| past_the_last("extent", index))?;
        let shape = tier.shape(found.number)?;
        let values = report!(spw_tier_extent_info from found {
            generation, committed, lost
        } with {
            extent: found.number, bytes: shape.bytes(), streams: found.streams.len() as u32,
            blocks: shape.blocks()
        });
        info_out.write(&values, "info_out")?;
        name_out.put_text(&found.name, size, needed_out)
    })
}

/// Reads the path with this number, counted from 0; SPW_ERR_NOT_FOUND past the last. `text_out` receives
/// its directory and why it is not healthy.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_get_path(
    tier: Option<&spw_tier>,
    number: u32,
    info_out: Out<spw_tier_path_info>,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let found = tier.path(number).ok_or_else(|| past_the_last("path", number.into()))?;
        let values = report!(spw_tier_path_info from found {
            read_bytes, written_bytes, file_bytes
        } with {
            health: found.health as u32, kind: found.memory.into(), reserved: 0, reading_ns: found.reading.as_nanos() as u64,
            writing_ns: found.writing.as_nanos() as u64, wear_bytes: found.wear, free_bytes: found.free,
            blocks: tier.blocks_on(number)
        });
        info_out.write(&values, "info_out")?;
        let separator = if found.reason.is_empty() { "" } else { ": " };
        let text = format!("{}{separator}{}", found.name, found.reason);
        text_out.put_text(&text, size, needed_out)
    })
}

/// Sets the health of a path: SPW_TIER_HEALTH_DRAINING stops new writes to it, SPW_TIER_HEALTH_FAILED marks it as
/// failed, SPW_TIER_HEALTH_HEALTHY allows writes again.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_set_path(tier: Option<&spw_tier>, number: u32, health: u32) -> spw_status {
    guard(|| {
        let health = match health {
            0 => Health::Healthy,
            1 => Health::Draining,
            2 => Health::Failed,
            other => {
                return Err(Error::invalid(
                    "health",
                    format!("{other} cannot be set; use healthy, draining or failed"),
                ));
            }
        };
        handle::get(tier)?.0.set_health(number, health, "set by the caller")
    })
}

/// Moves all extents off a path now, and sets the path to SPW_TIER_HEALTH_DRAINING. The next commit makes the move
/// durable. The call waits for puts and gets of the extents that are in flight, also those of a tiered update, and for a commit in
/// the background. A put or get of an extent waits while the extent is moved. SPW_ERR_BUSY while a `spw_tier_commit` is in flight; extents moved before that stay moved.
/// After an error the path stays SPW_TIER_HEALTH_DRAINING: `spw_tier_set_path` lets it take writes again.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_evacuate(tier: Option<&spw_tier>, number: u32) -> spw_status {
    guard(|| handle::get(tier)?.0.evacuate(number))
}

/// Reads all current blocks, all headers and the superblocks, and verifies their checksums. `info_out` (may be
/// NULL) receives the counts, also if something is damaged. Then the status is that of the first
/// damage, and the message names path, extent, block and offset. SPW_ERR_BUSY while an extent is put.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_verify(
    tier: Option<&spw_tier>,
    info_out: Out<spw_tier_verify_info>,
) -> spw_status {
    guard(|| {
        info_out.check("info_out")?;
        let found = handle::get(tier)?.0.verify()?;
        let values = report!(spw_tier_verify_info from found {
            extents, blocks, bytes
        } with {
            reserved: 0, damaged: found.damage.len() as u64
        });
        if !info_out.is_null() {
            info_out.write(&values, "info_out")?;
        }
        found.damage.into_iter().next().map_or(Ok(()), Err)
    })
}

fn past_the_last(what: &'static str, index: u64) -> Error {
    Error::NotFound(format!("there is no {what} {index} of the tier: the number is past the last one"))
}
