//! Implements libaio's functions with io_uring, and DeepSpeed's compiled CPU optimizers with Spillway's kernels
//! (`deepspeed`), for compiled programs: `LD_PRELOAD=libspillway_preload.so`.
//!
//! The rest of this text is about libaio.
//!
//! The definitions have no symbol version, so they satisfy every versioned reference. Signatures are those of
//! `<libaio.h>` (LIBAIO_0.4 and 0.5, not the callback forms that LIBAIO_0.1 had for `io_getevents` and `io_cancel`).
//! Semantics and errors are libaio's, except:
//!
//! - With `SPILLWAY_LOG=warn`, stderr lists every failed or short transfer, and completions that were never fetched. Of
//!   calls that go to the real libaio, it lists only failed events, by the address of the request.
//! - `fs.aio-max-nr` has no effect. If io_uring is refused (seccomp, sysctl, locked-memory limit) or
//!   `SPILLWAY_PRELOAD_FORWARD=1` is set, all calls go to the real libaio, and the log gives the reason.
//! - `io_submit` does not block for a read of an empty pipe. It takes locks, so signal handlers must not call it.
//! - The thread that submitted a request also finishes its completion. While that thread is blocked in the kernel, the
//!   completion is delayed. An `epoll_wait` in that thread may return EINTR once without a signal.
//! - If a file system refuses an `aio_rw_flags` bit or an I/O priority, the event's result has
//!   the error, not `io_submit`.
//! - Each of the first 64 contexts holds a descriptor; a program must not close descriptors that it did not open. Further
//!   contexts are those of the real libaio, which hold none.
//! - A context that this library did not create, as by a direct system call, is passed on to the kernel.
//! - After fork, the child gets EINVAL for its parent's contexts, as with libaio. `exit` waits for transfers in flight;
//!   `_exit`, `execve` and SIGKILL may drop transfers that Linux has queued to a worker.
//! - A buffered transfer of a file or block device is complete when `io_submit` returns, as in Linux. With
//!   `SPILLWAY_PRELOAD_ASYNC=1` it may complete later. A transfer with an I/O priority may always complete later.
//! - All calls go to the real libaio if a loaded program or library submits requests and does not fetch events with
//!   libaio's functions (`imports`).
//! - Direct system calls are not intercepted. The same holds for functions that a program looked up with `dlsym` in a
//!   libaio that it opened itself.
//!
//! Layers: `abi`, `memory` < `request`, `report`, `ring`, `table` < `context` < `registry`, `imports` < `forward` < this
//! file. `deepspeed` uses `report` and the hook of panics in `registry`.

mod abi;
#[path = "../../../src/sys/cancellation.rs"]
mod cancellation;
mod context;
mod deepspeed;
#[path = "../../../src/environment.rs"]
mod environment;
mod forward;
mod imports;
mod memory;
mod registry;
mod report;
mod request;
mod ring;
mod table;

use std::ffi::c_long;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use libc::{EINVAL, EIO, ENOSYS, SYS_io_cancel, SYS_io_destroy, SYS_io_getevents, SYS_io_submit, c_int};

use abi::IoEvent;
use cancellation::NoCancellation;
use context::{Context, Wanted};
use memory::Checked;
use ring::Patience;

/// The crate libc lacks this number.
const SYS_IO_PGETEVENTS: c_long = if cfg!(target_arch = "aarch64") { 292 } else { 333 };

/// `io_setup`: creates a context for `maxevents` requests and stores it at `ctxp`, which must hold zero.
///
/// # Safety
/// `ctxp` points to an `io_context_t`, or the call fails with EFAULT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_setup(maxevents: c_int, ctxp: *mut u64) -> c_int {
    guard(|| {
        // Linux's own limit: its ring of events must fit into 256 MiB.
        const MOST_REQUESTS: u32 = (0x1000_0000 / size_of::<IoEvent>() / 2) as u32;
        let held: u64 = Checked::default().read(ctxp as u64)?;
        let requests = maxevents as u32;
        if held != 0 || requests == 0 || requests > MOST_REQUESTS {
            return Err(EINVAL);
        }
        let forwarded = forward::reason().or_else(registry::has_no_room);
        match forwarded.map_or_else(|| Context::new(requests), Err) {
            Ok(context) => {
                let handle = registry::add(context);
                let stored = Checked::default().write(ctxp as u64, handle);
                if stored.is_err() {
                    registry::remove(handle);
                }
                stored.map(|()| 0)
            }
            // SAFETY: the caller guarantees the arguments.
            Err(reason) => Ok(unsafe { (forward::start(&reason)?.setup)(maxevents, ctxp) }),
        }
    })
}

/// `io_destroy`: ends a context. Threads that wait on it get EINVAL; the call waits for requests in flight.
#[unsafe(no_mangle)]
pub extern "C" fn io_destroy(ctx: u64) -> c_int {
    guard(|| match registry::remove(ctx) {
        Some(context) => {
            context.destroy();
            Ok(0)
        }
        // SAFETY: the caller guarantees the argument.
        None => forward::active().map_or_else(
            || forward::kernel(SYS_io_destroy, [ctx, 0, 0, 0, 0, 0]),
            |libaio| Ok(unsafe { (libaio.destroy)(ctx) }),
        ),
    })
}

/// `io_submit`: submits up to `nr` requests; returns the number of accepted requests, or the error of the first.
///
/// # Safety
/// Buffers and vectors of the requests stay valid until their completion.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_submit(ctx: u64, nr: c_long, ios: u64) -> c_int {
    guard(|| match registry::find(ctx) {
        Some(_) if nr < 0 => Err(EINVAL),
        Some(context) => context.submit(ios, nr).map(|accepted| accepted as c_int),
        // SAFETY: the caller guarantees the arguments.
        None => forward::active().map_or_else(
            || forward::kernel(SYS_io_submit, [ctx, nr as u64, ios, 0, 0, 0]),
            |libaio| Ok(unsafe { (libaio.submit)(ctx, nr, ios) }),
        ),
    })
}

/// `io_cancel`: EINPROGRESS for a poll, whose event then arrives; EINVAL for all other requests,
/// which Linux cannot cancel.
///
/// # Safety
/// `iocb` is only compared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_cancel(ctx: u64, iocb: u64, event: u64) -> c_int {
    guard(|| match registry::find(ctx) {
        Some(context) => {
            let _: u64 = Checked::default().read(iocb)?;
            Err(context.cancel(iocb))
        }
        None => {
            let Some(libaio) = forward::active() else {
                return forward::kernel(SYS_io_cancel, [ctx, iocb, event, 0, 0, 0]);
            };
            // SAFETY: the caller guarantees the arguments.
            Ok(unsafe { (libaio.cancel)(ctx, iocb, event) })
        }
    })
}

/// `io_getevents`: fetches `min_nr` to `nr` events. Waits at most `timeout`, or forever if it is null.
///
/// # Safety
/// `events` has room for `nr` events.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_getevents(
    ctx: u64,
    min_nr: c_long,
    nr: c_long,
    events: u64,
    timeout: u64,
) -> c_int {
    guard(|| match registry::find(ctx) {
        Some(context) => get_events(&context, min_nr, nr, events, timeout, 0),
        None => {
            let Some(libaio) = forward::active() else {
                let arguments = [ctx, min_nr as u64, nr as u64, events, timeout, 0];
                return Ok(looked_at(forward::kernel(SYS_io_getevents, arguments)?, events));
            };
            // SAFETY: the caller guarantees the arguments.
            Ok(looked_at(unsafe { (libaio.get_events)(ctx, min_nr, nr, events, timeout) }, events))
        }
    })
}

/// `io_pgetevents`: `io_getevents` with the signal mask `sigmask`, if not null, during the wait.
///
/// # Safety
/// As `io_getevents`; `sigmask` points to a `sigset_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_pgetevents(
    ctx: u64,
    min_nr: c_long,
    nr: c_long,
    events: u64,
    timeout: u64,
    sigmask: u64,
) -> c_int {
    guard(|| match registry::find(ctx) {
        Some(context) => get_events(&context, min_nr, nr, events, timeout, sigmask),
        None => {
            let Some(libaio) = forward::active() else {
                let set = [sigmask, 8];
                let arguments = [ctx, min_nr as u64, nr as u64, events, timeout, &raw const set as u64];
                return Ok(looked_at(forward::kernel(SYS_IO_PGETEVENTS, arguments)?, events));
            };
            let poll_events = libaio.poll_events.ok_or(ENOSYS)?;
            // SAFETY: the caller guarantees the arguments.
            Ok(looked_at(unsafe { poll_events(ctx, min_nr, nr, events, timeout, sigmask) }, events))
        }
    })
}

/// `io_queue_init`: `io_setup` without a check of the earlier value at `ctxp`.
///
/// # Safety
/// `ctxp` points to an `io_context_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_queue_init(maxevents: c_int, ctxp: *mut u64) -> c_int {
    if maxevents <= 0 {
        return -EINVAL;
    }
    let cleared = guard(|| Checked::default().write(ctxp as u64, 0u64).map(|()| 0));
    // SAFETY: the caller guarantees the argument.
    if cleared < 0 { cleared } else { unsafe { io_setup(maxevents, ctxp) } }
}

/// `io_queue_release`: `io_destroy`.
#[unsafe(no_mangle)]
pub extern "C" fn io_queue_release(ctx: u64) -> c_int {
    io_destroy(ctx)
}

/// `io_queue_wait`: requests no events, and so never waits.
///
/// # Safety
/// `timeout` is null or points to a `timespec`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_queue_wait(ctx: u64, timeout: u64) -> c_int {
    // SAFETY: the caller guarantees the arguments, and no event is stored.
    unsafe { io_getevents(ctx, 0, 0, 0, timeout) }
}

/// `io_queue_run`: calls each finished request's `data` as `(ctx, iocb, res, res2)` until no finished request is left.
///
/// # Safety
/// Every finished request's `data` is such a function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_queue_run(ctx: u64) -> c_int {
    type Callback = unsafe extern "C-unwind" fn(u64, u64, i64, i64);
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        let mut event = IoEvent { data: 0, obj: 0, res: 0, res2: 0 };
        // SAFETY: `event` has space for the one requested event.
        let got = unsafe { io_getevents(ctx, 0, 1, &raw mut event as u64, &raw const now as u64) };
        if got != 1 {
            return got;
        }
        // SAFETY: the caller guarantees the function; no lock is held, and nothing here needs unwinding.
        unsafe {
            let callback: Callback = std::mem::transmute(event.data as *const ());
            callback(ctx, event.obj, event.res, event.res2);
        }
    }
}

fn get_events(
    context: &Context,
    min: i64,
    max: i64,
    events: u64,
    timeout: u64,
    sigmask: u64,
) -> Result<c_int, c_int> {
    let timeout = read_timeout(timeout)?;
    if sigmask != 0 {
        let _: u64 = Checked::default().read(sigmask)?;
    }
    if min < 0 || min > max {
        // Before a call that must not wait, libaio checks whether the queue is empty.
        return if timeout == Some(Duration::ZERO) && context.is_idle() { Ok(0) } else { Err(EINVAL) };
    }
    let wanted = Wanted { min, max, events, patience: Patience { timeout, sigmask } };
    context.get_events(wanted).map(|got| got as c_int)
}

/// Linux's aio accepts all numbers: nanoseconds may exceed a second, and a negative time never expires.
fn read_timeout(address: u64) -> Result<Option<Duration>, c_int> {
    if address == 0 {
        return Ok(None);
    }
    let time: libc::timespec = Checked::default().read(address)?;
    let nanoseconds = i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec);
    Ok(u64::try_from(nanoseconds.min(i64::MAX.into())).ok().map(Duration::from_nanos))
}

/// Reports failures among the events that libaio delivered.
fn looked_at(got: c_int, events: u64) -> c_int {
    for index in 0..got.max(0) as u64 {
        // SAFETY: libaio has just stored this event.
        let event = unsafe { &*((events as *const IoEvent).wrapping_add(index as usize)) };
        if event.res < 0 {
            report::forwarded_failure(event.obj, -event.res as c_int);
        }
    }
    got
}

/// Runs the body of a function: errors become negated errnos, errno stays unchanged, and panics are caught.
fn guard(body: impl FnOnce() -> Result<c_int, c_int>) -> c_int {
    let errno = memory::last_errno();
    // A cancellation would unwind this library's frames, and libaio's functions are no cancellation points.
    let _no_cancellation = NoCancellation::enter();
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(EIO));
    memory::restore_errno(errno);
    result.unwrap_or_else(|errno| -errno)
}
