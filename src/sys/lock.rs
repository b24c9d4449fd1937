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

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

use super::file::Identity;
use super::fork_closed::ForkClosedFile;
use super::per_process::{PerProcessStatic, Shared};
use super::private_files::OpenFlags;
use super::private_files::PrivateDirectory;
use crate::log::{self, Level};

/// Most bytes of a lock file that an error message quotes.
const MAX_HOLDER_TEXT: u64 = 1024;

/// The files that this process has locked. A forked child owns none of its parent's locks.
static HELD: PerProcessStatic<Mutex<Vec<Identity>>> = PerProcessStatic::empty();

fn held() -> Shared<Mutex<Vec<Identity>>> {
    HELD.get_or_make(Mutex::default)
}

/// A held lock.
#[derive(Debug)]
pub struct FileLock {
    /// `None` only during the drop.
    file: Option<ForkClosedFile>,
    identity: Identity,
}

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
        let mut files = held.lock().unwrap_or_else(PoisonError::into_inner);
        if directory.entry(name)?.is_some_and(|found| files.contains(&found.identity)) {
            return Ok(LockAttempt::HeldByUs);
        }
        let flags = OpenFlags { read: true, write: true, make: true, direct: false };
        let kept = ForkClosedFile::open(|| directory.open(name, flags))?;
        let Some(file) = kept.file() else { return Err(io::Error::from_raw_os_error(libc::EBADF)) };
        let found = file.metadata()?;
        let identity = Identity { device: found.dev(), inode: found.ino() };
        if !lock(file)? {
            let mut text = Vec::new();
            // The holder may not have written its text yet.
            let _ = file.take(MAX_HOLDER_TEXT).read_to_end(&mut text);
            return Ok(LockAttempt::HeldByOther(String::from_utf8_lossy(&text).into_owned()));
        }
        files.push(identity);
        Ok(LockAttempt::Acquired(FileLock { file: Some(kept), identity }))
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
    pub fn is_held(&self) -> bool {
        self.file().is_some_and(|file| lock(file).unwrap_or(true))
    }

    /// The locked file; `None` in a forked child.
    fn file(&self) -> Option<&File> {
        self.file.as_ref().and_then(ForkClosedFile::file)
    }

    /// False in a forked child, which does not have its parent's lock.
    pub fn is_own(&self) -> bool {
        self.file().is_some()
    }

    /// Replaces the content of the file by text for the error messages of refused processes.
    pub fn write(&mut self, text: &str) -> io::Result<()> {
        let Some(mut file) = self.file() else { return Ok(()) };
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(text.as_bytes())
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        let Some(file) = self.file() else { return };
        let held = held();
        let mut files = held.lock().unwrap_or_else(PoisonError::into_inner);
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
    match record_locks.load(Ordering::Relaxed) {
        true => Kind::Record,
        false => Kind::OpenFile,
    }
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

/// Changes the lock of the whole file to `to`: F_WRLCK or F_UNLCK.
fn change(file: &File, kind: Kind, to: i32) -> nix::Result<()> {
    let range = libc::flock {
        l_type: to as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let command = match kind {
        Kind::OpenFile => FcntlArg::F_OFD_SETLK(&range),
        Kind::Record => FcntlArg::F_SETLK(&range),
    };
    fcntl(file, command).map(|_| ())
}

#[cfg(test)]
mod tests;
