//! The virtual tier: opening, extents, transfers, commits.
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

/// A virtual tier: named extents stored over several paths (MLP-Offload section 3.2; commits and checksums are
/// Spillway's own). Thread-safe: threads may use one tier concurrently.
///
/// An extent is a named object with up to 64 byte streams, for example the master weights and moments of a subgroup. A
/// put replaces an extent's contents. `spw_tier_commit` makes all puts so far durable as one step. After a crash at any
/// moment, the next open finds the last committed step complete. Every read verifies the checksum of each block.
pub struct spw_tier(Arc<Tier>);

/// Opens a tier, or creates one. Each path gets a directory job/host/rank-N with a lock file. The lock is held until
/// the tier is closed and its last operation has ended, or until the process ends.
///
/// - SPW_ERR_LOCKED: a live process holds the lock; the message names it.
/// - SPW_ERR_DEADLINE: the file system of a path gave no answer for `stall_ms`.
/// - SPW_ERR_FORMAT: a directory has another format version.
/// - SPW_ERR_FORMAT: the superblocks of the tier are lost, until `spw_tier_collect` removes it.
/// - SPW_ERR_FOREIGN: a directory belongs to another run, rank or number of ranks.
/// - SPW_ERR_FOREIGN: a file or directory belongs to another user, is a symbolic link, or is a file with a second name.
/// - SPW_ERR_PATH_MISSING: a path with committed blocks is not in `options`. SPW_TIER_DEGRADED opens without it.
///
/// New directories have mode 0700 and new files 0600. If the user's own files are accessible to others, or the user's
/// own directories writable by others, the open removes these permissions and logs a warning.
///
/// If paths were opened separately, each without the other, the later commit wins. A tie is SPW_ERR_FOREIGN until one
/// of the paths is opened alone.
///
/// In an object store the lock names the machine by its machine-id. If two machines of the same name share a
/// machine-id, as copies of one image may, a live holder on the other machine counts as dead.
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
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let tier = Tier::open(parse(&record::read(options, "options")?)?)?;
            tier_out.write(Box::into_raw(Box::new(spw_tier(Arc::new(tier)))));
        }
        Ok(())
    })
}

/// Waits for operations in flight for up to `timeout_ms` milliseconds (negative: without limit), and frees the tier.
/// The tier is freed whatever the status. Puts since the last commit are lost; the next open finds the committed state.
/// If a tiered update uses the tier, the tier ends with the update. Streams of tickets that were not waited for must be
/// presumed in use after this call.
///
/// # Safety
/// `tier` is NULL or came from `spw_tier_open`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_close(tier: *mut spw_tier, timeout_ms: i64) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise. A forked child leaves the parent's object untouched.
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

/// Deletes the tier's files from every path and frees the tier. The tier is freed whatever the status. A path with an
/// operation in flight keeps its files, and its lock until the operation ends; the status is then SPW_ERR_BUSY. Delete
/// such files later with `spw_tier_collect`. In a forked child the call is SPW_ERR_UNSUPPORTED and does nothing.
///
/// # Safety
/// As `spw_tier_close`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_destroy(tier: *mut spw_tier) -> spw_status {
    guard(|| {
        if tier.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise. A forked child leaves the parent's files untouched.
        unsafe { open(tier) }?;
        // SAFETY: made by Box::into_raw in spw_tier_open, and given up by the caller.
        match Arc::into_inner(unsafe { Box::from_raw(tier) }.0) {
            Some(tier) => tier.destroy(),
            None => Err(Error::Busy("a tiered update still uses the tier; its files stay".to_string())),
        }
    })
}

/// Deletes the files that a dead run left below `directory`, which may be an `s3://BUCKET/PREFIX`. `host` NULL means
/// this machine's name. A live run is SPW_ERR_LOCKED, a run without files SPW_ERR_NOT_FOUND.
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
    // SAFETY: the caller meets the callees' requirements.
    guard(|| unsafe { Place::of(path(directory, "directory")?).collect(&owner(job, host, rank)?) })
}

/// Finds or creates the extent `name`, with `stream_count` (at most 64) streams of `stream_bytes[i]` bytes each, and
/// writes its number. An existing extent with other streams is SPW_ERR_FOREIGN. The number is valid while the tier is
/// open.
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

/// Removes an extent with the next commit. `spw_tier_define` of the extent before that commit cancels the removal. Both
/// are SPW_ERR_BUSY while a commit is in flight.
///
/// # Safety
/// `tier` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_remove(tier: *mut spw_tier, extent: u32) -> spw_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { open(tier) }?.remove(extent))
}

/// Starts to write an extent, and returns at once with a ticket for `spw_tier_wait`. `streams` has one pointer for each
/// stream. Any alignment is allowed; pinned memory is fastest. `path` is the number of a path. -1 selects the extent's
/// present path, or the path with the least data. If that path fails or is full, another path is used; the wait is an
/// error only if no path accepted the data. The committed contents stay unchanged. SPW_ERR_BUSY while the extent is
/// put, read, moved or verified, or a commit is in flight.
///
/// # Safety
/// `tier` is open. The streams stay unchanged until the ticket was waited for. `ticket_out` points to a u64.
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
    // SAFETY: the caller meets the callee's requirements.
    unsafe { put(tier, extent, streams, &placement, ticket_out) }
}

/// Starts to write an extent as `spw_tier_put`, striped over several paths. `path_blocks[i]` is the number of blocks
/// for path i. Remaining blocks go to the last path with a nonzero entry.
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
    // SAFETY: the caller meets the callee's requirements.
    unsafe { put(tier, extent, streams, &Placement::Striped(parts), ticket_out) }
}

/// Starts to read an extent: the last put that was waited for, or after an open the committed contents. A NULL stream
/// is skipped. The wait succeeds only if every block matches its checksum; SPW_ERR_CORRUPT names path, extent, block
/// and offset.
///
/// # Safety
/// `tier` is open. The tier may write to the streams until the ticket was waited for, after SPW_ERR_DEADLINE for longer
/// (see `spw_tier_wait`), and no other code uses them meanwhile. `ticket_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_tier_get(
    tier: *mut spw_tier,
    extent: u32,
    streams: *const *mut c_void,
    ticket_out: *mut u64,
) -> spw_status {
    guard(|| {
        let ticket_out = out(ticket_out, "ticket_out")?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let tier = open(tier)?;
            let spans = spans(tier, extent, streams.cast(), true)?;
            ticket_out.write(tier.read(extent, &spans, false)?);
        }
        Ok(())
    })
}

/// Waits for a ticket for up to `timeout_ms` milliseconds (0: poll; negative: without limit). After the call the ticket
/// is invalid, except after SPW_ERR_TIMEOUT. `generation_out` (may be NULL) receives the generation that was put or
/// read.
///
/// Two errors leave the streams in use by the system: SPW_ERR_DEADLINE (a path gave no answer within the tier's
/// `stall_ms`) and SPW_ERR_SYSTEM (an I/O engine is lost). Then the caller keeps the memory allocated and unused until
/// the process ends. Memory of spw_pool and spw_pinned may be freed: the library quarantines it until the system
/// answers. After any other status the streams are free.
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

/// Makes all puts so far durable as step `step`, with a payload of up to 1 MiB that the next open returns. The call
/// waits for puts in flight. SPW_ERR_BUSY while another commit is in flight.
///
/// If a put failed since the last commit, the commit returns its error until the extent is put again or
/// `spw_tier_rollback` is called. After any error the next open finds the last committed step. If the devices gave no
/// answer, it may find this step instead.
///
/// If files of a path were removed, renamed or replaced, the path has failed. The commit moves the path's extents to
/// other paths, or it is SPW_ERR_PATH_MISSING.
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

/// Discards all puts since the last commit, after it has waited for puts in flight. Reads return the committed contents
/// again. SPW_ERR_BUSY while a commit is in flight.
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
        // SAFETY: the caller meets the callees' requirements.
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
        // SAFETY: the caller has one pointer for each stream, valid for its bytes.
        unsafe {
            let start = streams.add(n).read().cast_mut().cast::<u8>();
            let len = if start.is_null() && optional { 0 } else { *bytes as usize };
            Span::new(start, len).ok_or_else(|| Error::invalid(format!("streams[{n}]"), "is NULL"))
        }
    };
    shape.streams().iter().enumerate().map(span).collect()
}

/// The tier, if this process opened it.
///
/// # Safety
/// `tier` is NULL or open.
pub(super) unsafe fn open<'a>(tier: *const spw_tier) -> Result<&'a Tier> {
    // SAFETY: NULL, or an open tier by the caller's promise.
    let tier = unsafe { tier.as_ref() }.ok_or_else(|| Error::invalid("tier", "is NULL"))?;
    tier.0.owned()?;
    Ok(&tier.0)
}

/// Shared ownership of the tier, for an object that uses it.
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

/// Upper bound of a payload slice. A commit itself accepts at most 1 MiB ([`crate::tier::MAX_PAYLOAD`]).
pub(super) const MAX_PAYLOAD: u64 = 1 << 30;

fn timeout(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}
