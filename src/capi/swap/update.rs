//! The tiered update: optimizer state is stored on a tier and updated through a few buffers of host memory.

use std::ffi::{c_char, c_void};
use std::slice;
use std::sync::Arc;

use super::inputs::{self, Rules};
use super::options::{parse, spw_swap_budget, spw_swap_options, spw_swap_stats, write_budget};
use crate::capi::optim::adam::spw_adam_options;
use crate::capi::optim::tensor::{self, spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::capi::tier::{spw_tier, spw_tier_task};
use crate::offload::swap::beside::Beside;
use crate::offload::swap::budget;
use crate::offload::swap::encoding::STREAMS;
use crate::offload::swap::{Layout, SubgroupState, Swap};
use crate::sys::span::Span;

/// A tiered update: subgroups of optimizer state on a tier. A subgroup has f32 param (the master weight), exp_avg and
/// exp_avg_sq, 12 bytes per parameter, or less with flags of `spw_swap_flag`.
pub struct spw_swap {
    pub(in crate::capi) update: Beside,
    /// The coefficients of the open update.
    pub(in crate::capi) rules: Rules,
    opener: OpeningProcess,
}

handle!(spw_swap, "swap", opener, "the tier");

/// Writes the memory and traffic of an update that is opened with these options on a tier of `paths` paths. It allocates
/// no buffers. `options.ratio` and `options.speeds` are not read. More than 1024 paths are an error.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_plan_budget(
    options: In<spw_swap_options>,
    paths: u64,
    budget_out: Out<spw_swap_budget>,
) -> spw_status {
    guard(|| {
        budget_out.check("budget_out")?;
        let options = parse(options, 0)?;
        let paths = usize::try_from(paths).ok().filter(|paths| *paths <= 1024);
        let paths = paths.ok_or_else(|| Error::invalid("paths", "must be at most 1024"))?;
        let plan = budget::plan(&options.subgroups, options.usual, paths, options.host_memory)?;
        write_budget(plan, budget_out)
    })
}

/// Creates a tiered update: allocates all its memory and defines an extent of the tier for each subgroup. A resumed
/// tier with the same subgroups keeps their state; otherwise call `spw_swap_fill` next. The caller keeps the tier open
/// until `spw_swap_close`. A tier has one update at a time: another open is SPW_ERR_BUSY.
///
/// Once the update has changed a state, only it commits and rolls back, until it has done so: `spw_tier_commit`,
/// `spw_tier_rollback` and `spw_tier_import` are SPW_ERR_BUSY, or SPW_ERR_ROUND_OPEN between `spw_swap_begin` and the end of
/// that step. If it is closed before, `spw_tier_rollback` comes before the next `spw_tier_commit` or `spw_swap_open`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_open(
    tier: Option<&spw_tier>,
    options: In<spw_swap_options>,
    swap_out: Out<*mut spw_swap>,
) -> spw_status {
    guard(|| {
        let (tier, options) = {
            let tier = Arc::clone(&handle::get(tier)?.0);
            let paths = tier.paths().len();
            (tier, parse(options, paths)?)
        };
        swap_out.open(|| {
            let update = Beside::new(Swap::open(tier, &options)?);
            Ok(spw_swap { update, rules: Rules::None, opener: OpeningProcess::current() })
        })
    })
}

/// Sets the state of every subgroup. `states` has three addresses per subgroup, of its f32 param, exp_avg and
/// exp_avg_sq. The call copies from them; NULL means zeros. With SPW_SWAP_FLAG_LOW_BITS param has the low bits as numbers.
///
/// # Safety
/// `states` points to `3 * subgroups` addresses. Each is NULL or points to as many floats as the subgroup has elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_fill(swap: Option<&mut spw_swap>, states: *const *const f32) -> spw_status {
    guard(|| {
        let swap = &handle::get_mut(swap)?.update;
        if states.is_null() {
            return Err(Error::invalid("states", "is NULL"));
        }
        let fill = |subgroup: usize, mut state: SubgroupState<'_>| {
            let bytes = 4 * state.exp_avg.len();
            let of_caller = |stream: usize| {
                // SAFETY: the caller's promise: 3 addresses per subgroup, each NULL or of as many floats as the subgroup
                // has elements.
                unsafe {
                    let from = states.add(STREAMS * subgroup + stream).read();
                    (!from.is_null()).then(|| slice::from_raw_parts(from.cast::<u8>(), bytes))
                }
            };
            match of_caller(0) {
                Some(from) => state.store_param(from),
                None => {
                    state.param.fill(0.0);
                    state.low.fill(0);
                }
            }
            for (stream, to) in [(1, state.exp_avg), (2, state.exp_avg_sq)] {
                match of_caller(stream) {
                    Some(from) => to.store(from)?,
                    None => to.clear(),
                }
            }
            Ok(())
        };
        swap.at_rest(|swap| swap.fill(fill))
    })
}

/// Does one Adam step of all subgroups, with the same bits as `spw_adam_step` on tensors in memory. Each subgroup is
/// fetched, stepped, and written back unless it stays in memory for the next update. Fetches, steps and writes overlap.
/// Gradients (f32, bf16 or f16) are read in place and are never written to the tier. With SPW_SWAP_FLAG_BF16_MOMENTS
/// gradients are f32 or bf16, and `param_copy` is bf16.
///
/// `tensors[i]` is subgroup i. It names `n`, `grad` and optionally `param_copy`, which receives the new parameter in 16
/// bits. param_dtype is SPW_DTYPE_F32; state_dtype too, or SPW_DTYPE_BF16 with SPW_SWAP_FLAG_BF16_MOMENTS, or
/// SPW_DTYPE_CODES with SPW_SWAP_FLAG_CODED_MOMENTS. param, exp_avg, exp_avg_sq, their scales and the shadow spans are
/// NULL. Stochastic rounding needs narrow moments.
///
/// With SPW_SWAP_FLAG_SPLIT_MASTER, `param_copy` is bf16 and required. On entry it holds the weights of the step before
/// (at first, the filled param rounded); the step replaces them. Alternatively `param` names these weights, with
/// param_dtype SPW_DTYPE_BF16, and they stay unchanged. A caller that may roll back keeps two sets of weights and
/// alternates them. Weights that do not match the state are an error.
///
/// After an error some subgroups may have been stepped. Then every call is SPW_ERR_BUSY except `spw_swap_rollback`,
/// `spw_swap_close` and `spw_swap_get_stats`.
///
/// # Safety
/// As `spw_adam_step`; `count` is the number of subgroups.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_adam_step(
    swap: Option<&mut spw_swap>,
    options: In<spw_adam_options>,
    tensors: In<spw_tensor>,
    count: u64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    guard(|| {
        let swap = &handle::get_mut(swap)?.update;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            stats_out.check("stats_out")?;
            let parts = inputs::whole(swap.layout(), tensors, count, inputs::rules_of(options)?)?;
            let seen =
                swap.at_rest(|swap| swap.adam_step(parts, !stats_out.is_null(), &mut |_, _| Ok(())))?;
            tensor::write_stats(seen, stats_out)
        }
    })
}

/// As `spw_swap_adam_step`, for subgroups that hold parts of many tensors. `tensors[i]` is stepped with the `n` elements
/// of subgroup `subgroups[i]` from element `firsts[i]` on. The parts are sorted by subgroup and element, and do not
/// overlap. Elements of a subgroup without a part do not change; with SPW_SWAP_FLAG_CODED_MOMENTS see there.
///
/// A tensor may have options of its own. Its `param_copy` may also be SPW_DTYPE_F32: it then receives the new param
/// itself. The step does not return statistics. With SPW_SWAP_FLAG_SPLIT_MASTER the call is SPW_ERR_UNSUPPORTED.
///
/// With SPW_SWAP_FLAG_LOW_BITS, `param_copy` is bf16 or f32 and required: the parameter itself, which the step writes.
/// Alternatively `param` names the parameter, which stays unchanged, and `param_copy` receives the new one; `low_sums` are
/// then written only. param_dtype is copy_dtype, and `low_sums` may be given for bf16. Gradients of bf16 are f32 or bf16.
///
/// # Safety
/// As `spw_adam_step`; `subgroups` and `firsts` point to `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_adam_step_parts(
    swap: Option<&mut spw_swap>,
    options: In<spw_adam_options>,
    tensors: In<spw_tensor>,
    subgroups: In<u64>,
    firsts: In<u64>,
    count: u64,
) -> spw_status {
    guard(|| {
        let swap = &handle::get_mut(swap)?.update;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let rules = inputs::rules_of(options)?;
            let parts = inputs::parts(swap.layout(), tensors, [subgroups, firsts], count, rules)?;
            swap.at_rest(|swap| swap.adam_step(parts, false, &mut |_, _| Ok(())).map(drop))
        }
    })
}

/// Copies the f32 state of one subgroup to the caller's memory; NULL skips a part. Steps since the last commit are
/// included. `weights` are the bf16 weights that belong to the state. With SPW_SWAP_FLAG_SPLIT_MASTER they are required
/// to read param, and weights that do not match the state are an error. Otherwise they are not used and may be NULL.
/// With SPW_SWAP_FLAG_LOW_BITS `param_out` receives the low bits as numbers.
///
/// # Safety
/// Each output is NULL or has room for as many floats as the subgroup has elements. `weights` is NULL or has as many
/// bf16 numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_read(
    swap: Option<&mut spw_swap>,
    subgroup: u64,
    weights: *const c_void,
    param_out: *mut f32,
    exp_avg_out: *mut f32,
    exp_avg_sq_out: *mut f32,
) -> spw_status {
    guard(|| {
        let swap = &handle::get_mut(swap)?.update;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (subgroup, to) = lent(swap.layout(), subgroup, [param_out, exp_avg_out, exp_avg_sq_out])?;
            let elements = swap.layout().elements(subgroup)? as u64;
            let weights = inputs::weights_of(weights, elements, "weights")?;
            swap.at_rest(|swap| swap.read(subgroup, weights, to))
        }
    })
}

/// Replaces the f32 state of one subgroup, between steps. NULL leaves a part unchanged. With SPW_SWAP_FLAG_LOW_BITS param has
/// the low bits as numbers. If param is given with
/// SPW_SWAP_FLAG_SPLIT_MASTER, the weights on entry of the next step are this param, rounded to nearest even; the
/// rounding of every NaN is 0x7fc0. `spw_swap_commit` makes
/// the new state durable, and `spw_swap_rollback` discards it.
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
        let swap = &handle::get_mut(swap)?.update;
        let parts = [param, exp_avg, exp_avg_sq].map(<*const f32>::cast_mut);
        // SAFETY: the caller meets the callee's requirements; nothing is written through these spans.
        let (subgroup, from) = unsafe { lent(swap.layout(), subgroup, parts) }?;
        swap.at_rest(|swap| swap.write(subgroup, from))
    })
}

/// Makes all state durable as `step`: writes dirty subgroups from memory, then commits the tier (`spw_tier_commit`,
/// with its errors). The next open returns the payload.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_commit(
    swap: Option<&mut spw_swap>,
    step: u64,
    payload: In<c_void>,
    payload_bytes: u64,
) -> spw_status {
    guard(|| {
        let swap = &handle::get_mut(swap)?.update;
        let payload = payload.payload(payload_bytes)?;
        swap.at_rest(|swap| swap.commit(step, payload))
    })
}

/// Begins what `spw_swap_commit` does, and returns at once: a thread writes the subgroups that are only in memory, and
/// another makes all state durable as it is at this call. The next update may begin at once; its steps wait until the
/// subgroups are written. Other calls of the tiered update wait for that too. See `spw_tier_commit_begin` for the rest,
/// `spw_tier_task_wait` for the outcome.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_commit_begin(
    swap: Option<&mut spw_swap>,
    step: u64,
    payload: In<c_void>,
    payload_bytes: u64,
    task_out: Out<*mut spw_tier_task>,
) -> spw_status {
    guard(|| {
        let update = &handle::get_mut(swap)?.update;
        let payload = payload.payload(payload_bytes)?;
        task_out.open(|| Ok(spw_tier_task::commit(step, update.commit(step, payload)?)))
    })
}

/// Rolls back to the last commit, in memory and on the tier, also after a failed step. An open update is abandoned: its
/// gradients and copies belong to the caller again, and the copies hold any values.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_rollback(swap: Option<&mut spw_swap>) -> spw_status {
    guard(|| handle::get_mut(swap)?.update.rollback())
}

/// Writes the counters since open. An update of `spw_swap_begin` is included once all its subgroups are stepped.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_get_stats(
    swap: Option<&mut spw_swap>,
    stats_out: Out<spw_swap_stats>,
) -> spw_status {
    guard(|| {
        let seen = handle::get_mut(swap)?.update.stats();
        let counts = seen.pipeline;
        let stats = report!(spw_swap_stats from counts {
            rounds, hits, fetched, flushed
        } with {
            reserved: 0, moved: seen.moved, exposed_seconds: seen.exposed_seconds
        });
        stats_out.write(&stats, "stats_out")
    })
}

/// Writes the last update, and what was written to the tier since, as a trace for Perfetto (JSON): for each buffer the
/// fetches, steps and flushes of subgroups, and for each path the bytes of transfers in flight. A transfer on several
/// paths ends with its last part. `size` is the size of `text_out`, which may be NULL if it is 0; `needed_out` (may be
/// NULL) receives the size of the text with its zero byte.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_get_trace(
    swap: Option<&mut spw_swap>,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let trace = handle::get_mut(swap)?.update.at_rest(|swap| Ok(swap.trace()))?;
        text_out.put_text(&trace.to_json(), size, needed_out)
    })
}

/// Frees the update, and abandons one that `spw_swap_begin` opened. The tier stays open; state that was not committed is
/// lost. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_close(swap: Option<Box<spw_swap>>) -> spw_status {
    guard(|| handle::end(swap))
}

/// A subgroup's number, and the caller's memory for its param and states. NULL becomes an empty span.
unsafe fn lent(
    layout: &Layout,
    subgroup: u64,
    parts: [*mut f32; STREAMS],
) -> Result<(usize, [Span; STREAMS])> {
    let subgroup = usize::try_from(subgroup).unwrap_or(usize::MAX);
    let bytes = layout.elements(subgroup)? * size_of::<f32>();
    // SAFETY: the caller lends that many floats until the call returns.
    let span = |part: *mut f32| unsafe { Span::new(part.cast(), bytes) };
    Ok((subgroup, parts.map(|part| if part.is_null() { None } else { span(part) }.unwrap_or(Span::empty()))))
}
