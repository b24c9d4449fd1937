//! Arenas within one process.
