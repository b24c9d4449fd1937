//! The virtual tier: state on several storage paths.
#![forbid(unsafe_code)]

pub mod turn;
