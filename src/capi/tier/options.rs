//! Options of the virtual tier.

use std::ffi::c_char;
use std::time::Duration;

use crate::capi::io::engine::{backend, turns};
use crate::capi::prelude::*;
use crate::sys::host;
use crate::tier::directory::Owner;
use crate::tier::format::MAX_PATHS;
use crate::tier::options::{Durability, Mode, PathLocation, PathOptions, TierOptions};

/// How `spw_tier_open` treats existing state. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_mode {
    /// Resume a committed state if there is one, else create a tier. SPW_ERR_FOREIGN if this rank's state is in a
    /// directory of another host and no process holds its lock.
    SPW_TIER_MODE_AUTO = 0,
    /// Create a tier. A committed state on one of the paths is SPW_ERR_FOREIGN.
    SPW_TIER_MODE_CREATE = 1,
    /// Resume at the last committed step. Without one it is SPW_ERR_NO_STATE.
    SPW_TIER_MODE_RESUME = 2,
    /// Read the last committed step, or `at_step`, in directories. Nothing is created, written or locked, so several
    /// processes may read at once. `world` may differ from that of the tier. A put, a commit, a removal or a deletion is
    /// SPW_ERR_UNSUPPORTED. If a process has the tier open otherwise, the open is SPW_ERR_LOCKED. A process of another
    /// machine may go unnoticed.
    SPW_TIER_MODE_READ = 3,
}

/// Durability of a commit. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_durability {
    /// The commit waits until the devices report data and superblocks durable (fdatasync). It survives a power cut.
    SPW_TIER_DURABILITY_DATA = 0,
    /// The commit does not wait for the devices. It survives the end of the process, but not always a power cut.
    SPW_TIER_DURABILITY_PROCESS = 1,
    /// As SPW_TIER_DURABILITY_DATA; the commit also syncs directories and reads superblocks back.
    SPW_TIER_DURABILITY_FULL = 2,
}

/// Kinds of paths. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_path_kind {
    /// An existing directory on a local disk or a mounted file system. Or an existing bucket, as `s3://BUCKET/PREFIX`.
    SPW_TIER_PATH_KIND_DIRECTORY = 0,
    /// Memory of this process. Its contents are lost when the process ends, even if committed.
    SPW_TIER_PATH_KIND_MEMORY = 1,
}

/// Flags of a tier, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_flag {
    /// Open without missing paths; `spw_tier_get_opened` counts what is lost.
    SPW_TIER_FLAG_DEGRADED = 1,
    /// Use the page cache, even if the file system supports O_DIRECT.
    SPW_TIER_FLAG_NO_DIRECT = 2,
    /// Resume at `at_step`, which is the last committed step or the step before it (`spw_tier_get_steps`); any other
    /// step is SPW_ERR_NO_STEP. The step before is also SPW_ERR_NO_STEP if a put since the last commit has reused its
    /// space. An open at the step before discards the last step.
    SPW_TIER_FLAG_AT_STEP = 4,
    /// A commit in the background keeps the state of the commit before until the next commit begins, as with a `world`
    /// above 1. For several tiers of one process, whose commits are in flight together and which resume at one step.
    SPW_TIER_FLAG_KEEP_BEFORE = 8,
}

/// Flags of a path, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_path_flag {
    /// Take the memory of SPW_TIER_PATH_KIND_MEMORY from NUMA node `node` while it has some, and then from other nodes. A
    /// refused node gives a warning in the log.
    SPW_TIER_PATH_FLAG_NODE = 1,
}

c_struct! { first 40;
/// One path of a tier. All paths of an array have the same `struct_size`.
pub struct spw_tier_path {
    /// `spw_tier_path_kind`
    pub kind: u32,
    /// A directory that exists, so that an unmounted disk is reported. NULL for SPW_TIER_PATH_KIND_MEMORY.
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
    pub directory: In<c_char>,
    /// Maximum bytes of the path's data file; 0: limited only by the device.
    pub limit_bytes: u64,
    /// Initial bytes of the data file.
    pub reserve_bytes: u64,
    /// Sum of `spw_tier_path_flag`.
    pub flags: u32,
    /// NUMA node, used with SPW_TIER_PATH_FLAG_NODE.
    pub node: u32,
}
}

c_struct! { first 80;
/// Settings of a tier. Zero is the default of every field but struct_size, job and paths.
pub struct spw_tier_options {
    /// `spw_tier_mode`
    pub mode: u32,
    /// Name of the run. It must be valid as a directory name.
    pub job: In<c_char>,
    /// Name of the machine; NULL: this machine's name.
    pub host: In<c_char>,
    /// Rank in the run.
    pub rank: u32,
    /// Number of ranks of the run; 0: 1.
    pub world: u32,
    /// The paths. A reopened tier may list them in any order.
    pub paths: In<spw_tier_path>,
    /// Number of paths, 1 to 256.
    pub path_count: u64,
    /// `spw_tier_durability`
    pub durability: u32,
    /// Sum of `spw_tier_flag`.
    pub flags: u32,
    /// Bytes of a block, a multiple of 4096 up to 1 GiB; 0: 1 MiB. Each block has one checksum. An existing tier keeps
    /// its block size.
    pub block_bytes: u64,
    /// I/O timeout: a path without progress for this many milliseconds has failed; 0: 60 seconds.
    pub io_timeout_ms: u64,
    /// Maximum reads in flight on each path, and also the maximum writes. 0: the largest depth in the profile of
    /// `spillway tune`, or 32. On an object store 0 is 8, and at most 64 requests are in flight.
    pub queue_depth: u32,
    /// `spw_io_backend`
    pub io_backend: u32,
    /// The step to resume at, with SPW_TIER_FLAG_AT_STEP; else 0.
    pub at_step: u64,
    /// Number of processes of one user on this machine that transfer to the device of a directory at a time (MLP-Offload
    /// section 3.2); 0: any number. The others wait, and use their other paths meanwhile. All processes of a device pass the
    /// same number. A transfer of up to 64 KiB needs no turn. Processes see each other through files in /dev/shm, or in the
    /// directory that SPILLWAY_TURNS_DIR names.
    pub turns: u32,
    /// Milliseconds that a process waits for its turn on a device before it proceeds without the turn; 0: 30000. It waits
    /// once for a process that does not move.
    pub turn_timeout_ms: u32,
    /// With SPW_TIER_FLAG_AT_STEP: the tag of the commit to resume from, of `spw_tier_get_steps`. It tells two commits of one
    /// step apart. 0: the last commit of `at_step`.
    pub at_tag: u64,
}
}

pub(in crate::capi) fn owner(job: In<c_char>, host: In<c_char>, rank: u32) -> Result<Owner> {
    let host = if host.is_null() { host::name() } else { host.text("host")?.to_string() };
    Ok(Owner { job: job.text("job")?.to_string(), host, rank })
}

pub(in crate::capi) fn parse(raw: &spw_tier_options) -> Result<TierOptions> {
    abi_struct::flags("options.flags", raw.flags, 15)?;
    let (owner, paths) = (owner(raw.job, raw.host, raw.rank), parse_paths(raw)?);
    let mut options = TierOptions::new(owner.map_err(|error| error.within("options."))?, []);
    options.paths = paths;
    options.world = raw.world.max(1);
    let modes = [Mode::Auto, Mode::Create, Mode::Resume, Mode::Read];
    options.mode = choice("options.mode", raw.mode, "spw_tier_mode", &modes)?;
    let levels = [Durability::Data, Durability::Process, Durability::Full];
    options.durability = choice("options.durability", raw.durability, "spw_tier_durability", &levels)?;
    options.io.backend = backend("options.io_backend", raw.io_backend)?;
    options.at_step = match raw.flags & spw_tier_flag::SPW_TIER_FLAG_AT_STEP as u32 {
        0 if raw.at_step != 0 => {
            return Err(Error::invalid(
                "options.at_step",
                "is set, but options.flags has no SPW_TIER_FLAG_AT_STEP",
            ));
        }
        0 => None,
        _ => Some(raw.at_step),
    };
    options.at_tag = raw.at_tag;
    options.keep_before = raw.flags & spw_tier_flag::SPW_TIER_FLAG_KEEP_BEFORE as u32 != 0;
    options.degraded = raw.flags & spw_tier_flag::SPW_TIER_FLAG_DEGRADED as u32 != 0;
    options.io.direct = raw.flags & spw_tier_flag::SPW_TIER_FLAG_NO_DIRECT as u32 == 0;
    if raw.block_bytes > 0 {
        options.block_bytes = raw.block_bytes;
    }
    if raw.io_timeout_ms > 0 {
        options.io.io_timeout = Some(Duration::from_millis(raw.io_timeout_ms));
    }
    options.io.turns = turns(raw.turns, raw.turn_timeout_ms.into());
    if raw.queue_depth > 0 {
        options.io.depth = raw.queue_depth;
    }
    Ok(options)
}

fn parse_paths(raw: &spw_tier_options) -> Result<Vec<PathOptions>> {
    if raw.paths.is_null() || raw.path_count == 0 || raw.path_count > MAX_PATHS as u64 {
        let reason = format!("must not be NULL, and have 1 to {MAX_PATHS} entries");
        return Err(Error::invalid("options.paths", reason));
    }
    let parse = |one: &spw_tier_path| {
        abi_struct::flags("flags", one.flags, 1)?;
        let node = (one.flags == 1).then_some(one.node);
        let place = match one.kind {
            0 if node.is_some() => {
                return Err(Error::invalid("flags", "ask for a NUMA node, but the path is not in memory"));
            }
            0 => PathLocation::of(one.directory.path("directory")?.to_path_buf()),
            1 if one.directory.is_null() => PathLocation::Memory(node),
            1 => return Err(Error::invalid("directory", "is set, but the path is in memory: set NULL")),
            other => return Err(Error::invalid("kind", format!("{other} is not an spw_tier_path_kind"))),
        };
        let limit = (one.limit_bytes > 0).then_some(one.limit_bytes);
        Ok(PathOptions { location: place, limit, reserve: one.reserve_bytes })
    };
    let given = raw.paths.read_all(raw.path_count, "options.paths")?;
    let each = |(n, one): (usize, &spw_tier_path)| {
        parse(one).map_err(|error: Error| error.within(&format!("options.paths[{n}].")))
    };
    given.iter().enumerate().map(each).collect()
}
