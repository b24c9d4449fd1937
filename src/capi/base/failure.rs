//! What each thread keeps of its last failed call.
//!
//! Invariants:
//! - A failure is kept whenever the call was made: in exit handlers, in destructors of static objects, and in destructors
//!   of a thread's own data, in every round of them. The place has no destructor of its own, so it never ends before its
//!   thread.
//! - A thread that ends frees its failure: a key of the system does it. A failure in the last round of destructors is not
//!   freed.

use std::cell::Cell;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::error::IoError;

/// The last failed call of a thread.
pub struct Failure {
    /// Its message.
    pub message: CString,
    /// The error with the path as a C string, if it was an operation on a file.
    pub io: Option<(IoError, CString)>,
}

thread_local! {
    /// NULL, or a box that only this thread uses.
    static PLACE: Cell<*mut Failure> = const { Cell::new(ptr::null_mut()) };
}

/// The key whose destructor frees a thread's failure; [`NO_KEY`] before the first failure, and after the library's exit
/// handler.
static KEY: AtomicI64 = AtomicI64::new(NO_KEY);
const NO_KEY: i64 = -1;

/// Replaces the last failure of this thread.
pub fn keep(failure: Failure) {
    let place = PLACE.get();
    if place.is_null() {
        let made = Box::into_raw(Box::new(failure));
        PLACE.set(made);
        free_at_end(made);
        return;
    }
    // SAFETY: this thread's box, which no reference points to: `with` has returned.
    unsafe { *place = failure };
}

/// Passes the last failure of this thread to `read`, which keeps no failure.
pub fn with<T>(read: impl FnOnce(Option<&Failure>) -> T) -> T {
    // SAFETY: NULL, or this thread's box, which stays during the call.
    read(unsafe { PLACE.get().as_ref() })
}

/// The C string of `text` without NUL bytes in it.
pub fn c_string(text: &str) -> CString {
    CString::new(text.bytes().filter(|byte| *byte != 0).collect::<Vec<_>>()).unwrap_or_default()
}

/// Lets the end of this thread free the failure. Without a key, of which the system has 1024, it is not freed.
fn free_at_end(made: *mut Failure) {
    if let Some(key) = key() {
        // SAFETY: an existing key, and a value that its destructor accepts.
        unsafe { libc::pthread_setspecific(key, made.cast()) };
    }
}

fn key() -> Option<libc::pthread_key_t> {
    let known = KEY.load(Ordering::Acquire);
    if known != NO_KEY {
        return Some(known as libc::pthread_key_t);
    }
    let mut made = 0;
    // SAFETY: the key is a local, and the destructor a function of this library, which deletes the key when it ends.
    if unsafe { libc::pthread_key_create(&raw mut made, Some(free)) } != 0 {
        return None;
    }
    match KEY.compare_exchange(NO_KEY, made.into(), Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Some(made),
        Err(known) => {
            // SAFETY: the key that this call just made, which no thread has used.
            unsafe { libc::pthread_key_delete(made) };
            Some(known as libc::pthread_key_t)
        }
    }
}

unsafe extern "C" fn free(made: *mut c_void) {
    PLACE.set(ptr::null_mut());
    // SAFETY: the box of this thread, which `keep` made.
    drop(unsafe { Box::from_raw(made.cast::<Failure>()) });
}

/// Runs when the library is unloaded, or the process exits: a thread that ends later must not call [`free`].
extern "C" fn at_unload() {
    let key = KEY.swap(NO_KEY, Ordering::AcqRel);
    if key != NO_KEY {
        // SAFETY: a key that `key` made, and that no one can get any more.
        unsafe { libc::pthread_key_delete(key as libc::pthread_key_t) };
    }
}

// SAFETY: the loader calls each address of this section once, after all code of the library that `exit` runs.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_UNLOAD: extern "C" fn() = at_unload;
