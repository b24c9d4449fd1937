//! Stream capture: work that is recorded into a graph instead of run, and the calls that break it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread::ThreadId;

use crate::gpu::{Code, Gpu, INVALID_VALUE};

/// A capture, or a thread, in this mode forbids unsafe calls on every thread.
pub const GLOBAL: i32 = 0;
/// A capture in this mode forbids them on its own thread.
pub const THREAD_LOCAL: i32 = 1;
/// A capture in this mode forbids none, and a thread in it may make them.
pub const RELAXED: i32 = 2;

pub(crate) const UNSUPPORTED: Code = 900;
const INVALIDATED: Code = 901;
const UNMATCHED: Code = 903;
const UNJOINED: Code = 904;
const ISOLATION: Code = 905;
const CAPTURED_EVENT: Code = 907;
const ILLEGAL_STATE: Code = 401;

/// Calls that could touch work under capture, as the driver sees it.
const UNSAFE: [&str; 9] = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
];

thread_local! {
    static MODE: Cell<i32> = const { Cell::new(GLOBAL) };
}

/// Sets this thread's mode, and returns the one before.
pub(crate) fn exchange(mode: i32) -> Result<i32, Code> {
    match mode {
        GLOBAL..=RELAXED => Ok(MODE.replace(mode)),
        _ => Err(INVALID_VALUE),
    }
}

/// A capture under way.
#[derive(Debug)]
pub(crate) struct Capture {
    number: usize,
    origin: usize,
    thread: ThreadId,
    mode: i32,
    /// Streams that take part; true for those whose last work the origin does not wait for yet.
    streams: BTreeMap<usize, bool>,
    broken: bool,
}

impl Gpu {
    /// This thread begins to capture a stream, by its handle; gives the driver's code.
    pub fn begin_capture(&mut self, stream: u64, mode: i32) -> Code {
        self.capture_begin(crate::api::number(stream as usize), mode).err().unwrap_or(0)
    }

    /// Ends a capture, by the handle of the stream that it began with; gives the driver's code.
    pub fn end_capture(&mut self, stream: u64) -> Code {
        self.capture_end(crate::api::number(stream as usize)).err().unwrap_or(0)
    }

    pub(crate) fn capture_begin(&mut self, stream: usize, mode: i32) -> Result<(), Code> {
        self.known(stream)?;
        if stream == 0 {
            return Err(UNSUPPORTED);
        }
        if self.capture.is_some() {
            return Err(ILLEGAL_STATE);
        }
        self.capture = Some(Capture {
            number: self.id(),
            origin: stream,
            thread: std::thread::current().id(),
            mode,
            streams: BTreeMap::from([(stream, false)]),
            broken: false,
        });
        Ok(())
    }

    pub(crate) fn capture_end(&mut self, stream: usize) -> Result<(), Code> {
        match self.capture.take_if(|capture| capture.origin == stream) {
            None => Err(UNMATCHED),
            Some(capture) if capture.broken => Err(INVALIDATED),
            Some(capture) if capture.streams.values().any(|unjoined| *unjoined) => Err(UNJOINED),
            Some(_) => Ok(()),
        }
    }

    /// 0 for a stream that is not captured, 1 for one that is, 2 for one whose capture is broken.
    pub(crate) fn capture_status(&self, stream: usize) -> i32 {
        match self.capture_of(stream) {
            None => 0,
            Some(capture) => 1 + i32::from(capture.broken),
        }
    }

    /// Breaks the capture under way if `call` is unsafe and this thread may not make it.
    pub(crate) fn check_unsafe(&mut self, call: &str) -> Result<(), Code> {
        let Some(capture) = self.capture.as_mut().filter(|_| UNSAFE.contains(&call)) else { return Ok(()) };
        let own = capture.thread == std::thread::current().id() && capture.mode != RELAXED;
        let prohibited = match MODE.get() {
            GLOBAL => own || capture.mode == GLOBAL,
            THREAD_LOCAL => own,
            _ => false,
        };
        if prohibited {
            capture.broken = true;
            return Err(UNSUPPORTED);
        }
        Ok(())
    }

    /// True if work for this stream goes into a graph.
    pub(crate) fn captures(&mut self, stream: usize) -> Result<bool, Code> {
        let Some(capture) = self.capture.as_mut() else { return Ok(false) };
        let origin = capture.origin;
        let Some(unjoined) = capture.streams.get_mut(&stream) else { return Ok(false) };
        if capture.broken {
            return Err(INVALIDATED);
        }
        *unjoined = stream != origin;
        Ok(true)
    }

    /// The number of the capture that a stream takes part in.
    pub(crate) fn capture_number(&self, stream: usize) -> Option<usize> {
        self.capture_of(stream).map(|capture| capture.number)
    }

    /// A stream waits for an event of `source` in the capture `number`, and takes part from then on. True if it does.
    pub(crate) fn capture_wait(
        &mut self,
        stream: usize,
        event: Option<(usize, usize)>,
    ) -> Result<bool, Code> {
        let Some(capture) = self.capture.as_mut() else {
            return if event.is_some() { Err(CAPTURED_EVENT) } else { Ok(false) };
        };
        match event {
            Some((number, source)) if number == capture.number => {
                if stream == capture.origin {
                    capture.streams.insert(source, false);
                }
                capture.streams.entry(stream).or_insert(stream != capture.origin);
                Ok(true)
            }
            Some(_) => Err(CAPTURED_EVENT),
            None if capture.streams.contains_key(&stream) => {
                capture.broken = true;
                Err(ISOLATION)
            }
            None => Ok(false),
        }
    }

    /// The host may not ask for what is captured: that breaks the capture in every mode.
    pub(crate) fn refuse_captured(&mut self, captured: bool) -> Result<(), Code> {
        if !captured {
            return Ok(());
        }
        if let Some(capture) = &mut self.capture {
            capture.broken = true;
        }
        Err(CAPTURED_EVENT)
    }

    /// A stream that takes part goes.
    pub(crate) fn break_capture_of(&mut self, stream: usize) {
        if let Some(capture) = self.capture.as_mut().filter(|capture| capture.streams.contains_key(&stream)) {
            capture.broken = true;
        }
    }

    fn capture_of(&self, stream: usize) -> Option<&Capture> {
        self.capture.as_ref().filter(|capture| capture.streams.contains_key(&stream))
    }
}
