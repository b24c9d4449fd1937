//! Stream capture: work is recorded into a graph instead of executed. Some calls break the capture.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread::ThreadId;

use cudarc::driver::sys::{CUresult, CUstream, CUstreamCaptureMode};

use crate::gpu::{Code, Gpu, INVALID_VALUE};

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

/// A capture in progress.
#[derive(Debug)]
pub(crate) struct Capture {
    number: usize,
    origin: usize,
    thread: ThreadId,
    mode: i32,
    /// The streams that take part; true for those whose last work the origin stream does not wait for yet.
    streams: BTreeMap<usize, bool>,
    broken: bool,
}

impl Gpu {
    /// Begins to capture a stream, given by its handle, on this thread. Returns the driver's code.
    pub fn begin_capture(&mut self, stream: u64, mode: i32) -> Code {
        self.capture_begin(crate::api::number(stream as CUstream), mode).err().unwrap_or(0)
    }

    /// Ends a capture, given by the handle of the stream that it began with. Returns the driver's code.
    pub fn end_capture(&mut self, stream: u64) -> Code {
        self.capture_end(crate::api::number(stream as CUstream)).err().unwrap_or(0)
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

    /// Breaks the capture in progress if `call` is unsafe and this thread may not make it.
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

    /// True if work for this stream is recorded into a graph.
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

    /// The number of the capture in which a stream takes part.
    pub(crate) fn capture_number(&self, stream: usize) -> Option<usize> {
        self.capture_of(stream).map(|capture| capture.number)
    }

    /// A stream waits for an event of `source` in the capture `number`, and takes part from then on.
    /// Returns true if so.
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

    /// A query of captured work by the host breaks the capture in every mode.
    pub(crate) fn refuse_captured(&mut self, captured: bool) -> Result<(), Code> {
        if !captured {
            return Ok(());
        }
        if let Some(capture) = &mut self.capture {
            capture.broken = true;
        }
        Err(CAPTURED_EVENT)
    }

    /// Removes a stream that takes part.
    pub(crate) fn break_capture_of(&mut self, stream: usize) {
        if let Some(capture) = self.capture.as_mut().filter(|capture| capture.streams.contains_key(&stream)) {
            capture.broken = true;
        }
    }

    fn capture_of(&self, stream: usize) -> Option<&Capture> {
        self.capture.as_ref().filter(|capture| capture.streams.contains_key(&stream))
    }
}
