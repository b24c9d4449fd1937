//! Speculation with a GPU: buckets in device memory, and uploads of 16-bit copies.

use std::collections::HashMap;
use std::sync::Arc;

use crate::capi::gpu::copy::{copy_of, spw_gpu_copy};
use crate::capi::gpu::device::{jobs, spw_gpu};
use crate::capi::optim::tensor::{self, spw_tensor};
use crate::capi::prelude::*;
use crate::capi::speculate::bucket::{parse_event, spw_spec_event};
use crate::capi::speculate::engine::spw_spec;
use crate::gpu::stream::ForeignStream;
use crate::gpu::transfer::Direction;
use crate::offload::speculate::{Bucket, Publication, Published, Resident};
use crate::sys::event::Event;
use crate::sys::sync::Guard;

/// Sets the uploads of a bucket's 16-bit copies. From now on each copy is uploaded as soon as it is valid. `copies` are
/// `count` copies of direction SPW_GPU_DIRECTION_H2D from pinned memory, which the bucket's tensors name as param_copy.
/// Each upload first waits for its `handle`: that event or stream should cover all reads of the old parameters. `count`
/// 0 ends the uploads. Call it between rounds.
///
/// The engine overwrites a 16-bit copy only after its last upload has ended. Device memory, host memory and handles of
/// the copies stay valid until the engine is closed or this function is called again. `gpu` may be closed before the
/// engine.
///
/// # Safety
/// `gpu` may be closed before the engine. `copies` points to `count`
/// structs, `struct_size` bytes apart. Their device memory, host memory and handles stay valid until the engine is
/// closed or this function is called again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_publish_to(
    spec: Option<&spw_spec>,
    bucket: u32,
    gpu: Option<&spw_gpu>,
    copies: In<spw_gpu_copy>,
    count: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let spec = handle::get(spec)?;
            spec.engine.progress(bucket).map(drop)?;
            let gpu = handle::get(gpu)?;
            let mut parsed = Vec::new();
            for (index, raw) in copies.read_all(count, "copies")?.iter().enumerate() {
                let copy = copy_of(gpu, raw).map_err(|error| error.within(&format!("copies[{index}].")))?;
                if copy.direction != Direction::H2d {
                    let reason = "must be SPW_GPU_DIRECTION_H2D";
                    return Err(Error::invalid(format!("copies[{index}].copy.direction"), reason));
                }
                copy.check()?;
                parsed.push(copy);
            }
            let publication = Publication::new(&gpu.transfers, parsed);
            // Outside the lock, since dropping the old publication waits for its uploads.
            let old = match count {
                0 => spec.devices().remove(&bucket),
                _ => spec.devices().insert(bucket, publication),
            };
            drop(old);
            Ok(())
        }
    })
}

/// Submits a bucket whose tensors' spans are all device memory (a tail bucket of SuperOffload section
/// 4.3). The engine measures its gradient when `event` has happened; NULL: when all work has ended that is queued on
/// `stream` now. The GPU steps it once, after the verdict, with the bits of any other bucket. The step runs in order on
/// `stream`, which stays alive until the bucket is final. The round must be of `spw_spec_begin_adam`. Otherwise as
/// `spw_spec_submit`.
///
/// # Safety
/// As `spw_spec_submit`, for device memory. `gpu` may be closed before the engine. `stream` is 0 or a
/// stream of the device's primary context that stays alive until the bucket is final.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_submit_gpu(
    spec: Option<&spw_spec>,
    bucket: u32,
    gpu: Option<&spw_gpu>,
    tensors: In<spw_tensor>,
    count: u64,
    stream: u64,
    event: In<spw_spec_event>,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let spec = handle::get(spec)?;
            let round = spec.adam_round_for(bucket)?;
            let gpu = handle::get(gpu)?;
            if spec.devices().get(&bucket).is_some_and(Publication::uploads) {
                return Err(Error::invalid(
                    "bucket",
                    format!("{bucket} has copies of spw_spec_publish_to; a bucket on the GPU needs none"),
                ));
            }
            let event = parse_event(event)?;
            tensor::no_shadows(&tensor::read_split(tensors, count)?)?;
            let jobs = jobs(round, tensors, count)?;
            if jobs.iter().any(|job| job.rule.grad_scale != round.grad_scale) {
                return Err(Error::invalid("tensors", "must have the grad_scale of the round"));
            }
            let publication = Publication::new(&gpu.transfers, Vec::new());
            let stream = ForeignStream::new(stream);
            spec.engine.may_submit(bucket)?;
            let event = event.map_or_else(|| gpu.watches.stream(stream).map(Event::Reported), Ok)?;
            let work = Resident::new(&gpu.steps, jobs, stream, publication.ready());
            spec.engine.submit(bucket, Box::new(work), Some(event))?;
            // Outside the lock, since dropping the old publication waits for the GPU.
            let old = spec.devices().insert(bucket, publication);
            drop(old);
            Ok(())
        }
    })
}

/// Waits as `spw_spec_wait`. Then it makes work queued later on `stream` wait, on the device, for the bucket's new
/// parameters. They come from an upload of `spw_spec_publish_to` or from the GPU's step.
///
/// # Safety
/// `stream` is 0 or a live stream of the primary context of the bucket's GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_stream_wait(
    spec: Option<&spw_spec>,
    bucket: u32,
    stream: u64,
    timeout_ms: i64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        let (spec, stream) = unsafe { (handle::get(spec)?, ForeignStream::new(stream)) };
        spec.engine.wait(bucket, timeout(timeout_ms))?;
        let ready = spec.devices().get(&bucket).map(|to| Arc::clone(to.ready()));
        ready.map_or(Ok(()), |ready| ready.order(stream))
    })
}

impl spw_spec {
    /// Submits a bucket to the engine, with its uploads if any.
    pub(in crate::capi) fn submit(
        &self,
        bucket: u32,
        work: Box<dyn Bucket>,
        event: Option<Event>,
    ) -> Result<()> {
        let to = self.devices().get(&bucket).filter(|to| to.uploads()).cloned();
        let work = match to {
            Some(to) => Box::new(Published::new(work, self.engine.publish(), to)),
            None => work,
        };
        self.engine.submit(bucket, work, event)
    }

    fn devices(&self) -> Guard<'_, HashMap<u32, Publication>> {
        self.devices.lock()
    }
}
