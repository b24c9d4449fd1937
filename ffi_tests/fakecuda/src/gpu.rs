//! One fake GPU: its memory, streams and events, the faults that a test requests, and the simulated time of work.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUresult;

use crate::capture::Capture;
use crate::memory::{Allocation, Held};
use crate::order::{Access, Checker, Clock, HOST, Operation};
use crate::ptx::{Kernel, Module};
use crate::queue::{Mark, Stream, Work};

/// Result code of the driver.
pub type Code = i32;

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
    // An error of the work is that of later calls.
    for stream in std::mem::take(&mut gpu.destroyed) {
        let _ = gpu.stream_destroy(stream);
    }
    drop(gpu);
    RESUMED[ordinal as usize].notify_all();
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
    /// Calls that had to wait because the queue was full.
    pub blocked: usize,
    /// The largest number of operations that were queued at one time.
    pub most_queued: usize,
    /// The largest number of bytes that were allocated at one time.
    pub most_memory: u64,
    /// No queued work ends, until `resume`. Calls that need its end block.
    pub stalled: bool,
    /// Names of calls that block while the device is stalled, whatever they do: a driver has locks of its own.
    pub held: Vec<&'static str>,
    /// Threads that a call blocks now because of the stall.
    pub waiting: usize,
    /// The limits of the device.
    pub limits: Limits,
    /// The reasons why kernels were terminated, and the kernels whose module was unloaded before they ran.
    pub failures: Vec<String>,
    /// Names of the calls so far.
    pub calls: Vec<&'static str>,
    /// Bytes of all copies to the device that were queued.
    pub uploaded: u64,
    /// Instructions of all threads of all kernels that ran.
    pub instructions: u64,
    /// Has the effect of `FAKECUDA_FAIL`: the next call of this name returns this code, after the given number
    /// of calls that succeed.
    pub faults: Vec<(&'static str, usize, Code)>,
    pub(crate) checker: Checker,
    pub(crate) capture: Option<Capture>,
    pub(crate) host: Clock,
    pub(crate) streams: HashMap<usize, Stream>,
    /// The number of clock entries for streams so far, and the entries of destroyed streams.
    actors: usize,
    idle_actors: Vec<usize>,
    /// Streams that were destroyed while the device was stalled, and have work left.
    destroyed: Vec<usize>,
    events: HashMap<usize, EventState>,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) locked: BTreeMap<u64, u64>,
    modules: HashMap<usize, Arc<Module>>,
    functions: HashMap<usize, (usize, Arc<Kernel>)>,
    next: usize,
    pub(crate) queued: usize,
    /// Operations so far.
    pub(crate) pushed: u64,
    pub(crate) engines: [f64; 3],
    pub(crate) lost: Option<Code>,
}

/// The capacities and the speeds of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Operations that may be queued in all streams together. At the limit, a call blocks until
    /// one operation has finished.
    pub depth: usize,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes per second to the device, to the host, and threads per second through kernels; 0 means that
    /// work takes no time.
    pub rates: [f64; 3],
}

impl Default for Limits {
    fn default() -> Limits {
        let depth = std::env::var("FAKECUDA_DEPTH").ok().and_then(|text| text.parse().ok()).unwrap_or(1024);
        Limits { depth, memory_bytes: 1 << 34, rates: [1e8, 1e8, 1e9] }
    }
}

#[derive(Debug, Default, Clone)]
struct EventState {
    timed: bool,
    recorded: Option<Mark>,
    /// The capture and the stream in it that recorded the event last.
    captured: Option<(usize, usize)>,
}

pub(crate) const INVALID_VALUE: Code = CUresult::CUDA_ERROR_INVALID_VALUE as Code;
const INVALID_PTX: Code = CUresult::CUDA_ERROR_INVALID_PTX as Code;
const INVALID_HANDLE: Code = CUresult::CUDA_ERROR_INVALID_HANDLE as Code;
const NOT_FOUND: Code = CUresult::CUDA_ERROR_NOT_FOUND as Code;
const NOT_READY: Code = CUresult::CUDA_ERROR_NOT_READY as Code;
pub(crate) const ILLEGAL_ADDRESS: Code = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as Code;
pub(crate) const ALREADY_REGISTERED: Code = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as Code;
pub(crate) const NOT_REGISTERED: Code = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED as Code;

impl Gpu {
    /// Pairs of accesses so far that no event orders.
    pub fn races(&self) -> &[String] {
        &self.checker.races
    }

    /// Numbers of live objects: streams, events, modules, allocations, registrations.
    pub fn alive(&self) -> [usize; 5] {
        let own = |stream: &&usize| **stream != 0 && !self.destroyed.contains(stream);
        let streams = self.streams.keys().filter(own).count();
        [streams, self.events.len(), self.modules.len(), self.allocations.len(), self.locked.len()]
    }

    /// Records that the host reads or writes memory, after all work that it has waited for.
    pub fn host_access(&mut self, start: u64, bytes: u64, write: bool) {
        self.host.tick(HOST);
        let operation = Operation { actor: HOST, clock: self.host.clone(), what: "the host".to_string() };
        let access = Access { start, end: start + bytes, write };
        self.checker.note(operation, vec![access]);
    }

    /// Resets the device to its initial state.
    pub fn reset(&mut self) {
        *self = Gpu::default();
    }

    pub(crate) fn enter(&mut self, call: &'static str) -> Result<(), Code> {
        self.calls.push(call);
        if let Some(lost) = self.lost {
            return Err(lost);
        }
        self.check_unsafe(call)?;
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
                    self.lost = Some(code);
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
        self.stream(id);
        id
    }

    /// The stream of this number; creates the default stream on first use.
    pub(crate) fn stream(&mut self, id: usize) -> &mut Stream {
        self.streams.entry(id).or_insert_with(|| {
            let actor = self.idle_actors.pop().unwrap_or_else(|| {
                self.actors += 1;
                HOST + self.actors
            });
            Stream { actor, ..Stream::default() }
        })
    }

    pub(crate) fn known(&self, stream: usize) -> Result<(), Code> {
        let destroyed = self.destroyed.contains(&stream);
        if stream == 0 || self.streams.contains_key(&stream) && !destroyed {
            Ok(())
        } else {
            Err(INVALID_HANDLE)
        }
    }

    pub(crate) fn stream_destroy(&mut self, stream: usize) -> Result<(), Code> {
        self.known(stream)?;
        self.break_capture_of(stream);
        if self.stalled && !self.stream(stream).queue.is_empty() {
            // The call returns, and the work is done later.
            self.destroyed.push(stream);
            return Ok(());
        }
        self.drain(stream)?;
        // The host has waited for all of the stream's work, and the next stream with this
        // number inherits that knowledge.
        self.idle_actors.extend(self.streams.remove(&stream).map(|gone| gone.actor));
        Ok(())
    }

    pub(crate) fn stream_synchronize(&mut self, stream: usize) -> Result<(), Code> {
        self.known(stream)?;
        let captured = self.captures(stream)?;
        self.refuse_captured(captured)?;
        self.drain(stream)
    }

    pub(crate) fn stream_wait(&mut self, stream: usize, event: usize) -> Result<(), Code> {
        self.known(stream)?;
        let EventState { recorded: mark, captured, .. } =
            self.events.get(&event).ok_or(INVALID_HANDLE)?.clone();
        if self.capture_wait(stream, captured)? {
            return Ok(());
        }
        if let Some(mark) = &mark {
            let stream = self.stream(stream);
            stream.clock.merge(&mark.clock);
            stream.seconds = stream.seconds.max(mark.seconds);
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
        self.known(stream)?;
        if !self.events.contains_key(&event) {
            return Err(INVALID_HANDLE);
        }
        self.push(stream, "a record", Work::Mark, None)?;
        let captured = self.capture_number(stream).map(|number| (number, stream));
        let source = self.stream(stream);
        let mark =
            Mark { stream, place: source.queued, clock: source.clock.clone(), seconds: source.seconds };
        let event = self.events.entry(event).or_default();
        (event.recorded, event.captured) = (Some(mark).filter(|_| captured.is_none()), captured);
        Ok(())
    }

    /// The first query returns "not ready", so that callers meet both results.
    pub(crate) fn event_query(&mut self, event: usize) -> Result<(), Code> {
        let Some(mark) = self.recorded(event)? else { return Ok(()) };
        let pending = self.is_pending(event);
        if pending && self.stalled {
            return Err(NOT_READY);
        }
        self.run_to(mark.stream, mark.place)?;
        if pending {
            return Err(NOT_READY);
        }
        self.host.merge(&mark.clock);
        Ok(())
    }

    /// True if work before the last record of an event has not run.
    pub(crate) fn is_pending(&self, event: usize) -> bool {
        let mark = self.events.get(&event).and_then(|event| event.recorded.as_ref());
        let stream = |mark: &Mark| self.streams.get(&mark.stream).map_or(0, |stream| stream.done);
        mark.is_some_and(|mark| self.streams.contains_key(&mark.stream) && stream(mark) < mark.place)
    }

    /// True if another operation does not fit into the queue.
    pub(crate) fn is_full(&self) -> bool {
        self.queued >= self.limits.depth.max(1)
    }

    /// The place where the host recorded an event last.
    fn recorded(&mut self, event: usize) -> Result<Option<Mark>, Code> {
        let EventState { recorded, captured, .. } = self.events.get(&event).ok_or(INVALID_HANDLE)?.clone();
        self.refuse_captured(captured.is_some())?;
        Ok(recorded)
    }

    pub(crate) fn event_synchronize(&mut self, event: usize) -> Result<(), Code> {
        let Some(mark) = self.recorded(event)? else { return Ok(()) };
        self.run_to(mark.stream, mark.place)?;
        self.host.merge(&mark.clock);
        Ok(())
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
        self.known(stream)?;
        let (host, device) = if direction == 0 { (from, to) } else { (to, from) };
        if bytes == 0 || self.held(device, bytes as u64) != Held::Device {
            return Err(INVALID_VALUE);
        }
        let host = self.held(host, bytes as u64);
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
        if let Some(kernel) = self.queued_kernel(own) {
            self.failures.push(format!("the module of {kernel} was unloaded before the kernel ran"));
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
        self.known(stream)?;
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
