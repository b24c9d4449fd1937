//! What this process has used so far.

use std::time::Duration;

/// Processor time of all threads, in user mode and in the kernel.
pub fn cpu_time() -> Duration {
    // SAFETY: rusage is plain integers, for which zero is valid.
    let mut found: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a live struct.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut found) };
    let of = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    of(found.ru_utime) + of(found.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_processor_time() {
        let before = cpu_time();
        while cpu_time() - before < Duration::from_millis(2) {
            std::hint::spin_loop();
        }
    }
}
