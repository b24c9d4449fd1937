//! The weight window: units of parameters whose home is host memory or a tier are on the device only while they are used
//! (weight-flow: SuperOffload section 4.2).
//!
//! | file | holds |
//! |---|---|
//! | [`order`] | the rule: places, users, the recorded order of uses, what a copy waits for; no I/O, no locks |
//! | [`device`] | the memory of the places, and copies into it: a GPU, or host memory in its place |
//! | [`engine`] | the rule on a device; a thread that reads units of a tier |
#![forbid(unsafe_code)]

pub mod device;
pub mod engine;
pub mod order;

#[cfg(test)]
mod tests;
