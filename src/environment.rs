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
use std::sync::atomic::{AtomicI32, Ordering};

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

/// The number of the level that `SPILLWAY_LOG` names, as in `spw_log_level`; 0 for none. It is read once. A plain atomic,
/// because a `OnceLock` that a fork interrupts stays locked.
pub fn log_level() -> i32 {
    const UNREAD: i32 = -1;
    static LEVEL: AtomicI32 = AtomicI32::new(UNREAD);
    let mut known = LEVEL.load(Ordering::Relaxed);
    if known == UNREAD {
        known = text("SPILLWAY_LOG").ok().flatten().map_or(0, |text| level_of(&text));
        LEVEL.store(known, Ordering::Relaxed);
    }
    known
}

/// "1" means "info".
fn level_of(text: &str) -> i32 {
    match text.trim().to_ascii_lowercase().as_str() {
        "error" => 1,
        "warn" => 2,
        "info" | "1" => 3,
        "debug" => 4,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::level_of;

    #[test]
    fn level_names_parse_and_anything_else_is_silence() {
        let parsed = ["error", "warn", "info", "1", " DEBUG ", "off", ""].map(level_of);
        assert_eq!(parsed, [1, 2, 3, 3, 4, 0, 0]);
    }
}
