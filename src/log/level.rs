//! The values of `SPILLWAY_LOG`. The preload library compiles this file too.
#![forbid(unsafe_code)]

/// The number of the level that `text` names, as in `spw_log_level`; 0 for any other text. "1" means "info".
pub fn parse(text: &str) -> i32 {
    match text.trim().to_ascii_lowercase().as_str() {
        "error" => 1,
        "warn" => 2,
        "info" | "1" => 3,
        "debug" => 4,
        _ => 0,
    }
}
