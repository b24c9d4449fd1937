//! What a forked child may do with the objects of its parent.
//!
//! The rule: a call on an object of the parent fails, and a drop of one forgets it. The C border makes the check, once for
//! each call, before any lock is taken: a thread of the parent may have held it at the fork. So
//! functions below do not check. What the library itself drops, or keeps for the whole process, checks here:
//!
//! - [`OpeningProcess`] says whether an object is of this process.
//! - [`PerProcess`] is a value that a child neither uses nor drops. It may hold a lock that was taken at the fork, or
//!   threads that the child lacks.
//! - [`PerProcessStatic`] is a static of which every process makes its own value.
//! - [`super::fork_closed`] has the descriptors that a child closes.
//!
//! The id of a process is cached in a page that the system zeroes in every child (MADV_WIPEONFORK). This also covers a
//! program that calls clone directly, where handlers of pthread_atfork do not run. No lock is taken here.

use std::convert::Infallible;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use arc_swap::{ArcSwapOption, Guard};

use super::memory::Mapping;
use crate::error::{Error, Result};

/// The process that opened an object. A forked child has a copy of the object without its threads. The copy may contain
/// locks that a thread of the parent held and that stay locked.
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

/// A value of the process that made it. A forked child gets an error.
#[derive(Debug)]
pub struct PerProcess<T> {
    opener: OpeningProcess,
    value: ManuallyDrop<T>,
}

impl<T> PerProcess<T> {
    /// Makes a value of this process.
    pub fn new(value: T) -> PerProcess<T> {
        PerProcess { opener: OpeningProcess::current(), value: ManuallyDrop::new(value) }
    }

    /// False in a forked child.
    pub fn is_here(&self) -> bool {
        self.opener.is_current()
    }

    /// The value; `None` in a forked child.
    pub fn get(&self) -> Option<&T> {
        self.is_here().then_some(&*self.value)
    }

    /// The value; [`Error::Unsupported`](crate::error::Error::Unsupported) in a forked child. `what` names the object.
    pub fn check(&self, what: &str) -> Result<&T> {
        self.opener.check(what).map(|()| &*self.value)
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: dropped only here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A static with one value per process. A forked child starts without a value and makes its own.
#[derive(Debug)]
pub struct PerProcessStatic<T>(ArcSwapOption<PerProcess<T>>);

/// Shared ownership of the value of this process.
#[derive(Debug)]
pub struct Shared<T>(Arc<PerProcess<T>>);

impl<T> Deref for Shared<T> {
    type Target = T;

    /// The value was of this process when this object was made. A thread that holds this object while it forks
    /// continues with the parent's value in the child.
    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T> PerProcessStatic<T> {
    /// A static without a value.
    pub const fn empty() -> PerProcessStatic<T> {
        PerProcessStatic(ArcSwapOption::const_empty())
    }

    /// The value of this process; `None` if there is none yet.
    pub fn get(&self) -> Option<Shared<T>> {
        own(&self.0.load_full())
    }

    /// The value of this process; `make` makes it if there is none yet. Two threads may call `make` at once: both get
    /// the value of the first one.
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> Shared<T> {
        let Ok(value) = self.get_or_try(|| Ok::<T, Infallible>(make()));
        value
    }

    /// As [`PerProcessStatic::get_or_make`], with a `make` that may fail.
    pub fn get_or_try<E>(
        &self,
        make: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<Shared<T>, E> {
        let mut seen = self.0.load_full();
        if let Some(found) = own(&seen) {
            return Ok(found);
        }
        let made = Arc::new(PerProcess::new(make()?));
        loop {
            let before = Guard::into_inner(self.0.compare_and_swap(&seen, Some(Arc::clone(&made))));
            if let Some(first) = own(&before) {
                return Ok(first);
            }
            if before.as_ref().map(Arc::as_ptr) == seen.as_ref().map(Arc::as_ptr) {
                return Ok(Shared(made));
            }
            seen = before;
        }
    }

    /// Forgets the value. Its last user drops it.
    pub fn clear(&self) {
        self.0.store(None);
    }
}

fn own<T>(seen: &Option<Arc<PerProcess<T>>>) -> Option<Shared<T>> {
    seen.as_ref().filter(|value| value.is_here()).map(|value| Shared(Arc::clone(value)))
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
    use std::sync::atomic::AtomicUsize;
    use std::sync::{Barrier, Mutex, mpsc};

    use super::*;

    /// Counts its drops.
    #[derive(Debug)]
    struct Counted(&'static AtomicUsize);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_child_gets_an_error_and_never_drops_the_value() {
        static DROPS: AtomicUsize = AtomicUsize::new(0);
        let mut value = Some(PerProcess::new(Counted(&DROPS)));
        assert!(
            value.as_ref().is_some_and(|value| value.get().is_some() && value.check("the value").is_ok())
        );
        let parent = std::process::id().to_string();
        assert!(in_forked_child(|| {
            let theirs = value.take().unwrap();
            let refused = theirs.check("the value").unwrap_err();
            let named = matches!(&refused, Error::Unsupported(words) if words.contains(&parent));
            let absent = theirs.get().is_none() && !theirs.is_here();
            drop(theirs);
            named && absent && DROPS.load(Ordering::SeqCst) == 0
        }));
        drop(value);
        assert_eq!(DROPS.load(Ordering::SeqCst), 1);
    }

    /// Another thread of the parent holds the lock inside the value during the fork.
    #[test]
    fn a_child_makes_its_own_beside_a_locked_value_and_leaves_its_parents_alone() {
        static DROPS: AtomicUsize = AtomicUsize::new(0);
        static VALUE: PerProcessStatic<Mutex<(u32, Counted)>> = PerProcessStatic::empty();
        let made = || Mutex::new((1, Counted(&DROPS)));
        VALUE.get_or_make(made).lock().unwrap().0 = 7;
        let (locked, is_locked) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let value = VALUE.get().unwrap();
                let guard = value.lock().unwrap();
                locked.send(()).unwrap();
                let _ = released.recv();
                drop(guard);
            });
            is_locked.recv().unwrap();
            let child = in_forked_child(|| {
                let none_yet = VALUE.get().is_none();
                let own = VALUE.get_or_make(made);
                let fresh = own.try_lock().is_ok_and(|value| value.0 == 1);
                VALUE.clear();
                let before = DROPS.load(Ordering::SeqCst);
                drop(own);
                // The child's own value is dropped; its parent's is not.
                none_yet && fresh && (before, DROPS.load(Ordering::SeqCst)) == (0, 1)
            });
            drop(release);
            assert!(child);
        });
        assert_eq!(VALUE.get().unwrap().lock().unwrap().0, 7);
        VALUE.clear();
        assert_eq!(DROPS.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn threads_that_make_it_at_once_get_one_value() {
        static VALUE: PerProcessStatic<usize> = PerProcessStatic::empty();
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        for _ in 0..100 {
            let barrier = Barrier::new(4);
            let get = || {
                barrier.wait();
                *VALUE.get_or_make(|| NEXT.fetch_add(1, Ordering::SeqCst))
            };
            let seen: Vec<usize> = std::thread::scope(|scope| {
                let all: Vec<_> = (0..4).map(|_| scope.spawn(get)).collect();
                all.into_iter().map(|one| one.join().unwrap()).collect()
            });
            assert!(seen.iter().all(|value| *value == seen[0]), "{seen:?}");
            VALUE.clear();
        }
    }

    #[test]
    fn a_failed_make_stores_nothing() {
        static VALUE: PerProcessStatic<u32> = PerProcessStatic::empty();
        assert_eq!(VALUE.get_or_try(|| Err::<u32, _>("no")).err(), Some("no"));
        assert!(VALUE.get().is_none());
        assert_eq!(*VALUE.get_or_try(|| Ok::<_, ()>(3)).unwrap(), 3);
    }

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
