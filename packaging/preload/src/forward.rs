//! The real libaio, for processes that may not use io_uring and for programs that fetch
//! events without libaio's functions.
//!
//! The library is opened by name, and its functions are looked up with their versions. It is not in the global scope,
//! and an unversioned lookup would find this library.

use std::ffi::{CStr, c_char, c_long, c_void};
use std::mem::transmute_copy;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{ENOSYS, c_int};

use crate::environment;
use crate::imports;
use crate::memory::last_errno;
use crate::report::{self, Level};

type Setup = unsafe extern "C" fn(c_int, *mut u64) -> c_int;
type Destroy = unsafe extern "C" fn(u64) -> c_int;
type Submit = unsafe extern "C" fn(u64, c_long, u64) -> c_int;
type Cancel = unsafe extern "C" fn(u64, u64, u64) -> c_int;
type GetEvents = unsafe extern "C" fn(u64, c_long, c_long, u64, u64) -> c_int;
type PollEvents = unsafe extern "C" fn(u64, c_long, c_long, u64, u64, u64) -> c_int;

/// libaio's entry points; addresses are passed on as numbers, unchanged.
pub struct Libaio {
    pub setup: Setup,
    pub destroy: Destroy,
    pub submit: Submit,
    pub cancel: Cancel,
    pub get_events: GetEvents,
    /// Exists since libaio 0.3.111.
    pub poll_events: Option<PollEvents>,
}

static FORWARDS: AtomicBool = AtomicBool::new(false);

/// The reason not to create a context in this library; `None` if there is none.
pub fn reason() -> Option<String> {
    if is_set() {
        return Some("SPILLWAY_PRELOAD_FORWARD=1".to_string());
    }
    let name = imports::fetches_elsewhere()?;
    let name = if name.is_empty() { "the program" } else { &name };
    Some(format!("{name} submits requests with libaio, but does not fetch their events with it"))
}

/// True if `SPILLWAY_PRELOAD_FORWARD` is 1.
pub fn is_set() -> bool {
    environment::is_one("SPILLWAY_PRELOAD_FORWARD")
}

/// The real libaio, after this library could not create a context because of `reason`.
pub fn start(reason: &str) -> Result<&'static Libaio, c_int> {
    if !FORWARDS.swap(true, Ordering::Relaxed) {
        report::say(Level::Warn, || format!("forwarding to libaio.so.1: {reason}"));
    }
    libaio()
}

/// The real libaio, for a context that this library did not create; `None` if this library created all.
pub fn active() -> Option<&'static Libaio> {
    if FORWARDS.load(Ordering::Relaxed) { libaio().ok() } else { None }
}

/// The system call of one of libaio's functions, for a context that neither this library nor libaio created for it: the
/// kernel knows whether it exists. An errno is returned as libaio returns it.
pub fn kernel(number: c_long, [a, b, c, d, e, f]: [u64; 6]) -> Result<c_int, c_int> {
    // SAFETY: the kernel checks the addresses of these calls, and memory of transfers belongs to the program until then.
    match unsafe { libc::syscall(number, a, b, c, d, e, f) } {
        result if result < 0 => Err(last_errno()),
        result => Ok(result as c_int),
    }
}

fn libaio() -> Result<&'static Libaio, c_int> {
    static LIBAIO: OnceLock<Option<Libaio>> = OnceLock::new();
    let opened = LIBAIO.get_or_init(|| {
        let libaio = open();
        if libaio.is_none() {
            report::say(Level::Error, || {
                "libaio.so.1 cannot be opened, so asynchronous I/O fails; install libaio".to_string()
            });
        }
        libaio
    });
    opened.as_ref().ok_or(ENOSYS)
}

fn open() -> Option<Libaio> {
    // SAFETY: the name ends with NUL; libaio's constructors do nothing.
    let library =
        NonNull::new(unsafe { libc::dlopen(c"libaio.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })?;
    // SAFETY: each type is the one that `<libaio.h>` declares for the name in that version.
    unsafe {
        Some(Libaio {
            setup: function(library, c"io_setup", c"LIBAIO_0.4")?,
            destroy: function(library, c"io_destroy", c"LIBAIO_0.4")?,
            submit: function(library, c"io_submit", c"LIBAIO_0.1")?,
            cancel: function(library, c"io_cancel", c"LIBAIO_0.4")?,
            get_events: function(library, c"io_getevents", c"LIBAIO_0.4")?,
            poll_events: function(library, c"io_pgetevents", c"LIBAIO_0.5"),
        })
    }
}

unsafe extern "C" {
    fn dlvsym(library: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// # Safety
/// `F` is the function's type.
unsafe fn function<F>(library: NonNull<c_void>, name: &CStr, version: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the library is never closed; the caller guarantees the type.
    unsafe {
        let address = NonNull::new(dlvsym(library.as_ptr(), name.as_ptr(), version.as_ptr()))?;
        Some(transmute_copy(&address.as_ptr()))
    }
}
