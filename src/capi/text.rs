//! Copies text of any length into the caller's buffer.

use std::ffi::c_char;

use super::library::out;
use crate::error::{Error, Result};

/// Writes `words` and a NUL to the `size` bytes at `text`, and the number of bytes with the NUL to `needed_out`. With
/// `text` NULL it writes only the number. A buffer that is too small is an error.
///
/// # Safety
/// `text` is NULL or points to `size` writable bytes, `needed_out` to a u64.
pub unsafe fn hand_out(words: &str, text: *mut c_char, size: usize, needed_out: *mut u64) -> Result<()> {
    let needed_out = out(needed_out, "needed_out")?;
    let needed = words.len() + 1;
    if !text.is_null() {
        if size < needed {
            return Err(Error::invalid("size", format!("is {size}, the text takes {needed}")));
        }
        // SAFETY: `text` has room, as just checked, by the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(words.as_ptr().cast(), text, words.len());
            text.add(words.len()).write(0);
        }
    }
    // SAFETY: not NULL, and valid by the caller's promise.
    unsafe { needed_out.write(needed as u64) };
    Ok(())
}
