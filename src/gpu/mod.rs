//! The GPU, through its driver, which is found at run time.
//!
//! | file | holds |
//! |---|---|
//! | `table` | the driver's functions and codes |
//! | [`driver`] | the library: opened at first use, and what is wrong with it |
//! | [`device`] | one GPU and its primary context, shared with the framework |
//! | [`stream`] | streams and events, ours and the framework's |
//! | [`memory`] | device memory, and host memory that a copy may use |
//! | `module` | PTX to functions |
//! | [`steps`] | Adam over many tensors, in the order of the framework's stream |
//! | [`transfer`] | gradients out, parameters in |
//! | [`watch`] | events of the framework as the host waits for them |
//! | [`link`], [`speeds`], [`profile`] | how fast it is, measured once |
//! | [`kernels`] | the kernels of kernels/*.cu: casts, sums of squares, Adam and its inverse |
//!
//! The driver is called through an own table and not through a binding crate, because a binding's enums make a code that
//! a newer driver returns undefined behaviour, because a missing library or function has to be an error and not a
//! panic, and because tests put a driver of their own behind it.

mod module;
mod table;

pub mod device;
pub mod driver;
pub mod kernels;
pub mod link;
pub mod memory;
pub mod profile;
pub mod speeds;
pub mod steps;
pub mod stream;
pub mod transfer;
pub mod watch;

#[cfg(test)]
pub(crate) mod tests;
