//! One fake GPU: its memory, streams and events, the faults that a test requests, and the simulated time of work.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUresult;

use crate::capture::Captures;
use crate::code::{ALREADY_REGISTERED, Code, INVALID_HANDLE, INVALID_VALUE, NOT_REGISTERED};
use crate::memory::Held;
use crate::order::{Access, HOST, Operation};
use crate::ptx::{Kernel, Module};
use crate::queue::{Mark, Queues, Work};

/// Number of fake devices.
pub const DEVICES: usize = 96;

static GPUS: LazyLock<Vec<Mutex<Gpu>>> = LazyLock::new(|| (0..DEVICES).map(|_| Mutex::default()).collect());

/// Signalled when a stalled GPU works on.
static RESUMED: LazyLock<Vec<Condvar>> = LazyLock::new(|| (0..DEVICES).map(|_| Condvar::new()).collect());

/// Waits while the GPU is stalled, if the call `needs` an end of its work.
pub(crate) fn unless_stalled(
    ordinal: usize,
    mut gpu: MutexGuard<'static, Gpu>,
    needs: impl Fn(&Gpu) -> bool,
) -> MutexGuard<'static, Gpu> {
    while gpu.stalled && needs(&gpu) {
        gpu.waiting += 1;
        gpu = RESUMED[ordinal].wait(gpu).unwrap_or_else(PoisonError::into_inner);
        gpu.waiting -= 1;
    }
    gpu
}

/// Ends the stall of GPU `ordinal`.
pub fn resume(ordinal: u32) {
    let mut gpu = lock(ordinal);
    gpu.stalled = false;
    gpu.queues.finish_destroyed();
    drop(gpu);
    RESUMED[ordinal as usize].notify_all();
}

/// The number of an object in its handle, below the number of its device.
pub(crate) fn number(handle: usize) -> usize {
    handle & 0xffff_ffff
}

/// Locks GPU `ordinal` for this thread until the guard is dropped.
pub fn lock(ordinal: u32) -> MutexGuard<'static, Gpu> {
    GPUS[ordinal as usize].lock().unwrap_or_else(PoisonError::into_inner)
}

/// One device.
#[derive(Debug, Default)]
pub struct Gpu {
    /// How often the primary context is retained.
    pub retained: i32,
    /// Copies whose host side was not page-locked: each blocked its caller.
    pub pageable_copies: usize,
    /// No queued work ends, until `resume`. Calls that need its end block.
    pub stalled: bool,
    /// Names of calls that block while the device is stalled, whatever they do: a driver has locks of its own.
    pub held: Vec<&'static str>,
    /// Threads that a call blocks now because of the stall.
    pub waiting: usize,
    /// The streams, and their work.
    pub queues: Queues,
    /// Names of the calls so far.
    pub calls: Vec<&'static str>,
    /// Bytes of all copies to the device that were queued.
    pub uploaded: u64,
    /// Has the effect of `FAKECUDA_FAIL`: the next call of this name returns this code, after the given number
    /// of calls that succeed.
    pub faults: Vec<(&'static str, usize, Code)>,
    pub(crate) captures: Captures,
    events: HashMap<usize, EventState>,
    modules: HashMap<usize, Arc<Module>>,
    functions: HashMap<usize, (usize, Arc<Kernel>)>,
    next: usize,
}

#[derive(Debug, Default, Clone)]
struct EventState {
    timed: bool,
    recorded: Option<Mark>,
    /// The capture and the stream in it that recorded the event last.
    captured: Option<(usize, usize)>,
}

const INVALID_PTX: Code = CUresult::CUDA_ERROR_INVALID_PTX as Code;
const NOT_FOUND: Code = CUresult::CUDA_ERROR_NOT_FOUND as Code;
const NOT_READY: Code = CUresult::CUDA_ERROR_NOT_READY as Code;

impl Gpu {
    /// Pairs of accesses so far that no event orders.
    pub fn races(&self) -> &[String] {
        &self.queues.checker.races
    }

    /// Operations that have not run.
    pub fn queued(&self) -> usize {
        self.queues.queued()
    }

    /// Kernels that were launched and have not run.
    pub fn queued_kernels(&self) -> usize {
        self.queues.queued_kernels()
    }

    /// Bytes of this device's memory that are allocated.
    pub fn memory_used(&self) -> u64 {
        self.queues.reach.used()
    }

    /// The largest number of bytes that were allocated at one time.
    pub fn most_memory(&self) -> u64 {
        self.queues.reach.most
    }

    /// Page-locks memory as its owner would, with cudaHostAlloc.
    pub fn page_lock(&mut self, start: usize, bytes: usize) {
        self.queues.reach.lock(start as u64, bytes as u64);
    }

    /// Numbers of live objects: streams, events, modules, allocations, registrations.
    pub fn alive(&self) -> [usize; 5] {
        let [allocations, locked] = self.queues.reach.ranges();
        [self.queues.alive(), self.events.len(), self.modules.len(), allocations, locked]
    }

    /// Records that the host reads or writes memory, after all work that it has waited for.
    pub fn host_access(&mut self, start: u64, bytes: u64, write: bool) {
        let queues = &mut self.queues;
        queues.host.tick(HOST);
        let operation = Operation { actor: HOST, clock: queues.host.clone(), what: "the host".to_string() };
        let access = Access { start, end: start + bytes, write };
        queues.checker.note(operation, vec![access]);
    }

    /// Resets the device to its initial state.
    pub fn reset(&mut self) {
        *self = Gpu::default();
    }

    pub(crate) fn enter(&mut self, call: &'static str) -> Result<(), Code> {
        self.calls.push(call);
        if let Some(lost) = self.queues.lost {
            return Err(lost);
        }
        self.captures.check_unsafe(call)?;
        let due = self.faults.iter_mut().position(|(name, after, _)| {
            let named = *name == call;
            let due = named && *after == 0;
            *after -= usize::from(named && !due);
            due
        });
        match due.map(|due| self.faults.remove(due).2).or_else(|| fault_of_environment(call)) {
            None => Ok(()),
            Some(code) => {
                if (700..=719).contains(&code) && ![ALREADY_REGISTERED, NOT_REGISTERED].contains(&code) {
                    self.queues.lost = Some(code);
                }
                Err(code)
            }
        }
    }

    pub(crate) fn id(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    pub(crate) fn stream_create(&mut self) -> usize {
        let id = self.id();
        self.queues.create(id);
        id
    }

    pub(crate) fn stream_destroy(&mut self, stream: usize) -> Result<(), Code> {
        self.queues.known(stream)?;
        self.captures.leave(stream);
        self.queues.destroy(stream, self.stalled)
    }

    pub(crate) fn stream_synchronize(&mut self, stream: usize) -> Result<(), Code> {
        self.queues.known(stream)?;
        let captured = self.captures.records(stream)?;
        self.captures.refuse_captured(captured)?;
        self.queues.drain(stream)
    }

    /// Begins to capture a stream, given by its handle, on this thread. Returns the driver's code.
    pub fn begin_capture(&mut self, stream: u64, mode: i32) -> Code {
        self.capture_begin(number(stream as usize), mode).err().unwrap_or(0)
    }

    /// Ends a capture, given by the handle of the stream that it began with. Returns the driver's code.
    pub fn end_capture(&mut self, stream: u64) -> Code {
        self.captures.end(number(stream as usize)).err().unwrap_or(0)
    }

    pub(crate) fn capture_begin(&mut self, stream: usize, mode: i32) -> Result<(), Code> {
        self.queues.known(stream)?;
        let id = self.id();
        self.captures.begin(id, stream, mode)
    }

    /// Queues work, unless a capture records it.
    fn push(
        &mut self,
        stream: usize,
        what: &str,
        work: Work,
        cost: Option<(usize, f64)>,
    ) -> Result<(), Code> {
        if self.captures.records(stream)? {
            return Ok(());
        }
        self.queues.push(stream, what, work, cost)
    }

    pub(crate) fn stream_wait(&mut self, stream: usize, event: usize) -> Result<(), Code> {
        self.queues.known(stream)?;
        let EventState { recorded: mark, captured, .. } =
            self.events.get(&event).ok_or(INVALID_HANDLE)?.clone();
        if self.captures.wait(stream, captured)? {
            return Ok(());
        }
        if let Some(mark) = &mark {
            self.queues.follow(stream, mark);
        }
        self.push(stream, "a wait", Work::Wait(mark), None)
    }

    pub(crate) fn event_create(&mut self, timed: bool) -> usize {
        let id = self.id();
        self.events.insert(id, EventState { timed, ..EventState::default() });
        id
    }

    pub(crate) fn event_destroy(&mut self, event: usize) -> Result<(), Code> {
        self.events.remove(&event).map(drop).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn event_record(&mut self, event: usize, stream: usize) -> Result<(), Code> {
        self.queues.known(stream)?;
        if !self.events.contains_key(&event) {
            return Err(INVALID_HANDLE);
        }
        self.push(stream, "a record", Work::Mark, None)?;
        let captured = self.captures.number(stream).map(|number| (number, stream));
        let mark = self.queues.mark(stream);
        let event = self.events.entry(event).or_default();
        (event.recorded, event.captured) = (Some(mark).filter(|_| captured.is_none()), captured);
        Ok(())
    }

    /// The first query returns "not ready", so that callers meet both results.
    pub(crate) fn event_query(&mut self, event: usize) -> Result<(), Code> {
        let Some(mark) = self.recorded(event)? else { return Ok(()) };
        let pending = self.queues.is_pending(&mark);
        if pending && self.stalled {
            return Err(NOT_READY);
        }
        self.queues.run_before(&mark)?;
        if pending {
            return Err(NOT_READY);
        }
        self.queues.host.merge(&mark.clock);
        Ok(())
    }

    /// True if work before the last record of an event has not run.
    pub(crate) fn is_pending(&self, event: usize) -> bool {
        let mark = self.events.get(&event).and_then(|event| event.recorded.as_ref());
        mark.is_some_and(|mark| self.queues.is_pending(mark))
    }

    /// True if another operation does not fit into the queue.
    pub(crate) fn is_full(&self) -> bool {
        self.queues.is_full()
    }

    /// The place where the host recorded an event last.
    fn recorded(&mut self, event: usize) -> Result<Option<Mark>, Code> {
        let EventState { recorded, captured, .. } = self.events.get(&event).ok_or(INVALID_HANDLE)?.clone();
        self.captures.refuse_captured(captured.is_some())?;
        Ok(recorded)
    }

    pub(crate) fn event_synchronize(&mut self, event: usize) -> Result<(), Code> {
        let Some(mark) = self.recorded(event)? else { return Ok(()) };
        self.queues.wait(&mark)
    }

    pub(crate) fn event_seconds(&self, from: usize, to: usize) -> Result<f64, Code> {
        let at = |event: usize| {
            let event = self.events.get(&event).filter(|event| event.timed).ok_or(INVALID_HANDLE)?;
            event.recorded.as_ref().map(|mark| mark.seconds).ok_or(INVALID_HANDLE)
        };
        Ok(at(to)? - at(from)?)
    }

    /// Queues a copy; `direction` is 0 to the device and 1 to the host.
    pub(crate) fn copy(
        &mut self,
        stream: usize,
        from: u64,
        to: u64,
        bytes: usize,
        direction: usize,
    ) -> Result<(), Code> {
        self.queues.known(stream)?;
        let (host, device) = if direction == 0 { (from, to) } else { (to, from) };
        if bytes == 0 || self.queues.reach.held(device, bytes as u64) != Held::Device {
            return Err(INVALID_VALUE);
        }
        let host = self.queues.reach.held(host, bytes as u64);
        if ![Held::Locked, Held::Nothing].contains(&host) {
            return Err(INVALID_VALUE);
        }
        self.uploaded += if direction == 0 { bytes as u64 } else { 0 };
        let what = ["a copy to the device", "a copy to the host"][direction];
        self.push(stream, what, Work::Copy { from, to, bytes }, Some((direction, bytes as f64)))?;
        if host == Held::Nothing {
            // The copy uses a buffer of the driver, after all earlier work has finished.
            self.pageable_copies += 1;
            self.stream_synchronize(stream)?;
        }
        Ok(())
    }

    pub(crate) fn module_load(&mut self, ptx: &str) -> Result<usize, (Code, String)> {
        let module = Module::parse(ptx).map_err(|words| (INVALID_PTX, words))?;
        let id = self.id();
        self.modules.insert(id, Arc::new(module));
        Ok(id)
    }

    /// The driver does not wait for kernels of the module, whose code is gone.
    pub(crate) fn module_unload(&mut self, module: usize) -> Result<(), Code> {
        let own = |kernel: &Arc<Kernel>| {
            self.functions.values().any(|(owner, known)| *owner == module && Arc::ptr_eq(known, kernel))
        };
        if let Some(kernel) = self.queues.queued_kernel(own) {
            self.queues.failures.push(format!("the module of {kernel} was unloaded before the kernel ran"));
        }
        self.functions.retain(|_, (owner, _)| *owner != module);
        self.modules.remove(&module).map(drop).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn function(&mut self, module: usize, name: &str) -> Result<usize, Code> {
        let kernel = self.modules.get(&module).ok_or(INVALID_HANDLE)?.kernel(name).ok_or(NOT_FOUND)?;
        let id = self.id();
        self.functions.insert(id, (module, kernel));
        Ok(id)
    }

    /// The kernel of a function, which determines the size of its parameters.
    pub(crate) fn kernel(&self, function: usize) -> Result<Arc<Kernel>, Code> {
        self.functions.get(&function).map(|(_, kernel)| Arc::clone(kernel)).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn launch(
        &mut self,
        stream: usize,
        kernel: Arc<Kernel>,
        blocks: u32,
        threads: u32,
        parameters: Vec<u8>,
    ) -> Result<(), Code> {
        self.queues.known(stream)?;
        let limits = kernel.most_threads.unwrap_or(1024).min(1024);
        if blocks == 0 || threads == 0 || threads > limits {
            return Err(INVALID_VALUE);
        }
        let what = kernel.name.clone();
        let size = f64::from(blocks) * f64::from(threads);
        self.push(stream, &what, Work::Kernel { kernel, blocks, threads, parameters }, Some((2, size)))
    }
}

fn fault_of_environment(call: &str) -> Option<Code> {
    let list = std::env::var("FAKECUDA_FAIL").ok()?;
    let mut pairs = list.split(',').filter_map(|pair| pair.split_once('='));
    pairs.find(|(name, _)| *name == call).and_then(|(_, code)| code.parse().ok())
}
