//! A function of a loaded library, by its name.

use std::ffi::{CStr, c_void};
use std::mem::transmute_copy;
use std::ptr::NonNull;

/// A function of a library that is never closed.
///
/// # Safety
/// `F` is the function's type.
pub unsafe fn function<F>(library: NonNull<c_void>, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the library is open, and the name ends with NUL; the caller guarantees the type.
    unsafe {
        let address = NonNull::new(libc::dlsym(library.as_ptr(), name.as_ptr()))?;
        Some(transmute_copy(&address.as_ptr()))
    }
}
