//! Creating, opening, closing and describing arenas.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use crate::arena::{Arena, Create, Open, RegionSpec, collect};
use crate::capi::prelude::*;
use crate::sys::try_vec;

/// How an arena is created. Flags are combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_arena_flag {
    /// Try huge pages: reserved ones for a memfd, transparent ones otherwise. `spw_arena_get_notes` says why there are
    /// none.
    SPW_ARENA_FLAG_HUGE = 1,
    /// Bind the pages to the NUMA node `node`. A refused node is not an error: `spw_arena_get_notes` has the reason.
    SPW_ARENA_FLAG_BIND_NODE = 2,
    /// Remove an arena of this name whose owner has ended. An arena with a live owner is never removed, nor is a file that
    /// is no arena. A file that is empty, or that holds only zeros, counts as an arena whose creation was interrupted.
    SPW_ARENA_FLAG_COLLECT = 4,
}

/// How an arena is opened. Flags are combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_arena_open_flag {
    /// Map it for reading and writing; else for reading only.
    SPW_ARENA_OPEN_FLAG_WRITE = 1,
    /// Open it also if its owner has ended.
    SPW_ARENA_OPEN_FLAG_ORPHAN = 2,
}

c_struct! { first 24;
/// A region to make. Regions begin at whole pages.
pub struct spw_arena_region {
    /// 0
    pub reserved: u32,
    /// Name: 1 to 64 bytes of UTF-8, unique in the arena.
    pub name: In<c_char>,
    /// Length in bytes, at least 1.
    pub bytes: u64,
}
}

c_struct! { first 40;
/// An arena to create.
pub struct spw_arena_options {
    /// A sum of `spw_arena_flag`.
    pub flags: u32,
    /// Name: 1 to 200 letters, digits, dots, dashes and underscores; the file is /dev/shm/spillway-NAME. NULL: a memfd,
    /// which other processes open by a descriptor.
    pub name: In<c_char>,
    /// Regions, 1 to 65536.
    pub regions: In<spw_arena_region>,
    /// Number of regions.
    pub region_count: u64,
    /// NUMA node for SPW_ARENA_FLAG_BIND_NODE.
    pub node: u32,
    /// Number of processes that post results, at most 4096; 0 for none.
    pub processes: u32,
}
}

c_struct! { first 64;
/// An arena as this process sees it. `base`, `bytes` and `fd` describe the memory for a library that registers it,
/// such as one for RDMA: they are valid until `spw_arena_close`, and `id` tells two arenas at one address apart.
pub struct spw_arena_info {
    /// A descriptor of the memory. It may be sent to other processes (SCM_RIGHTS); the arena closes it.
    pub fd: i32,
    /// Address in this process.
    pub base: *mut c_void,
    /// Length of the mapping.
    pub bytes: u64,
    /// A random number of the arena.
    pub id: u64,
    /// Number of regions.
    pub region_count: u64,
    /// Number of processes that post results.
    pub processes: u32,
    /// Process id of the owner.
    pub owner_pid: u32,
    /// 1 if the owner has the arena open, else 0.
    pub owner_lives: u32,
    /// 1 if this handle created the arena, else 0.
    pub is_owner: u32,
    /// 1 if the arena is mapped for writing, else 0.
    pub writable: u32,
    /// 1 if reserved huge pages back it, else 0.
    pub huge: u32,
}
}

/// An arena that this process has mapped. Several threads may use it at once.
pub struct spw_arena(pub(in crate::capi) Arc<Arena>, OpeningProcess);

handle!(spw_arena, "arena", 1, "the arena");

/// Creates an arena. Its memory is allocated and zeroed, its regions have generation 0, and only processes of this user
/// may open it. The handle is its owner: `spw_arena_close` removes the name.
///
/// - SPW_ERR_ARENA_EXISTS: an arena of this name exists. The message says whether its owner lives. An empty file of this
///   name, which an interrupted creation leaves, becomes the arena.
/// - SPW_ERR_ARENA_FORMAT: the file of this name is no arena; it stays.
/// - SPW_ERR_ARENA_FOREIGN: the file of this name belongs to another user, is a link, or has a second name.
/// - SPW_ERR_LIMIT_REACHED: this process holds 1024 locks of arenas and tiers.
/// - SPW_ERR_SYSTEM: there is too little shared memory, or /proc is not mounted.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_create(
    options: In<spw_arena_options>,
    arena_out: Out<*mut spw_arena>,
) -> spw_status {
    guard(|| {
        let create = parse(&options.read("options")?)?;
        let make = || Arena::create(&create).map_err(|error| error.within("options."));
        arena_out.open(|| Ok(spw_arena(Arc::new(make()?), OpeningProcess::current())))
    })
}

/// Opens an arena by its name, with `flags` (a sum of `spw_arena_open_flag`). Waits up to `timeout_ms` milliseconds for
/// an arena that does not exist, is not complete, or whose owner has ended (0: does not wait; negative: without limit).
///
/// - SPW_ERR_ARENA_MISSING: it does not exist.
/// - SPW_ERR_ARENA_PEER_ENDED: its owner has ended.
/// - SPW_ERR_ARENA_FORMAT: it is truncated, damaged, not an arena, or of another version.
/// - SPW_ERR_ARENA_FOREIGN: it belongs to another user.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_open(
    name: In<c_char>,
    flags: u32,
    timeout_ms: i64,
    arena_out: Out<*mut spw_arena>,
) -> spw_status {
    guard(|| {
        let open = Open { timeout: timeout(timeout_ms), ..open_flags(flags)? };
        let name = name.text("name")?;
        arena_out.open(|| Ok(spw_arena(Arc::new(Arena::open(name, open)?), OpeningProcess::current())))
    })
}

/// Opens an arena that was created without a name, by a descriptor of its memfd: received from its owner, or opened as
/// /proc/PID/fd/FD. The caller keeps the descriptor. Errors are those of `spw_arena_open`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_open_fd(fd: i32, flags: u32, arena_out: Out<*mut spw_arena>) -> spw_status {
    guard(|| {
        let open = open_flags(flags)?;
        arena_out.open(|| Ok(spw_arena(Arc::new(Arena::open_fd(fd, open)?), OpeningProcess::current())))
    })
}

/// Unmaps the arena; addresses inside it become invalid once no stage uses it. The owner's close removes the name. If the
/// system refuses that, as under another effective user, the name stays with a warning in the log. A write that has not
/// ended leaves its region torn. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_close(arena: Option<Box<spw_arena>>) -> spw_status {
    guard(|| handle::end(arena))
}

/// Removes the name of an arena whose owner has ended. Processes that have it open keep their memory.
/// SPW_ERR_ARENA_EXISTS if its owner lives, SPW_ERR_ARENA_MISSING if there is none, SPW_ERR_ARENA_FORMAT if the file of
/// this name is no arena; the file stays. A file that is empty, or that holds only zeros, counts as an arena whose creation
/// was interrupted: it is removed.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_collect(name: In<c_char>) -> spw_status {
    guard(|| collect(name.text("name")?))
}

/// Writes the properties of the arena and of its mapping in this process.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_get_info(arena: Option<&spw_arena>, info_out: Out<spw_arena_info>) -> spw_status {
    guard(|| {
        let found = handle::get(arena)?.0.info()?;
        let values = report!(spw_arena_info from found {
            fd, id, processes, owner_lives, is_owner, writable, huge
        } with {
            base: found.span.as_ptr().cast(), bytes: found.span.len() as u64,
            region_count: found.regions as u64, owner_pid: found.owner
        });
        info_out.write(&values, "info_out")
    })
}

/// Writes the requested properties that the arena lacks, such as huge pages, and the reasons. The text is empty if the
/// arena has all of them. `size` and `needed_out` as for every text output.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_get_notes(
    arena: Option<&spw_arena>,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let arena = handle::get(arena)?;
        text_out.put_text(arena.0.notes(), size, needed_out)
    })
}

fn parse(raw: &spw_arena_options) -> Result<Create> {
    let flags = abi_struct::flags("options.flags", raw.flags, 7)?;
    let has = |flag: spw_arena_flag| flags & flag as u32 != 0;
    let given = raw.regions.read_all(raw.region_count, "options.regions")?;
    let mut regions = try_vec::with_capacity("listing the regions", given.len())?;
    for (index, region) in given.iter().enumerate() {
        let at = |error: Error| error.within(&format!("options.regions[{index}]."));
        abi_struct::zero("options.regions.reserved", region.reserved)?;
        let name = region.name.text("name").map_err(at)?.to_string();
        regions.push(RegionSpec { name, bytes: region.bytes });
    }
    let name = if raw.name.is_null() { None } else { Some(raw.name.text("options.name")?.to_string()) };
    Ok(Create {
        name,
        regions,
        processes: raw.processes,
        huge: has(spw_arena_flag::SPW_ARENA_FLAG_HUGE),
        node: has(spw_arena_flag::SPW_ARENA_FLAG_BIND_NODE).then_some(raw.node),
        collect: has(spw_arena_flag::SPW_ARENA_FLAG_COLLECT),
    })
}

fn open_flags(flags: u32) -> Result<Open> {
    let flags = abi_struct::flags("flags", flags, 3)?;
    let has = |flag: spw_arena_open_flag| flags & flag as u32 != 0;
    Ok(Open {
        write: has(spw_arena_open_flag::SPW_ARENA_OPEN_FLAG_WRITE),
        orphan: has(spw_arena_open_flag::SPW_ARENA_OPEN_FLAG_ORPHAN),
        timeout: None,
    })
}
