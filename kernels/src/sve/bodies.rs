//! The Adam bodies in C, grouped by instruction set, and the detection of these sets.

use std::arch::is_aarch64_feature_detected;

use super::ffi;

/// The Adam bodies of one instruction set. kernels/adam.h documents their contract.
#[derive(Debug)]
pub struct Adam {
    pub(super) step: ffi::Step,
    pub(super) record: ffi::Record,
    pub(super) undo: ffi::Undo,
}

/// Bodies that need SVE.
pub static SVE: Adam = Adam {
    step: ffi::spillway_adam_sve,
    record: ffi::spillway_adam_sve_record,
    undo: ffi::spillway_adam_sve_undo,
};

/// Bodies that need SVE and the BF16 extension.
pub static SVE_BF16: Adam = Adam {
    step: ffi::spillway_adam_sve_bf16,
    record: ffi::spillway_adam_sve_bf16_record,
    undo: ffi::spillway_adam_sve_bf16_undo,
};

/// True if the processor and the operating system support SVE.
pub fn detected() -> bool {
    is_aarch64_feature_detected!("sve")
}

/// True if the processor and the operating system also support the SVE conversions to bf16. Reads `AT_HWCAP2` because
/// the "bf16" of `is_aarch64_feature_detected` covers NEON only.
pub fn bf16_detected() -> bool {
    const HWCAP2_SVEBF16: u64 = 1 << 12;
    // SAFETY: getauxval only reads the auxiliary vector of the process.
    let extensions = unsafe { libc::getauxval(libc::AT_HWCAP2) };
    detected() && extensions & HWCAP2_SVEBF16 != 0
}
