//! A CUDA driver without a GPU, for tests.
//!
//! Device memory is host memory, and kernels are run from their PTX. Work in streams is lazy: an operation runs only when
//! the host waits for something that comes after it, so a missing wait of the host shows as wrong data every time. Vector
//! clocks find two accesses to the same bytes that no event orders, whatever order they happened to run in.
//!
//! It is as strict as a driver may be. A device has room for so many queued operations, and a call that queues one more
//! blocks until the oldest is over. A copy from or to memory that is not page-locked blocks, and is counted; one from or to
//! memory that is page-locked in part is refused. Unsafe calls break a capture unless the thread allows them.
//!
//! | file | holds |
//! |---|---|
//! | `api` | the driver's functions |
//! | `gpu`, `memory` | one fake GPU: streams, events, faults to come; its memory |
//! | `queue` | what is queued, and how it runs |
//! | `capture` | streams whose work goes into a graph, and what breaks that |
//! | `order` | vector clocks, and what raced |
//! | `ptx` | the kernels' PTX: parsed strictly, run thread by thread |
//!
//! There are 64 devices and they share nothing, so that tests can run at the same time. A program under test reads the
//! variables `FAKECUDA_INIT` (code of cuInit), `FAKECUDA_VERSION`, `FAKECUDA_DEVICES`, and `FAKECUDA_FAIL`, a list such
//! as `cuMemAlloc_v2=2,cuStreamSynchronize=700`. `FAKECUDA_DEPTH` is how much a device may have queued.

#[allow(
    clippy::missing_safety_doc,
    clippy::redundant_closure_call,
    missing_docs,
    non_snake_case,
    reason = "the driver's own functions"
)]
pub mod api;
pub mod capture;
pub mod gpu;
mod memory;
pub mod order;
pub mod ptx;
mod queue;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_void};

pub use gpu::Gpu;

/// The function of this name, null if there is none: what dlsym would say of the library.
pub fn symbol(name: &CStr) -> *mut c_void {
    let name = name.to_string_lossy();
    api::FUNCTIONS.iter().find(|(known, _)| *known == name).map_or(std::ptr::null_mut(), |(_, f)| f.0)
}

/// Does `work` with GPU `ordinal`, for a test to set it up or to ask what it saw.
pub fn with<R>(ordinal: u32, work: impl FnOnce(&mut Gpu) -> R) -> R {
    work(&mut gpu::lock(ordinal))
}
