//! The Adam bodies in C, by the instruction set that they need, and whether the processor has it.

use std::arch::is_aarch64_feature_detected;

use super::ffi;

/// The Adam bodies of one instruction set; the contract is kernels/adam.h.
#[derive(Debug)]
pub struct Adam {
    pub(super) step: ffi::Step,
    pub(super) record: ffi::Record,
    pub(super) undo: ffi::Undo,
}

/// Needs SVE.
pub static SVE: Adam = Adam {
    step: ffi::spillway_adam_sve,
    record: ffi::spillway_adam_sve_record,
    undo: ffi::spillway_adam_sve_undo,
};

/// Needs SVE with BF16.
pub static SVE_BF16: Adam = Adam {
    step: ffi::spillway_adam_sve_bf16,
    record: ffi::spillway_adam_sve_bf16_record,
    undo: ffi::spillway_adam_sve_bf16_undo,
};

/// True if this processor and operating system have SVE.
pub fn detected() -> bool {
    is_aarch64_feature_detected!("sve")
}

/// True if they have the conversions to bf16 for SVE too; the "bf16" of `is_aarch64_feature_detected` speaks of NEON.
pub fn bf16_detected() -> bool {
    const HWCAP2_SVEBF16: u64 = 1 << 12;
    // SAFETY: reads the auxiliary vector of the process.
    let extensions = unsafe { libc::getauxval(libc::AT_HWCAP2) };
    detected() && extensions & HWCAP2_SVEBF16 != 0
}
