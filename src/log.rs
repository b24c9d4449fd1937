//! Where messages go: a callback, else stderr when `SPILLWAY_LOG` names a level, else nowhere.
//!
//! Lock-free, so that a forked child can log whatever the parent's threads were doing.
#![forbid(unsafe_code)]

use std::io::Write;
use std::sync::atomic::{AtomicI32, Ordering};

use arc_swap::ArcSwapOption;

/// How much a message matters; a sink set to one level also gets the levels before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub enum Level {
    /// A call failed in a way that the caller may not see.
    Error = 1,
    /// Something works worse than it could; says what to change.
    Warn = 2,
    /// A choice made once, and why.
    Info = 3,
    /// Detail for a bug report.
    Debug = 4,
}

impl Level {
    /// The level with this number.
    pub fn from_number(number: i32) -> Option<Level> {
        [Level::Error, Level::Warn, Level::Info, Level::Debug]
            .into_iter()
            .find(|level| *level as i32 == number)
    }
}

type Sink = Box<dyn Fn(Level, &str) + Send + Sync>;

static SINK: ArcSwapOption<(Level, Sink)> = ArcSwapOption::const_empty();

/// Sends messages up to `level` to `sink`, from any thread; `None` returns to `SPILLWAY_LOG`.
pub fn set_sink(sink: Option<(Level, Sink)>) {
    SINK.store(sink.map(std::sync::Arc::new));
}

/// True if a message of this level would go anywhere.
pub fn enabled(level: Level) -> bool {
    match SINK.load().as_ref() {
        Some(sink) => level <= sink.0,
        None => env_level().is_some_and(|limit| level <= limit),
    }
}

/// Hands one message to the sink.
pub fn write(level: Level, message: &str) {
    match SINK.load_full() {
        Some(sink) if level <= sink.0 => (sink.1)(level, message),
        Some(_) => {}
        None if enabled(level) => {
            // A closed stderr is no reason to fail the step that wanted to say something.
            let _ = writeln!(std::io::stderr(), "spillway: {message}");
        }
        None => {}
    }
}

/// `SPILLWAY_LOG`, read once. A plain atomic, because a `OnceLock` caught half-way by fork would never open.
fn env_level() -> Option<Level> {
    const UNREAD: i32 = -1;
    static LEVEL: AtomicI32 = AtomicI32::new(UNREAD);
    let mut known = LEVEL.load(Ordering::Relaxed);
    if known == UNREAD {
        let level = std::env::var("SPILLWAY_LOG").ok().and_then(|text| parse_level(&text));
        known = level.map_or(0, |level| level as i32);
        LEVEL.store(known, Ordering::Relaxed);
    }
    Level::from_number(known)
}

fn parse_level(text: &str) -> Option<Level> {
    match text.trim().to_ascii_lowercase().as_str() {
        "error" => Some(Level::Error),
        "warn" => Some(Level::Warn),
        "info" | "1" => Some(Level::Info),
        "debug" => Some(Level::Debug),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_names_parse_and_anything_else_is_silence() {
        assert_eq!(parse_level("warn"), Some(Level::Warn));
        assert_eq!(parse_level(" DEBUG "), Some(Level::Debug));
        assert_eq!(parse_level("off"), None);
        assert_eq!(parse_level(""), None);
    }
}
