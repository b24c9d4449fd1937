//! The last failed calls: one of each thread, and those of all threads by number.
//!
//! Invariants:
//! - A failure is kept whenever the call was made: in exit handlers, in destructors of static objects, and in destructors
//!   of a thread's own data, in every round of them. A thread's place has no destructor of its own, so it never ends
//!   before its thread.
//! - The address of a thread's text stays valid until the thread ends: a later failure changes the text in place.
//! - A number belongs to one failure. If that failure is no longer kept, nothing is found, and never another failure.
//! - The destructor of a pthread key frees the place of a thread that ends. A place that a failure makes in the last round
//!   of destructors is not freed.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::capi::pointer::prefix;
use crate::error::IoError;
use crate::log::recent::Recent;

/// A failed call.
pub struct Failure {
    /// Its message.
    pub message: String,
    /// The error, if it was an operation on a file.
    pub io: Option<IoError>,
}

type Kept = Arc<(u64, Failure)>;

/// The last failure of a thread.
struct Place {
    last: Kept,
    /// The message with a NUL, truncated.
    text: [u8; TEXT_BYTES],
}

const TEXT_BYTES: usize = 4096;

thread_local! {
    /// NULL, or a box that only this thread uses.
    static PLACE: Cell<*mut Place> = const { Cell::new(ptr::null_mut()) };
}

/// Failures of all threads.
static RECENT: Recent<Failure, 1024> = Recent::empty();

/// Numbers of failures: far from those of errno. They start again after 2^30 failures.
const FIRST_NUMBER: i32 = 1 << 30;
const NUMBERS: u64 = 1 << 30;

/// The key whose destructor frees a thread's place; [`NO_KEY`] before the first failure, and after the library's exit
/// handler.
static KEY: AtomicI64 = AtomicI64::new(NO_KEY);
const NO_KEY: i64 = -1;

/// Keeps a failure of this thread, and returns its number.
pub fn keep(failure: Failure) -> i32 {
    let last = RECENT.push(failure);
    let number = FIRST_NUMBER + (last.0 % NUMBERS) as i32;
    let place = PLACE.get();
    if place.is_null() {
        let made = Box::into_raw(Box::new(Place { text: text_of(&last.1.message), last }));
        PLACE.set(made);
        free_at_end(made);
        return number;
    }
    // SAFETY: this thread's box, which no reference points to: `with` has returned. C reads the text on this thread only.
    unsafe {
        (*place).text = text_of(&last.1.message);
        (*place).last = last;
    }
    number
}

/// The text of this thread's last failure as a C string, at an address that stays valid until the thread ends.
pub fn last_text() -> *const c_char {
    let place = PLACE.get();
    // SAFETY: this thread's box, as `keep` made it.
    if place.is_null() { c"".as_ptr() } else { unsafe { (&raw const (*place).text).cast() } }
}

/// The failure with this number; 0 is the last one of this thread.
pub fn find(number: i32) -> Option<Kept> {
    if number == 0 {
        // SAFETY: NULL, or this thread's box, which stays during the call.
        return unsafe { PLACE.get().as_ref() }.map(|place| Arc::clone(&place.last));
    }
    let low = u64::try_from(i64::from(number) - i64::from(FIRST_NUMBER)).ok()?;
    let newest = RECENT.end().checked_sub(1)?;
    RECENT.get(newest.checked_sub(newest.wrapping_sub(low) % NUMBERS)?)
}

fn text_of(message: &str) -> [u8; TEXT_BYTES] {
    let mut text = [0; TEXT_BYTES];
    let bytes = prefix(message, TEXT_BYTES - 1).as_bytes();
    text[..bytes.len()].copy_from_slice(bytes);
    text
}

/// The C string of `text` without NUL bytes in it.
pub fn c_string(text: &str) -> CString {
    CString::new(text.bytes().filter(|byte| *byte != 0).collect::<Vec<_>>()).unwrap_or_default()
}

/// Has the place freed when this thread ends. Without a key, of which a process has 1024, the place is not freed.
fn free_at_end(made: *mut Place) {
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
    drop(unsafe { Box::from_raw(made.cast::<Place>()) });
}

/// Runs when the library is unloaded, or the process exits: a thread that ends later must not call [`free`].
extern "C" fn at_unload() {
    let key = KEY.swap(NO_KEY, Ordering::AcqRel);
    if key != NO_KEY {
        // SAFETY: a key that `key` made, and that no one can get any more.
        unsafe { libc::pthread_key_delete(key as libc::pthread_key_t) };
    }
    RECENT.clear();
}

// SAFETY: the loader calls each address of this section once, after all code of the library that `exit` runs.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_UNLOAD: extern "C" fn() = at_unload;
