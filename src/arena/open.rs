//! Creating and opening arenas.
//!
//! Invariants:
//! - The magic is stored last. A file without it is not complete.
//! - The header is read from the file and checked before the memory is mapped.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::handle::{Arena, Notes, OWNER_LOCK, OpenedFile};
use super::layout::{HEADER, Identity, Layout, MAGIC, RegionSpec};
use super::name::NamedFile;
use super::owner::{identity, own_description, take_name, take_owner_lock};
use crate::error::{ArenaError, ArenaKind, Error, Result};
use crate::sys::private_files::{self, OpenFlags};
use crate::sys::shared_memory::{self, MapOptions, SharedMapping};
use crate::sys::{descriptor, fork, memory, range_lock, try_vec};

/// Period at which an open looks for an arena that does not exist yet.
const PERIOD: Duration = Duration::from_millis(2);

/// An arena to create.
#[derive(Debug, Clone, Default)]
pub struct Create {
    /// Its name; `None` for anonymous memory, which other processes open by a descriptor.
    pub name: Option<String>,
    /// Its regions.
    pub regions: Vec<RegionSpec>,
    /// Number of processes that post verdicts; 0 for none.
    pub processes: u32,
    /// Try huge pages.
    pub huge: bool,
    /// NUMA node of its pages.
    pub node: Option<u32>,
    /// Remove an arena of this name that an owner left behind.
    pub collect: bool,
}

/// How an arena is opened.
#[derive(Debug, Clone, Copy, Default)]
pub struct Open {
    /// For writing as well.
    pub write: bool,
    /// Also if its owner has ended.
    pub orphan: bool,
    /// How long to wait for an arena that does not exist yet, or whose owner has ended; `None` without limit.
    pub timeout: Option<Duration>,
}

impl Arena {
    /// Creates an arena and its regions, which hold zeros in generation 0. This handle is its owner. Errors: an arena
    /// of this name exists; no room.
    pub fn create(options: &Create) -> Result<Arena> {
        let reserved = options.huge && options.name.is_none();
        let whole = |end| shared_memory::whole_pages(end, reserved);
        let layout = Layout::new(&options.regions, options.processes, whole)?;
        check_room(&layout)?;
        match &options.name {
            None => create_anonymous(layout, options),
            Some(name) => create_named(NamedFile::new(name)?, layout, options),
        }
    }

    /// Opens the arena of this name.
    pub fn open(name: &str, options: Open) -> Result<Arena> {
        let named = NamedFile::new(name)?;
        let began = Instant::now();
        loop {
            let flags = OpenFlags { read: true, write: options.write, ..OpenFlags::default() };
            let outcome = named.open(flags).and_then(|file| adopt(file, named.title(), false, options));
            let may_come = matches!(&outcome, Err(error) if
                matches!(error.arena_kind(), Some(ArenaKind::Missing | ArenaKind::PeerEnded)));
            if !may_come || options.timeout.is_some_and(|limit| began.elapsed() >= limit) {
                return outcome;
            }
            std::thread::sleep(PERIOD);
        }
    }

    /// Opens the arena of a memfd, which the descriptor `fd` of this process names. The descriptor stays the caller's.
    pub fn open_fd(fd: RawFd, options: Open) -> Result<Arena> {
        let failed = |error: io::Error| descriptor::refusal("fd", fd, &error);
        let title = format!("the arena of descriptor {fd}");
        let given = File::from(descriptor::duplicate(fd).map_err(failed)?);
        check_kind(&given, &title, true)?;
        let file =
            shared_memory::reopen(given.as_raw_fd(), options.write).map_err(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    ArenaError::of(ArenaKind::Foreign, title.clone(), error.to_string())
                }
                _ => Error::system("opening the descriptor of an arena anew by its name in /proc", &error),
            })?;
        adopt(file, &title, true, options)
    }
}

fn create_anonymous(layout: Layout, options: &Create) -> Result<Arena> {
    let failed = |error: io::Error| Error::system("creating a memfd for an arena", &error);
    let mut notes = Notes::default();
    let map = MapOptions { write: true, huge: options.huge, node: options.node };
    let mut made = shared_memory::anonymous("spillway-arena", layout.total, options.huge).map_err(failed)?;
    let mut mapped = SharedMapping::map(&made.file, layout.total, map);
    if let (true, Err(error)) = (made.huge, &mapped) {
        notes.add(format!("no reserved huge pages: {error}"));
        made = shared_memory::anonymous("spillway-arena", layout.total, false).map_err(failed)?;
        mapped = SharedMapping::map(&made.file, layout.total, map);
    }
    if let Some(error) = &made.refused {
        notes.add(format!("no reserved huge pages: {error}"));
    }
    if options.huge && !made.huge {
        notes.transparent();
    }
    let locks = own_description(&made.file, true)?;
    take_owner_lock(&locks)?;
    let title = "the arena".to_string();
    let parts =
        OpenedFile { title, layout, locks, shared: made.file, is_owner: true, huge: made.huge, notes };
    complete(parts, mapped)
}

fn create_named(named: NamedFile, layout: Layout, options: &Create) -> Result<Arena> {
    let (file, locks) = take_name(&named, options.collect)?;
    let mut notes = Notes::default();
    if options.huge {
        notes.transparent();
    }
    let found = identity(&file)?;
    let map = MapOptions { write: true, huge: options.huge, node: options.node };
    let title = named.title().to_string();
    let complete = || {
        file.set_len(layout.total as u64).map_err(|error| no_room(&layout, &error))?;
        let mapped = SharedMapping::map(&file, layout.total, map);
        let shared = file.try_clone().map_err(|error| Error::system("duplicating a descriptor", &error))?;
        complete(OpenedFile { title, layout, locks, shared, is_owner: true, huge: false, notes }, mapped)
    };
    match complete() {
        Ok(arena) => Ok(arena.owning(named)),
        Err(error) => {
            named.remove_if(found);
            Err(error)
        }
    }
}

/// Allocates the memory of a new file that this process has locked as the owner, and writes the header.
fn complete(mut parts: OpenedFile, mapped: io::Result<(SharedMapping, Option<io::Error>)>) -> Result<Arena> {
    let (mapping, unbound) = mapped.map_err(|error| Error::system("mapping an arena", &error))?;
    if let Some(error) = unbound {
        parts.notes.add(format!("not bound to the NUMA node: {error}"));
    }
    let layout = &parts.layout;
    shared_memory::allocate(&parts.shared, layout.total).map_err(|error| no_room(layout, &error))?;
    let identity = Identity { id: random_id(), owner: fork::id() };
    mapping.write(0, &layout.encode(identity)?);
    mapping.store64(0, u64::from_le_bytes(MAGIC), Ordering::Release);
    Arena::of(parts, identity, mapping)
}

/// Refuses a size that the system would grant and that ends the process: a file above the limit of this process raises
/// SIGXFSZ, and for one above the available memory the system kills processes (out of memory).
fn check_room(layout: &Layout) -> Result<()> {
    let wanted = layout.total as u64;
    let refused = |errno| Err(no_room(layout, &io::Error::from_raw_os_error(errno)));
    if memory::file_size_limit().is_some_and(|limit| wanted > limit) {
        return refused(libc::EFBIG);
    }
    if let Some(available) = memory::available_bytes().filter(|available| wanted > *available) {
        let reason = format!("{wanted} bytes exceed the {available} bytes of available memory");
        return Err(Error::System { what: "allocating shared memory", reason });
    }
    Ok(())
}

fn no_room(layout: &Layout, error: &io::Error) -> Error {
    let reason = format!("{} bytes: {error}", layout.total).replace("os error", "errno");
    Error::System { what: "allocating shared memory", reason }
}

/// A random number that identifies an arena. The standard library seeds its hashes at random.
fn random_id() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(fork::id())
}

/// Maps a file of shared memory that should be an arena.
fn adopt(file: File, title: &str, sealed: bool, options: Open) -> Result<Arena> {
    let size = check_kind(&file, title, sealed)?;
    let format = |reason: String| ArenaError::of(ArenaKind::Format, title, reason);
    let incomplete =
        || ArenaError::of(ArenaKind::Missing, title, "its owner has not completed it; wait for the owner");
    let unreadable = |error: io::Error| Error::system("reading the header of an arena", &error);
    if size == 0 {
        return Err(incomplete());
    }
    if size < HEADER as u64 {
        return Err(format(format!("it has {size} bytes, fewer than a header")));
    }
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0).map_err(unreadable)?;
    if header[..8] == [0; 8] {
        return Err(incomplete());
    }
    let bytes = Layout::described(&header, size).map_err(format)?;
    let mut described = try_vec::from_fn("reading the header of an arena", bytes, |_| 0_u8)?;
    file.read_exact_at(&mut described, 0).map_err(unreadable)?;
    let (layout, identity) = Layout::decode(&described).map_err(format)?;
    let locks = own_description(&file, options.write)?;
    let held = locks.file().map(|file| range_lock::is_held_elsewhere(file, OWNER_LOCK));
    let lives = held.transpose().map_err(|error| Error::system("looking at a lock of an arena", &error))?;
    if lives != Some(true) && !options.orphan {
        let detail = format!(
            "its owner, process {}, has ended; open it with the flag for orphans, or collect it",
            identity.owner
        );
        return Err(ArenaError::of(ArenaKind::PeerEnded, title, detail));
    }
    let map = MapOptions { write: options.write, huge: false, node: None };
    let (mapping, _) = SharedMapping::map(&file, layout.total, map)
        .map_err(|error| Error::system("mapping an arena", &error))?;
    let (title, notes) = (title.to_string(), Notes::default());
    let parts = OpenedFile { title, layout, locks, shared: file, is_owner: false, huge: false, notes };
    Arena::of(parts, identity, mapping)
}

/// The size of a file that may hold an arena of this user.
fn check_kind(file: &File, title: &str, sealed: bool) -> Result<u64> {
    let unknown = |error: io::Error| Error::system("looking at shared memory", &error);
    let owner = file.metadata().map_err(unknown)?.uid();
    if owner != private_files::user() {
        let detail =
            format!("it is of user {owner}, and this process runs as user {}", private_files::user());
        return Err(ArenaError::of(ArenaKind::Foreign, title, detail));
    }
    let size = shared_memory::checked_size(file, sealed).map_err(unknown)?;
    size.map_err(|reason| ArenaError::of(ArenaKind::Format, title, reason))
}
