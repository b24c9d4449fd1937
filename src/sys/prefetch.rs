//! Loads of memory into the processor's caches, ahead of its use.

/// Begins to load the cache lines of these addresses, which may be any numbers: an address without memory has no effect.
pub fn lines(addresses: &[u64]) {
    for address in addresses {
        line(*address as usize);
    }
}

#[cfg(target_arch = "x86_64")]
fn line(address: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch of any address is harmless.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address)) }
}

#[cfg(target_arch = "aarch64")]
fn line(address: usize) {
    // SAFETY: a prefetch of any address is harmless.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn addresses_without_memory_are_harmless() {
        let own = 1_u64;
        super::lines(&[0, 1, u64::MAX, 1 << 63, 1 << 47, (&raw const own).addr() as u64]);
        super::lines(&[]);
    }
}
