//! The virtual tier: opening, closing, deleting.

use std::ffi::c_char;
use std::sync::Arc;

use super::options::{owner, parse, spw_tier_options};
use crate::capi::handle::Handle;
use crate::capi::prelude::*;
use crate::tier::Tier;
use crate::tier::options::PathLocation;

/// A virtual tier: named extents stored over several paths (MLP-Offload section 3.2; commits and checksums are
/// Spillway's own).
///
/// An extent is a named object with up to 64 byte streams, for example the master weights and moments of a subgroup. A
/// put replaces an extent's contents. `spw_tier_commit` makes all puts so far durable as one step. After a crash at any
/// moment, the next open finds the last committed step complete, or the step whose commit was in flight. What a power
/// cut leaves depends on the durability (docs/promises.md). Every read verifies the checksum of each block.
pub struct spw_tier(pub(in crate::capi) Arc<Tier>, OpeningProcess);

handle!(spw_tier, "tier", 1, "the tier");

/// Opens a tier, or creates one. Each path gets a directory job/host/rank-N with a lock file. The lock is held until
/// the tier is closed and its last operation has ended, or until the process ends.
///
/// - SPW_ERR_LOCKED: a live process holds the lock; the message names it. On a network, cluster or FUSE file system the
///   call may wait 21 s for a sign of life of a process on another machine (docs/tier.md).
/// - SPW_ERR_DEADLINE: the file system of a path did not respond within `io_timeout_ms`.
/// - SPW_ERR_FORMAT: a directory has another format version.
/// - SPW_ERR_FORMAT: the superblocks of the tier are lost, until `spw_tier_collect` removes it.
/// - SPW_ERR_FOREIGN: what was found does not match the options, or is not a file of this user alone. The comment of the
///   status lists the causes.
/// - SPW_ERR_PATH_MISSING: a path of the last open is missing, or is not in `options`. SPW_TIER_FLAG_DEGRADED opens
///   without it; a path that holds no blocks is then no longer one of the tier.
///
/// New directories have mode 0700 and new files 0600. If the user's own files are accessible to others, or the user's
/// own directories writable by others, the open removes these permissions and logs a warning.
///
/// If paths were opened separately, each without the other, the superblock with the higher sequence number wins. Each
/// open and each commit writes one superblock with the next number. Different superblocks of the same number are
/// SPW_ERR_FOREIGN until one of the paths is opened alone.
///
/// In an object store the lock names the machine by its machine-id. If two machines of the same name share a
/// machine-id, as copies of one image may, a live holder on the other machine counts as dead.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_open(options: In<spw_tier_options>, tier_out: Out<*mut spw_tier>) -> spw_status {
    guard(|| {
        let options = parse(&options.read("options")?)?;
        tier_out.open(|| Ok(spw_tier(Arc::new(Tier::open(options)?), OpeningProcess::current())))
    })
}

/// Lets transfers of the tier begin without turns (`turns` of `spw_tier_options`) from now on, and with them those that wait for
/// one. For a program that ends: what it waits for before `spw_tier_close` then waits for no other process.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_end_turns(tier: Option<&spw_tier>) -> spw_status {
    guard(|| {
        handle::get(tier)?.0.end_turns();
        Ok(())
    })
}

/// Waits for operations in flight for up to `timeout_ms` milliseconds (0: polls; negative: without limit), and frees the tier.
/// They wait for no turns. The tier is freed whatever the status. After SPW_ERR_TIMEOUT the streams of tickets in flight must
/// stay allocated and unused for the rest of the process. Puts since the last commit are lost, and so are the errors of those
/// that no call waited for; the next open finds the committed state.
///
/// If a tiered update, a window, an export or a commit in the background uses the tier, this call waits for nothing. The
/// library frees the tier when that use has ended. Until then the streams of tickets may be in use.
///
/// SPW_ERR_DEADLINE: a file system did not respond to the close of the files within the I/O timeout, or within the rest of
/// `timeout_ms`, at least 1 s. The close continues without the caller, and the lock is held until it ends.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_close(tier: Option<Box<spw_tier>>, timeout_ms: i64) -> spw_status {
    guard(|| {
        let Some(opened) = handle::close(tier) else { return Ok(()) };
        opened.0.end_turns();
        Arc::into_inner(opened.0).map_or(Ok(()), |tier| tier.close(timeout(timeout_ms)))
    })
}

/// Deletes the tier's files from every path and frees the tier. The tier is freed whatever the status. A path with an
/// operation in flight keeps its files, and its lock until the operation ends; the status is then SPW_ERR_BUSY. It is
/// SPW_ERR_BUSY too while a tiered update, a window, an export or a commit in the background uses the tier, which then keeps its files. Delete such files later with
/// `spw_tier_collect`. A directory or file that was renamed or replaced while the tier was open is
/// SPW_ERR_PATH_MISSING, and its path keeps all files. A file system that does not respond within the I/O timeout is
/// SPW_ERR_DEADLINE; the deletion continues without the caller. In a forked child the call is SPW_ERR_UNSUPPORTED and does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_destroy(tier: Option<Box<spw_tier>>) -> spw_status {
    guard(|| {
        let forked = tier.as_ref().map_or(Ok(()), |tier| tier.check_process());
        let Some(opened) = handle::close(tier) else { return forked };
        match Arc::into_inner(opened.0) {
            Some(tier) => tier.destroy(),
            None => Err(Error::Busy(
                "an open spw_swap or spw_window, an export or a commit in the background still uses the tier; its files were not removed".to_string(),
            )),
        }
    })
}

/// Deletes the files that a dead run left below `directory`, which may be an `s3://BUCKET/PREFIX`. `host` NULL means
/// this machine's name. A live run is SPW_ERR_LOCKED, a run without files SPW_ERR_NOT_FOUND.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_collect(
    directory: In<c_char>,
    job: In<c_char>,
    host: In<c_char>,
    rank: u32,
) -> spw_status {
    guard(|| PathLocation::of(directory.path("directory")?.to_path_buf()).collect(&owner(job, host, rank)?))
}
