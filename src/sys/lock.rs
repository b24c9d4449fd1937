//! A file lock that this process owns and that ends with the process.
//!
//! Invariants:
//! - At most one process holds the lock of a file: on one machine, and on several if the file system supports POSIX
//!   locks over the network.
//! - The lock belongs to an open file description (F_OFD_SETLK). This process may open and close another descriptor of
//!   the file without losing the lock. POSIX record locks, which older versions of this library take, conflict with it.
//! - A child made by fork does not own the lock and cannot keep it alive. `parents` explains how, and the exception of
//!   a raw clone.
//! - If the system refuses such locks, the lock is a POSIX record lock. A record lock ends when the process closes any
//!   descriptor of the file; the list of held files keeps this library from doing so.
//! - The lock is released before its descriptor is closed. A descriptor that a concurrent fork inherited therefore
//!   holds no lock.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;

use super::file::Identity;
use super::own::OwnDirectory;
use super::own::Want;
use super::parents::ParentsFile;
use super::process;
use crate::log::{self, Level};

/// Most bytes of a lock file that an error message quotes.
const MOST_WORDS: u64 = 1024;

#[derive(Debug)]
struct Held {
    process: u32,
    files: Mutex<Vec<Identity>>,
    /// The parent's list. A thread of the parent may have been changing it at the fork, so the child keeps it and never
    /// drops it.
    _parents: Option<Arc<Held>>,
}

static HELD: ArcSwapOption<Held> = ArcSwapOption::const_empty();

/// The files that this process has locked. A forked child starts with an empty list, because it owns none of its
/// parent's locks.
fn held() -> Arc<Held> {
    let process = process::id();
    loop {
        let seen = HELD.load_full();
        if let Some(found) = seen.as_ref().filter(|found| found.process == process) {
            return Arc::clone(found);
        }
        let made = Arc::new(Held { process, files: Mutex::default(), _parents: seen.clone() });
        HELD.compare_and_swap(&seen, Some(made));
    }
}

/// A held lock.
#[derive(Debug)]
pub struct FileLock {
    /// `None` only during the drop.
    file: Option<ParentsFile>,
    identity: Identity,
    process: u32,
}

/// Outcome of [`FileLock::attempt`].
#[derive(Debug)]
pub enum Attempt {
    /// This process took the lock.
    Held(FileLock),
    /// This process already held the lock.
    Ours,
    /// Another process holds the lock. The file begins with this text.
    Theirs(String),
}

impl FileLock {
    /// Tries to lock the file `name`, which is created if it does not exist.
    pub fn attempt(directory: &OwnDirectory, name: &str) -> io::Result<Attempt> {
        let held = held();
        let mut files = held.files.lock().unwrap_or_else(PoisonError::into_inner);
        if directory.entry(name)?.is_some_and(|found| files.contains(&found.identity)) {
            return Ok(Attempt::Ours);
        }
        let want = Want { read: true, write: true, make: true, direct: false };
        let kept = ParentsFile::open(|| directory.open(name, want))?;
        let Some(file) = kept.file() else { return Err(io::Error::from_raw_os_error(libc::EBADF)) };
        let found = file.metadata()?;
        let identity = Identity { device: found.dev(), inode: found.ino() };
        if !lock(file)? {
            let mut words = Vec::new();
            // The holder may not have written its text yet.
            let _ = file.take(MOST_WORDS).read_to_end(&mut words);
            return Ok(Attempt::Theirs(String::from_utf8_lossy(&words).into_owned()));
        }
        files.push(identity);
        Ok(Attempt::Held(FileLock { file: Some(kept), identity, process: process::id() }))
    }

    /// True if `name` is still the locked file.
    pub fn names(&self, directory: &OwnDirectory, name: &str) -> io::Result<bool> {
        Ok(directory.entry(name)?.is_some_and(|found| found.identity == self.identity))
    }

    /// Identity of the locked file.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// True if this process holds the lock. A lock that the system dropped is taken again if no other process has it.
    pub fn is_held(&self) -> bool {
        let file = self.file.as_ref().and_then(ParentsFile::file);
        file.is_some_and(|file| lock(file).unwrap_or(true))
    }

    /// False in a forked child, which does not have its parent's lock.
    pub fn is_own(&self) -> bool {
        self.process == process::id()
    }

    /// Replaces the content of the file by text for the error messages of refused processes.
    pub fn write(&mut self, words: &str) -> io::Result<()> {
        let Some(mut file) = self.file.as_ref().and_then(ParentsFile::file) else { return Ok(()) };
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(words.as_bytes())
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        if self.process != process::id() {
            return;
        }
        let held = held();
        let mut files = held.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|identity| *identity != self.identity);
        if let Some(file) = self.file.as_ref().and_then(ParentsFile::file) {
            // A child forked concurrently may keep a descriptor, which then holds no lock.
            let _ = change(file, kind(), libc::F_UNLCK);
        }
        // Close while the list is locked: closing later could end a record lock that another thread takes next.
        drop(self.file.take());
    }
}

/// True if the system refuses locks of open file descriptions.
static RECORD_LOCKS: AtomicBool = AtomicBool::new(false);

fn kind() -> i32 {
    match RECORD_LOCKS.load(Ordering::Relaxed) {
        true => libc::F_SETLK,
        false => libc::F_OFD_SETLK,
    }
}

/// Takes the lock; false if another process holds it.
fn lock(file: &File) -> io::Result<bool> {
    loop {
        let kind = kind();
        match change(file, kind, libc::F_WRLCK) {
            Ok(()) => return Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EACCES | libc::EAGAIN) => return Ok(false),
                Some(libc::EINVAL) if kind == libc::F_OFD_SETLK => {
                    RECORD_LOCKS.store(true, Ordering::Relaxed);
                    let words = "the system refuses locks of open file descriptions: directories of tiers get POSIX \
                                 record locks, which end when this process closes any descriptor of a lock file";
                    log::write(Level::Warn, words);
                }
                _ => return Err(error),
            },
        }
    }
}

fn change(file: &File, kind: i32, to: i32) -> io::Result<()> {
    // SAFETY: flock is plain integers, for which zero is valid; all zeros is the whole file.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = to as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: an open descriptor and a live struct.
    match unsafe { libc::fcntl(file.as_raw_fd(), kind, &range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests;
