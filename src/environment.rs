//! Variables of the environment: the only place that reads them. The preload library compiles this file too.
//!
//! Invariants:
//! - A program with more rights than its caller (setuid, setgid, file capabilities) sees no variable: whoever starts it
//!   sets them, and some name files and libraries.
//! - A variable that is empty or blank is as one that is not set. The exceptions are `CUDA_VISIBLE_DEVICES` and
//!   `SPILLWAY_PROFILE`, whose readers take the [`value`].
//! - A value that is not UTF-8 is an error of the variable, never as if it were not set.

use std::ffi::OsString;
use std::path::PathBuf;

/// The name of a variable that must be text, but is not UTF-8. Its value may be a secret, so no message has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotText(pub &'static str);

/// The value of a variable as it is; `None` if it is not set, or in a program with more rights than its caller.
pub fn value(name: &str) -> Option<OsString> {
    // SAFETY: getauxval reads a table that the kernel filled before the program started.
    let has_more_rights = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    if has_more_rights { None } else { std::env::var_os(name) }
}

/// The text of a variable; `None` if it is not set or blank.
pub fn text(name: &'static str) -> Result<Option<String>, NotText> {
    let text = value(name).map(|value| value.into_string().map_err(|_| NotText(name))).transpose()?;
    Ok(text.filter(|text| !text.trim().is_empty()))
}

/// The text of a variable without the blanks around it; `None` if it is not set or blank.
pub fn word(name: &'static str) -> Result<Option<String>, NotText> {
    Ok(text(name)?.map(|text| text.trim().to_string()))
}

/// The path that a variable names; `None` if it is not set or empty.
pub fn path(name: &str) -> Option<PathBuf> {
    value(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// True if the variable is 1.
pub fn is_one(name: &str) -> bool {
    value(name).is_some_and(|value| value == "1")
}
