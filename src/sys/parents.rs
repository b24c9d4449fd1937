//! Descriptors that are the parent's alone: a child made by fork closes them.
//!
//! A lock on an open file description lives as long as any descriptor of it. A forked child has its parent's descriptors,
//! and would keep the lock alive after the parent's death.
//!
//! Invariants:
//! - From its publication in the table on, every child made by fork closes the descriptor before it runs anything else.
//! - No fork falls between the open of a descriptor and its publication: such a descriptor is closed and opened again.
//! - The handlers take no lock and make no call but close: they are async-signal-safe.
//!
//! exec closes the descriptors too (O_CLOEXEC). A child made by a raw clone, or by _Fork, runs no handlers: it keeps the
//! descriptors until it calls exec or exits.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use super::process;

/// Most descriptors at a time.
const SLOTS: usize = 1024;
const FREE: i32 = -1;
/// How often an open is tried again, a millisecond apart, in a process that forks all the time.
const TRIES: u32 = 1000;

static TABLE: [AtomicI32; SLOTS] = [const { AtomicI32::new(FREE) }; SLOTS];
/// Forks that began, and forks that are over.
static BEGUN: AtomicU64 = AtomicU64::new(0);
static OVER: AtomicU64 = AtomicU64::new(0);

/// An open file that forked children do not have.
#[derive(Debug)]
pub struct ParentsFile {
    file: ManuallyDrop<File>,
    slot: usize,
    process: u32,
}

impl ParentsFile {
    /// Opens a file, again if the process forks meanwhile.
    pub fn open(open: impl Fn() -> io::Result<File>) -> io::Result<ParentsFile> {
        register()?;
        let mut tries = 0;
        loop {
            let begun = BEGUN.load(Ordering::SeqCst);
            let forking = OVER.load(Ordering::SeqCst) < begun;
            if !forking || tries >= TRIES {
                let kept = ParentsFile::publish(open()?)?;
                if BEGUN.load(Ordering::SeqCst) == begun || tries >= TRIES {
                    return Ok(kept);
                }
            }
            tries += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn publish(file: File) -> io::Result<ParentsFile> {
        let fd = file.as_raw_fd();
        let take =
            |slot: &AtomicI32| slot.compare_exchange(FREE, fd, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        let slot = TABLE.iter().position(take).ok_or_else(|| {
            io::Error::other(format!(
                "this process holds {SLOTS} locks on directories of tiers, which is the most"
            ))
        })?;
        Ok(ParentsFile { file: ManuallyDrop::new(file), slot, process: process::id() })
    }

    /// The file; `None` in a forked child.
    pub fn file(&self) -> Option<&File> {
        (self.process == process::id()).then_some(&*self.file)
    }
}

impl Drop for ParentsFile {
    fn drop(&mut self) {
        // In a forked child the descriptor is closed, and its number and its slot may be another file's.
        if self.process != process::id() {
            return;
        }
        // Before the close: afterwards the number may be another file's.
        TABLE[self.slot].store(FREE, Ordering::SeqCst);
        // SAFETY: dropped here alone, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.file) };
    }
}

/// Registers the handlers. Two threads may both do so: the handlers may run twice.
fn register() -> io::Result<()> {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if REGISTERED.load(Ordering::SeqCst) {
        return Ok(());
    }
    // SAFETY: functions that live as long as this library, whose unloading unregisters them.
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
    OVER.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn after_in_child() {
    for slot in &TABLE {
        let fd = slot.swap(FREE, Ordering::SeqCst);
        if fd != FREE {
            // SAFETY: the child's copy of a descriptor that was published; nothing in the child uses it any more.
            unsafe { libc::close(fd) };
        }
    }
    OVER.store(BEGUN.load(Ordering::SeqCst), Ordering::SeqCst);
}
