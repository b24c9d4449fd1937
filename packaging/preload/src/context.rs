//! One `io_context_t`. Requests are submitted under the ring's filling lock, and events are taken under the state lock.
//! No lock is held while a thread sleeps in the kernel.
//!
//! - At most one thread, the leader, waits in io_uring_enter, which can wait for several completions at once. Others
//!   poll the ring's descriptor. The thread that wakes first takes all completions that have arrived.
//! - Locks are taken in the order filling, state.
//! - The submitting thread performs a buffered transfer itself, between two groups of requests for the ring, and parks
//!   its completion. It holds no lock meanwhile.
//! - Linux cancels a request if the thread that submitted it exits before a worker starts the request. libaio has no
//!   such rule, so a cancellation that the program did not request is submitted again.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use io_uring::opcode;
use libc::{EAGAIN, ECANCELED, EFAULT, EINPROGRESS, EINTR, EINVAL, ETIME, c_int};

use crate::abi::{CMD_POLL, IoEvent, Iocb};
use crate::environment;
use crate::memory::Checked;
use crate::report::{self, Level};
use crate::request::{Request, check_fields};
use crate::ring::{Filling, Patience, Ring, let_signals_in};
use crate::table::{HIDDEN, Table};

/// The leader waits for at most this number of completions, so that this many empty completions always wake it.
const MAX_BATCH: i64 = 64;

/// A context; its address is the program's `io_context_t`.
#[repr(C)]
pub struct Context {
    /// At this place Linux keeps the header of its event ring. libaio and fio, which read events from there, first look
    /// for a magic number. If it is missing, they call `io_getevents`. `imports` finds the programs that do not check.
    no_event_ring: [u32; 8],
    /// Buffered transfers use the ring too.
    asynchronous: bool,
    ring: Ring,
    state: Mutex<State>,
    left: Condvar,
}

struct State {
    table: Table,
    /// Completions that the next call returns: of transfers performed at once, of requests that the ring did not take
    /// again, and of requests from the ring whose event could not be stored at the program's address.
    parked: VecDeque<(u64, i32)>,
    /// Requests that the exit of a thread cancelled.
    again: Vec<u64>,
    waiters: usize,
    led: bool,
    destroyed: bool,
}

/// The arguments of `io_getevents`.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub min: i64,
    pub max: i64,
    /// Address of the program's array.
    pub events: u64,
    pub patience: Patience,
}

impl Context {
    pub fn new(requests: u32) -> Result<Context, String> {
        let capacity = capacity(requests);
        let state = State {
            table: Table::new(capacity as usize),
            parked: VecDeque::new(),
            again: Vec::new(),
            waiters: 0,
            led: false,
            destroyed: false,
        };
        let ring = Ring::build(requests, capacity)?;
        let asynchronous = environment::is_one("SPILLWAY_PRELOAD_ASYNC");
        Ok(Context {
            no_event_ring: [0; 8],
            asynchronous,
            ring,
            state: Mutex::new(state),
            left: Condvar::new(),
        })
    }

    /// Submits `count` requests from the program's array of addresses. Returns the number of accepted requests, or the
    /// error of the first one.
    pub fn submit(&self, requests: u64, count: i64) -> Result<i64, c_int> {
        let mut accepted = 0;
        while accepted < count {
            let (taken, stopped) = self.submit_lot(requests, accepted..count);
            accepted += taken;
            match stopped {
                Ok(Some(number)) => self.carry_out(number),
                Ok(None) => {}
                Err(errno) if accepted == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(accepted)
    }

    /// Submits requests to the ring, up to the first that is performed at once. Returns the number of accepted
    /// requests, that one included, and its request number or the error of the next request.
    fn submit_lot(&self, requests: u64, lot: Range<i64>) -> (i64, Result<Option<u64>, c_int>) {
        self.ring.submit(|filling| {
            let mut memory = Checked::default();
            for index in lot.clone() {
                match self.submit_one(requests, index, &mut memory, filling) {
                    Ok(None) => {}
                    Ok(number) => return (index + 1 - lot.start, Ok(number)),
                    Err(errno) => return (index - lot.start, Err(errno)),
                }
            }
            (lot.end - lot.start, Ok(None))
        })
    }

    /// Submits one request. Returns its number if the ring did not receive it.
    fn submit_one(
        &self,
        array: u64,
        index: i64,
        memory: &mut Checked,
        filling: &mut Filling,
    ) -> Result<Option<u64>, c_int> {
        let entry = array.checked_add(index as u64 * size_of::<u64>() as u64).ok_or(EFAULT)?;
        let address: u64 = memory.read(entry)?;
        let iocb: Iocb = memory.read(address)?;
        check_fields(&iocb)?;
        {
            let state = self.lock();
            if state.destroyed {
                return Err(EINVAL);
            }
            if state.table.is_full() {
                return Err(EAGAIN);
            }
        }
        let request = Request::check(address, iocb, memory)?;
        let at_once = request.at_once && !self.asynchronous;
        let number = self.lock().table.insert(request);
        if at_once {
            return Ok(Some(number));
        }
        let pushed = self.push(number, filling);
        if pushed.is_err() {
            self.lock().table.remove(number);
        }
        pushed.map(|()| None)
    }

    /// Transfers as Linux does inside io_submit, and wakes the threads that wait for events.
    fn carry_out(&self, number: u64) {
        let mut state = self.lock();
        let Some(request) = state.table.get_mut(number) else { return };
        let (transfer, notice) = (request.transfer(), request.notice(HIDDEN));
        drop(state);
        // SAFETY: the request leaves the table only when its completion is fetched, and the completion is parked below.
        let result = unsafe { transfer.perform() };
        let mut state = self.lock();
        state.parked.push_back((number, result));
        let awaited = state.waiters > 0;
        drop(state);
        // A waiter counts completions of the ring, and needs one for each event.
        let wake = || awaited.then(|| opcode::Nop::new().build().user_data(HIDDEN));
        if let Some(entry) = notice.or_else(wake) {
            // SAFETY: the data written to the eventfd is static; the other entry has no pointer.
            self.ring.submit(|filling| unsafe { filling.push(&[entry]) }).unwrap_or_else(|errno| {
                let why = std::io::Error::from_raw_os_error(errno);
                report::say(Level::Error, || format!("cannot wake a thread that waits for events: {why}"));
            });
        }
    }

    fn push(&self, number: u64, filling: &mut Filling) -> Result<(), c_int> {
        let mut state = self.lock();
        let Some(request) = state.table.get_mut(number) else { return Ok(()) };
        let (operation, notice) = request.entries(number, HIDDEN);
        drop(state);
        // SAFETY: buffers belong to the program until their completion; the vectors stay in the table until then.
        unsafe {
            match notice {
                Some(notice) => filling.push(&[operation, notice]),
                None => filling.push(&[operation]),
            }
        }
    }

    /// Fetches events according to `wanted`.
    pub fn get_events(&self, wanted: Wanted) -> Result<i64, c_int> {
        let started = Instant::now();
        let mut got = 0;
        let mut slept = false;
        let mut outcome = Ok(());
        let mut last_round = wanted.patience.timeout == Some(Duration::ZERO);
        loop {
            let state = self.take(wanted, &mut got)?;
            if state.destroyed {
                outcome = Err(EINVAL);
            }
            if got >= wanted.min || last_round || outcome.is_err() {
                break;
            }
            let left = wanted.patience.timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
            let patience = Patience { timeout: left, ..wanted.patience };
            slept = true;
            match self.sleep(state, wanted.min - got, patience) {
                Ok(()) => {}
                Err(ETIME) => last_round = true,
                Err(errno) => {
                    // Events that arrived together with the interruption still count.
                    drop(self.take(wanted, &mut got)?);
                    outcome = Err(errno);
                    break;
                }
            }
        }
        let masked = wanted.patience.sigmask != 0;
        if masked && !slept && outcome.is_ok() && let_signals_in(wanted.patience.sigmask) {
            outcome = Err(EINTR);
        }
        if got > 0 { Ok(got) } else { outcome.map(|()| 0) }
    }

    /// True if no event can be fetched.
    pub fn is_idle(&self) -> bool {
        self.lock().parked.is_empty() && !self.ring.has_completions()
    }

    /// Waits for `missing` more completions, with the lock released.
    fn sleep(&self, mut state: MutexGuard<'_, State>, missing: i64, patience: Patience) -> Result<(), c_int> {
        let leads = !state.led;
        state.led = true;
        state.waiters += 1;
        drop(state);
        self.ring.submit_leftover();
        let slept = if leads {
            self.ring.wait(missing.clamp(1, MAX_BATCH) as u32, patience)
        } else {
            self.ring.poll(patience)
        };
        let mut state = self.lock();
        state.waiters -= 1;
        state.led &= !leads;
        if state.destroyed && state.waiters == 0 {
            self.left.notify_all();
        }
        slept
    }

    /// Stores the events that have arrived in the program's array, as far as they fit, and returns the locked state.
    fn take(&self, wanted: Wanted, got: &mut i64) -> Result<MutexGuard<'_, State>, c_int> {
        let mut memory = Checked::default();
        let mut state = self.lock();
        loop {
            // In a destroyed context the completions are wake-ups, which must remain for the other threads.
            while *got < wanted.max && !state.destroyed {
                let Some((number, res)) = self.next(&mut state) else { break };
                let Some(event) = state.event(number, res) else { continue };
                let place = wanted.events.wrapping_add(*got as u64 * size_of::<IoEvent>() as u64);
                if memory.write(place, event).is_err() {
                    state.parked.push_front((number, res));
                    return if *got > 0 { Ok(state) } else { Err(EFAULT) };
                }
                state.close(number, res);
                *got += 1;
            }
            if state.again.is_empty() {
                return Ok(state);
            }
            drop(state);
            self.submit_again();
            // Requests that the ring refused have events now.
            state = self.lock();
        }
    }

    fn next(&self, state: &mut State) -> Option<(u64, i32)> {
        if let Some(parked) = state.parked.pop_front() {
            return Some(parked);
        }
        let next = self.ring.take();
        if next.is_some() || !self.ring.may_overflow(state.table.open()) {
            return next;
        }
        self.ring.make_room();
        self.ring.take()
    }

    /// Submits cancelled requests again. One that the ring refuses ends with the ring's error: each accepted request has
    /// an event.
    fn submit_again(&self) {
        self.ring.submit(|filling| {
            let numbers = std::mem::take(&mut self.lock().again);
            for number in numbers {
                if let Err(errno) = self.push(number, filling) {
                    self.lock().parked.push_back((number, -errno));
                }
            }
        });
    }

    /// Requests the end of a poll, the only request that Linux's aio can cancel; its event arrives as usual.
    pub fn cancel(&self, obj: u64) -> c_int {
        let poll = |request: &Request| request.obj == obj && request.iocb.opcode == CMD_POLL;
        if self.cancel_where(poll) > 0 { EINPROGRESS } else { EINVAL }
    }

    fn cancel_where(&self, wanted: impl Fn(&Request) -> bool) -> usize {
        self.ring.submit(|filling| {
            let numbers = self.lock().table.select(wanted);
            for number in &numbers {
                if let Some(request) = self.lock().table.get_mut(*number) {
                    request.cancelled = true;
                }
                let cancel = opcode::AsyncCancel::new(*number).build().user_data(HIDDEN);
                // SAFETY: the entry has no pointer.
                let _ = unsafe { filling.push(&[cancel]) };
            }
            numbers.len()
        })
    }

    /// Ends the context, which the registry no longer contains: makes waiters return, cancels requests that would never
    /// end, and waits for the rest, as Linux does.
    pub fn destroy(&self) {
        let mut state = self.lock();
        state.destroyed = true;
        let waiters = state.waiters;
        drop(state);
        self.cancel_where(Request::may_never_end);
        if waiters > 0 {
            self.wake_all();
        }
        let state = self.lock();
        drop(self.left.wait_while(state, |state| state.waiters > 0).unwrap_or_else(PoisonError::into_inner));
        let unreaped = self.drain(|_| true);
        report::unreaped(unreaped, "io_destroy");
    }

    fn wake_all(&self) {
        self.ring.submit(|filling| {
            for _ in 0..MAX_BATCH {
                // SAFETY: the entry points to nothing.
                let _ = unsafe { filling.push(&[opcode::Nop::new().build().user_data(HIDDEN)]) };
            }
        });
    }

    /// At exit: waits for transfers that Linux would otherwise drop, and reports events that were never fetched.
    pub fn finish(&self) {
        let unreaped = self.drain(|request| !request.may_never_end());
        report::unreaped(unreaped, "exit");
    }

    /// Takes completions until no request that `awaited` selects is open; returns their number.
    fn drain(&self, awaited: impl Fn(&Request) -> bool) -> usize {
        const GLANCE: Duration = Duration::from_millis(50);
        let mut drained = 0;
        loop {
            let mut state = self.lock();
            while let Some((number, res)) = self.next(&mut state) {
                if state.event(number, res).is_some() {
                    state.close(number, res);
                    drained += usize::from(res != -ECANCELED);
                }
            }
            let again = !state.again.is_empty();
            if !again && state.table.select(&awaited).is_empty() {
                return drained;
            }
            drop(state);
            if again {
                self.submit_again();
                continue;
            }
            self.ring.submit_leftover();
            match self.ring.wait(1, Patience { timeout: Some(GLANCE), sigmask: 0 }) {
                Ok(()) | Err(ETIME | EINTR) => {}
                Err(errno) => {
                    report::say(Level::Error, || {
                        let why = std::io::Error::from_raw_os_error(errno);
                        format!("waiting for requests in flight failed: {why}")
                    });
                    return drained;
                }
            }
        }
    }

    /// In a forked child: closes the inherited descriptor; the ring's memory was not inherited.
    pub fn disown(&self) {
        // SAFETY: the descriptor is this ring's. The child never drops the context, so nothing closes it twice.
        unsafe { libc::close(self.ring.descriptor()) };
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The event of a completion. None for the library's own entries and for requests that are submitted again.
    fn event(&mut self, number: u64, res: i32) -> Option<IoEvent> {
        let request = self.table.get_mut(number)?;
        let mut res = i64::from(res);
        if res == -i64::from(ECANCELED) {
            if !request.cancelled {
                self.again.push(number);
                return None;
            }
            // A cancelled poll returns no error and an empty event mask.
            res = 0;
        }
        Some(IoEvent { data: request.iocb.data, obj: request.obj, res, res2: 0 })
    }

    /// Frees the request's slot, and reports a failed or short result, because the program may not check it.
    fn close(&mut self, number: u64, res: i32) {
        if let Some(request) = self.table.remove(number)
            && res != -ECANCELED
        {
            report::completion(&request, res);
        }
    }
}

/// The number of requests that Linux's aio would admit: more than the program asked for, and programs
/// rely on the surplus.
fn capacity(requests: u32) -> u32 {
    const PAGE: u64 = 4096;
    const HEADER: u64 = 32;
    const EVENT: u64 = 32;
    // SAFETY: sysconf has no pointer argument.
    let processors = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) }.max(1) as u64;
    let events = u64::from(requests).max(processors * 4) * 2 + 2;
    let pages = (HEADER + events * EVENT).div_ceil(PAGE);
    ((pages * PAGE - HEADER) / EVENT - 1) as u32
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::abi::CMD_FSYNC;

    #[test]
    fn a_cancelled_request_that_the_ring_does_not_take_again_has_an_event() {
        let context = Context::new(1).unwrap();
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let iocb = |data| Iocb {
            data,
            key: 0,
            rw_flags: 0,
            opcode: CMD_FSYNC,
            reqprio: 0,
            fd: zero.as_raw_fd(),
            buf: 0,
            nbytes: 0,
            offset: 0,
            reserved: 0,
            flags: 0,
            resfd: 0,
        };
        let requests = [7, 8].map(|data| Request::check(0, iocb(data), &mut Checked::default()).unwrap());
        {
            let mut state = context.lock();
            for request in requests {
                let number = state.table.insert(request);
                state.again.push(number);
            }
        }
        // The kernel refuses every entry from now on. The queue has room for one.
        context.disown();
        let mut events = [IoEvent { data: 0, obj: 0, res: 0, res2: 0 }; 2];
        let patience = Patience { timeout: Some(Duration::ZERO), sigmask: 0 };
        let wanted = Wanted { min: 1, max: 2, events: events.as_mut_ptr() as u64, patience };
        assert_eq!(context.get_events(wanted), Ok(1));
        assert_eq!((events[0].data, events[0].res), (8, -i64::from(libc::EBADF)));
        // Its descriptor is closed already.
        std::mem::forget(context);
    }
}
