//! The interleaved update: CPU and GPU step different subgroups at the same time.

use std::ffi::c_char;

use super::plan::{placements_of, read_placements, read_rates, spw_interleave_rates};
use super::subgroups::{InterleaveSetup, parts, spw_interleave_options, spw_interleave_subgroup};
use crate::capi::deepspeed::call::{rules_of, spw_ds_adam_call};
use crate::capi::optim::adam::{self, spw_adam_options};
use crate::capi::prelude::*;
use crate::gpu::stream::ForeignStream;
use crate::offload::interleave::engine::{InterleavedUpdate, Reader};
use crate::offload::interleave::{Model, trace};
use crate::optim::deepspeed::ADAM;

/// An interleaved update.
pub struct spw_interleave {
    pub(in crate::capi) engine: InterleavedUpdate,
    streams: bool,
    opener: OpeningProcess,
}

handle!(spw_interleave, "interleave", opener, "the interleaved update");

/// Creates an interleaved update of `count` (at most 65536) subgroups, numbered in the order in which their gradients
/// arrive. The CPU updates all of them until `spw_interleave_set_plan`. Free it with `spw_interleave_close`.
///
/// An iteration consists of
///
/// - optionally `spw_interleave_set_plan`,
/// - `spw_interleave_grad_ready` for every subgroup,
/// - `spw_interleave_begin`,
/// - `spw_interleave_stream_wait_params` for every subgroup, or `spw_interleave_finish`.
///
/// The spans of the subgroups stay in place until the update is closed. Three rules hold for other code:
///
/// - It uses no state from the first `spw_interleave_grad_ready` of an iteration until `spw_interleave_drain`.
/// - It uses no 16-bit parameters from `spw_interleave_begin` until `spw_interleave_stream_wait_params`.
/// - It writes no gradient from `spw_interleave_grad_ready` until `spw_interleave_stream_wait_params`.
///
/// Flushes to host memory may continue into the next iteration. With any plan, the bits are those of `spw_adam_step` on
/// every subgroup.
///
/// With SPW_INTERLEAVE_BACKEND_CUDA the update has seven streams of its own. Set CUDA_DEVICE_MAX_CONNECTIONS=32 in the
/// environment before CUDA starts. With the default of 8, streams share hardware queues and wait for each other
/// (Megatron sets 1).
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes, `subgroups` to `count` structs, `interleave_out` to a pointer.
/// The spans stay valid until the update is closed, and other code keeps the three rules above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_open(
    options: In<spw_interleave_options>,
    subgroups: In<spw_interleave_subgroup>,
    count: u64,
    interleave_out: Out<*mut spw_interleave>,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            interleave_out.open(|| {
                let InterleaveSetup { streams, shape, backend } = parts(options, subgroups, count)?;
                let engine = InterleavedUpdate::new(shape, backend)?;
                Ok(spw_interleave { engine, streams, opener: OpeningProcess::current() })
            })
        }
    })
}

/// Sets the plan of the next step: `count` values of `spw_placement`, one per subgroup. SPW_ERR_BUSY from the first
/// gradient of an iteration until the CPU's part of the step has ended. The update moves the state of residents to the
/// GPU and back. It allocates the memory of residents and slots before anything moves. If the GPU has too little, the
/// first residents, or all SPW_PLACEMENT_GPU subgroups, are on the CPU instead, with one line in the log.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_set_plan(
    interleave: Option<&spw_interleave>,
    placements: In<u32>,
    count: u64,
) -> spw_status {
    guard(|| {
        let engine = &handle::get(interleave)?.engine;
        let subgroups = subgroups_of(engine)?;
        check_count(count, [subgroups, subgroups])?;
        engine.set_plan(read_placements(placements, count)?)
    })
}

/// Writes the plan of the next step, or of the step in flight: a placement per subgroup.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_get_plan(
    interleave: Option<&spw_interleave>,
    placements_out: Out<u32>,
) -> spw_status {
    guard(|| {
        placements_out.required("placements_out")?;
        placements_out.put_all(placements_of(&handle::get(interleave)?.engine.plan()));
        Ok(())
    })
}

/// Announces the gradient of a subgroup. Work already queued on `stream` produces it; its transfer may start. With
/// SPW_INTERLEAVE_BACKEND_HOST `stream` is 0 and the gradient is complete. SPW_ERR_BUSY while the previous update is
/// still being queued on the device; `spw_interleave_stream_wait_params` of the last subgroup waits for that.
///
/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_grad_ready(
    interleave: Option<&spw_interleave>,
    subgroup: u64,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let (engine, stream) = unsafe { with_stream(interleave, stream) }?;
        engine.gradient(number(subgroup), stream)
    })
}

/// Announces that only work already queued on `stream` still reads the old 16-bit parameters of a subgroup. The update
/// may overwrite them after that work. If the call is omitted, `spw_interleave_begin` announces the same for its own
/// `stream`.
///
/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_release_params(
    interleave: Option<&spw_interleave>,
    subgroup: u64,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let (engine, stream) = unsafe { with_stream(interleave, stream) }?;
        engine.params_free(number(subgroup), stream)
    })
}

/// Starts the step of all subgroups and returns. All gradients must have been announced. `options` is one struct for
/// all subgroups (`count` 1), or one per subgroup, `struct_size` bytes apart.
///
/// # Safety
/// `options` points to `count` structs; `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_begin(
    interleave: Option<&spw_interleave>,
    options: In<spw_adam_options>,
    count: u64,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (engine, stream) = with_stream(interleave, stream)?;
            check_count(count, [subgroups_of(engine)?, 1])?;
            engine.begin(adam::rules(options, count)?, stream)
        }
    })
}

/// Makes work queued later on `stream` wait for the new 16-bit parameters of a subgroup. With
/// SPW_INTERLEAVE_BACKEND_HOST `stream` is 0 and the call returns when they are complete. For a CPU subgroup
/// the call blocks until the step ends. For a GPU subgroup it blocks until the work is queued, which happens a few
/// subgroups ahead.
///
/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_stream_wait_params(
    interleave: Option<&spw_interleave>,
    subgroup: u64,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let (engine, stream) = unsafe { with_stream(interleave, stream) }?;
        engine.publish(number(subgroup), Reader::Stream(stream))
    })
}

/// Writes 1 if the 16-bit parameters of a subgroup are those of the last step begun, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_get_ready(
    interleave: Option<&spw_interleave>,
    subgroup: u64,
    ready_out: Out<u32>,
) -> spw_status {
    guard(|| {
        let ready = handle::get(interleave)?.engine.is_ready(number(subgroup))?;
        ready_out.put(ready.into(), "ready_out")
    })
}

/// Waits until the 16-bit parameters of all subgroups are new. Flushes may still be in flight.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_finish(interleave: Option<&spw_interleave>) -> spw_status {
    guard(|| handle::get(interleave)?.engine.finish(Reader::Caller))
}

/// Waits until the states of all subgroups except residents are in host memory, for example before a checkpoint. To
/// include residents, set a plan without residents first.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_drain(interleave: Option<&spw_interleave>) -> spw_status {
    guard(|| handle::get(interleave)?.engine.drain())
}

/// Lists the subgroups whose state in host memory is not that of the last step begun: the first `capacity` numbers go
/// to `subgroups_out`, in ascending order, and their total to `count_out`. After a failure the states of these
/// subgroups are lost.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_get_in_flight(
    interleave: Option<&spw_interleave>,
    subgroups_out: Out<u64>,
    capacity: u64,
    count_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let away: Vec<u64> =
            handle::get(interleave)?.engine.away().into_iter().map(|index| index as u64).collect();
        subgroups_out.put_array(&away, capacity, "subgroups_out", count_out)
    })
}

/// Sets the initial rates for planning. `spw_interleave_replan` corrects them by the measured times of every step.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_calibrate(
    interleave: Option<&spw_interleave>,
    rates: In<spw_interleave_rates>,
) -> spw_status {
    guard(|| {
        let engine = &handle::get(interleave)?.engine;
        engine.calibrate(read_rates(rates)?)
    })
}

/// Updates the rates from the operations since the last call, and sets a better plan for the next step if it gains more
/// than 2 percent. A plan is given up if steps with it take longer than without it. `backward` is the time in seconds of
/// the backward pass that overlaps with the step. `changed_out` (may be NULL) receives 1 if the plan changed, else 0.
/// Call `spw_interleave_calibrate` before it.
///
/// If `spw_interleave_set_plan` was not called, the number of residents is chosen after two steps. As many of the last
/// subgroups become resident as fit in the device memory that is free then, 12 bytes per parameter. A tenth of the
/// device's memory stays free for the framework, and slots have room if fetching gains more than they cost. Otherwise
/// the number of residents is that of the plan that was set.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_replan(
    interleave: Option<&spw_interleave>,
    backward: f64,
    changed_out: Out<u32>,
) -> spw_status {
    guard(|| {
        let changed = handle::get(interleave)?.engine.replan(backward)?;
        changed_out.put_optional(changed.into());
        Ok(())
    })
}

/// Writes the operations since the last `spw_interleave_begin` as a trace for Perfetto (JSON). The text grows until all
/// flushes have ended.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_get_trace(
    interleave: Option<&spw_interleave>,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let ran = handle::get(interleave)?.engine.ran();
        text_out.put_text(&trace::of_timings(&ran).to_json(), size, needed_out)
    })
}

/// Does `spw_interleave_begin` with the arithmetic of `spw_ds_adam_update`, one call per subgroup, applied in the order
/// of `calls`. The id advances if the step starts.
///
/// # Safety
/// `calls` points to `count` structs, `struct_size` bytes apart; `stream` as for `spw_interleave_begin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_begin_ds_adam(
    interleave: Option<&spw_interleave>,
    id: i32,
    calls: In<spw_ds_adam_call>,
    count: u64,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (engine, stream) = with_stream(interleave, stream)?;
            let subgroups = subgroups_of(engine)?;
            check_count(count, [subgroups, subgroups])?;
            let (kept, rules) = rules_of(id, calls, count, false)?;
            engine.begin(rules, stream)?;
            ADAM.create(id, kept);
            Ok(())
        }
    })
}

/// Waits for all transfers in flight and frees the update. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_close(interleave: Option<Box<spw_interleave>>) -> spw_status {
    guard(|| handle::end(interleave))
}

/// The engine, and the framework's stream in the engine's form.
///
/// # Safety
/// `stream` is 0, or a live stream of the device's primary context.
unsafe fn with_stream(
    interleave: Option<&spw_interleave>,
    stream: u64,
) -> Result<(&InterleavedUpdate, Model)> {
    let spw_interleave { engine, streams, .. } = handle::get(interleave)?;
    match (*streams, stream) {
        // SAFETY: the caller meets the callee's requirements.
        (true, stream) => Ok((engine, Some(unsafe { ForeignStream::new(stream) }))),
        (false, 0) => Ok((engine, None)),
        (false, _) => Err(Error::invalid("stream", "must be 0: without a GPU there are no streams")),
    }
}

/// Number of subgroups. A count is checked against it before an array of that many entries is read.
fn subgroups_of(engine: &InterleavedUpdate) -> Result<u64> {
    Ok(engine.plan().placements().len() as u64)
}

/// Rejects a count that is none of those allowed.
fn check_count(count: u64, allowed: [u64; 2]) -> Result<()> {
    match allowed.contains(&count) {
        true => Ok(()),
        false => Err(Error::invalid("count", format!("is {count}, but there are {} subgroups", allowed[0]))),
    }
}

/// A subgroup's number. A number beyond the address space becomes one that does not exist.
fn number(subgroup: u64) -> usize {
    usize::try_from(subgroup).unwrap_or(usize::MAX)
}
