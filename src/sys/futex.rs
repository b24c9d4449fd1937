//! Waits on words of memory that several processes share.
//!
//! Invariants:
//! - The futex is not private: a waiter and its waker may be different processes, with different addresses of the word.
//! - A word in memory that is mapped for reading only can be waited for, not woken.

use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` is `seen`, at most for `limit`. A wake, a signal, or another value of the word end the sleep
/// early: the caller looks at its condition again.
pub fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    // SAFETY: an aligned word and a time limit, which live during the call. The call only reads them.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const limit) };
}

/// Wakes all sleepers of `word`, in every process.
pub fn wake_all(word: &AtomicU32) {
    let nothing = ptr::null::<libc::timespec>();
    // SAFETY: an aligned word that lives during the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX, nothing) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_sleep_ends_at_a_wake_at_another_value_and_at_its_limit() {
        let word = AtomicU32::new(0);
        wait(&word, 1, Duration::from_secs(1000));
        let began = Instant::now();
        wait(&word, 0, Duration::from_millis(5));
        assert!(began.elapsed() >= Duration::from_millis(5));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while word.load(Ordering::Acquire) == 0 {
                    wait(&word, 0, Duration::from_secs(1000));
                }
            });
            word.store(1, Ordering::Release);
            wake_all(&word);
        });
    }
}
