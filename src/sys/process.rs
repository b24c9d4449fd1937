//! The id of this process, without a system call once it is known.
//!
//! The id is cached in a page that the system zeroes in every child (MADV_WIPEONFORK). This also covers a program that
//! calls clone directly, where handlers of pthread_atfork do not run. No lock is held across a fork.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::memory::Mapping;
use crate::error::{Error, Result};

/// The process that opened an object. A forked child has a copy of the object without its threads. The copy may contain
/// locks that a thread of the parent held and that stay locked. Every call checks the process before it takes a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpeningProcess(u32);

impl OpeningProcess {
    /// This process.
    pub fn current() -> OpeningProcess {
        OpeningProcess(id())
    }

    /// The id of the process.
    pub fn id(self) -> u32 {
        self.0
    }

    /// False in a forked child.
    pub fn is_current(self) -> bool {
        self.0 == id()
    }

    /// [`Error::Unsupported`] in a forked child; `what` names the object.
    pub fn check(self, what: &str) -> Result<()> {
        match self.is_current() {
            true => Ok(()),
            false => Err(Error::Unsupported(format!(
                "{what} was opened by process {} before this process was forked; a child process must open \
                 its own",
                self.0
            ))),
        }
    }
}

static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// The id of this process; a forked child gets its own.
pub fn id() -> u32 {
    let page = PAGE.load(Ordering::Acquire);
    let page = if page.is_null() { make() } else { page };
    // SAFETY: NULL or the page of `make`, which is never unmapped and begins with an aligned u32, 0 at first.
    let Some(known) = (unsafe { page.as_ref() }) else { return std::process::id() };
    match known.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            known.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// Maps the page. NULL if memory or MADV_WIPEONFORK is unavailable (before Linux 4.14, and in qemu-user).
fn make() -> *mut AtomicU32 {
    let Some(mapping) = Mapping::emptied_by_fork().ok() else { return ptr::null_mut() };
    let page = mapping.span().as_ptr().cast::<AtomicU32>();
    match PAGE.compare_exchange(ptr::null_mut(), page, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            std::mem::forget(mapping);
            page
        }
        Err(other_thread_was_first) => other_thread_was_first,
    }
}

/// For tests: the result of `work` in a forked child. `work` must not wait for other threads.
#[cfg(test)]
pub fn in_forked_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `work`, which waits for no thread that the child lacks, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(false);
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!answer)) };
    }
    let mut status = -1;
    // SAFETY: the status is a local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parent_and_child_each_have_their_own() {
        assert_eq!((id(), id()), (std::process::id(), std::process::id()));
        // SAFETY: the child only loads and stores words, asks for its id and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(i32::from((id(), id()) != (std::process::id(), std::process::id()))) };
        }
        let mut status = -1;
        // SAFETY: the status is a local.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((status, id()), (0, std::process::id()));
    }
}
