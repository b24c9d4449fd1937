//! Buckets of a speculation engine: submission and progress.

use std::ffi::c_void;

use crate::capi::gpu::device::spw_gpu;
use crate::capi::optim::tensor::spw_tensor;
use crate::capi::prelude::*;
use crate::capi::speculate::engine::spw_spec;
use crate::gpu::stream::{ForeignEvent, ForeignStream};
use crate::offload::speculate::{Bucket, Tensors};
use crate::optim::Family;
use crate::optim::lent::Lent;
use crate::sys::descriptor;
use crate::sys::event::{Event, Word};

/// Progress of a bucket in the round.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_spec_state {
    /// Not submitted in this round.
    SPW_SPEC_STATE_MISSING = 0,
    /// Submitted. Its spans may change at any moment.
    SPW_SPEC_STATE_PENDING = 1,
    /// Stepped, but the round has no verdict yet, so the step may be rolled back.
    SPW_SPEC_STATE_SPECULATIVE = 2,
    /// Final. Its spans belong to the caller again.
    SPW_SPEC_STATE_FINAL = 3,
}

/// Kind of event that signals that a bucket's gradient is complete. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_spec_event_kind {
    /// The gradient is already complete.
    SPW_SPEC_EVENT_KIND_NONE = 0,
    /// `fd`, an eventfd or the read end of a pipe, becomes readable. The engine duplicates it and reads nothing from
    /// it. The caller may close it after the call.
    SPW_SPEC_EVENT_KIND_FD = 1,
    /// The 32-bit `*word` reaches `value`, counting up modulo 2^32. The engine polls it every 0.2 ms, so a GPU may
    /// write it. It must stay readable until the bucket has begun or `spw_spec_finish` has returned.
    SPW_SPEC_EVENT_KIND_WORD = 2,
    /// The CUDA event `handle` of `gpu` (`event.cuda_event` in torch, a `CUevent` or `cudaEvent_t` in C), as last
    /// recorded before the call. It may be recorded again or destroyed after the call. One thread waits for the events
    /// of `gpu`, in the order of the calls; they cost nothing while they are pending.
    SPW_SPEC_EVENT_KIND_CUDA = 3,
    /// All work queued on the CUDA stream `handle` of `gpu` (`stream.cuda_stream` in torch) at the time of the call; 0
    /// is the legacy default stream. Otherwise as SPW_SPEC_EVENT_KIND_CUDA.
    SPW_SPEC_EVENT_KIND_CUDA_STREAM = 4,
}

c_struct! { first 24;
/// The event that signals that a bucket's gradient is complete.
pub struct spw_spec_event {
    /// An `spw_spec_event_kind`.
    pub kind: u32,
    /// File descriptor for SPW_SPEC_EVENT_KIND_FD.
    pub fd: i32,
    /// Count for SPW_SPEC_EVENT_KIND_WORD.
    pub value: u32,
    /// Address for SPW_SPEC_EVENT_KIND_WORD, aligned to 4 bytes.
    pub word: *const u32,
    /// The `spw_gpu` for SPW_SPEC_EVENT_KIND_CUDA and SPW_SPEC_EVENT_KIND_CUDA_STREAM. It may be closed after the call.
    pub gpu: *const c_void,
    /// Event for SPW_SPEC_EVENT_KIND_CUDA, stream for SPW_SPEC_EVENT_KIND_CUDA_STREAM.
    pub handle: u64,
}
}

/// Submits a bucket and returns at once. The bucket's step starts when `event` has happened, or now if `event` is NULL.
/// Tensors may have their own options, with the round's grad_scale. The engine copies the structs.
///
/// Kept: the spans of the tensors, including gradients, until the bucket is final. They belong to the engine, and no other
/// bucket may use them. So does the word or descriptor of the event.
///
/// - SPW_ERR_NO_ROUND: no round was opened, or the last one ended without a bucket.
/// - SPW_ERR_ROUND_RESOLVED: the last round already has its verdict, and no new round is open.
/// - SPW_ERR_BUCKET_SUBMITTED: the bucket was already submitted in this round.
///
/// # Safety
/// `tensors` and their spans are as for `spw_adam_step`, and any thread may use the spans
/// until the bucket is final. `event` is NULL or points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_submit(
    spec: Option<&spw_spec>,
    bucket: u32,
    tensors: In<spw_tensor>,
    count: u64,
    event: In<spw_spec_event>,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let spec = handle::get(spec)?;
            let rule = spec.rule_for(bucket)?;
            let event = parse_event(event)?;
            let work = rule.bucket(spec.undo, spec.engine.publish(), tensors, count)?;
            spec.submit(bucket, work, event)
        }
    })
}

/// Writes the progress of a bucket, an `spw_spec_state`. If the bucket failed, the call returns its error.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_get_bucket(
    spec: Option<&spw_spec>,
    bucket: u32,
    state_out: Out<u32>,
) -> spw_status {
    guard(|| {
        let state = handle::get(spec)?.engine.progress(bucket)?;
        state_out.put(state as u32, "state_out")
    })
}

/// Waits until the 16-bit copies of a bucket are valid, for up to `timeout_ms` milliseconds (negative: without limit).
/// They are valid when the bucket is final, which requires a verdict. With SPW_SPEC_PUBLISH_SPECULATIVE they are valid
/// once the bucket is stepped. If the bucket failed, the call returns its error.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_wait(spec: Option<&spw_spec>, bucket: u32, timeout_ms: i64) -> spw_status {
    guard(|| handle::get(spec)?.engine.wait(bucket, timeout(timeout_ms)))
}

pub(in crate::capi) unsafe fn parse_event(event: In<spw_spec_event>) -> Result<Option<Event>> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        let Some(raw) = event.read_optional("event")? else { return Ok(None) };
        match raw.kind {
            0 => Ok(None),
            1 => Event::readable(raw.fd)
                .map(Some)
                .map_err(|error| descriptor::refusal("event.fd", raw.fd, &error)),
            2 => Word::new(raw.word, raw.value)
                .map(|word| Some(Event::Word(word)))
                .ok_or_else(|| Error::invalid("event.word", "is NULL or not aligned to 4 bytes")),
            3 | 4 => gpu_event(&raw).map(Some).map_err(|error| error.within("event.")),
            other => Err(Error::invalid("event.kind", format!("{other} is not an spw_spec_event_kind"))),
        }
    }
}

unsafe fn gpu_event(raw: &spw_spec_event) -> Result<Event> {
    // SAFETY: NULL or an open GPU, and a handle of its primary context, by the caller's promise.
    unsafe {
        let watches = &handle::get(raw.gpu.cast::<spw_gpu>().as_ref())?.watches;
        let report = match raw.kind == spw_spec_event_kind::SPW_SPEC_EVENT_KIND_CUDA as u32 {
            true => watches.event(ForeignEvent::new(raw.handle, "handle")?)?,
            false => watches.stream(ForeignStream::new(raw.handle))?,
        };
        Ok(Event::Reported(report))
    }
}

impl spw_spec {
    /// The bucket of these tensors.
    pub(in crate::capi) fn boxed<R: Family>(&self, tensors: Lent<R>) -> Result<Box<dyn Bucket>> {
        Ok(Box::new(Tensors::new(tensors, self.undo, self.engine.publish())?))
    }
}
