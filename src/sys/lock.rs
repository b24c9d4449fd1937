//! A lock on a file that belongs to this process and ends with it.
//!
//! Invariants:
//! - At most one process holds the lock of a file, on one machine and, where the file system carries POSIX locks, on
//!   several. The lock belongs to an open file description (F_OFD_SETLK): another descriptor of the file that this process
//!   opens and closes does not end the lock. POSIX record locks, which older versions of this library take, conflict with
//!   it.
//! - A child made by fork does not have the lock and cannot keep it alive: see `parents`, also for a raw clone.
//! - Where the system refuses such locks, the lock is a POSIX record lock. A record lock ends when the process closes any
//!   descriptor of the file; the list of held files keeps this library from doing so.
//! - The lock ends before its descriptor is closed: a child that a fork has just made cannot have inherited a held one.

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

/// Most bytes of a lock file that a message quotes.
const MOST_WORDS: u64 = 1024;

#[derive(Debug)]
struct Held {
    process: u32,
    files: Mutex<Vec<Identity>>,
    /// The parent's list, which a thread of the parent's may have been changing at the fork: kept, never dropped.
    _parents: Option<Arc<Held>>,
}

static HELD: ArcSwapOption<Held> = ArcSwapOption::const_empty();

/// The files held by this process; a forked child starts with none, since it has none of its parent's locks.
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
    /// Present until the drop.
    file: Option<ParentsFile>,
    identity: Identity,
    process: u32,
}

/// The outcome of trying for a lock.
#[derive(Debug)]
pub enum Attempt {
    /// This process has it now.
    Held(FileLock),
    /// This process had it already.
    Ours,
    /// Another process has it. The file begins with this text.
    Theirs(String),
}

impl FileLock {
    /// Tries for the lock of the file `name`, which is made if it does not exist.
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
            // The holder may not have written its words yet.
            let _ = file.take(MOST_WORDS).read_to_end(&mut words);
            return Ok(Attempt::Theirs(String::from_utf8_lossy(&words).into_owned()));
        }
        files.push(identity);
        Ok(Attempt::Held(FileLock { file: Some(kept), identity, process: process::id() }))
    }

    /// Whether the name is that of the locked file.
    pub fn names(&self, directory: &OwnDirectory, name: &str) -> io::Result<bool> {
        Ok(directory.entry(name)?.is_some_and(|found| found.identity == self.identity))
    }

    /// Which file is locked.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether this process still has the lock, which is taken again if the system lost it and nobody else has it.
    pub fn is_held(&self) -> bool {
        let file = self.file.as_ref().and_then(ParentsFile::file);
        file.is_some_and(|file| lock(file).unwrap_or(true))
    }

    /// False in a forked child, which does not have its parent's lock.
    pub fn is_own(&self) -> bool {
        self.process == process::id()
    }

    /// Text in the file, for processes that are refused.
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
            // A child that is being forked at this moment keeps a descriptor without a lock.
            let _ = change(file, kind(), libc::F_UNLCK);
        }
        // While the list is closed: a descriptor that closed later would end a record lock that comes next.
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

/// True if the lock was free.
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
