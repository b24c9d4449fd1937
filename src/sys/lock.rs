//! A lock on a file that belongs to this process and ends with it.
//!
//! Invariants:
//! - At most one process holds the lock of a file, on one machine and, where the file system carries POSIX locks, on
//!   several. It is a POSIX record lock: a child made by fork does not have it, and cannot keep it alive.
//! - Such a lock ends when the process closes any descriptor of the file. Inside the process a list of held files keeps
//!   every other descriptor away.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;

/// Device and inode.
type Key = (u64, u64);

#[derive(Debug)]
struct Held {
    process: u32,
    files: Mutex<Vec<Key>>,
    /// The parent's list, which a thread of the parent's may have been changing at the fork: kept, never dropped.
    _parents: Option<Arc<Held>>,
}

static HELD: ArcSwapOption<Held> = ArcSwapOption::const_empty();

/// The files held by this process; a forked child starts with none, since it has none of its parent's locks.
fn held() -> Arc<Held> {
    let process = std::process::id();
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
    file: Option<File>,
    key: Key,
    process: u32,
}

/// What trying for a lock came to.
#[derive(Debug)]
pub enum Attempt {
    /// It is ours.
    Held(FileLock),
    /// This process has it already.
    Ours,
    /// Another process has it. The file says this.
    Theirs(String),
}

impl FileLock {
    /// Tries for the lock of `path`, which is made if it does not exist.
    pub fn attempt(path: &Path) -> io::Result<Attempt> {
        let held = held();
        let mut files = held.files.lock().unwrap_or_else(PoisonError::into_inner);
        if std::fs::metadata(path).is_ok_and(|found| files.contains(&(found.dev(), found.ino()))) {
            return Ok(Attempt::Ours);
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.custom_flags(libc::O_CLOEXEC | libc::O_NOCTTY).open(path)?;
        let found = file.metadata()?;
        let key = (found.dev(), found.ino());
        if !lock(&file)? {
            let mut words = String::new();
            // Whoever holds it may not have written its words yet.
            let _ = file.read_to_string(&mut words);
            return Ok(Attempt::Theirs(words));
        }
        files.push(key);
        Ok(Attempt::Held(FileLock { file: Some(file), key, process: std::process::id() }))
    }

    /// Whether the path still names the file that is locked.
    pub fn names(&self, path: &Path) -> bool {
        std::fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == self.key)
    }

    /// Words in the file, for whoever is refused.
    pub fn write(&mut self, words: &str) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(words.as_bytes())
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        let held = held();
        let mut files = held.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|key| *key != self.key);
        // While the list is closed: a descriptor that closed later would end the lock of whoever comes next.
        drop(self.file.take());
    }
}

/// True if the lock was free.
fn lock(file: &File) -> io::Result<bool> {
    loop {
        match set_lock(file) {
            Ok(()) => return Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EACCES | libc::EAGAIN) => return Ok(false),
                _ => return Err(error),
            },
        }
    }
}

fn set_lock(file: &File) -> io::Result<()> {
    // SAFETY: flock is plain integers, for which zero is valid; all zeros is the whole file.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_WRLCK as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: an open descriptor and a live struct.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_holds_a_lock_once_and_gives_it_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let Attempt::Held(mut lock) = FileLock::attempt(&path).unwrap() else { panic!("it was free") };
        lock.write("mine").unwrap();
        assert!(matches!(FileLock::attempt(&path).unwrap(), Attempt::Ours));
        assert!(lock.names(&path));
        drop(lock);
        assert!(matches!(FileLock::attempt(&path).unwrap(), Attempt::Held(_)));
    }
}
