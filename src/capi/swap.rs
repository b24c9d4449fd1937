//! The tiered update: optimizer state is stored on a tier and updated through a few buffers of host memory.
#![allow(non_camel_case_types)]

use std::ffi::c_void;

use super::adam::{self, spw_adam_options};
use super::guard::guard;
use super::library::out;
use super::record;
use super::status::spw_status;
use super::swap_options::{parse, spw_swap_budget, spw_swap_options, spw_swap_stats, write_budget};
use super::tensor::{self, spw_dtype, spw_step_stats, spw_tensor};
use super::tier::{self, MAX_PAYLOAD, spw_tier};
use crate::dtype::bf16;
use crate::error::{Error, Result};
use crate::kernel::squares;
use crate::offload::swap::budget;
use crate::offload::swap::form::{Form, STREAMS};
use crate::offload::swap::{State, Swap};
use crate::optim::{self, StepStats};
use crate::sys::span::Span;

/// A tiered update: subgroups of optimizer state on a tier. A subgroup has f32 param (the master weight), exp_avg and
/// exp_avg_sq, 12 bytes per parameter.
pub struct spw_swap {
    swap: Swap,
}

/// Computes the memory and traffic of `spw_swap_open` with these options on a tier of `paths` paths. It allocates no
/// buffers. More than 1024 paths are an error.
///
/// # Safety
/// `options` and `budget_out` point to structs of `struct_size` bytes, with `options` as for `spw_swap_open`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_plan(
    options: *const spw_swap_options,
    paths: u64,
    budget_out: *mut spw_swap_budget,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            record::check_output(budget_out, "budget_out")?;
            let options = parse(options, 0)?;
            let paths = usize::try_from(paths).ok().filter(|paths| *paths <= 1024);
            let paths = paths.ok_or_else(|| Error::invalid("paths", "are over 1024"))?;
            let plan = budget::plan(&options.subgroups, options.usual, paths, options.host_bytes)?;
            write_budget(plan, budget_out)
        }
    })
}

/// Creates a tiered update: allocates all its memory and defines an extent of the tier for each subgroup. A resumed
/// tier with the same subgroups keeps their state; otherwise call `spw_swap_fill` next. The caller keeps the tier open
/// until `spw_swap_close`, and commits and rolls back only through the update. One thread at a time may use an update.
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes. Its `elements` has `subgroups` entries; its `ratio` and
/// `speeds` are NULL or have one entry per path of the tier. `tier` is open; `swap_out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_open(
    tier: *mut spw_tier,
    options: *const spw_swap_options,
    swap_out: *mut *mut spw_swap,
) -> spw_status {
    guard(|| {
        let swap_out = out(swap_out, "swap_out")?;
        // SAFETY: the caller meets the callees' requirements.
        let (tier, options) = unsafe {
            let tier = tier::shared(tier)?;
            let paths = tier.paths().len();
            (tier, parse(options, paths)?)
        };
        let swap = Swap::open(tier, &options)?;
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { swap_out.write(Box::into_raw(Box::new(spw_swap { swap }))) };
        Ok(())
    })
}

/// Writes the memory and traffic that the update was opened with.
///
/// # Safety
/// `budget_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_budget_of(
    swap: Option<&spw_swap>,
    budget_out: *mut spw_swap_budget,
) -> spw_status {
    guard(|| {
        let swap = swap.ok_or_else(|| Error::invalid("swap", "is NULL"))?;
        // SAFETY: the caller meets the callee's requirements.
        unsafe { write_budget(swap.swap.budget(), budget_out) }
    })
}

/// Sets the state of every subgroup. `states` has three addresses per subgroup, of its f32 param, exp_avg and
/// exp_avg_sq. The call copies from them; NULL means zeros.
///
/// # Safety
/// `states` points to `3 * subgroups` addresses. Each is NULL or points to as many floats as the subgroup has elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_fill(swap: Option<&mut spw_swap>, states: *const *const f32) -> spw_status {
    guard(|| {
        let swap = object(swap)?;
        if states.is_null() {
            return Err(Error::invalid("states", "is NULL"));
        }
        swap.fill(|subgroup, state| {
            let State { param, exp_avg, exp_avg_sq } = state;
            for (stream, to) in [param, exp_avg, exp_avg_sq].into_iter().enumerate() {
                // SAFETY: the caller's promise: 3 addresses per subgroup, each of `to.len()` floats.
                unsafe {
                    let from = states.add(STREAMS * subgroup + stream).read();
                    match from.is_null() {
                        true => to.fill(0.0),
                        false => std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()),
                    }
                }
            }
            Ok(())
        })
    })
}

/// Does one Adam step of all subgroups, with the same bits as `spw_adam_step` on tensors in memory. Each subgroup is
/// fetched, stepped, and written back unless it stays in memory for the next update. Fetches, steps and writes overlap.
/// Gradients (f32, bf16 or f16) are read in place and are never written to the tier.
///
/// `tensors[i]` is subgroup i. It names `n`, `grad` and optionally `param_copy`, which receives the new parameter in 16
/// bits. param_dtype and state_dtype are SPW_DTYPE_F32. param, exp_avg, exp_avg_sq and the shadow spans are NULL.
///
/// With SPW_SWAP_SPLIT_MASTER, `param_copy` is bf16 and required. On entry it holds the weights of the step before (at
/// first, the filled param rounded); the step replaces them. Alternatively `param` names these weights, with
/// param_dtype SPW_DTYPE_BF16, and they stay unchanged. A caller that may roll back keeps two sets of weights and
/// alternates them.
///
/// After an error some subgroups may have been stepped. Then every call but `spw_swap_roll_back` and `spw_swap_close`
/// is SPW_ERR_BUSY.
///
/// # Safety
/// As `spw_adam_step`; `count` is the number of subgroups.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_adam_step(
    swap: Option<&mut spw_swap>,
    options: *const spw_adam_options,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        let swap = object(swap)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            record::check_output(stats, "stats")?;
            let raw = tensor::read_all(tensors, count)?;
            check_inputs(swap, &raw)?;
            adam::check(options, &raw)?;
            let mut seen = vec![0.0; raw.len()];
            swap.step_with(&|subgroup| published(&raw[subgroup]), |subgroup, state| {
                let whole = with_state(raw[subgroup], state);
                let named =
                    |error: Error| error.without("tensors[0].").within(&format!("tensors[{subgroup}]."));
                let mut jobs = adam::jobs(options, &whole, 1).map_err(named)?;
                seen[subgroup] = optim::adam::step(&mut jobs, !stats.is_null())?.sum_squares;
                Ok(())
            })?;
            tensor::write_stats(StepStats::of(squares_of(&seen)), stats)
        }
    })
}

/// Copies the f32 state of one subgroup to the caller's memory. NULL skips a part. Steps since the last commit are
/// included. With SPW_SWAP_SPLIT_MASTER, param needs `spw_swap_read_split`.
///
/// # Safety
/// Each address is NULL or points to as many floats as the subgroup has elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_read(
    swap: Option<&mut spw_swap>,
    subgroup: u64,
    param: *mut f32,
    exp_avg: *mut f32,
    exp_avg_sq: *mut f32,
) -> spw_status {
    guard(|| {
        let swap = object(swap)?;
        // SAFETY: the caller meets the callee's requirements.
        let (subgroup, to) = unsafe { lent(swap, subgroup, [param, exp_avg, exp_avg_sq]) }?;
        swap.read(subgroup, None, to)
    })
}

/// Copies the state of one subgroup as `spw_swap_read`. `weights` are the bf16 weights that belong to the state; with
/// SPW_SWAP_SPLIT_MASTER they supply the upper 16 bits of param. Weights that do not match the state's checksum are an
/// error.
///
/// # Safety
/// As `spw_swap_read`; `weights` has as many bf16 numbers as the subgroup has elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_read_split(
    swap: Option<&mut spw_swap>,
    subgroup: u64,
    weights: *const c_void,
    param: *mut f32,
    exp_avg: *mut f32,
    exp_avg_sq: *mut f32,
) -> spw_status {
    guard(|| {
        let swap = object(swap)?;
        if weights.is_null() {
            return Err(Error::invalid("weights", "is NULL"));
        }
        check_aligned(weights, "weights")?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (subgroup, to) = lent(swap, subgroup, [param, exp_avg, exp_avg_sq])?;
            let weights = std::slice::from_raw_parts(weights.cast(), swap.elements(subgroup)?);
            swap.read(subgroup, Some(weights), to)
        }
    })
}

/// Replaces the f32 state of one subgroup, between steps. NULL leaves a part unchanged. If param is given with
/// SPW_SWAP_SPLIT_MASTER, the weights on entry of the next step are this param, rounded. `spw_swap_commit` makes the
/// new state durable, and `spw_swap_roll_back` discards it.
///
/// # Safety
/// Each address is NULL or points to as many floats as the subgroup has elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_write(
    swap: Option<&mut spw_swap>,
    subgroup: u64,
    param: *const f32,
    exp_avg: *const f32,
    exp_avg_sq: *const f32,
) -> spw_status {
    guard(|| {
        let swap = object(swap)?;
        let parts = [param, exp_avg, exp_avg_sq].map(<*const f32>::cast_mut);
        // SAFETY: the caller meets the callee's requirements; nothing is written through these spans.
        let (subgroup, from) = unsafe { lent(swap, subgroup, parts) }?;
        swap.write(subgroup, from)
    })
}

/// Makes all state durable as `step`: writes dirty subgroups from memory, then commits the tier (`spw_tier_commit`,
/// with its errors). The next open returns the payload.
///
/// # Safety
/// `payload` points to `payload_bytes` bytes, or is NULL if there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_commit(
    swap: Option<&mut spw_swap>,
    step: u64,
    payload: *const c_void,
    payload_bytes: u64,
) -> spw_status {
    guard(|| {
        let swap = object(swap)?;
        let payload = match (payload.is_null(), payload_bytes) {
            (_, 0) => &[][..],
            (true, _) => return Err(Error::invalid("payload", "is NULL, but payload_bytes is not 0")),
            (_, bytes) if bytes > MAX_PAYLOAD => {
                return Err(Error::invalid("payload_bytes", format!("{bytes} is over {MAX_PAYLOAD}")));
            }
            // SAFETY: the caller's promise.
            (false, bytes) => unsafe { std::slice::from_raw_parts(payload.cast(), bytes as usize) },
        };
        swap.commit(step, payload)
    })
}

/// Rolls back to the last commit, in memory and on the tier, also after a failed step.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_roll_back(swap: Option<&mut spw_swap>) -> spw_status {
    guard(|| object(swap)?.roll_back())
}

/// Writes the counters since open.
///
/// # Safety
/// `stats_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_get_stats(
    swap: Option<&spw_swap>,
    stats_out: *mut spw_swap_stats,
) -> spw_status {
    guard(|| {
        let swap = swap.ok_or_else(|| Error::invalid("swap", "is NULL"))?;
        swap.swap.owned()?;
        let seen = swap.swap.stats();
        let stats = spw_swap_stats {
            struct_size: 0,
            reserved: 0,
            rounds: seen.pipeline.rounds,
            hits: seen.pipeline.hits,
            fetched: seen.pipeline.fetched,
            flushed: seen.pipeline.flushed,
            moved: seen.moved,
            exposed_seconds: seen.exposed_seconds,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { record::write(&stats, stats_out, "stats_out") }
    })
}

/// Frees the update. The tier stays open; state that was not committed is lost. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_close(swap: Option<Box<spw_swap>>) -> spw_status {
    guard(|| {
        match swap {
            // In a forked child the parent's object stays untouched.
            Some(swap) if swap.swap.owned().is_err() => std::mem::forget(swap),
            other => drop(other),
        }
        Ok(())
    })
}

/// A subgroup's number, and the caller's memory for its param and states. NULL becomes an empty span.
unsafe fn lent(swap: &Swap, subgroup: u64, parts: [*mut f32; STREAMS]) -> Result<(usize, [Span; STREAMS])> {
    let subgroup = usize::try_from(subgroup).unwrap_or(usize::MAX);
    let bytes = swap.elements(subgroup)? * size_of::<f32>();
    // SAFETY: the caller lends that many floats until the call returns.
    let span = |part: *mut f32| unsafe { Span::new(part.cast(), bytes) };
    Ok((subgroup, parts.map(|part| if part.is_null() { None } else { span(part) }.unwrap_or(Span::empty()))))
}

pub(super) fn object(swap: Option<&mut spw_swap>) -> Result<&mut Swap> {
    let swap = swap.map(|swap| &mut swap.swap).ok_or_else(|| Error::invalid("swap", "is NULL"))?;
    swap.owned()?;
    Ok(swap)
}

/// The caller's tensor with the subgroup's state in memory.
pub(super) fn with_state(tensor: spw_tensor, state: State<'_>) -> spw_tensor {
    spw_tensor {
        param_dtype: spw_dtype::SPW_DTYPE_F32 as u32,
        param: state.param.as_mut_ptr().cast(),
        exp_avg: state.exp_avg.as_mut_ptr().cast(),
        exp_avg_sq: state.exp_avg_sq.as_mut_ptr().cast(),
        ..tensor
    }
}

/// The bf16 weights that a tensor names as those of the step before; empty without them.
///
/// # Safety
/// [`check_inputs`] accepted the tensor. No code writes the weights while the slice is in use.
pub(super) unsafe fn published<'a>(raw: &spw_tensor) -> &'a [bf16] {
    let (from, _) = weights_of(raw);
    if from.is_null() || raw.n == 0 {
        return &[];
    }
    // SAFETY: the type and alignment are checked, and the caller lends `n` numbers until the call returns. The slice is
    // used only before the tensor is stepped, and no code writes to it until then.
    unsafe { std::slice::from_raw_parts(from.cast(), raw.n as usize) }
}

/// The address of a tensor's bf16 weights and the field that names it; NULL without weights.
fn weights_of(raw: &spw_tensor) -> (*const c_void, &'static str) {
    let bf16 = spw_dtype::SPW_DTYPE_BF16 as u32;
    match (raw.param.is_null(), raw.copy_dtype == bf16) {
        (false, _) => (raw.param.cast_const(), "param"),
        (true, true) => (raw.param_copy.cast_const(), "param_copy"),
        (true, false) => (std::ptr::null(), "param"),
    }
}

fn check_aligned(weights: *const c_void, name: &'static str) -> Result<()> {
    match weights.cast::<bf16>().is_aligned() {
        true => Ok(()),
        false => Err(Error::invalid(name, "is at an odd address, and holds numbers of 2 bytes")),
    }
}

/// Adds the sums of subgroups in the order in which one call adds those of its tensors.
fn squares_of(parts: &[f64]) -> f64 {
    match parts {
        [] => 0.0,
        [one] => *one,
        many => {
            let (left, right) = many.split_at(many.len() / 2);
            squares::add(squares_of(left), squares_of(right))
        }
    }
}

/// Rejects invalid tensors before any subgroup is stepped.
pub(super) fn check_inputs(swap: &Swap, tensors: &[spw_tensor]) -> Result<()> {
    if tensors.len() != swap.len() {
        return Err(Error::invalid("count", format!("is {} for {} subgroups", tensors.len(), swap.len())));
    }
    let [f32, bf16] = [spw_dtype::SPW_DTYPE_F32, spw_dtype::SPW_DTYPE_BF16].map(|dtype| dtype as u32);
    let split = swap.usual() == Form::Split;
    for (index, raw) in tensors.iter().enumerate() {
        let at = |error: Error| error.within(&format!("tensors[{index}]."));
        let elements = swap.elements(index)? as u64;
        let weights = split && raw.param_dtype == bf16;
        let wrong = if raw.n != elements {
            Some(("n", format!("is {}, the subgroup has {elements}", raw.n)))
        } else if raw.param_dtype != f32 && !weights || raw.state_dtype != f32 {
            Some(("param_dtype", "and state_dtype must be SPW_DTYPE_F32".to_string()))
        } else if split && raw.n > 0 && (raw.copy_dtype != bf16 || raw.param_copy.is_null()) {
            Some(("param_copy", "must be there, of bf16: the master is split".to_string()))
        } else if !raw.param.is_null() && !weights || !raw.exp_avg.is_null() || !raw.exp_avg_sq.is_null() {
            Some(("param", "exp_avg and exp_avg_sq must be NULL: they are on the tier".to_string()))
        } else if raw.grad.is_null() && raw.n > 0 {
            Some(("grad", "is NULL".to_string()))
        } else {
            None
        };
        if let Some((argument, reason)) = wrong {
            return Err(at(Error::invalid(argument, reason)));
        }
        if raw.n > 0 {
            let (weights, name) = weights_of(raw);
            check_aligned(weights, name).map_err(at)?;
        }
    }
    tensor::no_shadows(tensors)?;
    tensor::check_overlap(tensors)
}
