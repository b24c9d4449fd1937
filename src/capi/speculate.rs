//! Speculation-then-validation: buckets are stepped before the norm of the whole gradient is known.
#![allow(non_camel_case_types)]

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::adagrad::{self, spw_adagrad_options};
use super::adam::{self, spw_adam_options};
use super::guard::guard;
use super::library::out;
use super::lion::{self, spw_lion_options};
use super::record::{self, Record};
use super::status::spw_status;
use crate::error::{Error, Result};
use crate::kernel::{AdagradRule, AdamRule, LionRule};
use crate::offload::speculate::{Clip, Engine, Publication, Publish, Undo};

/// When the 16-bit copies of parameters (param_copy) are written, and when readers may use them. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_spec_publish {
    /// Written once, when the bucket is final; until then the model may read the old copies. A bucket whose step is
    /// kept needs one more pass over its parameters (6 bytes each).
    SPW_SPEC_PUBLISH_FINAL = 0,
    /// Written by the step, as into a staging buffer. Readers may use them only when the bucket is final.
    SPW_SPEC_PUBLISH_STAGED = 1,
    /// Written by the step, and usable at once. `spw_spec_withdrawn` names the copies that a verdict invalidated.
    SPW_SPEC_PUBLISH_SPECULATIVE = 2,
}

/// Options of an engine.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_spec_options {
    /// `sizeof(spw_spec_options)`
    pub struct_size: u32,
    /// Number of buckets of every round. Buckets are numbered from 0.
    pub buckets: u32,
    /// An exact `spw_undo_mode`: SPW_UNDO_DELTA, or SPW_UNDO_SHADOW, where every tensor must have shadow spans. With
    /// SPW_UNDO_SHADOW, the shadow spans hold the state after SPW_SPEC_COMMIT and SPW_SPEC_REDO. The tensor's own spans
    /// hold it after SPW_SPEC_SKIP and an abort. The next round names the set with the state as the tensor's own.
    pub undo_mode: u32,
    /// An `spw_spec_publish`.
    pub publish: u32,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_spec_options {
    const FIRST_SIZE: usize = 16;
    const NAME: &'static str = "spw_spec_options";
}

/// Counters since the engine was opened.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_spec_stats {
    /// `sizeof(spw_spec_stats)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Rounds with the verdict SPW_SPEC_COMMIT.
    pub commits: u64,
    /// Rounds with the verdict SPW_SPEC_REDO.
    pub redos: u64,
    /// Rounds with the verdict SPW_SPEC_SKIP.
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
    /// Buckets not stepped before the verdict: the verdict was already certain, or the bucket is in device memory.
    pub buckets_spared: u64,
    /// Seconds that callers waited in `spw_spec_local_result`, `spw_spec_wait` and `spw_spec_finish`, summed over
    /// callers.
    pub seconds_exposed: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_spec_stats {
    const FIRST_SIZE: usize = 88;
    const NAME: &'static str = "spw_spec_stats";
}

/// A speculation engine. It has one thread, which distributes steps to the thread pool.
pub struct spw_spec {
    pub(super) engine: Engine,
    pub(super) undo: Undo,
    rules: Mutex<Rules>,
    /// Uploads and GPU steps of each bucket. Dropped after the engine, which uses them.
    pub(super) devices: Mutex<HashMap<u32, Publication>>,
}

/// The coefficients of the round.
#[derive(Clone, Copy)]
pub(super) enum Rules {
    None,
    Adam(AdamRule),
    Adagrad(AdagradRule),
    Lion(LionRule),
}

/// Creates an engine (SuperOffload section 4.4, "speculation-then-validation"). A round is
///
///     spw_spec_begin_adam(spec, &options, max_norm);
///     spw_spec_submit(spec, bucket, tensors, count, event);    for every bucket, as gradients come
///     spw_spec_local_result(spec, -1, &mine);                  then add up mine.sum_squares over all ranks
///     spw_spec_resolve(spec, &all, &outcome);
///     spw_spec_wait(spec, bucket, -1);                         for every bucket, or spw_spec_finish
///
/// The thread pool steps a bucket as soon as its event has happened, with the factor `options.grad_scale`. It records a
/// log for an exact rollback, about 1.2 bytes per parameter and at most 13. After the verdict every bucket has the bits
/// of waiting for the norm and stepping once, whatever the order of arrival. If the partial sum already determines the
/// verdict, later buckets are only measured, and stepped once after the verdict.
///
/// Every function but `spw_spec_close` is thread-safe. Complete example: examples_c/speculate.c.
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes, `spec_out` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_open(
    options: *const spw_spec_options,
    spec_out: *mut *mut spw_spec,
) -> spw_status {
    guard(|| {
        let spec_out = out(spec_out, "spec_out")?;
        // SAFETY: the caller meets the callee's requirements.
        let options = unsafe { record::read(options, "options") }?;
        let undo = match options.undo_mode {
            1 => Undo::Delta,
            2 => Undo::Shadow,
            other => {
                let reason = format!("{other} is not an spw_undo_mode that is exact");
                return Err(Error::invalid("options.undo_mode", reason));
            }
        };
        let publish = match options.publish {
            0 => Publish::Final,
            1 => Publish::Staged,
            2 => Publish::Speculative,
            other => {
                return Err(Error::invalid("options.publish", format!("{other} is not an spw_spec_publish")));
            }
        };
        let engine = Engine::open(options.buckets, publish).map_err(|error| error.within("options."))?;
        let spec = spw_spec { engine, undo, rules: Mutex::new(Rules::None), devices: Mutex::default() };
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { spec_out.write(Box::into_raw(Box::new(spec))) };
        Ok(())
    })
}

/// Opens a round of Adam steps with `options`, including `options.step` and `options.grad_scale` (1 / loss scale). If
/// the norm over all ranks exceeds `max_norm` (0: no limit), gradients are clipped as by
/// `torch.nn.utils.clip_grad_norm_` and DeepSpeed:
///
///     factor = grad_scale * min(1, max_norm / (norm + 1e-6))          in f64, rounded to f32 once
///
/// SPW_ERR_ROUND_OPEN while a round is open, SPW_ERR_BUSY while buckets of the previous round are not final.
///
/// # Safety
/// `spec` is an open engine, `options` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_begin_adam(
    spec: *const spw_spec,
    options: *const spw_adam_options,
    max_norm: f64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let options = unsafe { adam::parse(options) }?;
        let rules = Rules::Adam(adam::rule(&options)?);
        // SAFETY: as above.
        unsafe { open(spec) }?.begin(rules, Clip::new(max_norm, options.grad_scale)?)
    })
}

/// Opens a round of Adagrad steps, as `spw_spec_begin_adam`.
///
/// # Safety
/// As `spw_spec_begin_adam`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_begin_adagrad(
    spec: *const spw_spec,
    options: *const spw_adagrad_options,
    max_norm: f64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let options = unsafe { adagrad::parse(options) }?;
        let rules = Rules::Adagrad(adagrad::rule(&options)?);
        // SAFETY: as above.
        unsafe { open(spec) }?.begin(rules, Clip::new(max_norm, options.grad_scale)?)
    })
}

/// Opens a round of Lion steps, as `spw_spec_begin_adam`.
///
/// # Safety
/// As `spw_spec_begin_adam`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_begin_lion(
    spec: *const spw_spec,
    options: *const spw_lion_options,
    max_norm: f64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let options = unsafe { lion::parse(options) }?;
        let rules = Rules::Lion(lion::rule(&options)?);
        // SAFETY: as above.
        unsafe { open(spec) }?.begin(rules, Clip::new(max_norm, options.grad_scale)?)
    })
}

/// Reads the counters. Set `stats->struct_size` first.
///
/// # Safety
/// `spec` is an open engine, `stats` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_stats_get(spec: *const spw_spec, stats: *mut spw_spec_stats) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let found = open(spec)?.engine.stats()?;
            let counts = found.counts;
            let values = spw_spec_stats {
                struct_size: 0,
                reserved: 0,
                commits: counts.commits,
                redos: counts.redos,
                skips: counts.skips,
                aborts: counts.aborts,
                buckets_speculated: counts.speculated,
                buckets_committed: counts.committed,
                buckets_redone: counts.redone,
                buckets_rolled_back: counts.rolled_back,
                buckets_spared: counts.spared,
                seconds_exposed: found.exposed.as_secs_f64(),
            };
            record::write(&values, stats, "stats")
        }
    })
}

/// Closes the engine. It first rolls back a round without a verdict, and completes a round with one. NULL does nothing.
///
/// # Safety
/// `spec` is NULL or an open engine, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_close(spec: *mut spw_spec) -> spw_status {
    guard(|| {
        if !spec.is_null() {
            // SAFETY: made by Box::into_raw in spw_spec_open, and given up by the caller.
            drop(unsafe { Box::from_raw(spec) });
        }
        Ok(())
    })
}

pub(super) unsafe fn open<'a>(spec: *const spw_spec) -> Result<&'a spw_spec> {
    // SAFETY: NULL, or an open engine by the caller's promise.
    unsafe { spec.as_ref() }.ok_or_else(|| Error::invalid("spec", "is NULL"))
}

impl spw_spec {
    fn begin(&self, rules: Rules, clip: Clip) -> Result<()> {
        let mut mine = self.rules()?;
        self.engine.begin(clip)?;
        *mine = rules;
        Ok(())
    }

    pub(super) fn rules(&self) -> Result<MutexGuard<'_, Rules>> {
        self.engine.owned()?;
        Ok(self.rules.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
