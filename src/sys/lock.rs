//! A file lock that this process owns and that ends with the process.
//!
//! Invariants:
//! - At most one process holds the lock of a file: on one machine, and on several if the file system supports POSIX
//!   locks over the network.
//! - The lock belongs to an open file description (F_OFD_SETLK). This process may open and close another descriptor of
//!   the file without losing the lock. POSIX record locks, which older versions of this library take, conflict with it.
//! - A child made by fork does not own the lock and cannot keep it alive. `fork_closed` explains how, and the exception
//!   of a raw clone.
//! - If the system refuses such locks, the lock is a POSIX record lock. A record lock ends when the process closes any
//!   descriptor of the file; the list of held files keeps this library from doing so.
//! - The lock is released before its descriptor is closed. A descriptor that a concurrent fork inherited therefore
//!   holds no lock.
//! - A lock that does not exclude a second descriptor of this process, or that the file system refuses, counts as one
//!   that excludes nobody ([`FileLock::excludes`]). Whether a lock excludes other mounts cannot be seen from one mount.
//! - Pages of the file can be read without the caches of this mount where the file system allows it. They are written in
//!   place, into blocks that were reserved when the file was created.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

use super::file::{self, FileSystem, Identity};
use super::fork::{PerProcessStatic, Shared};
use super::fork_closed::ForkClosedFile;
use super::private_files::OpenFlags;
use super::private_files::PrivateDirectory;
use crate::log::{self, Level};
use crate::sys::sync::Lock;

/// Most bytes of a lock file that an error message quotes.
const MAX_HOLDER_TEXT: u64 = 1024;

/// The files that this process has locked. A forked child owns none of its parent's locks.
static HELD: PerProcessStatic<Lock<Vec<Identity>>> = PerProcessStatic::empty();

fn held() -> Shared<Lock<Vec<Identity>>> {
    HELD.get_or_make(Lock::default)
}

/// A held lock.
#[derive(Debug)]
pub struct FileLock {
    /// `None` only during the drop.
    file: Option<ForkClosedFile>,
    identity: Identity,
    excludes: bool,
}

/// Length of a page of a lock file, in bytes.
pub const PAGE: usize = 4096;
/// Pages that are reserved in a lock file.
const PAGES: u64 = 2;

/// Memory for one page, aligned for direct I/O.
#[repr(align(4096))]
struct Page([u8; PAGE]);

/// Outcome of [`FileLock::attempt`].
#[derive(Debug)]
pub enum LockAttempt {
    /// This process took the lock.
    Acquired(FileLock),
    /// This process already held the lock.
    HeldByUs,
    /// Another process holds the lock. The file begins with this text.
    HeldByOther(String),
}

impl FileLock {
    /// Tries to lock the file `name`, which is created if it does not exist.
    pub fn attempt(directory: &PrivateDirectory, name: &str) -> io::Result<LockAttempt> {
        let held = held();
        let mut files = held.lock();
        if directory.entry(name)?.is_some_and(|found| files.contains(&found.identity)) {
            return Ok(LockAttempt::HeldByUs);
        }
        let flags = OpenFlags { read: true, write: true, make: true, direct: false };
        let kept = ForkClosedFile::open(|| directory.open(name, flags))?;
        let Some(file) = kept.file() else { return Err(io::Error::from_raw_os_error(libc::EBADF)) };
        let found = file.metadata()?;
        let identity = Identity { device: found.dev(), inode: found.ino() };
        let excludes = match lock(file) {
            Err(error) if is_unsupported(&error) => Some(false),
            Err(error) => return Err(error),
            Ok(true) => Some(excludes_a_second(directory, name)?),
            Ok(false) => None,
        };
        let Some(excludes) = excludes else {
            let mut text = Vec::new();
            // The holder may not have written its text yet.
            let _ = file.take(MAX_HOLDER_TEXT).read_to_end(&mut text);
            return Ok(LockAttempt::HeldByOther(String::from_utf8_lossy(&text).into_owned()));
        };
        files.push(identity);
        Ok(LockAttempt::Acquired(FileLock { file: Some(kept), identity, excludes }))
    }

    /// The first line of the file `name`, if a process holds its lock, on any mount that shares its locks. `None` if no
    /// process holds it, if there is no such file, or if the file system cannot tell. Takes no lock.
    pub fn holder(directory: &PrivateDirectory, name: &str) -> io::Result<Option<String>> {
        let held = held();
        // While the list is locked, no other thread takes a record lock, which the close of this descriptor would release.
        let files = held.lock();
        if directory.entry(name)?.is_some_and(|found| files.contains(&found.identity)) {
            return Ok(Some("this process has it open".to_string()));
        }
        let file = match directory.open(name, OpenFlags { read: true, ..OpenFlags::default() }) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut found = whole_file(libc::F_WRLCK);
        let asked = match kind(&RECORD_LOCKS) {
            Kind::OpenFile => fcntl(&file, FcntlArg::F_OFD_GETLK(&mut found)),
            Kind::Record => fcntl(&file, FcntlArg::F_GETLK(&mut found)),
        };
        if asked.is_err() || i32::from(found.l_type) == libc::F_UNLCK {
            return Ok(None);
        }
        let mut text = Vec::new();
        let _ = (&file).take(MAX_HOLDER_TEXT).read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        Ok(Some(text.lines().next().unwrap_or_default().trim().to_string()))
    }

    /// True if `name` is still the locked file.
    pub fn is_named(&self, directory: &PrivateDirectory, name: &str) -> io::Result<bool> {
        Ok(directory.entry(name)?.is_some_and(|found| found.identity == self.identity))
    }

    /// Identity of the locked file.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// True if this process holds the lock. A lock that the system dropped is taken again if no other process has it.
    /// A lock that excludes nobody counts as held.
    pub fn is_held(&self) -> bool {
        self.file().is_some_and(|file| !self.excludes || lock(file).unwrap_or(true))
    }

    /// False if the locked file was removed from its directory: another process may lock a new one of its name.
    pub fn has_a_name(&self) -> bool {
        self.file().is_none_or(|file| file::info(file).is_ok_and(|info| info.links > 0))
    }

    /// False if the lock does not keep another process of this mount out.
    pub fn excludes(&self) -> bool {
        self.excludes
    }

    /// The file system of the file.
    pub fn file_system(&self) -> io::Result<FileSystem> {
        file::file_system(self.file().ok_or_else(inherited)?)
    }

    /// The locked file; `None` in a forked child.
    fn file(&self) -> Option<&File> {
        self.file.as_ref().and_then(ForkClosedFile::file)
    }

    /// False in a forked child, which does not have its parent's lock.
    pub fn is_own(&self) -> bool {
        self.file().is_some()
    }

    /// Reserves the blocks of the pages, so that a full disk does not refuse a later write. A file system that cannot
    /// reserve them, or has no room, is no error here: the write reports it.
    pub fn reserve(&self) {
        let Some(file) = self.file() else { return };
        let bytes = PAGES * PAGE as u64;
        if file.metadata().is_ok_and(|found| found.len() >= bytes) {
            return;
        }
        file::write_in_place(file);
        let _ = file::preallocate(file, 0, bytes);
    }

    /// Overwrites a page in place. With `sync` the bytes are durable, or have reached the server, afterwards.
    pub fn write_page(&self, page: u64, bytes: &[u8; PAGE], sync: bool) -> io::Result<()> {
        let file = self.file().ok_or_else(inherited)?;
        file.write_all_at(bytes, page * PAGE as u64)?;
        if sync { file.sync_data() } else { Ok(()) }
    }

    /// Reads a page of the file that `name` stands for now, which may be another one than the locked file. Missing bytes
    /// are zeros. `None` if there is no such file. With `fresh` the caches of this mount are bypassed.
    pub fn read_page(
        &self,
        directory: &PrivateDirectory,
        name: &str,
        page: u64,
        fresh: bool,
    ) -> io::Result<Option<Vec<u8>>> {
        let own = self.file().ok_or_else(inherited)?;
        let mut bytes = Box::new(Page([0; PAGE]));
        let at = page * PAGE as u64;
        if kind(&RECORD_LOCKS) == Kind::Record {
            // Closing another descriptor would end the lock.
            read_up_to(own, &mut bytes.0, at)?;
            return Ok(Some(bytes.0.to_vec()));
        }
        let ways: &[bool] = if fresh { &[true, false] } else { &[false] };
        for direct in ways.iter().copied() {
            let flags = OpenFlags { read: true, direct, ..OpenFlags::default() };
            let found = directory.open(name, flags).and_then(|file| {
                if fresh && !direct {
                    file::drop_cache(&file);
                }
                read_up_to(&file, &mut bytes.0, at)
            });
            match found {
                Ok(()) => return Ok(Some(bytes.0.to_vec())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                // The file system refuses direct I/O, or this alignment.
                Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => bytes.0.fill(0),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

/// Error of a call on a lock in a forked child.
fn inherited() -> io::Error {
    io::Error::from_raw_os_error(libc::EBADF)
}

/// Reads until the buffer is full or the file ends.
fn read_up_to(file: &File, bytes: &mut [u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], at + done as u64) {
            Ok(0) => return Ok(()),
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// True for an error of a file system that has no locks.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOLCK | libc::ENOSYS | libc::EOPNOTSUPP))
}

/// True if a second descriptor of the locked file `name` does not get the lock. Record locks cannot be tested: they
/// belong to the process, and the test would end them.
fn excludes_a_second(directory: &PrivateDirectory, name: &str) -> io::Result<bool> {
    if kind(&RECORD_LOCKS) == Kind::Record {
        return Ok(true);
    }
    let second = match directory.open(name, OpenFlags { read: true, write: true, ..OpenFlags::default() }) {
        Ok(second) => second,
        // Removed meanwhile: the caller finds that the locked file has no name.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    let free = lock(&second)?;
    if free {
        let _ = change(&second, Kind::OpenFile, libc::F_UNLCK);
    }
    Ok(!free)
}

impl Drop for FileLock {
    fn drop(&mut self) {
        let Some(file) = self.file() else { return };
        let held = held();
        let mut files = held.lock();
        files.retain(|identity| *identity != self.identity);
        // A child forked concurrently may keep a descriptor, which then holds no lock.
        let _ = change(file, kind(&RECORD_LOCKS), libc::F_UNLCK);
        // Close while the list is locked: closing later could end a record lock that another thread takes next.
        drop(self.file.take());
    }
}

/// True if the system refuses locks of open file descriptions.
static RECORD_LOCKS: AtomicBool = AtomicBool::new(false);

/// The two kinds of POSIX locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Belongs to an open file description.
    OpenFile,
    /// Belongs to the process.
    Record,
}

fn kind(record_locks: &AtomicBool) -> Kind {
    if record_locks.load(Ordering::Relaxed) { Kind::Record } else { Kind::OpenFile }
}

/// Takes the lock; false if another process holds it.
fn lock(file: &File) -> io::Result<bool> {
    lock_by(&RECORD_LOCKS, |kind| change(file, kind, libc::F_WRLCK))
}

/// Takes the lock by the system call `take`. Sets `record_locks` if the system refuses locks of open file descriptions.
fn lock_by(record_locks: &AtomicBool, mut take: impl FnMut(Kind) -> nix::Result<()>) -> io::Result<bool> {
    loop {
        let kind = kind(record_locks);
        match take(kind) {
            Ok(()) => return Ok(true),
            Err(Errno::EINTR) => {}
            Err(Errno::EACCES | Errno::EAGAIN) => return Ok(false),
            Err(Errno::EINVAL) if kind == Kind::OpenFile => {
                record_locks.store(true, Ordering::Relaxed);
                let text = "the system has no locks of open file descriptions, so directories of tiers get \
                            POSIX record locks; these end when this process closes any descriptor of a lock \
                            file";
                log::write(Level::Warn, text);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// A lock of the whole file: F_WRLCK or F_UNLCK.
fn whole_file(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// Changes the lock of the whole file to `to`: F_WRLCK or F_UNLCK.
fn change(file: &File, kind: Kind, to: i32) -> nix::Result<()> {
    let range = whole_file(to);
    let command = match kind {
        Kind::OpenFile => FcntlArg::F_OFD_SETLK(&range),
        Kind::Record => FcntlArg::F_SETLK(&range),
    };
    fcntl(file, command).map(|_| ())
}

#[cfg(test)]
mod tests;
