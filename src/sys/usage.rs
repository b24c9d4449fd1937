//! Resources that this process has used so far.

use std::time::Duration;

/// Processor time of all threads of this process, user and kernel mode together.
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
    fn it_grows_with_the_work_of_the_process_and_does_not_exceed_the_clock_of_the_process() {
        let clock = || {
            let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: a live struct.
            let status = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut now) };
            assert_eq!(status, 0);
            Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
        };
        // The kernel adds what runs to this value at its ticks, so that it lags behind the clock, which is exact.
        let (began, used) = (clock(), cpu_time());
        while cpu_time() == used {
            assert!(clock() - began < Duration::from_secs(10), "it does not grow");
            std::hint::spin_loop();
        }
        let used = cpu_time();
        assert!(used <= clock(), "{used:?}");
    }
}
