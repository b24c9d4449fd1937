//! Handles: objects of this library that C holds by pointer.
//!
//! This is the only place where a forked child is told that an object is its parent's: the functions below a handle do not
//! check. A GPU also checks below, because its driver is of the whole process.
//!
//! C receives a handle from an `open` function and gives it back to a `close` function. A call that several threads may
//! make at once takes `Option<&T>`, which the header shows as a const pointer. Other calls take `Option<&mut T>`.

use crate::error::{Error, Result};

/// Implements [`Handle`]: `handle!(name, argument, field, "the object")` for an object that works only in the process that
/// opened it, which the field holds, and `handle!(name, argument)` for one that a forked child may use too.
macro_rules! handle {
    ($name:ident, $argument:literal $(, $opener:tt, $object:literal)?) => {
        impl $crate::capi::handle::Handle for $name {
            const NAME: &'static str = $argument;

            fn check_process(&self) -> $crate::error::Result<()> {
                $(self.$opener.check($object)?;)?
                Ok(())
            }
        }
    };
}
pub(in crate::capi) use handle;

/// An object that C holds by pointer.
pub trait Handle {
    /// Name of the argument in the header.
    const NAME: &'static str;

    /// Fails in a forked child if the object works only in the process that opened it.
    fn check_process(&self) -> Result<()>;
}

/// The object behind a handle. Fails for NULL, and in a forked child.
pub fn get<T: Handle>(handle: Option<&T>) -> Result<&T> {
    let object = handle.ok_or_else(|| Error::invalid(T::NAME, "is NULL"))?;
    object.check_process()?;
    Ok(object)
}

/// The object behind a handle that one thread uses at a time. Fails for NULL, and in a forked child.
pub fn get_mut<T: Handle>(handle: Option<&mut T>) -> Result<&mut T> {
    let object = handle.ok_or_else(|| Error::invalid(T::NAME, "is NULL"))?;
    object.check_process()?;
    Ok(object)
}

/// Takes the object from a handle that C gives up. `None` for NULL, and in a forked child, where the parent's object
/// stays untouched.
pub fn close<T: Handle>(handle: Option<Box<T>>) -> Option<Box<T>> {
    let object = handle?;
    if object.check_process().is_err() {
        std::mem::forget(object);
        return None;
    }
    Some(object)
}

/// Closes a handle whose end cannot fail.
pub fn end<T: Handle>(handle: Option<Box<T>>) -> Result<()> {
    drop(close(handle));
    Ok(())
}
