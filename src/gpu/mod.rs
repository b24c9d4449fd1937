//! The GPU, through the CUDA driver, which is loaded at run time.
//!
//! | file | holds |
//! |---|---|
//! | `table` | the driver's functions and result codes |
//! | [`driver`] | the driver library: opened at first use; error diagnosis |
//! | [`device`] | one GPU and its primary context, shared with the framework |
//! | [`stream`] | streams and events, Spillway's and the framework's |
//! | [`memory`] | device memory, and page-locked host memory for copies |
//! | `module` | compiles PTX into functions |
//! | [`steps`] | Adam over many tensors, in order on the framework's stream |
//! | [`list`] | the tensors of one call as the kernels read them, and their launches |
//! | `tables`, `staging` | the lists in device memory, kept while they stay the same; the memory of their uploads |
//! | `sums` | buffers for the sums of squares of one call |
//! | [`transfer`] | copies of gradients to the host and of parameters to the device |
//! | `copy`, `tickets`, `lane` | one copy; what is known of each; the queue and the thread of a direction |
//! | `marks` | points in the framework's work at the time of a call |
//! | [`watch`] | host threads wait for the framework's events |
//! | `waiters` | waits in the driver with a limit of time |
//! | [`link`], [`speeds`], [`profile`] | bandwidth of the link and speed of the CPU, measured once |
//! | [`visible`], [`machine`] | the GPU behind each ordinal, and its place in the topology |
//! | [`kernels`] | the kernels of kernels/*.cu: casts, sums of squares, Adam |
//!
//! Types, constants and signatures of the driver come from cudarc's bindings. Spillway calls the driver through its own
//! function table, not through cudarc's functions, for three reasons:
//! - cudarc's enums make a result code of a newer driver undefined behaviour.
//! - cudarc panics if the library or a function is missing; here that is an error.
//! - Tests replace the driver with a fake one.

mod copy;
mod lane;
mod marks;
mod module;
mod staging;
mod sums;
mod table;
mod tables;
mod tickets;
mod waiters;

pub mod device;
pub mod driver;
pub mod kernels;
pub mod link;
pub mod list;
pub mod machine;
pub mod memory;
pub mod profile;
pub mod speeds;
pub mod steps;
pub mod stream;
pub mod transfer;
pub mod visible;
pub mod watch;

#[cfg(test)]
pub(crate) mod tests;
