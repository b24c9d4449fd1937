//! Descriptors that belong to the parent process alone: a child made by fork closes them.
//!
//! A lock on an open file description lives as long as any descriptor of it. A forked child inherits its parent's
//! descriptors, and would keep the lock alive after the parent's death.
//!
//! Invariants:
//! - Once a descriptor is in the table, every child made by fork closes it before the child runs anything else.
//! - No fork happens between the open of a descriptor and its entry in the table; otherwise the descriptor is closed
//!   and opened again, up to TRIES times.
//! - The fork handlers take no lock and make no system call but close: they are async-signal-safe.
//!
//! exec closes the descriptors too (O_CLOEXEC). A child made by a raw clone, or by _Fork, runs no handlers: it keeps
//! the descriptors until it calls exec or exits.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use super::fork::PerProcess;
use crate::error::Error;

/// Most descriptors in the table.
const MAX_FILES: usize = 1024;
const FREE: i32 = -1;
/// Number of retries, one millisecond apart, in a process that forks continuously.
const TRIES: u32 = 1000;

static TABLE: [AtomicI32; MAX_FILES] = [const { AtomicI32::new(FREE) }; MAX_FILES];
/// Number of forks that began; ENDED counts those that ended.
static BEGUN: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicU64 = AtomicU64::new(0);

/// Why no further descriptor is kept.
#[derive(Debug, thiserror::Error)]
#[error(
    "this process holds {MAX_FILES} locks on directories of tiers and on arenas, which is the limit; close one first"
)]
struct TableFull;

/// The error that the limit of [`ForkClosedFile`]s was reached; `None` for other errors of [`ForkClosedFile::open`].
pub fn limit_reached(error: &io::Error) -> Option<Error> {
    let full = error.get_ref()?.downcast_ref::<TableFull>()?;
    Some(Error::LimitReached(full.to_string()))
}

/// An open file whose descriptor forked children close.
#[derive(Debug)]
pub struct ForkClosedFile {
    file: PerProcess<File>,
    slot: usize,
}

impl ForkClosedFile {
    /// Opens a file; retries if the process forks meanwhile.
    pub fn open(open: impl Fn() -> io::Result<File>) -> io::Result<ForkClosedFile> {
        register()?;
        // Before the open, which may create the file.
        if TABLE.iter().all(|slot| slot.load(Ordering::SeqCst) != FREE) {
            return Err(io::Error::other(TableFull));
        }
        let mut tries = 0;
        loop {
            let begun = BEGUN.load(Ordering::SeqCst);
            let forking = ENDED.load(Ordering::SeqCst) < begun;
            if !forking || tries >= TRIES {
                let kept = ForkClosedFile::publish(open()?)?;
                if BEGUN.load(Ordering::SeqCst) == begun || tries >= TRIES {
                    return Ok(kept);
                }
            }
            tries += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn publish(file: File) -> io::Result<ForkClosedFile> {
        let fd = file.as_raw_fd();
        let take =
            |slot: &AtomicI32| slot.compare_exchange(FREE, fd, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        let slot = TABLE.iter().position(take).ok_or_else(|| io::Error::other(TableFull))?;
        Ok(ForkClosedFile { file: PerProcess::new(file), slot })
    }

    /// The file; `None` in a forked child.
    pub fn file(&self) -> Option<&File> {
        self.file.get()
    }
}

impl Drop for ForkClosedFile {
    fn drop(&mut self) {
        // In a forked child the descriptor is closed, and another file may have its number and its slot.
        if self.file.is_here() {
            // Clear the slot before the close, which follows this call: afterwards another file may have the number.
            TABLE[self.slot].store(FREE, Ordering::SeqCst);
        }
    }
}

/// Registers the handlers. If two threads register at once, the handlers run twice, which is harmless.
fn register() -> io::Result<()> {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if REGISTERED.load(Ordering::SeqCst) {
        return Ok(());
    }
    // SAFETY: functions that live as long as this library; unloading the library unregisters them.
    match unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) } {
        0 => REGISTERED.store(true, Ordering::SeqCst),
        errno => return Err(io::Error::from_raw_os_error(errno)),
    }
    Ok(())
}

extern "C" fn before() {
    BEGUN.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn after_in_parent() {
    ENDED.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn after_in_child() {
    for slot in &TABLE {
        let fd = slot.swap(FREE, Ordering::SeqCst);
        if fd != FREE {
            // SAFETY: the child's copy of a descriptor in the table; the child does not use it.
            unsafe { libc::close(fd) };
        }
    }
    ENDED.store(BEGUN.load(Ordering::SeqCst), Ordering::SeqCst);
}
