//! The virtual tier: extents, transfers, commits.

use std::ffi::{c_char, c_void};

use super::open::spw_tier;
use crate::capi::prelude::*;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;
use crate::tier::extent::MAX_STREAMS;
use crate::tier::{ExtentPlacement, Tier};

/// Finds or creates the extent `name`, with `stream_count` (at most 64) streams of `stream_bytes[i]` bytes each, and
/// writes its number. A name is UTF-8 of 1 to 255 bytes. An existing extent with other streams is SPW_ERR_FOREIGN. The
/// number is valid while the tier is open.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_define(
    tier: Option<&spw_tier>,
    name: In<c_char>,
    stream_bytes: In<u64>,
    stream_count: u64,
    extent_out: Out<u32>,
) -> spw_status {
    guard(|| {
        extent_out.required("extent_out")?;
        let tier = &handle::get(tier)?.0;
        if stream_bytes.is_null() {
            return Err(Error::invalid("stream_bytes", "is NULL"));
        }
        if stream_count > MAX_STREAMS as u64 {
            let reason = format!("is {stream_count}, but an extent has at most {MAX_STREAMS} streams");
            return Err(Error::invalid("stream_count", reason));
        }
        let streams = stream_bytes.array(stream_count, "stream_bytes")?;
        extent_out.put(tier.define(name.text("name")?, streams)?, "extent_out")
    })
}

/// Removes an extent with the next commit. `spw_tier_define` of the extent before that commit cancels the removal. Both
/// are SPW_ERR_BUSY while a `spw_tier_commit` is in flight, and wait for a `spw_tier_commit_begin`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_remove(tier: Option<&spw_tier>, extent: u32) -> spw_status {
    guard(|| handle::get(tier)?.0.remove(extent))
}

c_struct! { first 24;
/// The paths that `spw_tier_put` writes an extent to.
pub struct spw_tier_target {
    /// Number of the path, if `path_blocks` is NULL.
    pub path: u32,
    /// NULL, or the number of blocks for each path: the extent is striped over the paths. Remaining blocks go to the
    /// last path with a nonzero entry.
    pub path_blocks: In<u32>,
    /// Number of entries of `path_blocks`.
    pub path_count: u64,
}
}

/// Starts to write an extent, and returns a ticket for `spw_tier_wait`. The call computes the checksums of all blocks
/// before it returns. If the data file must grow, it also waits for the allocation, at most for the I/O timeout.
///
/// Kept: the memory that `streams` points to, unchanged until the wait for the ticket returns. `streams` has one pointer
/// for each stream. Any alignment is allowed; pinned memory is fastest. `target` NULL selects the extent's present path,
/// or the path with the least data.
///
/// If a path fails or is full, another path is used; the wait is an error only if no path accepted the data. The
/// committed contents stay unchanged. SPW_ERR_BUSY while the extent is put, read, moved or verified, or a `spw_tier_commit` is in
/// flight.
///
/// # Safety
/// The streams stay unchanged until the ticket was waited for. `target` is NULL or points to a struct of `struct_size`
/// bytes, `ticket_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_put(
    tier: Option<&spw_tier>,
    extent: u32,
    streams: *const *const c_void,
    target: In<spw_tier_target>,
    ticket_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        ticket_out.required("ticket_out")?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let placement = placement_of(target)?;
            let spans = spans(tier, extent, streams, "streams", false)?;
            ticket_out.put(tier.write(extent, &spans, &placement, None)?, "ticket_out")
        }
    })
}

fn placement_of(target: In<spw_tier_target>) -> Result<ExtentPlacement> {
    let Some(raw) = target.read_optional("target")? else {
        return Ok(ExtentPlacement::Auto);
    };
    if raw.path_blocks.is_null() {
        return match raw.path_count {
            0 => Ok(ExtentPlacement::On(raw.path)),
            _ => Err(Error::invalid("target.path_blocks", "is NULL, but path_count is not 0")),
        };
    }
    if raw.path_count == 0 || raw.path_count > 1 << 16 {
        return Err(Error::invalid(
            "target.path_count",
            format!("is {}, but must be 1 to 65536", raw.path_count),
        ));
    }
    let blocks = raw.path_blocks.array(raw.path_count, "target.path_blocks")?;
    Ok(ExtentPlacement::Striped(
        (0..).zip(blocks.iter().copied()).filter(|(_, blocks)| *blocks > 0).collect(),
    ))
}

/// Starts to read an extent: the last put that was waited for, or after an open the committed contents. `streams_out`
/// has one pointer for each stream; NULL skips the stream.
///
/// Kept: the memory that `streams_out` points to, until the wait for the ticket returns. After SPW_ERR_DEADLINE it stays
/// in use (see `spw_tier_wait`). The wait succeeds only if every block matches its
/// checksum; SPW_ERR_CORRUPT names path, extent, block and offset.
///
/// # Safety
/// No other code uses the streams until the ticket was waited for, or longer as above. `ticket_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_get(
    tier: Option<&spw_tier>,
    extent: u32,
    streams_out: *const *mut c_void,
    ticket_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        ticket_out.required("ticket_out")?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let spans = spans(tier, extent, streams_out.cast(), "streams_out", true)?;
            ticket_out.put(tier.read(extent, &spans)?, "ticket_out")
        }
    })
}

/// Waits for a ticket for up to `timeout_ms` milliseconds (0: poll; negative: without limit). After the call the ticket
/// is invalid, except after SPW_ERR_TIMEOUT. `generation_out` (may be NULL) receives the version of the contents
/// that was put or read.
///
/// Two errors leave the streams in use by the system: SPW_ERR_DEADLINE (a path did not respond within the tier's
/// `io_timeout_ms`) and SPW_ERR_SYSTEM (an I/O engine is lost). Then the caller keeps the memory allocated and unused
/// until the process ends. Memory of spw_pinned_alloc may be freed: the library quarantines it until the
/// operation ends. After any other status the streams are free.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_wait(
    tier: Option<&spw_tier>,
    ticket: u64,
    timeout_ms: i64,
    generation_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let generation = handle::get(tier)?.0.wait(ticket, timeout(timeout_ms))?;
        generation_out.put_optional(generation);
        Ok(())
    })
}

/// Makes all puts so far durable as step `step`, with a payload of up to 1 MiB that the next open returns. The call
/// waits for puts in flight, and for a commit in the background. SPW_ERR_BUSY while another `spw_tier_commit` is in flight, or if a tiered update changed states (see
/// `spw_swap_open`). SPW_ERR_FENCED if another process claimed
/// the tier; every later commit of this handle is SPW_ERR_FENCED too.
///
/// If a put failed since the last commit, the commit returns its error until the extent is put again or
/// `spw_tier_rollback` is called. After any error the next open finds the last committed step. If the devices did
/// not respond, or if the lock file was damaged, it may find this step instead.
///
/// If files of a path were removed, renamed or replaced, the path has failed. The commit moves the path's extents to
/// other paths, or it is SPW_ERR_PATH_MISSING.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_commit(
    tier: Option<&spw_tier>,
    step: u64,
    payload: In<c_void>,
    payload_bytes: u64,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        tier.commit(step, payload.payload(payload_bytes)?)
    })
}

/// Discards all puts since the last commit, after it has waited for puts in flight. Reads return the committed contents
/// again. SPW_ERR_BUSY while a `spw_tier_commit` is in flight (one in the background is waited for), or if a tiered update changed states (see `spw_swap_open`).
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_rollback(tier: Option<&spw_tier>) -> spw_status {
    guard(|| handle::get(tier)?.0.rollback())
}

/// The caller's memory for each stream; with `optional`, NULL is an empty span.
unsafe fn spans(
    tier: &Tier,
    extent: u32,
    streams: *const *const c_void,
    argument: &'static str,
    optional: bool,
) -> Result<Vec<TransferBuffer>> {
    if streams.is_null() {
        return Err(Error::invalid(argument, "is NULL"));
    }
    let shape = tier.shape(extent)?;
    let span = |(n, bytes): (usize, &u64)| {
        // SAFETY: the caller has one pointer for each stream, valid for its bytes.
        unsafe {
            let start = streams.add(n).read().cast_mut().cast::<u8>();
            let len = if start.is_null() && optional { 0 } else { *bytes as usize };
            let span = Span::new(start, len);
            let span = span.ok_or_else(|| Error::invalid(format!("{argument}[{n}]"), "is NULL"))?;
            Ok(TransferBuffer::at_address(span))
        }
    };
    shape.streams().iter().enumerate().map(span).collect()
}
