//! IEEE arithmetic for the length of a kernel call, whatever mode the calling thread is in.
//!
//! A library built with -ffast-math switches flush-to-zero on for the thread that loads it, and new threads inherit it.

/// While it lives, this thread rounds to nearest, keeps denormals and traps nothing; then the caller's mode returns,
/// exception flags included.
#[derive(Debug)]
pub struct IeeeMode {
    saved: u64,
    // Restoring on another thread would change that thread's mode.
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

/// MXCSR: all exceptions masked, no flags, nearest, no FTZ, no DAZ.
#[cfg(target_arch = "x86_64")]
const IEEE: u64 = 0x1f80;
/// FPCR: nearest, no flush, no traps, IEEE half precision; and every NaN the default one, so that conversions to 16 bits
/// give 0x7e00 and 0x7fc0 by themselves.
#[cfg(target_arch = "aarch64")]
const IEEE: u64 = 1 << 25;

#[cfg(target_arch = "x86_64")]
/// The mode of this thread, as its processor keeps it.
pub fn read() -> u64 {
    let mut mode = 0u32;
    // SAFETY: stores the thread's own MXCSR into a local.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
    u64::from(mode)
}

#[cfg(target_arch = "x86_64")]
/// Sets it.
pub fn write(mode: u64) {
    // The bits above are reserved; all below exist on every x86-64 processor.
    let mode = mode as u32 & 0xffff;
    // SAFETY: no reserved bit is set, so the instruction does not fault. The exception flags in MXCSR change, which the
    // options do not deny.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, readonly)) };
}

#[cfg(target_arch = "aarch64")]
/// The mode of this thread, as its processor keeps it.
pub fn read() -> u64 {
    let mode: u64;
    // SAFETY: reads the thread's own FPCR.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) mode, options(nomem, nostack, preserves_flags)) };
    mode
}

#[cfg(target_arch = "aarch64")]
/// Sets it.
pub fn write(mode: u64) {
    // SAFETY: reserved bits of FPCR ignore what is written. Exception flags are in FPSR, which stays.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) mode, options(nostack, preserves_flags)) };
}
