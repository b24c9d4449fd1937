//! Speculation-then-validation: buckets are stepped before the norm of the whole gradient is known.

use std::collections::HashMap;
use std::sync::Arc;

use crate::capi::optim::adam::spw_adam_options;
use crate::capi::optim::table::StepOptions;
use crate::capi::prelude::*;
use crate::capi::speculate::rule::{RoundRule, RuleOf};
use crate::capi::undo::spw_undo_mode;
use crate::error::{RoundKind, Rounds};
use crate::kernel::AdamRule;
use crate::offload::speculate::{Clip, Engine, Publication, Publish, Undo};
use crate::sys::sync::Lock;

/// When the 16-bit copies of parameters (param_copy) are written, and when readers may use them. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_spec_publish {
    /// Written once, when the bucket is final; until then the model may read the old copies. A bucket whose step is
    /// kept needs one more pass over its parameters (6 bytes each).
    SPW_SPEC_PUBLISH_FINAL = 0,
    /// Written by the step, as into a staging buffer. Readers may use them only when the bucket is final.
    SPW_SPEC_PUBLISH_STAGED = 1,
    /// Written by the step, and usable at once. `spw_spec_get_rolled_back` names the copies that a verdict invalidated.
    SPW_SPEC_PUBLISH_SPECULATIVE = 2,
}

c_struct! { first 16;
/// Options of an engine.
pub struct spw_spec_options {
    /// Number of buckets of every round, at most 2^20. Buckets are numbered from 0.
    pub buckets: u32,
    /// An `spw_undo_mode`: SPW_UNDO_MODE_DELTA (initially), SPW_UNDO_MODE_NONE, or SPW_UNDO_MODE_SHADOW, where every tensor
    /// must have shadow spans. With SPW_UNDO_MODE_SHADOW, the shadow spans hold the state after SPW_SPEC_VERDICT_COMMIT and
    /// SPW_SPEC_VERDICT_REDO. The tensor's own spans hold it after SPW_SPEC_VERDICT_SKIP and an abort. The next round
    /// names the set with the state as the tensor's own.
    pub undo_mode: u32,
    /// An `spw_spec_publish`.
    pub publish: u32,
}
}

c_struct! { first 88;
/// Counters since the engine was opened, and the age of a round.
pub struct spw_spec_stats {
    /// 0
    pub reserved: u32,
    /// Rounds with the verdict SPW_SPEC_VERDICT_COMMIT.
    pub commits: u64,
    /// Rounds with the verdict SPW_SPEC_VERDICT_REDO.
    pub redos: u64,
    /// Rounds with the verdict SPW_SPEC_VERDICT_SKIP.
    pub skips: u64,
    /// Aborted rounds.
    pub aborts: u64,
    /// Buckets stepped before the verdict (speculatively).
    pub buckets_speculated: u64,
    /// Speculative steps that were kept.
    pub buckets_committed: u64,
    /// Speculative steps that were rolled back and repeated.
    pub buckets_redone: u64,
    /// Speculative steps that were rolled back and not repeated.
    pub buckets_rolled_back: u64,
    /// Buckets not stepped before the verdict: the verdict was already certain, the early steps of the last two rounds
    /// were in vain, the bucket is in device memory, or the engine has SPW_UNDO_MODE_NONE.
    pub buckets_spared: u64,
    /// Seconds that callers waited in `spw_spec_local_result`, `spw_spec_wait` and `spw_spec_finish`, summed over
    /// callers.
    pub seconds_exposed: f64,
    /// Seconds since the first bucket of the open or the last round began, once its event had happened; -1 if none has begun.
    pub seconds_since_begun: f64,
}
}

/// A speculation engine. It has one thread, which distributes steps to the thread pool.
pub struct spw_spec {
    pub(in crate::capi) engine: Engine,
    pub(in crate::capi) undo: Undo,
    /// The coefficients of the round; `None` before the first one.
    rule: Lock<Option<Arc<dyn RoundRule>>>,
    opener: OpeningProcess,
    /// Uploads and GPU steps of each bucket. Dropped after the engine, which uses them.
    pub(in crate::capi) devices: Lock<HashMap<u32, Publication>>,
}

handle!(spw_spec, "spec", opener, "the speculation engine");

/// Creates an engine (SuperOffload section 4.4, "speculation-then-validation"). The order of calls in a round is at the
/// head of this header.
///
/// The thread pool steps a bucket as soon as its event has happened, with the factor `options.grad_scale`. It records a
/// log for an exact rollback, about 1.2 bytes per parameter and at most 13. The result is bit-identical to one step
/// after the norm is known, for every arrival order of the gradients. If the partial sum already exceeds the limit,
/// later buckets are only measured, and stepped once after the verdict. After an Inf or NaN, later buckets are neither
/// measured nor stepped. With SPW_UNDO_MODE_NONE all buckets are only measured before the verdict. So are they after
/// two rounds in a row with a verdict other than SPW_SPEC_VERDICT_COMMIT, or whose early steps an abort took back, until
/// a verdict would have kept such steps; that of the round after such an abort says nothing. The rule does not hold with
/// SPW_SPEC_PUBLISH_SPECULATIVE, whose readers use early steps.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_open(options: In<spw_spec_options>, spec_out: Out<*mut spw_spec>) -> spw_status {
    guard(|| {
        let options = options.read("options")?;
        let [delta, shadow] = EXACT;
        let undo =
            undo_of(options.undo_mode, &[delta, shadow, (spw_undo_mode::SPW_UNDO_MODE_NONE, Undo::None)])?;
        let publishes = [Publish::Final, Publish::Staged, Publish::Speculative];
        let publish = choice("options.publish", options.publish, "spw_spec_publish", &publishes)?;
        let open = || {
            let engine = Engine::open(options.buckets, publish, Rounds::Speculation)
                .map_err(|error| error.within("options."))?;
            let opener = OpeningProcess::current();
            Ok(spw_spec { engine, undo, rule: Lock::default(), opener, devices: Lock::default() })
        };
        spec_out.open(open)
    })
}

/// The undos that restore every bit, by their `spw_undo_mode`.
pub(in crate::capi) const EXACT: [(spw_undo_mode, Undo); 2] =
    [(spw_undo_mode::SPW_UNDO_MODE_DELTA, Undo::Delta), (spw_undo_mode::SPW_UNDO_MODE_SHADOW, Undo::Shadow)];

/// The undo of an `spw_undo_mode`, if it is one of these.
pub(in crate::capi) fn undo_of(mode: u32, known: &[(spw_undo_mode, Undo)]) -> Result<Undo> {
    if let Some((_, found)) = known.iter().find(|(name, _)| *name as u32 == mode) {
        return Ok(*found);
    }
    let names: Vec<String> = known.iter().map(|(name, _)| format!("{name:?}")).collect();
    Err(Error::invalid("options.undo_mode", format!("is {mode}, but must be {}", names.join(" or "))))
}

/// Opens a round of Adam steps with `options`, including `options.step` and `options.grad_scale` (1 / loss scale). If
/// the norm over all ranks exceeds `max_norm` (0: no limit), gradients are clipped as by
/// `torch.nn.utils.clip_grad_norm_` and DeepSpeed:
///
///     factor = grad_scale * min(1, max_norm / (norm + 1e-6))          in f64, rounded to f32 once
///
/// SPW_ERR_ROUND_OPEN while a round is open, SPW_ERR_BUSY while buckets of the previous round are not final.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_begin_adam(
    spec: Option<&spw_spec>,
    options: In<spw_adam_options>,
    max_norm: f64,
) -> spw_status {
    guard(|| begin(spec, options, max_norm))
}

/// Opens a round of steps with `options`.
pub(in crate::capi) fn begin<O: StepOptions + 'static>(
    spec: Option<&spw_spec>,
    options: In<O>,
    max_norm: f64,
) -> Result<()> {
    let options = options.read("options")?;
    let rule = Arc::new(RuleOf::<O>(options.rule()?));
    handle::get(spec)?.begin(rule, Clip::new(max_norm, options.grad_scale())?)
}

/// Reads the counters.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_get_stats(spec: Option<&spw_spec>, stats_out: Out<spw_spec_stats>) -> spw_status {
    guard(|| {
        let found = handle::get(spec)?.engine.stats()?;
        let counts = found.counts;
        let values = report!(spw_spec_stats from counts {
            commits, redos, skips, aborts
        } with {
            reserved: 0, buckets_speculated: counts.speculated, buckets_committed: counts.committed,
            buckets_redone: counts.redone, buckets_rolled_back: counts.rolled_back,
            buckets_spared: counts.spared, seconds_exposed: found.exposed.as_secs_f64(),
            seconds_since_begun: found.begun.map_or(-1.0, |begun| begun.as_secs_f64())
        });
        stats_out.write(&values, "stats_out")
    })
}

/// Closes the engine. It first rolls back a round without a verdict, and completes a round with one. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_spec_close(spec: Option<Box<spw_spec>>) -> spw_status {
    guard(|| handle::end(spec))
}

impl spw_spec {
    fn begin(&self, rule: Arc<dyn RoundRule>, clip: Clip) -> Result<()> {
        let mut mine = self.rule.lock();
        self.engine.begin(clip)?;
        *mine = Some(rule);
        Ok(())
    }

    /// The coefficients of the round, if it takes this bucket now.
    pub(in crate::capi) fn rule_for(&self, bucket: u32) -> Result<Arc<dyn RoundRule>> {
        let rule = self.rule.lock().clone();
        self.engine.may_submit(bucket)?;
        rule.ok_or_else(|| Rounds::Speculation.error(RoundKind::NotBegun))
    }

    /// As [`spw_spec::rule_for`]. Errors: the round is not of Adam.
    pub(in crate::capi) fn adam_round_for(&self, bucket: u32) -> Result<AdamRule> {
        self.rule_for(bucket)?.adam().ok_or_else(|| {
            Error::invalid("spec", "has no open round of Adam; call spw_spec_begin_adam first")
        })
    }
}
