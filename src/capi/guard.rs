//! The wrapper around the body of every exported function.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use super::base::status::{self, spw_status};
use crate::error::{Error, Result};
use crate::kernel::IeeeMode;
use crate::log;
use crate::sys::cancellation::NoCancellation;
use crate::sys::{fork, threads};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of an exported function. An error or a panic becomes a status and this thread's
/// message. Messages of the log that wait are delivered.
pub fn guard(body: impl FnOnce() -> Result<()>) -> spw_status {
    // A cancellation acts at the next point outside of the library.
    let _no_cancellation = NoCancellation::enter();
    guard_step(body)
}

/// As [`guard`], for a step on memory. It reaches no point of cancellation but in what a first step does: it chooses the
/// kernel and starts workers, which exclude a cancellation themselves. To exclude it takes 2 % of a step of 16 elements.
pub fn guard_step(body: impl FnOnce() -> Result<()>) -> spw_status {
    silence_panics();
    let outer = INSIDE.replace(true);
    // Coefficients are computed from the caller's options, so the caller's float mode must not affect them.
    let _mode = IeeeMode::enter();
    let outcome = catch_unwind(AssertUnwindSafe(body));
    INSIDE.set(outer);
    log::deliver();
    match outcome.unwrap_or_else(|panic| Err(Error::of_panic(&*panic))) {
        Ok(()) => spw_status::SPW_OK,
        Err(error) => status::record(&error),
    }
}

/// Installs a panic hook that prints nothing for panics on this thread inside [`guard`] or on the library's threads.
/// [`guard`] reports these panics.
fn silence_panics() {
    /// NONE, SET, or the id of the process whose thread is setting the hook.
    static HOOK: AtomicU32 = AtomicU32::new(NONE);
    const NONE: u32 = 0;
    const SET: u32 = u32::MAX;
    while HOOK.load(Ordering::Acquire) != SET {
        match HOOK.compare_exchange(NONE, fork::id(), Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => {
                set_quiet_hook();
                HOOK.store(SET, Ordering::Release);
            }
            Err(SET) => {}
            // Wait: until the other thread has set the hook, a panic on this thread would be printed.
            Err(setting) if setting == fork::id() => std::thread::yield_now(),
            // A fork interrupted the thread that was setting the hook. The standard library's lock may stay held
            // forever, so this process keeps the default hook, which prints panics.
            Err(_) => return,
        }
    }
}

fn set_quiet_hook() {
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !threads::is_own() && !INSIDE.get() {
            previous(info);
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_on_the_callers_thread_or_a_worker_becomes_a_status() {
        assert_eq!(guard(|| panic!("on the caller")), spw_status::SPW_ERR_INTERNAL);
        assert!(status::last_message().contains("on the caller"));
        let spread = || threads::each(&mut [0; 9], |_| panic!("where it is spread"));
        assert_eq!(guard(spread), spw_status::SPW_ERR_INTERNAL);
        assert!(status::last_message().contains("where it is spread"));
        assert_eq!(guard(|| Ok(())), spw_status::SPW_OK);
    }
}
