//! A CUDA driver without a GPU, for tests.
//!
//! Device memory is host memory, and kernels are run from their PTX. Work in streams is lazy: an operation runs only
//! when the host waits for it or for later work. A missing wait of the host therefore shows as wrong data every time.
//! Vector clocks find two accesses to the same bytes that no event orders, in whatever order they ran.
//!
//! The driver has every limit that a real driver may have. A device's queue is bounded: a call that exceeds the
//! bound blocks until the oldest operation ends. A copy from or to pageable memory blocks and is counted; a copy
//! from or to memory that is page-locked in part is refused. A call that is unsafe during capture ends the capture,
//! unless the thread allows the call.
//!
//! A test may stall a device: no work ends until it resumes. Calls that need the end of work block meanwhile, and are
//! counted: waits, frees, registrations of host memory, work for a full queue, and the calls that the test names.
//!
//! | file | holds |
//! |---|---|
//! | `api` | the driver's functions |
//! | `gpu` | one fake GPU: its objects, and requested faults |
//! | `queue` | streams, queued work, and how it runs |
//! | `memory` | memory of the device, and of the host where it is page-locked |
//! | `capture` | streams whose work is recorded into a graph, and the calls that break it |
//! | `code` | result codes |
//! | `order` | vector clocks, and the races that they show |
//! | `ptx` | the kernels' PTX: parsed strictly, run thread by thread |
//!
//! There are 96 devices and they share nothing, so that tests can run at the same time. A program under test reads
//! the variables `FAKECUDA_INIT` (code of cuInit), `FAKECUDA_VERSION`, `FAKECUDA_DEVICES`, and `FAKECUDA_FAIL`, a
//! list such as `cuMemAlloc_v2=2,cuStreamSynchronize=700`. `FAKECUDA_DEPTH` is how much a device may have queued.

#[allow(
    clippy::missing_safety_doc,
    clippy::redundant_closure_call,
    missing_docs,
    non_snake_case,
    reason = "the driver's own functions"
)]
pub mod api;
pub mod capture;
pub mod code;
pub mod gpu;
mod memory;
pub mod order;
pub mod ptx;
pub mod queue;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_void};

pub use gpu::{Gpu, resume};

/// The function of this name, or null if there is none: the result that dlsym would return for the library.
pub fn symbol(name: &CStr) -> *mut c_void {
    let name = name.to_string_lossy();
    api::FUNCTIONS.iter().find(|(known, _)| *known == name).map_or(std::ptr::null_mut(), |(_, f)| f.0)
}

/// Calls `work` with GPU `ordinal`, so that a test can configure it or read its records.
pub fn with<R>(ordinal: u32, work: impl FnOnce(&mut Gpu) -> R) -> R {
    work(&mut gpu::lock(ordinal))
}
