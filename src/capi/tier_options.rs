//! Options of the virtual tier.
#![allow(non_camel_case_types)]

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::record::{self, Record};
use crate::error::{Error, Result};
use crate::io::options::Choice;
use crate::sys::host;
use crate::tier::directory::Owner;
use crate::tier::options::{Durability, Mode, PathOptions, Place, TierOptions};

/// How `spw_tier_open` treats existing state. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_mode {
    /// Resume a committed state if there is one, else create a tier. SPW_ERR_FOREIGN if this rank's state is in a
    /// directory of another host and no process holds its lock.
    SPW_TIER_AUTO = 0,
    /// Create a tier. A committed state on one of the paths is SPW_ERR_FOREIGN.
    SPW_TIER_CREATE = 1,
    /// Resume at the last committed step. Without one it is SPW_ERR_NO_STATE.
    SPW_TIER_RESUME = 2,
}

/// Durability of a commit. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_durability {
    /// The commit waits until the devices report data and superblocks durable (fdatasync). It survives a power cut.
    SPW_TIER_DURABLE_DATA = 0,
    /// The commit does not wait for the devices. It survives the end of the process, but not always a power cut.
    SPW_TIER_DURABLE_PROCESS = 1,
    /// As SPW_TIER_DURABLE_DATA; the commit also syncs directories and reads superblocks back.
    SPW_TIER_DURABLE_FULL = 2,
}

/// Kinds of paths. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_kind {
    /// An existing directory on a local disk or a mounted file system. Or an existing bucket, as `s3://BUCKET/PREFIX`.
    SPW_TIER_DIRECTORY = 0,
    /// Memory of this process. Its contents are lost when the process ends, even if committed.
    SPW_TIER_MEMORY = 1,
}

/// Flags of a tier, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_flag {
    /// Open without missing paths; `spw_tier_opened` counts what is lost.
    SPW_TIER_DEGRADED = 1,
    /// Use the page cache, even if the file system supports O_DIRECT.
    SPW_TIER_NO_DIRECT = 2,
    /// Resume at `at_step`, which is the last committed step or the step before it (`spw_tier_steps`); any other step
    /// is SPW_ERR_NO_STEP. The step before is also SPW_ERR_NO_STEP if a put since the last commit has reused its space.
    /// An open at the step before discards the last step.
    SPW_TIER_AT_STEP = 4,
}

/// One path of a tier.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_tier_path {
    /// `sizeof(spw_tier_path)`, the same in all of an array.
    pub struct_size: u32,
    /// `spw_tier_kind`
    pub kind: u32,
    /// An existing directory; a disk that is not mounted is therefore an error. NULL for SPW_TIER_MEMORY.
    /// `s3://BUCKET/PREFIX` is a location in an S3-compatible object store. Its access settings are the environment
    /// variables of the AWS tools:
    ///
    /// - AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL
    /// - AWS_REGION or AWS_DEFAULT_REGION
    /// - AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN
    /// - AWS_CA_BUNDLE
    ///
    /// A missing variable is SPW_ERR_INVALID_ARGUMENT. A library built without the feature `s3` returns
    /// SPW_ERR_UNSUPPORTED.
    pub directory: *const c_char,
    /// Maximum bytes of the path's data file; 0: limited only by the device.
    pub limit_bytes: u64,
    /// Initial bytes of the data file.
    pub reserve_bytes: u64,
}

// SAFETY: integers and a pointer without padding; a null pointer is valid.
unsafe impl Record for spw_tier_path {
    const FIRST_SIZE: usize = 32;
    const NAME: &'static str = "spw_tier_path";
}

/// Settings of a tier. Zero is the default of every field but struct_size, job and paths.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_tier_options {
    /// `sizeof(spw_tier_options)`
    pub struct_size: u32,
    /// `spw_tier_mode`
    pub mode: u32,
    /// Name of the run. It must be valid as a directory name.
    pub job: *const c_char,
    /// Name of the machine; NULL: this machine's name.
    pub host: *const c_char,
    /// Rank in the run.
    pub rank: u32,
    /// Number of ranks of the run; 0: 1.
    pub world: u32,
    /// The paths. A reopened tier may list them in any order.
    pub paths: *const spw_tier_path,
    /// Number of paths.
    pub path_count: u64,
    /// `spw_tier_durability`
    pub durability: u32,
    /// Sum of `spw_tier_flag`.
    pub flags: u32,
    /// Bytes of a block, a multiple of 4096; 0: 1 MiB. Each block has one checksum. An existing tier keeps its block
    /// size.
    pub block_bytes: u64,
    /// I/O timeout: a path without progress for this many milliseconds has failed; 0: 60 seconds.
    pub stall_ms: u64,
    /// Maximum reads in flight on each path, and also the maximum writes; 0: 32, or 8 on an object store, which allows
    /// at most 64.
    pub queue_depth: u32,
    /// `spw_io_backend`
    pub io_backend: u32,
    /// The step to resume at, with SPW_TIER_AT_STEP; else 0.
    pub at_step: u64,
}

// SAFETY: integers and pointers without padding; null pointers are valid.
unsafe impl Record for spw_tier_options {
    const FIRST_SIZE: usize = 80;
    const NAME: &'static str = "spw_tier_options";
}

pub(super) unsafe fn owner(job: *const c_char, host: *const c_char, rank: u32) -> Result<Owner> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        let host = if host.is_null() { host::name() } else { text(host, "host")?.to_string() };
        Ok(Owner { job: text(job, "job")?.to_string(), host, rank })
    }
}

pub(super) unsafe fn parse(raw: &spw_tier_options) -> Result<TierOptions> {
    if raw.flags > 7 {
        return Err(Error::invalid("options.flags", format!("{:#x} has unknown bits", raw.flags)));
    }
    let wrong = |field: &'static str, value: u32| {
        Err(Error::invalid(field, format!("{value} is not one of the enum")))
    };
    // SAFETY: the caller meets the callees' requirements.
    let (owner, paths) = unsafe { (owner(raw.job, raw.host, raw.rank), parse_paths(raw)?) };
    let mut options = TierOptions::new(owner.map_err(|error| error.within("options."))?, []);
    options.paths = paths;
    options.world = raw.world.max(1);
    options.mode = match raw.mode {
        0 => Mode::Auto,
        1 => Mode::Create,
        2 => Mode::Resume,
        other => return wrong("options.mode", other),
    };
    options.durability = match raw.durability {
        0 => Durability::Data,
        1 => Durability::Process,
        2 => Durability::Full,
        other => return wrong("options.durability", other),
    };
    options.io.backend = match raw.io_backend {
        0 => Choice::Auto,
        1 => Choice::Uring,
        2 => Choice::Threads,
        other => return wrong("options.io_backend", other),
    };
    options.at_step = match raw.flags & spw_tier_flag::SPW_TIER_AT_STEP as u32 {
        0 if raw.at_step != 0 => return Err(Error::invalid("options.at_step", "needs SPW_TIER_AT_STEP")),
        0 => None,
        _ => Some(raw.at_step),
    };
    options.degraded = raw.flags & spw_tier_flag::SPW_TIER_DEGRADED as u32 != 0;
    options.io.direct = raw.flags & spw_tier_flag::SPW_TIER_NO_DIRECT as u32 == 0;
    if raw.block_bytes > 0 {
        options.block_bytes = raw.block_bytes;
    }
    if raw.stall_ms > 0 {
        options.io.stall = Some(Duration::from_millis(raw.stall_ms));
    }
    if raw.queue_depth > 0 {
        options.io.depth = raw.queue_depth;
    }
    Ok(options)
}

unsafe fn parse_paths(raw: &spw_tier_options) -> Result<Vec<PathOptions>> {
    if raw.paths.is_null() || raw.path_count == 0 || raw.path_count > 256 {
        return Err(Error::invalid("options.paths", "is NULL, or not 1 to 256"));
    }
    let parse = |n: u64| {
        // SAFETY: the caller's array has path_count structs, each of the first one's struct_size bytes.
        unsafe {
            let stride = record::stride(raw.paths, "options.paths")?;
            let from = raw.paths.cast::<u8>().add(n as usize * stride).cast();
            let one: spw_tier_path = record::read(from, "options.paths")?;
            let place = match one.kind {
                0 => Place::of(path(one.directory, "directory")?),
                1 => Place::Memory,
                other => return Err(Error::invalid("kind", format!("{other} is not an spw_tier_kind"))),
            };
            let limit = (one.limit_bytes > 0).then_some(one.limit_bytes);
            Ok(PathOptions { place, limit, reserve: one.reserve_bytes })
        }
    };
    let each = |n: u64| parse(n).map_err(|error: Error| error.within(&format!("options.paths[{n}].")));
    (0..raw.path_count).map(each).collect()
}

/// Reads a C string of UTF-8.
pub(super) unsafe fn text<'a>(start: *const c_char, argument: &'static str) -> Result<&'a str> {
    if start.is_null() {
        return Err(Error::invalid(argument, "is NULL"));
    }
    // SAFETY: not NULL, and a C string by the caller's promise.
    unsafe { CStr::from_ptr(start) }.to_str().map_err(|_| Error::invalid(argument, "is not UTF-8"))
}

pub(super) unsafe fn path(start: *const c_char, argument: &'static str) -> Result<PathBuf> {
    if start.is_null() {
        return Err(Error::invalid(argument, "is NULL"));
    }
    // SAFETY: not NULL, and a C string by the caller's promise.
    let bytes = unsafe { CStr::from_ptr(start) }.to_bytes();
    Ok(Path::new(OsStr::from_bytes(bytes)).to_path_buf())
}
