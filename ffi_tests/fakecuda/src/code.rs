//! Result codes of the driver that more than one file returns.

use cudarc::driver::sys::CUresult;

/// Result code of the driver.
pub type Code = i32;

pub(crate) const INVALID_VALUE: Code = CUresult::CUDA_ERROR_INVALID_VALUE as Code;
pub(crate) const INVALID_HANDLE: Code = CUresult::CUDA_ERROR_INVALID_HANDLE as Code;
pub(crate) const ILLEGAL_ADDRESS: Code = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as Code;
pub(crate) const ALREADY_REGISTERED: Code = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as Code;
pub(crate) const NOT_REGISTERED: Code = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED as Code;
