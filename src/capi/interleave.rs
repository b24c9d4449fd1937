//! The interleaved update: CPU and GPU step different subgroups at the same time.
#![allow(non_camel_case_types)]

use std::ffi::c_char;

use super::adam::{self, spw_adam_options};
use super::deepspeed_swap::{rules_of, spw_ds_adam_call};
use super::guard::guard;
use super::interleave_open::{Parts, parts, spw_interleave_options, spw_interleave_subgroup};
use super::library::out;
use super::plan::{read_rates, read_sites, spw_plan_rates, write_sites};
use super::status::spw_status;
use super::text::hand_out;
use crate::error::{Error, Result};
use crate::gpu::stream::ForeignStream;
use crate::offload::interleave::engine::{Engine, Reader};
use crate::offload::interleave::{Backend, Model, trace};
use crate::optim::deepspeed::ADAM;
use crate::plan::interleave::MAX_SUBGROUPS;

/// An interleaved update. Thread-safe: threads may use one update concurrently.
pub struct spw_interleave {
    engine: Engine<Box<dyn Backend>>,
    streams: bool,
}

/// Creates an interleaved update of `count` subgroups, numbered in the order in which their gradients arrive. The CPU
/// updates all of them until `spw_interleave_set_plan`. Free it with `spw_interleave_close`.
///
/// An iteration consists of
///
/// - optionally `spw_interleave_set_plan`,
/// - `spw_interleave_gradient` for every subgroup,
/// - `spw_interleave_begin`,
/// - `spw_interleave_publish` for every subgroup, or `spw_interleave_finish`.
///
/// Flushes to host memory may continue into the next iteration. With any plan, the bits are those of `spw_adam_step` on
/// every subgroup.
///
/// With SPW_INTERLEAVE_CUDA the update has seven streams of its own. Set CUDA_DEVICE_MAX_CONNECTIONS=32 in the
/// environment before CUDA starts. With the default of 8, streams share hardware queues and wait for each other
/// (Megatron sets 1).
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes, `subgroups` to `count` structs, `interleave_out` to a pointer.
/// The spans stay valid until the update is closed. Three rules hold for other code:
///
/// - It uses no state from the first `spw_interleave_gradient` of an iteration until `spw_interleave_drain`.
/// - It uses no 16-bit parameters from `spw_interleave_begin` until `spw_interleave_publish`.
/// - It writes no gradient from `spw_interleave_gradient` until `spw_interleave_publish`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_open(
    options: *const spw_interleave_options,
    subgroups: *const spw_interleave_subgroup,
    count: usize,
    interleave_out: *mut *mut spw_interleave,
) -> spw_status {
    guard(|| {
        let interleave_out = out(interleave_out, "interleave_out")?;
        // SAFETY: the caller meets the callee's requirements.
        let Parts { streams, shape, backend } = unsafe { parts(options, subgroups, count) }?;
        let made = Box::new(spw_interleave { engine: Engine::new(shape, backend)?, streams });
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { interleave_out.write(Box::into_raw(made)) };
        Ok(())
    })
}

/// Sets the plan of the next step: `count` values of `spw_plan_site`, one per subgroup. SPW_ERR_BUSY from the first
/// gradient of an iteration until the CPU's part of the step has ended. The update moves the state of residents to the
/// GPU and back.
///
/// # Safety
/// `sites` has `count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_set_plan(
    interleave: Option<&spw_interleave>,
    sites: *const u32,
    count: usize,
) -> spw_status {
    guard(|| {
        let engine = object(interleave)?;
        if count > MAX_SUBGROUPS {
            return Err(Error::invalid("count", format!("is {count}, over {MAX_SUBGROUPS}")));
        }
        // SAFETY: the caller meets the callee's requirements.
        engine.set_plan(unsafe { read_sites(sites, count) }?)
    })
}

/// Writes the plan of the next step, or of the step in flight: a site per subgroup.
///
/// # Safety
/// `sites` has room for one entry per subgroup.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_get_plan(
    interleave: Option<&spw_interleave>,
    sites: *mut u32,
) -> spw_status {
    guard(|| {
        let sites = out(sites, "sites")?;
        let plan = object(interleave)?.plan()?;
        // SAFETY: the caller meets the callee's requirements.
        unsafe { write_sites(&plan, sites) };
        Ok(())
    })
}

/// Announces the gradient of a subgroup. Work already queued on `stream` produces it; its transfer may start. With
/// SPW_INTERLEAVE_HOST `stream` is 0 and the gradient is complete. SPW_ERR_BUSY while the previous update is still
/// being queued on the device; `spw_interleave_publish` of the last subgroup waits for that.
///
/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_gradient(
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
pub unsafe extern "C" fn spw_interleave_params_free(
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
    options: *const spw_adam_options,
    count: usize,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (engine, stream) = with_stream(interleave, stream)?;
            engine.begin(adam::rules(options, count)?, stream)
        }
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
    calls: *const spw_ds_adam_call,
    count: usize,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (engine, stream) = with_stream(interleave, stream)?;
            let (kept, rules) = rules_of(id, calls, count)?;
            engine.begin(rules, stream)?;
            ADAM.create(id, kept);
            Ok(())
        }
    })
}

/// Makes work queued later on `stream` wait for the new 16-bit parameters of a subgroup. With SPW_INTERLEAVE_HOST
/// `stream` is 0 and the call returns when they are complete. The call blocks until the CPU has stepped the subgroup,
/// or until its GPU work is queued, which happens a few subgroups ahead.
///
/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_publish(
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
///
/// # Safety
/// `ready_out` points to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_is_ready(
    interleave: Option<&spw_interleave>,
    subgroup: u64,
    ready_out: *mut u32,
) -> spw_status {
    guard(|| {
        let ready_out = out(ready_out, "ready_out")?;
        let ready = object(interleave)?.is_ready(number(subgroup))?;
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { ready_out.write(ready.into()) };
        Ok(())
    })
}

/// Waits until the 16-bit parameters of all subgroups are new. Flushes may still be in flight.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_finish(interleave: Option<&spw_interleave>) -> spw_status {
    guard(|| object(interleave)?.finish(Reader::Caller))
}

/// Waits until the states of all subgroups except residents are in host memory, for example before a checkpoint. To
/// include residents, set a plan without residents first.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_drain(interleave: Option<&spw_interleave>) -> spw_status {
    guard(|| object(interleave)?.drain())
}

/// Lists the subgroups whose state in host memory is not that of the last step begun. At most `room` numbers go to
/// `subgroups`, in ascending order, and their total to `count_out`. After a failure the states of these subgroups are
/// lost.
///
/// # Safety
/// `subgroups` has `room` entries, or is NULL with room 0; `count_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_away(
    interleave: Option<&spw_interleave>,
    subgroups: *mut u64,
    room: usize,
    count_out: *mut u64,
) -> spw_status {
    guard(|| {
        let count_out = out(count_out, "count_out")?;
        if subgroups.is_null() && room > 0 {
            return Err(Error::invalid("subgroups", "is NULL"));
        }
        let away = object(interleave)?.away();
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe {
            away.iter().take(room).enumerate().for_each(|(at, index)| subgroups.add(at).write(*index as u64));
            count_out.write(away.len() as u64);
        }
        Ok(())
    })
}

/// Sets the initial rates for planning. `spw_interleave_replan` corrects them by the measured times of every step.
///
/// # Safety
/// `rates` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_calibrate(
    interleave: Option<&spw_interleave>,
    rates: *const spw_plan_rates,
) -> spw_status {
    guard(|| {
        let engine = object(interleave)?;
        // SAFETY: the caller meets the callee's requirements.
        engine.calibrate(unsafe { read_rates(rates) }?)
    })
}

/// Updates the rates from the operations since the last call, and sets a better plan for the next step if it gains more
/// than 2 percent. The number of residents stays. `backward` is the time in seconds of the backward pass that overlaps
/// with the step. `changed_out` (may be NULL) receives 1 if the plan changed, else 0. Call `spw_interleave_calibrate`
/// before it.
///
/// # Safety
/// `changed_out` is NULL or points to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_replan(
    interleave: Option<&spw_interleave>,
    backward: f64,
    changed_out: *mut u32,
) -> spw_status {
    guard(|| {
        let changed = object(interleave)?.replan(backward)?;
        if !changed_out.is_null() {
            // SAFETY: not NULL, and valid by the caller's promise.
            unsafe { changed_out.write(changed.into()) };
        }
        Ok(())
    })
}

/// Writes the operations since the last `spw_interleave_begin` as a trace for Perfetto. `text` receives JSON and a NUL,
/// and `needed_out` their number of bytes. With `text` NULL the call writes only the number, which grows until all
/// flushes have ended.
///
/// # Safety
/// `text` is NULL or points to `size` bytes, `needed_out` to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_trace(
    interleave: Option<&spw_interleave>,
    text: *mut c_char,
    size: usize,
    needed_out: *mut u64,
) -> spw_status {
    guard(|| {
        let ran = object(interleave)?.ran()?;
        // SAFETY: the caller meets the callee's requirements.
        unsafe { hand_out(&trace::of_timings(&ran).to_json(), text, size, needed_out) }
    })
}

/// Waits for all transfers in flight and frees the update. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_interleave_close(interleave: Option<Box<spw_interleave>>) -> spw_status {
    guard(|| {
        drop(interleave);
        Ok(())
    })
}

fn object(interleave: Option<&spw_interleave>) -> Result<&Engine<Box<dyn Backend>>> {
    interleave.map(|interleave| &interleave.engine).ok_or_else(|| Error::invalid("interleave", "is NULL"))
}

/// The engine, and the framework's stream in the engine's form.
///
/// # Safety
/// `stream` is 0, or a live stream of the device's primary context.
unsafe fn with_stream(
    interleave: Option<&spw_interleave>,
    stream: u64,
) -> Result<(&Engine<Box<dyn Backend>>, Model)> {
    let streams = interleave.is_some_and(|interleave| interleave.streams);
    let engine = object(interleave)?;
    match (streams, stream) {
        // SAFETY: the caller meets the callee's requirements.
        (true, stream) => Ok((engine, Some(unsafe { ForeignStream::new(stream) }))),
        (false, 0) => Ok((engine, None)),
        (false, _) => Err(Error::invalid("stream", "is not 0, but threads have no streams")),
    }
}

/// A subgroup's number. A number beyond the address space becomes one that does not exist.
fn number(subgroup: u64) -> usize {
    usize::try_from(subgroup).unwrap_or(usize::MAX)
}
