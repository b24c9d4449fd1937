//! How soon a thread that wakes gets its processor.
//!
//! A worker sleeps between steps, and wakes on a processor that threads of other libraries may hold by spinning. Linux
//! lets a waking thread wait until the running one has had its slice, some milliseconds, unless it asks for shorter
//! slices itself (since 6.12). That changes when a thread runs, not how much.

use std::ffi::c_long;

/// Nanoseconds; the shortest that Linux takes.
const SLICE: u64 = 100_000;

/// The first version of the kernel's `sched_attr`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Asks for short slices for the calling thread. A kernel that knows none, a thread of another policy than the normal
/// one, or a sandbox that forbids the call, leaves all as it was.
pub fn shorten() {
    let mut attributes = Attributes { size: size_of::<Attributes>() as u32, ..Default::default() };
    let size = c_long::from(attributes.size);
    let this_thread: c_long = 0;
    // SAFETY: a live struct of the size that is passed twice; both calls concern the calling thread alone.
    unsafe {
        let read = libc::syscall(libc::SYS_sched_getattr, this_thread, &mut attributes, size, 0);
        if read == 0 && attributes.policy == libc::SCHED_OTHER as u32 {
            attributes.runtime = SLICE;
            libc::syscall(libc::SYS_sched_setattr, this_thread, &attributes, 0);
        }
    }
}
