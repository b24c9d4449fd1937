//! The contexts of this process, looked up by the pointer that the program holds.
//!
//! A context does not survive fork, as with Linux's aio: the child gets EINVAL for its parent's contexts and may create
//! its own. The fork handlers hold the lock across the fork, so that the child's map is consistent.

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Once, PoisonError, RwLock, RwLockWriteGuard};

use crate::context::Context;
use crate::report::{self, Level};

type Contexts = BTreeMap<u64, Arc<Context>>;

static CONTEXTS: RwLock<Contexts> = RwLock::new(BTreeMap::new());

/// Stores a context, and returns the number by which the program refers to it.
pub fn add(context: Context) -> u64 {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(prepare);
    let context = Arc::new(context);
    let handle = Arc::as_ptr(&context) as u64;
    write().insert(handle, context);
    handle
}

/// Most contexts with a ring, each of which holds a descriptor. Programs that have more keep them in pools, and have few
/// descriptors left.
const MOST: usize = 64;

/// The reason not to create another context with a ring; `None` if there is none.
pub fn has_no_room() -> Option<String> {
    let held = CONTEXTS.read().unwrap_or_else(PoisonError::into_inner).len();
    (held >= MOST)
        .then(|| format!("{held} contexts hold a descriptor for a ring, and further ones hold none"))
}

/// The context, if it exists.
pub fn find(handle: u64) -> Option<Arc<Context>> {
    CONTEXTS.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned()
}

/// Removes and returns the context; later lookups do not find it.
pub fn remove(handle: u64) -> Option<Arc<Context>> {
    write().remove(&handle)
}

fn write() -> RwLockWriteGuard<'static, Contexts> {
    CONTEXTS.write().unwrap_or_else(PoisonError::into_inner)
}

/// A panic in this library becomes a line in the log and an error to the caller, and never prints to stderr.
pub fn log_panics() {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            report::say(Level::Error, || format!("internal error: {panic}"))
        }));
    });
}

fn prepare() {
    log_panics();
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
}

/// The write lock, held from before a fork until after it.
struct AcrossFork(UnsafeCell<Option<RwLockWriteGuard<'static, Contexts>>>);

// SAFETY: only the thread that holds the write lock touches the cell.
unsafe impl Sync for AcrossFork {}

static ACROSS_FORK: AcrossFork = AcrossFork(UnsafeCell::new(None));

extern "C" fn before_fork() {
    let lock = write();
    // SAFETY: this thread has just taken the lock.
    unsafe { *ACROSS_FORK.0.get() = Some(lock) };
}

extern "C" fn after_fork_in_parent() {
    // SAFETY: this thread took the lock in `before_fork`. The guard leaves the cell before the lock is released.
    drop(unsafe { (*ACROSS_FORK.0.get()).take() });
}

extern "C" fn after_fork_in_child() {
    // SAFETY: as above; the child has no other thread.
    let Some(mut lock) = (unsafe { (*ACROSS_FORK.0.get()).take() }) else { return };
    let inherited = std::mem::take(&mut *lock);
    for context in inherited.values() {
        context.disown();
    }
    // Never dropped: the rings' memory is not mapped in the child, and other threads of the parent
    // may hold their locks.
    std::mem::forget(inherited);
}

/// Runs after the program's own exit handlers and destructors, which may still do I/O.
extern "C" fn at_exit() {
    let Ok(contexts) = CONTEXTS.try_read() else { return };
    let mut living = Vec::new();
    // A program may exit because memory is exhausted.
    if living.try_reserve_exact(contexts.len()).is_err() {
        return report::say(Level::Error, || {
            "out of memory: the process exits without waiting for requests in flight".to_string()
        });
    }
    living.extend(contexts.values().cloned());
    drop(contexts);
    for context in &living {
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| context.finish()));
    }
    // The kernel releases the rings: threads may still be waiting on them.
    std::mem::forget(living);
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;
