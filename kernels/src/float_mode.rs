//! IEEE float mode for the duration of a kernel call, whatever mode the calling thread has set.
//!
//! A library built with -ffast-math enables flush-to-zero on the thread that loads it, and new threads inherit that
//! mode.

/// Guard for IEEE float mode. While it lives, this thread rounds to nearest, keeps denormals and has no float traps.
/// Drop restores the previous mode; on x86-64 that includes the exception flags.
#[derive(Debug)]
pub struct IeeeMode {
    saved: u64,
    // Not Send: a drop on another thread would change the mode of that thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl IeeeMode {
    /// Switches this thread to IEEE mode.
    #[inline]
    pub fn enter() -> Self {
        let saved = read();
        write(IEEE);
        IeeeMode { saved, _not_send: std::marker::PhantomData }
    }
}

impl Drop for IeeeMode {
    #[inline]
    fn drop(&mut self) {
        write(self.saved);
    }
}

/// MXCSR: all exceptions masked, no flags set, round to nearest, no FTZ, no DAZ.
#[cfg(target_arch = "x86_64")]
const IEEE: u64 = 0x1f80;
/// FPCR: round to nearest, no flush to zero, no traps, IEEE half precision, default NaN. Default NaN makes conversions
/// to 16 bits return 0x7e00 (f16) and 0x7fc0 (bf16) for every NaN.
#[cfg(target_arch = "aarch64")]
const IEEE: u64 = 1 << 25;

#[cfg(target_arch = "x86_64")]
/// Returns the MXCSR register of this thread.
pub fn read() -> u64 {
    let mut mode = 0u32;
    // SAFETY: stores the thread's own MXCSR into a local.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
    u64::from(mode)
}

#[cfg(target_arch = "x86_64")]
/// Sets the MXCSR register of this thread.
pub fn write(mode: u64) {
    // Bits 16 and above are reserved; bits 0 to 15 exist on every x86-64 processor.
    let mode = mode as u32 & 0xffff;
    // SAFETY: no reserved bit is set, so the instruction does not fault. The instruction changes the exception flags in
    // MXCSR; the options do not claim that they are preserved.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, readonly)) };
}

#[cfg(target_arch = "aarch64")]
/// Returns the FPCR register of this thread.
pub fn read() -> u64 {
    let mode: u64;
    // SAFETY: reads the thread's own FPCR.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) mode, options(nomem, nostack, preserves_flags)) };
    mode
}

#[cfg(target_arch = "aarch64")]
/// Sets the FPCR register of this thread.
pub fn write(mode: u64) {
    // SAFETY: reserved bits of FPCR ignore writes. The exception flags are in FPSR, which this does not change.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) mode, options(nostack, preserves_flags)) };
}
