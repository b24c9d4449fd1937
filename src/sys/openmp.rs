//! The OpenMP threads of the process, if it has some: torch and DeepSpeed's ops start them.
//!
//! After a parallel region, OpenMP's threads wait awake for some milliseconds. They occupy the processors on which the
//! library's own workers would wake up. While they are awake, they do the library's work instead of its workers.
//!
//! Invariants:
//! - Only the main thread of the process that loaded the library enters a region. Any other thread would get a second
//!   set of OpenMP threads, and those of a parent do not exist in a forked child.
//! - A region is entered only if it has as many threads as the library is configured to use, and only while other threads
//!   of the process use a processor outside of the library's calls. A program without such threads has none that the
//!   library keeps awake.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::os::raw::{c_int, c_uint};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::fork;
use crate::environment;
use crate::error::{Error, Result};

type Body = unsafe extern "C" fn(*mut c_void);
type Parallel = unsafe extern "C" fn(Body, *mut c_void, c_uint, c_uint);
type Number = unsafe extern "C" fn() -> c_int;

/// Functions of the OpenMP runtime that the process has loaded.
struct Runtime {
    parallel: Parallel,
    max_threads: Number,
    in_parallel: Number,
    thread_num: Number,
}

static RUNTIME: OnceLock<Runtime> = OnceLock::new();
/// The process that loaded the library.
static LOADED_BY: AtomicU32 = AtomicU32::new(0);
/// What `SPILLWAY_OPENMP` says; [`UNREAD`] until it is read.
static CHOICE: AtomicU8 = AtomicU8::new(UNREAD);
const UNREAD: u8 = 0;
const NEVER: u8 = 1;
const ALWAYS: u8 = 2;
const WHILE_AWAKE: u8 = 3;

extern "C" fn note_process() {
    LOADED_BY.store(fork::id(), Ordering::Relaxed);
}

// SAFETY: the loader calls each address of this section once, before any other code of the library runs.
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = note_process;

/// Reads `SPILLWAY_OPENMP`.
pub fn configure() -> Result<()> {
    let choice = match environment::word("SPILLWAY_OPENMP")?.as_deref() {
        None | Some("auto") => WHILE_AWAKE,
        Some("0") => NEVER,
        Some("1") => ALWAYS,
        Some(text) => return Err(Error::invalid("SPILLWAY_OPENMP", format!("{text:?} is not 0, 1 or auto"))),
    };
    CHOICE.store(choice, Ordering::Relaxed);
    Ok(())
}

/// True if the next call of [`run`] with this number of threads uses OpenMP's threads, which are awake.
pub fn is_awake(threads: usize) -> bool {
    let wanted = match CHOICE.load(Ordering::Relaxed) {
        ALWAYS => is_main_thread(),
        WHILE_AWAKE => is_main_thread() && ACTIVITY.with(|activity| activity.others_run(threads)),
        _ => false,
    };
    wanted && runtime().is_some_and(|runtime| runtime.fits(threads))
}

/// Calls `work` with the number of each of `threads` OpenMP threads; the caller is number 0. False if OpenMP's threads
/// are not to be used now: `work` was not called then. `work` must not panic.
pub fn run(threads: usize, work: &(dyn Fn(usize) + Sync)) -> bool {
    let Some(runtime) = is_awake(threads).then(runtime).flatten() else { return false };
    runtime.region(threads, work);
    true
}

/// Reports the end of a call of the library that began at `began`, by whichever threads.
pub fn call_ended(began: u64) {
    if CHOICE.load(Ordering::Relaxed) == WHILE_AWAKE {
        ACTIVITY.with(|activity| activity.inside.set(activity.inside.get() + (now() - began)));
    }
}

/// Monotonic time in nanoseconds.
pub fn now() -> u64 {
    // The monotonic clock always exists.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| Duration::from(time).as_nanos() as u64)
}

fn is_main_thread() -> bool {
    let loader = LOADED_BY.load(Ordering::Relaxed);
    // The system call, because glibc has a function for it only since 2.30.
    // SAFETY: gettid takes nothing and cannot fail.
    loader == fork::id() && unsafe { libc::syscall(libc::SYS_gettid) } as u32 == loader
}

/// The runtime, searched again until it is found: torch may be loaded after this library.
fn runtime() -> Option<&'static Runtime> {
    if RUNTIME.get().is_none()
        && let Some(found) = Runtime::find()
    {
        let _ = RUNTIME.set(found);
    }
    RUNTIME.get()
}

impl Runtime {
    fn find() -> Option<Runtime> {
        let symbol = |name: &CStr| {
            // SAFETY: a C string; the handle stands for all symbols of the process.
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            (!found.is_null()).then_some(found)
        };
        let parallel = symbol(c"GOMP_parallel")?;
        let number = |name| {
            symbol(name).map(|found| {
                // SAFETY: the runtimes of GNU, LLVM and Intel define these functions as `int name(void)`.
                unsafe { transmute::<*mut c_void, Number>(found) }
            })
        };
        Some(Runtime {
            // SAFETY: the same runtimes define GOMP_parallel with this type; it is part of GCC's stable ABI.
            parallel: unsafe { transmute::<*mut c_void, Parallel>(parallel) },
            max_threads: number(c"omp_get_max_threads")?,
            in_parallel: number(c"omp_in_parallel")?,
            thread_num: number(c"omp_get_thread_num")?,
        })
    }

    /// True if a region of the calling thread would have this number of threads.
    fn fits(&self, threads: usize) -> bool {
        // SAFETY: functions of the runtime without arguments.
        unsafe { (self.in_parallel)() == 0 && usize::try_from((self.max_threads)()) == Ok(threads) }
    }

    fn region(&self, threads: usize, work: &(dyn Fn(usize) + Sync)) {
        let mut call = Call { work, thread_num: self.thread_num };
        // SAFETY: `body` expects a Call. It lives until the region has ended, for which the function waits.
        unsafe { (self.parallel)(body, (&raw mut call).cast(), threads as c_uint, 0) };
    }
}

struct Call<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    thread_num: Number,
}

unsafe extern "C" fn body(call: *mut c_void) {
    // SAFETY: `region` passes a Call that outlives the region, and no thread writes to it.
    let call = unsafe { &*call.cast::<Call<'_>>() };
    // SAFETY: a function of the runtime without arguments.
    let number = unsafe { (call.thread_num)() };
    (call.work)(number as usize);
}

/// Processor time of the process outside of the library's calls, as the main thread sees it.
struct Activity {
    /// Wall-clock and processor time of the last sample, in nanoseconds.
    sampled: Cell<u64>,
    processor: Cell<u64>,
    /// Wall-clock time since then inside calls of the library.
    inside: Cell<u64>,
    /// Result of the last sample.
    others_run: Cell<bool>,
}

thread_local! {
    static ACTIVITY: Activity = const {
        Activity { sampled: Cell::new(0), processor: Cell::new(0), inside: Cell::new(0), others_run: Cell::new(false) }
    };
}

/// Least time between two samples: the system counts the time of running threads at its ticks.
const SAMPLE: u64 = 8_000_000;
/// A sample with less time outside of the library's calls says nothing.
const LEAST_OUTSIDE: u64 = 1_000_000;

impl Activity {
    /// True if threads beside the main thread used a processor at the last sample.
    fn others_run(&self, threads: usize) -> bool {
        let now = now();
        let elapsed = now.saturating_sub(self.sampled.get());
        if elapsed >= SAMPLE {
            // The clock of the process always exists.
            let processor = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)
                .map_or(0, |time| Duration::from(time).as_nanos() as u64);
            let inside = self.inside.get();
            let outside = elapsed.saturating_sub(inside);
            // At most: all threads of the library used a processor during its calls.
            let used = (processor - self.processor.get()).saturating_sub(inside * threads as u64);
            if outside >= LEAST_OUTSIDE && self.sampled.get() > 0 {
                self.others_run.set(used > outside + outside / 4);
            }
            self.sampled.set(now);
            self.processor.set(processor);
            self.inside.set(0);
        }
        self.others_run.get()
    }
}
