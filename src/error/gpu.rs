//! Failures of the GPU and its driver.
#![forbid(unsafe_code)]

/// Kind of a GPU or driver failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuKind {
    /// There is no driver library, or the driver reports no device.
    NoDevice,
    /// The library is a CUDA toolkit's stub.
    DriverStub,
    /// The driver is older than the kernels need, or does not match its kernel module.
    DriverTooOld,
    /// The driver could not compile the kernels.
    Jit,
    /// Device memory, or memory that can be registered, is used up.
    OutOfMemory,
    /// An earlier error destroyed the context.
    Lost,
    /// CUDA was used before this process was forked.
    Forked,
    /// Any other error.
    Refused,
}

/// A failed call to the GPU's driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{doing}: {detail}")]
pub struct GpuError {
    /// Kind of the failure.
    pub kind: GpuKind,
    /// The operation that failed.
    pub doing: String,
    /// The driver's name of the error, and further facts.
    pub detail: String,
}
