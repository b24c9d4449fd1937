//! Pure cost models: numbers in, plan out. No clock, no file, no thread.
#![forbid(unsafe_code)]

pub mod placement;
pub mod split;
