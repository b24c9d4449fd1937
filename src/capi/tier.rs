//! The virtual tier: opening, extents, commits.
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::guard::guard;
use super::library::out;
use super::record;
use super::status::spw_status;
use super::tier_options::{owner, parse, path, spw_tier_options, text};
use crate::error::{Error, Result};
use crate::sys::span::Span;
use crate::tier::options::Place;
use crate::tier::{Placement, Tier};

/// A virtual tier: named extents over several paths. Any number of threads may use one at a time.
///
/// An extent is a name and up to 64 streams of bytes, for a subgroup its master weights and moments. What is put is new
/// until `spw_tier_commit` makes everything put so far durable as one step; a crash at any moment leaves a tier that
/// opens at the last committed step, whole. Every block is checked against its checksum whenever it is read (MLP-Offload,
/// section 3.2, has the tiers; the rest is new).
pub struct spw_tier(Arc<Tier>);

/// Opens a tier, or makes one. Each path gets a directory job/host/rank-N with a lock, held until the tier is closed and
/// its last operation has ended, or the process ends: SPW_ERR_LOCKED names a live holder. Directories and files below a
/// path are the effective user's alone, with modes 0700 and 0600 when they are new: another user's, a symbolic link or a
/// file with a second name is SPW_ERR_FOREIGN. Own files that let others in, and own directories that let others write, are
/// tightened, with a warning in the log. A path whose file system gives no answer for `stall_ms` is SPW_ERR_DEADLINE. A
/// tier whose superblocks are lost is SPW_ERR_FORMAT until it is collected. A directory of another run, rank or number of
/// ranks is SPW_ERR_FOREIGN, one of another format SPW_ERR_FORMAT, and a path that holds committed blocks and is not given
/// SPW_ERR_PATH_MISSING, unless SPW_TIER_DEGRADED. Of paths that went on without each other, each opened without the
/// other, the one that went further counts; two that went as far are SPW_ERR_FOREIGN until one of them is opened alone.
/// In an object store the lock names the machine by its machine-id: where an image brings that id along, a live holder on
/// another machine of the same name is taken for dead.
///
/// # Safety
/// `options` and its paths point to structs of `struct_size` bytes with C strings, `tier_out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_open(
    options: *const spw_tier_options,
    tier_out: *mut *mut spw_tier,
) -> spw_status {
    guard(|| {
        let tier_out = out(tier_out, "tier_out")?;
        // SAFETY: the caller's promises are the callees'.
        unsafe {
            let tier = Tier::open(parse(&record::read(options, "options")?)?)?;
            tier_out.write(Box::into_raw(Box::new(spw_tier(Arc::new(tier)))));
        }
        Ok(())
    })
}

/// Waits for what is under way, at the longest `timeout_ms` milliseconds (negative: for ever), and frees the tier, which
/// is gone whatever is returned. What was not committed is lost; what was is found by the next open. A tier that a tiered
/// update uses ends with the update. Whether the streams of a ticket are free is known only to who has waited for it.
///
/// # Safety
/// `tier` is NULL or came from `spw_tier_open`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_close(tier: *mut spw_tier, timeout_ms: i64) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise. A forked child leaves its copy alone, and everything behind it.
        if tier.is_null() || unsafe { open(tier) }.is_err() {
            return Ok(());
        }
        // SAFETY: made by Box::into_raw in spw_tier_open, and given up by the caller.
        match Arc::into_inner(unsafe { Box::from_raw(tier) }.0) {
            Some(tier) => tier.close(timeout(timeout_ms)),
            None => Ok(()),
        }
    })
}

/// Removes the tier's files from every path and frees the tier, which is gone whatever is returned. A path with an operation
/// that is still in flight keeps its files, and its lock until the operation ends: SPW_ERR_BUSY; collect it then. In a
/// forked child it is SPW_ERR_UNSUPPORTED and does nothing.
///
/// # Safety
/// As `spw_tier_close`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_destroy(tier: *mut spw_tier) -> spw_status {
    guard(|| {
        if tier.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise. A forked child leaves its copy alone, and the files of its parent.
        unsafe { open(tier) }?;
        // SAFETY: made by Box::into_raw in spw_tier_open, and given up by the caller.
        match Arc::into_inner(unsafe { Box::from_raw(tier) }.0) {
            Some(tier) => tier.destroy(),
            None => Err(Error::Busy("a tiered update still uses the tier; its files stay".to_string())),
        }
    })
}

/// Removes what a run that is dead left below `directory`, which may be an `s3://BUCKET/PREFIX`. `host` may be NULL for
/// this machine's name. A live run is SPW_ERR_LOCKED, none is SPW_ERR_NOT_FOUND.
///
/// # Safety
/// The strings are C strings; `host` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_collect(
    directory: *const c_char,
    job: *const c_char,
    host: *const c_char,
    rank: u32,
) -> spw_status {
    // SAFETY: the caller's promises are the callees'.
    guard(|| unsafe { Place::of(path(directory, "directory")?).collect(&owner(job, host, rank)?) })
}

/// Finds the extent with this name, or makes it, with streams of these many bytes. One that exists with other streams is
/// SPW_ERR_FOREIGN. Its number is good while the tier is open.
///
/// # Safety
/// `tier` is open, `name` is a C string, `stream_bytes` points to `stream_count` numbers, `extent_out` to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_define(
    tier: *mut spw_tier,
    name: *const c_char,
    stream_bytes: *const u64,
    stream_count: u64,
    extent_out: *mut u32,
) -> spw_status {
    guard(|| {
        let extent_out = out(extent_out, "extent_out")?;
        if stream_bytes.is_null() || stream_count > 64 {
            return Err(Error::invalid("stream_bytes", "is NULL, or has more than 64 streams"));
        }
        // SAFETY: the caller's promise; checked for NULL.
        unsafe {
            let streams = std::slice::from_raw_parts(stream_bytes, stream_count as usize);
            extent_out.write(open(tier)?.define(text(name, "name")?, streams)?);
        }
        Ok(())
    })
}

/// Takes an extent out with the next commit; defining it again before takes that back. Both are SPW_ERR_BUSY while a commit
/// is under way.
///
/// # Safety
/// `tier` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_remove(tier: *mut spw_tier, extent: u32) -> spw_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { open(tier) }?.remove(extent))
}

/// Begins to write an extent, and returns at once with a ticket to wait for. `streams` has one pointer for each stream;
/// any address is good, pinned memory is fastest. `path` is the number of a path, or -1 for where the extent lies or the
/// least lies; a path that fails or is full is left for another, and the wait tells only if none took it. The committed
/// contents stay as they are. SPW_ERR_BUSY while the extent is put, read, moved or verified, or a commit is under way.
///
/// # Safety
/// `tier` is open; the streams stay as they are until the ticket was waited for; `ticket_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_put(
    tier: *mut spw_tier,
    extent: u32,
    streams: *const *const c_void,
    path: i32,
    ticket_out: *mut u64,
) -> spw_status {
    let placement = match u32::try_from(path) {
        Ok(path) => Placement::On(path),
        Err(_) if path == -1 => Placement::Auto,
        Err(_) => return guard(|| Err(Error::invalid("path", format!("{path} is neither a path nor -1")))),
    };
    // SAFETY: the caller's promises are the callee's.
    unsafe { put(tier, extent, streams, &placement, ticket_out) }
}

/// As `spw_tier_put`, in pieces over several paths: `path_blocks` has for each path, by number, how many blocks it
/// takes. Blocks left over go to the last one that takes any.
///
/// # Safety
/// As `spw_tier_put`; `path_blocks` points to `path_count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_put_striped(
    tier: *mut spw_tier,
    extent: u32,
    streams: *const *const c_void,
    path_blocks: *const u32,
    path_count: u64,
    ticket_out: *mut u64,
) -> spw_status {
    if path_blocks.is_null() || path_count == 0 || path_count > 1 << 16 {
        return guard(|| Err(Error::invalid("path_blocks", "is NULL, empty or too long")));
    }
    // SAFETY: the caller's promise; checked for NULL.
    let blocks = unsafe { std::slice::from_raw_parts(path_blocks, path_count as usize) };
    let parts = (0..).zip(blocks.iter().copied()).filter(|(_, blocks)| *blocks > 0).collect();
    // SAFETY: the caller's promises are the callee's.
    unsafe { put(tier, extent, streams, &Placement::Striped(parts), ticket_out) }
}

/// Begins to read what was last put and waited for, or the committed contents after an open. A NULL stream is left out.
/// The wait succeeds only if every block matches its checksum; SPW_ERR_CORRUPT names path, extent, block and offset.
///
/// # Safety
/// `tier` is open; the streams may be written to until the ticket was waited for, after SPW_ERR_DEADLINE for longer (see
/// `spw_tier_wait`), and nobody else uses them meanwhile; `ticket_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_get(
    tier: *mut spw_tier,
    extent: u32,
    streams: *const *mut c_void,
    ticket_out: *mut u64,
) -> spw_status {
    guard(|| {
        let ticket_out = out(ticket_out, "ticket_out")?;
        // SAFETY: the caller's promises are the callees'.
        unsafe {
            let tier = open(tier)?;
            let spans = spans(tier, extent, streams.cast(), true)?;
            ticket_out.write(tier.read(extent, &spans, false)?);
        }
        Ok(())
    })
}

/// Waits for a ticket, at the longest `timeout_ms` milliseconds (0: only looks; negative: for ever), and is done with it,
/// except after SPW_ERR_TIMEOUT. `generation_out` (may be NULL) receives the generation that was put or read.
///
/// After SPW_ERR_DEADLINE (a path gave no answer within the tier's `stall_ms`) and SPW_ERR_SYSTEM (an I/O engine is lost)
/// the system may still use the streams at any time: their memory stays allocated, and out of use, until the process
/// ends. Memory of spw_pool and spw_pinned may be freed; it is kept out of use until the system answers. After any other
/// status nothing writes to the streams any more.
///
/// # Safety
/// `tier` is open, `generation_out` is NULL or points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_wait(
    tier: *mut spw_tier,
    ticket: u64,
    timeout_ms: i64,
    generation_out: *mut u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise; NULL is not written to.
        unsafe {
            let generation = open(tier)?.wait(ticket, timeout(timeout_ms))?;
            if !generation_out.is_null() {
                generation_out.write(generation);
            }
        }
        Ok(())
    })
}

/// Makes everything put so far durable, as step `step`, with up to 1 MiB of the caller's own bytes, which the next open
/// gives back. It waits for puts under way. If one of them failed since the last commit, its error is returned until the
/// extent is put again or `spw_tier_rollback`; after any error the last committed step is still what an open finds, or,
/// where the devices gave no answer, this one. A path whose files were removed, renamed or replaced fails here: what lies
/// there is moved to other paths, or the commit is SPW_ERR_PATH_MISSING.
///
/// # Safety
/// `tier` is open, `payload` points to `payload_bytes` bytes, or is NULL if there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_commit(
    tier: *mut spw_tier,
    step: u64,
    payload: *const c_void,
    payload_bytes: u64,
) -> spw_status {
    guard(|| {
        if payload.is_null() && payload_bytes > 0 {
            return Err(Error::invalid("payload", "is NULL, but payload_bytes is not 0"));
        }
        if payload_bytes > MAX_PAYLOAD {
            return Err(Error::invalid("payload_bytes", format!("{payload_bytes} is over {MAX_PAYLOAD}")));
        }
        let payload = match payload_bytes {
            0 => &[][..],
            // SAFETY: the caller's promise; NULL has no bytes.
            bytes => unsafe { std::slice::from_raw_parts(payload.cast::<u8>(), bytes as usize) },
        };
        // SAFETY: the caller's promise.
        unsafe { open(tier) }?.commit(step, payload)
    })
}

/// Forgets everything put since the last commit: reads see the committed contents again.
///
/// # Safety
/// `tier` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_rollback(tier: *mut spw_tier) -> spw_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { open(tier) }?.roll_back())
}

unsafe fn put(
    tier: *mut spw_tier,
    extent: u32,
    streams: *const *const c_void,
    placement: &Placement,
    ticket_out: *mut u64,
) -> spw_status {
    guard(|| {
        let ticket_out = out(ticket_out, "ticket_out")?;
        // SAFETY: the caller's promises are the callees'.
        unsafe {
            let tier = open(tier)?;
            let spans = spans(tier, extent, streams, false)?;
            ticket_out.write(tier.write(extent, &spans, placement, None)?);
        }
        Ok(())
    })
}

/// The caller's memory for each stream; with `optional`, NULL is an empty span.
unsafe fn spans(
    tier: &Tier,
    extent: u32,
    streams: *const *const c_void,
    optional: bool,
) -> Result<Vec<Span>> {
    if streams.is_null() {
        return Err(Error::invalid("streams", "is NULL"));
    }
    let shape = tier.shape(extent)?;
    let span = |(n, bytes): (usize, &u64)| {
        // SAFETY: the caller has one pointer for each stream, good for its bytes.
        unsafe {
            let start = streams.add(n).read().cast_mut().cast::<u8>();
            let len = if start.is_null() && optional { 0 } else { *bytes as usize };
            Span::new(start, len).ok_or_else(|| Error::invalid(format!("streams[{n}]"), "is NULL"))
        }
    };
    shape.streams().iter().enumerate().map(span).collect()
}

/// The tier, in the process that opened it.
///
/// # Safety
/// `tier` is NULL or open.
pub(super) unsafe fn open<'a>(tier: *const spw_tier) -> Result<&'a Tier> {
    // SAFETY: NULL, or an open tier by the caller's promise.
    let tier = unsafe { tier.as_ref() }.ok_or_else(|| Error::invalid("tier", "is NULL"))?;
    tier.0.owned()?;
    Ok(&tier.0)
}

/// The tier, for an object that lives on it.
///
/// # Safety
/// `tier` is NULL or open.
pub(super) unsafe fn shared(tier: *const spw_tier) -> Result<Arc<Tier>> {
    // SAFETY: NULL, or an open tier by the caller's promise.
    unsafe {
        open(tier)?;
        Ok(Arc::clone(&(*tier).0))
    }
}

/// `None`, for ever, if negative.
/// Most bytes that a commit keeps for the caller.
pub(super) const MAX_PAYLOAD: u64 = 1 << 30;

fn timeout(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}
