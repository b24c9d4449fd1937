//! The library as a whole: version, kernel, counters.
#![allow(non_camel_case_types)]

use std::ffi::c_char;

use super::status::spw_status;
use crate::capi::abi_struct::{self, c_struct};
use crate::capi::guard::guard;
use crate::capi::output;
use crate::optim::processor;
use crate::stats;

/// Version of the binary interface; the SONAME contains it. Within one version, functions and fields are only added.
pub const SPW_ABI_VERSION: u32 = 2;

/// Returns the `SPW_ABI_VERSION` of the loaded library. Compare it with the macro before any other call.
#[unsafe(no_mangle)]
pub extern "C" fn spw_abi_version() -> u32 {
    SPW_ABI_VERSION
}

/// Returns the release version, for example "0.1.0". The string is constant.
#[unsafe(no_mangle)]
pub extern "C" fn spw_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Writes the name of the kernel that runs steps: "avx512", "avx2", "sve_bf16", "sve", "neon" or "scalar". The
/// environment variable `SPILLWAY_KERNEL` selects a kernel. If this processor lacks it, this call and every step are
/// SPW_ERR_UNSUPPORTED. The string is constant.
///
/// # Safety
/// `name_out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_get_kernel(name_out: *mut *const c_char) -> spw_status {
    guard(|| {
        let name = match processor::kernel()?.name() {
            "avx512" => c"avx512",
            "avx2" => c"avx2",
            "sve_bf16" => c"sve_bf16",
            "sve" => c"sve",
            "neon" => c"neon",
            _ => c"scalar",
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { output::write(name.as_ptr(), name_out, "name_out") }
    })
}

c_struct! { first 56;
/// Optimizer work of this process since the library was loaded.
pub struct spw_stats {
    /// `sizeof(spw_stats)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Successful Adam and AdamW calls.
    pub adam_calls: u64,
    /// Elements that these calls updated.
    pub adam_elements: u64,
    /// Successful Adagrad calls.
    pub adagrad_calls: u64,
    /// Elements that these calls updated.
    pub adagrad_elements: u64,
    /// Successful Lion calls.
    pub lion_calls: u64,
    /// Elements that these calls updated.
    pub lion_elements: u64,
}
}

/// Reads the counters of the process.
///
/// # Safety
/// `stats_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_get_stats(stats_out: *mut spw_stats) -> spw_status {
    guard(|| {
        let (adam_calls, adam_elements) = stats::ADAM.get();
        let (adagrad_calls, adagrad_elements) = stats::ADAGRAD.get();
        let (lion_calls, lion_elements) = stats::LION.get();
        let values = spw_stats {
            struct_size: 0,
            reserved: 0,
            adam_calls,
            adam_elements,
            adagrad_calls,
            adagrad_elements,
            lion_calls,
            lion_elements,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { abi_struct::write(&values, stats_out, "stats_out") }
    })
}

/// Panics inside the guard. Tests use it to see what a C caller receives. A debug build has it, so that they need no
/// build of their own.
#[cfg(any(feature = "probe", debug_assertions))]
#[unsafe(no_mangle)]
pub extern "C" fn spw_probe_panic() -> spw_status {
    guard(|| panic!("probe"))
}
