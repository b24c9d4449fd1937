//! Creating, opening and collecting arenas.
//!
//! Invariants:
//! - The owner locks the file before it gives the file a size. A file with a size and without that lock was left behind
//!   by an owner that ended.
//! - A file that was left behind is unlinked, never truncated or reused: other processes may still have it mapped.
//! - The magic is stored last. A file without it is not complete.
//! - The header is read from the file and checked before the memory is mapped.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::handle::{Arena, OWNER_LOCK, Parts};
use super::layout::{HEADER, Identity, Layout, MAGIC, RegionSpec};
use super::name::NamedFile;
use crate::error::{ArenaError, ArenaKind, Error, Result};
use crate::sys::fork_closed::ForkClosedFile;
use crate::sys::private_files::{self, OpenFlags};
use crate::sys::shared_memory::{self, MapOptions, SharedMapping};
use crate::sys::{file, memory, process, range_lock, try_vec};

/// Period at which an open looks for an arena that does not exist yet.
const PERIOD: Duration = Duration::from_millis(2);
/// Attempts to create a file that other processes create and remove at the same time.
const TRIES: usize = 100;

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
        let invalid = |error: io::Error| Error::invalid("fd", format!("{fd}: {error}"));
        let title = format!("the arena of descriptor {fd}");
        let given = File::from(file::duplicate_from(fd, 0).map_err(invalid)?);
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

/// Removes the name of an arena whose owner has ended. Processes that have it open keep their memory. Errors: there is
/// none; its owner lives.
pub fn collect(name: &str) -> Result<()> {
    let named = NamedFile::new(name)?;
    let file = named.open(OpenFlags { read: true, write: true, ..OpenFlags::default() })?;
    let locks = own_description(&file, true)?;
    if !take_owner_lock(&locks)? {
        return Err(lives(&named, &file));
    }
    let found = file.metadata().map_err(|error| Error::system("looking at shared memory", &error))?;
    named.remove_if((found.dev(), found.ino()));
    Ok(())
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
    complete(Made { layout, title, file: made.file, locks, huge: made.huge, notes }, mapped)
}

fn create_named(named: NamedFile, layout: Layout, options: &Create) -> Result<Arena> {
    let (file, locks) = claim(&named, options.collect)?;
    let mut notes = Notes::default();
    if options.huge {
        notes.transparent();
    }
    let found = file.metadata().map_err(|error| Error::system("looking at shared memory", &error))?;
    let map = MapOptions { write: true, huge: options.huge, node: options.node };
    let title = named.title().to_string();
    let complete = || {
        file.set_len(layout.total as u64).map_err(|error| no_room(&layout, &error))?;
        let mapped = SharedMapping::map(&file, layout.total, map);
        let file = file.try_clone().map_err(|error| Error::system("duplicating a descriptor", &error))?;
        complete(Made { layout, title, file, locks, huge: false, notes }, mapped)
    };
    match complete() {
        Ok(arena) => Ok(arena.owning(named)),
        Err(error) => {
            named.remove_if((found.dev(), found.ino()));
            Err(error)
        }
    }
}

/// Opens and locks the file of a name, which is empty then.
fn claim(named: &NamedFile, collect: bool) -> Result<(File, ForkClosedFile)> {
    for _ in 0..TRIES {
        let file = named.open(OpenFlags { read: true, write: true, make: true, direct: false })?;
        let locks = own_description(&file, true)?;
        if !take_owner_lock(&locks)? {
            return Err(lives(named, &file));
        }
        let found = file.metadata().map_err(|error| Error::system("looking at shared memory", &error))?;
        if !named.is((found.dev(), found.ino())) {
            continue;
        }
        if found.len() == 0 {
            return Ok((file, locks));
        }
        if !collect {
            let detail =
                "its owner has ended and left it behind; collect it, or create it with the flag that does so";
            return Err(named.error(ArenaKind::Exists, detail));
        }
        named.remove_if((found.dev(), found.ino()));
    }
    Err(Error::Busy(format!("{}: other processes create and remove it all the time", named.title())))
}

fn lives(named: &NamedFile, file: &File) -> Error {
    let mut header = [0; HEADER];
    let owner = match file.read_exact_at(&mut header, 0) {
        Ok(()) if header[..8] == MAGIC => format!("process {}", Layout::owner_in(&header)),
        _ => "a process".to_string(),
    };
    named.error(ArenaKind::Exists, format!("{owner} owns it and has it open; choose another name"))
}

/// Requested properties that an arena lacks, with the reasons.
#[derive(Default)]
struct Notes(String);

impl Notes {
    fn add(&mut self, note: String) {
        let separator = if self.0.is_empty() { "" } else { "; " };
        self.0.push_str(&format!("{separator}{note}"));
    }

    fn transparent(&mut self) {
        if let Some(reason) = shared_memory::no_huge_reason() {
            self.add(format!("no transparent huge pages: {reason}"));
        }
    }
}

/// A new file that this process has locked as the owner.
struct Made {
    layout: Layout,
    title: String,
    file: File,
    locks: ForkClosedFile,
    huge: bool,
    notes: Notes,
}

/// Allocates the memory, and writes the header.
fn complete(made: Made, mapped: io::Result<(SharedMapping, Option<io::Error>)>) -> Result<Arena> {
    let Made { layout, title, file, locks, huge, mut notes } = made;
    let (mapping, unbound) = mapped.map_err(|error| Error::system("mapping an arena", &error))?;
    if let Some(error) = unbound {
        notes.add(format!("not bound to the NUMA node: {error}"));
    }
    shared_memory::allocate(&file, layout.total).map_err(|error| no_room(&layout, &error))?;
    let identity = Identity { id: random_id(), owner: process::id() };
    mapping.write(0, &layout.encode(identity)?);
    mapping.store64(0, u64::from_le_bytes(MAGIC), Ordering::Release);
    Arena::of(Parts {
        title,
        layout,
        identity,
        mapping,
        locks,
        shared: file,
        is_owner: true,
        huge,
        notes: notes.0,
    })
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
    RandomState::new().hash_one(process::id())
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
    let (title, notes) = (title.to_string(), String::new());
    Arena::of(Parts {
        title,
        layout,
        identity,
        mapping,
        locks,
        shared: file,
        is_owner: false,
        huge: false,
        notes,
    })
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

/// A description of the file for the locks of one handle.
fn own_description(file: &File, write: bool) -> Result<ForkClosedFile> {
    ForkClosedFile::open(|| shared_memory::reopen(file.as_raw_fd(), write))
        .map_err(|error| Error::system("opening an arena anew by its name in /proc", &error))
}

fn take_owner_lock(locks: &ForkClosedFile) -> Result<bool> {
    let Some(file) = locks.file() else { return Ok(false) };
    range_lock::take(file, OWNER_LOCK).map_err(|error| Error::system("locking an arena", &error))
}
