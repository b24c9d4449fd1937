//! Cancellation of threads by `pthread_cancel`. The preload library compiles this file too.
//!
//! A cancelled thread unwinds its stack at its next point of cancellation: a call of the C library that may wait, such as
//! open, read and write. Rust ends the process if the stack is unwound through its frames.

use std::ffi::c_int;
use std::ptr;

// The bindings of the crate libc lack it on Linux.
unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE` of Linux.
const DISABLE: c_int = 1;

/// While it lives, a cancellation of the calling thread waits: no call is a cancellation point.
pub struct NoCancellation {
    before: c_int,
    /// The state belongs to one thread.
    _here: std::marker::PhantomData<*const ()>,
}

impl NoCancellation {
    /// Begins it.
    pub fn enter() -> NoCancellation {
        let mut before = DISABLE;
        // SAFETY: a valid state, and a local for the earlier one.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        NoCancellation { before, _here: std::marker::PhantomData }
    }
}

impl Drop for NoCancellation {
    fn drop(&mut self) {
        if self.before != DISABLE {
            // SAFETY: the state that `enter` found; no earlier state is asked for.
            unsafe { pthread_setcancelstate(self.before, ptr::null_mut()) };
        }
    }
}
