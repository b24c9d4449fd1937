//! Stream capture: work is recorded into a graph instead of executed. Some calls break the capture.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread::ThreadId;

use cudarc::driver::sys::{CUresult, CUstreamCaptureMode};

use crate::code::{Code, INVALID_VALUE};

/// A capture, or a thread, in this mode forbids unsafe calls on every thread.
pub const GLOBAL: i32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL as i32;
/// A capture in this mode forbids unsafe calls on its own thread.
pub const THREAD_LOCAL: i32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as i32;
/// A capture in this mode forbids no calls, and a thread in this mode may make unsafe calls.
pub const RELAXED: i32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as i32;

pub(crate) const UNSUPPORTED: Code = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as Code;
const INVALIDATED: Code = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED as Code;
const UNMATCHED: Code = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED as Code;
const UNJOINED: Code = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED as Code;
const ISOLATION: Code = CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION as Code;
const CAPTURED_EVENT: Code = CUresult::CUDA_ERROR_CAPTURED_EVENT as Code;
const ILLEGAL_STATE: Code = CUresult::CUDA_ERROR_ILLEGAL_STATE as Code;

/// Calls that could touch captured work, according to the driver.
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

/// Sets this thread's mode, and returns the earlier one.
pub(crate) fn exchange(mode: i32) -> Result<i32, Code> {
    match mode {
        GLOBAL..=RELAXED => Ok(MODE.replace(mode)),
        _ => Err(INVALID_VALUE),
    }
}

/// The capture in progress, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Captures(Option<Capture>);

#[derive(Debug)]
struct Capture {
    number: usize,
    origin: usize,
    thread: ThreadId,
    mode: i32,
    /// The streams that take part; true for those whose last work the origin stream does not wait for yet.
    streams: BTreeMap<usize, bool>,
    broken: bool,
}

impl Captures {
    /// Begins to capture `stream` on this thread. The capture gets this number.
    pub(crate) fn begin(&mut self, number: usize, stream: usize, mode: i32) -> Result<(), Code> {
        if stream == 0 {
            return Err(UNSUPPORTED);
        }
        if self.0.is_some() {
            return Err(ILLEGAL_STATE);
        }
        self.0 = Some(Capture {
            number,
            origin: stream,
            thread: std::thread::current().id(),
            mode,
            streams: BTreeMap::from([(stream, false)]),
            broken: false,
        });
        Ok(())
    }

    pub(crate) fn end(&mut self, stream: usize) -> Result<(), Code> {
        match self.0.take_if(|capture| capture.origin == stream) {
            None => Err(UNMATCHED),
            Some(capture) if capture.broken => Err(INVALIDATED),
            Some(capture) if capture.streams.values().any(|unjoined| *unjoined) => Err(UNJOINED),
            Some(_) => Ok(()),
        }
    }

    /// 0 for a stream that is not captured, 1 for one that is, 2 for one whose capture is broken.
    pub(crate) fn status(&self, stream: usize) -> i32 {
        match self.of(stream) {
            None => 0,
            Some(capture) => 1 + i32::from(capture.broken),
        }
    }

    /// Breaks the capture in progress if `call` is unsafe and this thread may not make it.
    pub(crate) fn check_unsafe(&mut self, call: &str) -> Result<(), Code> {
        let Some(capture) = self.0.as_mut().filter(|_| UNSAFE.contains(&call)) else { return Ok(()) };
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

    /// True if work for this stream is recorded into a graph.
    pub(crate) fn records(&mut self, stream: usize) -> Result<bool, Code> {
        let Some(capture) = self.0.as_mut() else { return Ok(false) };
        let origin = capture.origin;
        let Some(unjoined) = capture.streams.get_mut(&stream) else { return Ok(false) };
        if capture.broken {
            return Err(INVALIDATED);
        }
        *unjoined = stream != origin;
        Ok(true)
    }

    /// The number of the capture in which a stream takes part.
    pub(crate) fn number(&self, stream: usize) -> Option<usize> {
        self.of(stream).map(|capture| capture.number)
    }

    /// A stream waits for an event of `source` in the capture `number`, and takes part from then on.
    /// Returns true if so.
    pub(crate) fn wait(&mut self, stream: usize, event: Option<(usize, usize)>) -> Result<bool, Code> {
        let Some(capture) = self.0.as_mut() else {
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

    /// A query of captured work by the host breaks the capture in every mode.
    pub(crate) fn refuse_captured(&mut self, captured: bool) -> Result<(), Code> {
        if !captured {
            return Ok(());
        }
        if let Some(capture) = &mut self.0 {
            capture.broken = true;
        }
        Err(CAPTURED_EVENT)
    }

    /// A stream that takes part is destroyed, which breaks the capture.
    pub(crate) fn leave(&mut self, stream: usize) {
        if let Some(capture) = self.0.as_mut().filter(|capture| capture.streams.contains_key(&stream)) {
            capture.broken = true;
        }
    }

    fn of(&self, stream: usize) -> Option<&Capture> {
        self.0.as_ref().filter(|capture| capture.streams.contains_key(&stream))
    }
}
