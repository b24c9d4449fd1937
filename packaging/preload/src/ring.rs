//! The ring of one context: built with the features that the kernel offers, filled under a lock, waited on without one.
//!
//! The ring's flags suit several threads on one context. SINGLE_ISSUER is not set, because any thread may submit.
//! COOP_TASKRUN is not set, because a submitter that computes in user space must not delay another thread's wait.

use std::io::Error;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use io_uring::IoUring;
use io_uring::squeue::Entry;
use libc::{EAGAIN, EBUSY, EINTR, EINVAL, ENOMEM, ETIME, c_int};

use crate::memory::last_errno;
use crate::report::{self, Level};

const GETEVENTS: u32 = 1;
const EXT_ARG: u32 = 1 << 3;
const SIGSET_BYTES: u32 = 8;
const MAX_SUBMISSIONS: u32 = 128;
const MAX_COMPLETIONS: u32 = 65536;
/// The kernel releases the memory of closed rings a short time after the close.
const ENOMEM_RETRIES: u32 = 20;
const SUBMIT_RETRIES: u32 = 1000;

/// The extended argument of io_uring_enter.
#[repr(C)]
struct WaitArgument {
    sigmask: u64,
    sigmask_bytes: u32,
    min_wait_usec: u32,
    timespec: u64,
}

/// The limit of a wait, and the signals that are allowed during it.
#[derive(Clone, Copy)]
pub struct Patience {
    /// `None` waits forever.
    pub timeout: Option<Duration>,
    /// Address of a signal set, or 0.
    pub sigmask: u64,
}

/// One io_uring instance.
pub struct Ring {
    ring: IoUring,
    filling: Mutex<()>,
    leftover: AtomicBool,
}

impl Ring {
    /// Creates a ring for `requests` at once, of which `capacity` may be open.
    pub fn build(requests: u32, capacity: u32) -> Result<Ring, String> {
        let submissions = requests.clamp(1, MAX_SUBMISSIONS).next_power_of_two();
        let completions = capacity.saturating_mul(2).clamp(submissions, MAX_COMPLETIONS).next_power_of_two();
        let mut attempts = 0;
        let mut submit_all = true;
        let mut low = Vec::new();
        let ring = loop {
            let mut builder = IoUring::builder();
            builder.dontfork().setup_cqsize(completions);
            if submit_all {
                builder.setup_submit_all();
            }
            match builder.build(submissions) {
                // The number of a standard stream: what the program writes to it must not reach the ring.
                Ok(ring) if ring.as_raw_fd() < 3 => low.push(ring),
                Ok(ring) => break ring,
                Err(error) if error.raw_os_error() == Some(EINVAL) && submit_all => submit_all = false,
                Err(error) if error.raw_os_error() == Some(ENOMEM) && attempts < ENOMEM_RETRIES => {
                    attempts += 1;
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => return Err(format!("io_uring_setup failed: {error}")),
            }
        };
        let features = ring.params();
        if !(features.is_feature_ext_arg() && features.is_feature_nodrop()) {
            return Err(
                "this kernel's io_uring has no timed waits; Linux 5.11 or newer is needed".to_string()
            );
        }
        Ok(Ring { ring, filling: Mutex::new(()), leftover: AtomicBool::new(false) })
    }

    /// Runs `fill` as the only thread that adds entries, then submits all of them to the kernel.
    pub fn submit<R>(&self, fill: impl FnOnce(&mut Filling) -> R) -> R {
        let alone = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let result = fill(&mut Filling { ring: self });
        if let Err(errno) = self.flush() {
            let why = Error::from_raw_os_error(errno);
            report::say(Level::Error, || {
                format!("io_uring_enter failed, so requests are submitted later: {why}")
            });
        }
        drop(alone);
        result
    }

    /// Submits entries again for which the kernel had no memory; they count as accepted.
    pub fn submit_leftover(&self) {
        if self.leftover.load(Ordering::Acquire) {
            self.submit(|_| ());
        }
    }

    /// Requires the `filling` lock.
    fn flush(&self) -> Result<(), c_int> {
        let mut tries = 0;
        loop {
            // SAFETY: `filling` is locked, so this is the only view of the submission queue.
            let pending = unsafe { self.ring.submission_shared() }.len() as u32;
            self.leftover.store(pending > 0, Ordering::Release);
            if pending == 0 {
                return Ok(());
            }
            match self.enter(pending, 0, 0, None) {
                Ok(()) | Err(EINTR) => {}
                Err(EAGAIN | EBUSY | ENOMEM) if tries < SUBMIT_RETRIES => {
                    tries += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Blocks until `min` completions have arrived since the last one was taken. Only one thread at a time may call
    /// this: the kernel wakes waiters in order and stops at the first that requires more.
    pub fn wait(&self, min: u32, patience: Patience) -> Result<(), c_int> {
        let timespec = patience.timeout.map(timespec);
        let argument = WaitArgument {
            sigmask: patience.sigmask,
            sigmask_bytes: if patience.sigmask == 0 { 0 } else { SIGSET_BYTES },
            min_wait_usec: 0,
            timespec: timespec.as_ref().map_or(0, |timespec| std::ptr::from_ref(timespec) as u64),
        };
        self.enter(0, min, GETEVENTS | EXT_ARG, Some(&argument))
    }

    /// Blocks until a completion arrives. Any number of threads may call this, beside the one in [`Ring::wait`].
    pub fn poll(&self, patience: Patience) -> Result<(), c_int> {
        let mut descriptor = libc::pollfd { fd: self.ring.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        match ppoll(Some(&mut descriptor), patience)? {
            0 => Err(ETIME),
            _ => Ok(()),
        }
    }

    /// Makes the kernel move overflowed completions into the queue.
    pub fn make_room(&self) {
        let _ = self.enter(0, 0, GETEVENTS, None);
    }

    /// True if more completions may be in flight than the queue holds.
    pub fn may_overflow(&self, open: usize) -> bool {
        open.saturating_mul(2) > self.ring.params().cq_entries() as usize
    }

    /// The oldest completion: user data and result. Requires the context's lock.
    pub fn take(&self) -> Option<(u64, i32)> {
        // SAFETY: the context's lock makes this the only view of the completion queue.
        let mut queue = unsafe { self.ring.completion_shared() };
        queue.next().map(|entry| (entry.user_data(), entry.result()))
    }

    /// True if [`Ring::take`] would return a completion. Requires the context's lock.
    pub fn has_completions(&self) -> bool {
        // SAFETY: the context's lock makes this the only view of the completion queue.
        !unsafe { self.ring.completion_shared() }.is_empty()
    }

    /// The descriptor, for the forked child, which must close its copy.
    pub fn descriptor(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    fn enter(&self, submit: u32, min: u32, flags: u32, argument: Option<&WaitArgument>) -> Result<(), c_int> {
        let (pointer, bytes) = match argument {
            Some(argument) => (std::ptr::from_ref(argument), size_of::<WaitArgument>()),
            None => (std::ptr::null(), 0),
        };
        // SAFETY: the argument and the memory it points to live across the call. The entries were made from checked
        // requests, whose buffers belong to the program until their completion, as with libaio.
        let result = unsafe {
            libc::syscall(libc::SYS_io_uring_enter, self.ring.as_raw_fd(), submit, min, flags, pointer, bytes)
        };
        if result < 0 { Err(last_errno()) } else { Ok(()) }
    }
}

/// The right to add entries, while the lock is held.
pub struct Filling<'a> {
    ring: &'a Ring,
}

impl Filling<'_> {
    /// Adds entries that belong together; makes room first if necessary.
    ///
    /// # Safety
    /// The memory that the entries point to stays valid until their completion.
    pub unsafe fn push(&mut self, entries: &[Entry]) -> Result<(), c_int> {
        for _ in 0..2 {
            // SAFETY: a `Filling` exists only while the lock is held, and the caller guarantees validity.
            if unsafe { self.ring.ring.submission_shared().push_multiple(entries) }.is_ok() {
                return Ok(());
            }
            self.ring.flush()?;
        }
        Err(EAGAIN)
    }
}

/// Runs the handlers of pending signals that this mask allows, without waiting. Returns true if one ran.
pub fn let_signals_in(sigmask: u64) -> bool {
    ppoll(None, Patience { timeout: Some(Duration::ZERO), sigmask }) == Err(EINTR)
}

fn ppoll(descriptor: Option<&mut libc::pollfd>, patience: Patience) -> Result<usize, c_int> {
    let count = usize::from(descriptor.is_some());
    let descriptors = descriptor.map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let mut left = patience.timeout.map(timespec);
    let timeout = left.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // SAFETY: all pointers are null or to locals that live across the call; the mask was checked by the caller.
    let result = unsafe {
        libc::syscall(libc::SYS_ppoll, descriptors, count, timeout, patience.sigmask, SIGSET_BYTES as usize)
    };
    if result < 0 { Err(last_errno()) } else { Ok(result as usize) }
}

fn timespec(duration: Duration) -> libc::timespec {
    let seconds = duration.as_secs().min(i64::MAX as u64) as i64;
    libc::timespec { tv_sec: seconds, tv_nsec: i64::from(duration.subsec_nanos()) }
}
