//! One fake GPU: its memory, streams and events, the faults that a test ordered, and the time that work would take.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::memory::Guarded;
use crate::order::{Access, Checker, Clock, HOST, Operation};
use crate::ptx::{Kernel, Module};

/// Result code of the driver.
pub type Code = i32;

/// Number of fake devices.
pub const DEVICES: usize = 64;

static GPUS: LazyLock<Vec<Mutex<Gpu>>> = LazyLock::new(|| (0..DEVICES).map(|_| Mutex::default()).collect());

/// GPU `ordinal`, for this thread alone until the guard goes.
pub fn lock(ordinal: u32) -> MutexGuard<'static, Gpu> {
    GPUS[ordinal as usize].lock().unwrap_or_else(PoisonError::into_inner)
}

/// One device.
#[derive(Debug, Default)]
pub struct Gpu {
    /// How often the primary context is retained.
    pub retained: i32,
    /// Copies whose host side was not page-locked.
    pub pageable_copies: usize,
    /// Why kernels were ended.
    pub failures: Vec<String>,
    /// Names of the calls so far.
    pub calls: Vec<&'static str>,
    /// Stands for `FAKECUDA_FAIL`: the next call of this name gives this code, after so many that succeed.
    pub faults: Vec<(&'static str, usize, Code)>,
    /// True while a test pretends that streams are captured.
    pub capturing: bool,
    /// Bytes per second to the device, to the host, and elements per second through kernels; 0 is no time at all.
    pub rates: [f64; 3],
    pub(crate) checker: Checker,
    host: Clock,
    pub(crate) streams: HashMap<usize, Stream>,
    /// Numbers of streams in clocks, given so far, and those of streams that are gone.
    actors: usize,
    idle_actors: Vec<usize>,
    events: HashMap<usize, Event>,
    pub(crate) allocations: BTreeMap<u64, Box<[u64]>>,
    pub(crate) locked: BTreeMap<u64, u64>,
    modules: HashMap<usize, Arc<Module>>,
    functions: HashMap<usize, (usize, Arc<Kernel>)>,
    next: usize,
    engines: [f64; 3],
    lost: Option<Code>,
}

#[derive(Debug, Default)]
pub(crate) struct Stream {
    actor: usize,
    clock: Clock,
    seconds: f64,
    queue: VecDeque<(u64, Operation, Work)>,
    queued: u64,
    done: u64,
}

#[derive(Debug, Default, Clone)]
struct Event {
    timed: bool,
    recorded: Option<Mark>,
}

/// A point in a stream.
#[derive(Debug, Clone)]
struct Mark {
    stream: usize,
    place: u64,
    clock: Clock,
    seconds: f64,
}

#[derive(Debug)]
enum Work {
    Copy { from: u64, to: u64, bytes: usize },
    Kernel { kernel: Arc<Kernel>, blocks: u32, threads: u32, parameters: Vec<u8> },
    Wait(Option<Mark>),
    Mark,
}

pub(crate) const INVALID_VALUE: Code = 1;
const INVALID_PTX: Code = 218;
const INVALID_HANDLE: Code = 400;
const NOT_FOUND: Code = 500;
const NOT_READY: Code = 600;
const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const ALREADY_REGISTERED: Code = 712;
pub(crate) const NOT_REGISTERED: Code = 713;

impl Gpu {
    /// Accesses that nothing orders, so far.
    pub fn races(&self) -> &[String] {
        &self.checker.races
    }

    /// Objects that are still alive: streams, events, modules, allocations, registrations.
    pub fn alive(&self) -> [usize; 5] {
        let streams = self.streams.keys().filter(|stream| **stream != 0).count();
        [streams, self.events.len(), self.modules.len(), self.allocations.len(), self.locked.len()]
    }

    /// The host reads or writes memory, as far as it knows in order.
    pub fn host_access(&mut self, start: u64, bytes: u64, write: bool) {
        self.host.tick(HOST);
        let operation = Operation { actor: HOST, clock: self.host.clone(), what: "the host".to_string() };
        let access = Access { start, end: start + bytes, write };
        self.checker.note(operation, vec![access]);
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        *self = Gpu::default();
    }

    pub(crate) fn enter(&mut self, call: &'static str) -> Result<(), Code> {
        self.calls.push(call);
        if let Some(lost) = self.lost {
            return Err(lost);
        }
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

    fn id(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    pub(crate) fn stream_create(&mut self) -> usize {
        let id = self.id();
        self.stream(id);
        id
    }

    /// The stream of this number, made if it is the default one.
    fn stream(&mut self, id: usize) -> &mut Stream {
        self.streams.entry(id).or_insert_with(|| {
            let actor = self.idle_actors.pop().unwrap_or_else(|| {
                self.actors += 1;
                HOST + self.actors
            });
            Stream { actor, ..Stream::default() }
        })
    }

    fn known(&self, stream: usize) -> Result<(), Code> {
        if stream == 0 || self.streams.contains_key(&stream) { Ok(()) } else { Err(INVALID_HANDLE) }
    }

    pub(crate) fn stream_destroy(&mut self, stream: usize) -> Result<(), Code> {
        self.stream_synchronize(stream)?;
        // The host knows all that it did, and so will the stream that has its number next.
        self.idle_actors.extend(self.streams.remove(&stream).map(|gone| gone.actor));
        Ok(())
    }

    pub(crate) fn stream_synchronize(&mut self, stream: usize) -> Result<(), Code> {
        self.known(stream)?;
        let place = self.stream(stream).queued;
        self.run_to(stream, place)?;
        let clock = self.stream(stream).clock.clone();
        self.host.merge(&clock);
        Ok(())
    }

    pub(crate) fn stream_wait(&mut self, stream: usize, event: usize) -> Result<(), Code> {
        self.known(stream)?;
        let mark = self.events.get(&event).ok_or(INVALID_HANDLE)?.recorded.clone();
        if let Some(mark) = &mark {
            let stream = self.stream(stream);
            stream.clock.merge(&mark.clock);
            stream.seconds = stream.seconds.max(mark.seconds);
        }
        self.push(stream, "a wait", Work::Wait(mark), None);
        Ok(())
    }

    pub(crate) fn event_create(&mut self, timed: bool) -> usize {
        let id = self.id();
        self.events.insert(id, Event { timed, recorded: None });
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
        self.push(stream, "a record", Work::Mark, None);
        let source = self.stream(stream);
        let mark =
            Mark { stream, place: source.queued, clock: source.clock.clone(), seconds: source.seconds };
        self.events.entry(event).or_default().recorded = Some(mark);
        Ok(())
    }

    /// Not ready at the first question, so that callers meet both answers.
    pub(crate) fn event_query(&mut self, event: usize) -> Result<(), Code> {
        let Some(mark) = self.events.get(&event).ok_or(INVALID_HANDLE)?.recorded.clone() else {
            return Ok(());
        };
        let pending = self.streams.get(&mark.stream).is_some_and(|stream| stream.done < mark.place);
        self.run_to(mark.stream, mark.place)?;
        if pending {
            return Err(NOT_READY);
        }
        self.host.merge(&mark.clock);
        Ok(())
    }

    pub(crate) fn event_synchronize(&mut self, event: usize) -> Result<(), Code> {
        let Some(mark) = self.events.get(&event).ok_or(INVALID_HANDLE)?.recorded.clone() else {
            return Ok(());
        };
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
        let last = bytes as u64 - 1;
        if self.kind(device) != 2 || self.kind(device + last) != 2 {
            return Err(INVALID_VALUE);
        }
        if self.kind(host) != 1 || self.kind(host + last) != 1 {
            self.pageable_copies += 1;
        }
        let what = ["a copy to the device", "a copy to the host"][direction];
        self.push(stream, what, Work::Copy { from, to, bytes }, Some((direction, bytes as f64)));
        Ok(())
    }

    pub(crate) fn module_load(&mut self, ptx: &str) -> Result<usize, (Code, String)> {
        let module = Module::parse(ptx).map_err(|words| (INVALID_PTX, words))?;
        let id = self.id();
        self.modules.insert(id, Arc::new(module));
        Ok(id)
    }

    pub(crate) fn module_unload(&mut self, module: usize) -> Result<(), Code> {
        self.functions.retain(|_, (owner, _)| *owner != module);
        self.modules.remove(&module).map(drop).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn function(&mut self, module: usize, name: &str) -> Result<usize, Code> {
        let kernel = self.modules.get(&module).ok_or(INVALID_HANDLE)?.kernel(name).ok_or(NOT_FOUND)?;
        let id = self.id();
        self.functions.insert(id, (module, kernel));
        Ok(id)
    }

    /// The kernel of a function, which knows how large its parameters are.
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
        self.push(stream, &what, Work::Kernel { kernel, blocks, threads, parameters }, Some((2, size)));
        Ok(())
    }

    /// Queues work that takes `cost` units on an engine, or no time.
    fn push(&mut self, id: usize, what: &str, work: Work, cost: Option<(usize, f64)>) {
        let host = self.host.clone();
        let (rates, mut engines) = (self.rates, self.engines);
        let stream = self.stream(id);
        stream.clock.merge(&host);
        stream.clock.tick(stream.actor);
        if let Some((engine, units)) = cost.filter(|(engine, _)| rates[*engine] > 0.0) {
            stream.seconds = stream.seconds.max(engines[engine]) + units / rates[engine];
            engines[engine] = stream.seconds;
        }
        stream.queued += 1;
        let operation = Operation {
            actor: stream.actor,
            clock: stream.clock.clone(),
            what: format!("{what} in stream {id}"),
        };
        stream.queue.push_back((stream.queued, operation, work));
        self.engines = engines;
    }

    /// Runs a stream, and what it waits for, up to `place`.
    fn run_to(&mut self, stream: usize, place: u64) -> Result<(), Code> {
        if let Some(lost) = self.lost {
            return Err(lost);
        }
        while let Some((number, ..)) = self.streams.get(&stream).and_then(|stream| stream.queue.front())
            && *number <= place
        {
            let Some((number, operation, work)) = self.stream(stream).queue.pop_front() else { break };
            self.run(operation, work).inspect_err(|code| self.lost = Some(*code))?;
            self.stream(stream).done = number;
        }
        Ok(())
    }

    fn run(&mut self, operation: Operation, work: Work) -> Result<(), Code> {
        let accesses = match work {
            Work::Mark | Work::Wait(None) => return Ok(()),
            Work::Wait(Some(mark)) => return self.run_to(mark.stream, mark.place),
            Work::Copy { from, to, bytes } => {
                // SAFETY: the device side was checked when the copy was queued, the host side is the caller's promise.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
                let of = |start: u64, write| Access { start, end: start + bytes as u64, write };
                vec![of(from, false), of(to, true)]
            }
            Work::Kernel { kernel, blocks, threads, parameters } => {
                let mut memory = Guarded { gpu: self, accesses: Vec::new() };
                let outcome = kernel.run(blocks, threads, &parameters, &mut memory);
                let accesses = memory.accesses;
                if let Err(words) = outcome {
                    self.failures.push(words);
                    return Err(ILLEGAL_ADDRESS);
                }
                accesses
            }
        };
        self.checker.note(operation, accesses);
        if self.streams.values().all(|stream| stream.queue.is_empty()) {
            self.checker.settle(&self.host);
        }
        Ok(())
    }
}

fn fault_of_environment(call: &str) -> Option<Code> {
    let list = std::env::var("FAKECUDA_FAIL").ok()?;
    let mut pairs = list.split(',').filter_map(|pair| pair.split_once('='));
    pairs.find(|(name, _)| *name == call).and_then(|(_, code)| code.parse().ok())
}
