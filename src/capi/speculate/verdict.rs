//! The verdict of a speculation round: its inputs, its outcome, and the steps that it rolled back.

use crate::capi::optim::tensor::{self, spw_step_stats};
use crate::capi::prelude::*;
use crate::capi::speculate::engine::spw_spec;
use crate::offload::speculate::{Outcome, Verdict};
use crate::optim::{StepStats, check};

/// Verdict of a round. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_spec_verdict {
    /// Every bucket's step is kept.
    SPW_SPEC_VERDICT_COMMIT = 0,
    /// No bucket is stepped, since a gradient is not finite.
    SPW_SPEC_VERDICT_SKIP = 1,
    /// Every bucket is stepped with the clipped factor.
    SPW_SPEC_VERDICT_REDO = 2,
}

c_struct! { first 32;
/// Result of a verdict.
pub struct spw_spec_outcome {
    /// An `spw_spec_verdict`.
    pub verdict: u32,
    /// Norm of the scaled gradients of all ranks. NaN if they are not finite, or after `spw_spec_resolve_as`.
    pub norm: f64,
    /// Factor on the gradient in the round's final steps; 0 after SPW_SPEC_VERDICT_SKIP.
    pub grad_scale: f64,
    /// Number of buckets whose speculative steps are rolled back.
    pub rolled_back: u32,
    /// 0
    pub reserved: u32,
}
}

/// Waits until every bucket of the round is measured, for up to `timeout_ms` milliseconds (0: poll; negative: without
/// limit). Writes this rank's statistics: the sum of squares of the scaled gradients, added in the order of the bucket
/// numbers, whatever their order of arrival. With `nonfinite` 1 the sum is NaN. Add the sums of all ranks for
/// `spw_spec_resolve`.
///
/// - SPW_ERR_BUCKET_MISSING: a bucket was not submitted; the message names it.
/// - SPW_ERR_TIMEOUT: events are outstanding; the message names their buckets.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_local_result(
    spec: Option<&spw_spec>,
    timeout_ms: i64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    let wait = || handle::get(spec)?.engine.local_result(timeout(timeout_ms));
    guard(|| tensor::wait_stats(wait, stats_out))
}

/// Writes the sum of squares of the scaled gradients of each bucket: at most `capacity` numbers to `squares_out`, and
/// the number of buckets to `count_out`. A sum is NaN if a gradient of its bucket is not finite. The function is for
/// callers whose buckets count in several norms, or that add the sums in an order of their own.
///
/// SPW_ERR_BUSY while buckets are being measured: call `spw_spec_local_result` first.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_get_squares(
    spec: Option<&spw_spec>,
    squares_out: Out<f64>,
    capacity: u64,
    count_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let squares = handle::get(spec)?.engine.squares()?;
        squares_out.put_array(&squares, capacity, "squares_out", count_out)
    })
}

/// Gives the round the verdict that follows from `global`, the statistics of all ranks, and returns at once. The engine
/// then rolls back and repeats steps as needed, the bucket that was submitted last first. `outcome_out` may be NULL.
///
/// SPW_ERR_BUSY while buckets are being measured: call `spw_spec_local_result` first.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_resolve(
    spec: Option<&spw_spec>,
    global: In<spw_step_stats>,
    outcome_out: Out<spw_spec_outcome>,
) -> spw_status {
    guard(|| {
        outcome_out.check("outcome_out")?;
        let global = global.read("global")?;
        let nonfinite = abi_struct::flag("global.nonfinite", global.nonfinite)?;
        if global.sum_squares < 0.0 {
            return Err(Error::invalid(
                "global.sum_squares",
                format!("is {}, but must not be negative", global.sum_squares),
            ));
        }
        let global = StepStats { nonfinite, sum_squares: global.sum_squares };
        write_outcome(handle::get(spec)?.engine.resolve(global)?, outcome_out)
    })
}

/// Gives the round the caller's own verdict (an `spw_spec_verdict`), for a clipping rule other than that of
/// `spw_spec_begin_adam`. `grad_scale` is the complete factor for SPW_SPEC_VERDICT_REDO, rounded to f32. Otherwise as
/// `spw_spec_resolve`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_resolve_as(
    spec: Option<&spw_spec>,
    verdict: u32,
    grad_scale: f64,
    outcome_out: Out<spw_spec_outcome>,
) -> spw_status {
    guard(|| {
        let verdict = parse_verdict(verdict, grad_scale)?;
        outcome_out.check("outcome_out")?;
        write_outcome(handle::get(spec)?.engine.resolve_as(verdict)?, outcome_out)
    })
}

/// Aborts an open round: stepped buckets are rolled back, the others never start. Without an open round it does
/// nothing. `spw_spec_finish` waits for the rollback.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_abort(spec: Option<&spw_spec>) -> spw_status {
    guard(|| handle::get(spec)?.engine.abort())
}

/// Waits until every bucket of the round is final, for up to `timeout_ms` milliseconds (negative: without limit). After
/// it all spans, and the words of events, belong to the caller again. If a bucket of a round without a verdict has
/// failed, its error is returned at once: abort the round then, and finish again. The second call waits, and repeats
/// the error of the bucket.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_finish(spec: Option<&spw_spec>, timeout_ms: i64) -> spw_status {
    guard(|| handle::get(spec)?.engine.finish(timeout(timeout_ms)))
}

/// Writes the buckets whose speculative steps the last verdict rolled back: at most `capacity` numbers to
/// `buckets_out`, and their total to `count_out`. With SPW_SPEC_PUBLISH_SPECULATIVE the caller fetches these buckets'
/// 16-bit copies again once the bucket is final.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_get_rolled_back(
    spec: Option<&spw_spec>,
    buckets_out: Out<u32>,
    capacity: u64,
    count_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let buckets = handle::get(spec)?.engine.rolled_back_buckets()?;
        buckets_out.put_array(&buckets, capacity, "buckets_out", count_out)
    })
}

/// A verdict, with the complete factor of a redo.
pub(in crate::capi) fn parse_verdict(verdict: u32, grad_scale: f64) -> Result<Verdict> {
    match verdict {
        0 => Ok(Verdict::Commit),
        1 => Ok(Verdict::Skip),
        2 => check::finite("grad_scale", grad_scale).map(Verdict::Redo),
        other => Err(Error::invalid("verdict", format!("{other} is not an spw_spec_verdict"))),
    }
}

fn write_outcome(found: Outcome, to: Out<spw_spec_outcome>) -> Result<()> {
    if to.is_null() {
        return Ok(());
    }
    let verdict = match found.verdict {
        Verdict::Commit => spw_spec_verdict::SPW_SPEC_VERDICT_COMMIT,
        Verdict::Skip => spw_spec_verdict::SPW_SPEC_VERDICT_SKIP,
        Verdict::Redo(_) => spw_spec_verdict::SPW_SPEC_VERDICT_REDO,
    };
    let values = report!(spw_spec_outcome from found {
        norm, rolled_back
    } with {
        verdict: verdict as u32, grad_scale: found.factor.into(), reserved: 0
    });
    to.write(&values, "outcome_out")
}
