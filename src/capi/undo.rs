//! Reversible steps: a recording of one step, which can be rolled back, repeated with another factor, or kept.
//!
//! SuperOffload section 4.4 and SysX section 3.2 describe the rollback by an inverse formula. The modes
//! SPW_UNDO_MODE_DELTA and SPW_UNDO_MODE_SHADOW restore every bit.
//!
//!     spw_undo_options options = SPW_UNDO_OPTIONS_INIT;
//!     options.elements = n;
//!     options.tensors = 1;
//!     spw_undo *undo;
//!     spw_undo_open(&options, &undo);
//!
//!     spw_step_stats stats = SPW_STEP_STATS_INIT;
//!     spw_undo_adam_step(undo, &adam, &tensor, 1, &stats);
//!     if (stats.nonfinite)
//!         spw_undo_rollback(undo);
//!     else
//!         spw_undo_commit(undo, 0);
//!
//!     spw_undo_close(undo);

use super::optim::adam::spw_adam_options;
use super::optim::table::{self, StepOptions};
use super::optim::tensor::{self, spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::optim::recording::{Mode, Recording};
use crate::optim::{self, check};

/// How a recorded step is rolled back. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_undo_mode {
    /// Bit-exactly, from a log of the differences to the inverse formula. The log takes about 1.2 bytes per element in
    /// steady state, 3.4 at step 2, and never more than 13. Once the step is rolled back, redone or committed, each
    /// chunk of 65536 elements whose log used more than 3 bytes per element returns its log memory to the system. The log of
    /// split masters and 8-bit moments holds the old values, 6 to 12 bytes per element, and keeps its memory.
    SPW_UNDO_MODE_DELTA = 0,
    /// Approximately, by the inverse formula (SuperOffload section 4.4, SysX section 3.2), without extra memory. With
    /// Adam in f32, most old values come back exactly. The others differ by at most 2 units in the last place of the
    /// larger of the old and the new value. With SPW_WEIGHT_DECAY_L2 the difference of param also enters exp_avg and
    /// exp_avg_sq, which then differ by a few units more. Old values 2^24 times smaller than the new ones are lost, for
    /// example the zero states before step 1. exp_avg_sq never becomes negative. With Inf or NaN in a
    /// scaled gradient, param or state the step is done, but its rollback or redo is an error that changes nothing.
    SPW_UNDO_MODE_ARITHMETIC = 1,
    /// Bit-exactly and in constant time. The step reads one set of spans and writes another set, which the tensors name
    /// in their shadow fields. `spw_undo_rollback` says which set is current afterwards.
    SPW_UNDO_MODE_SHADOW = 2,
    /// Not at all. For `spw_spec_open` only: before the verdict a bucket is measured, and it steps once after the verdict.
    /// This takes no memory for a log, and reads each gradient twice.
    SPW_UNDO_MODE_NONE = 3,
}

c_struct! { first 24;
/// Mode and capacity of a recording.
pub struct spw_undo_options {
    /// An `spw_undo_mode`; initially SPW_UNDO_MODE_DELTA, which is exact.
    pub mode: u32,
    /// Maximum number of elements of one step, all tensors together. Used only with SPW_UNDO_MODE_DELTA.
    pub elements: u64,
    /// Maximum number of tensors of one step.
    pub tensors: u64,
}
}

/// A recording of one step, which can be rolled back. A forked child has a working copy.
pub struct spw_undo(pub(in crate::capi) Recording);

handle!(spw_undo, "undo");

/// Creates a recording. SPW_UNDO_MODE_DELTA reserves 13 bytes of address space per element now, and takes memory page
/// by page as steps need it. Free the recording with `spw_undo_close`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_undo_open(options: In<spw_undo_options>, undo_out: Out<*mut spw_undo>) -> spw_status {
    guard(|| {
        let options = options.read("options")?;
        let (elements, tensors) = (options.elements as usize, options.tensors as usize);
        if options.elements > LIMIT || options.tensors > LIMIT {
            return Err(Error::invalid("options.elements", "must be at most 2^48, options.tensors too"));
        }
        if options.mode == spw_undo_mode::SPW_UNDO_MODE_NONE as u32 {
            let reason = "is SPW_UNDO_MODE_NONE, which records nothing; pass another mode, or step without a recording";
            return Err(Error::invalid("options.mode", reason));
        }
        let modes = [Mode::Delta { elements }, Mode::Arithmetic, Mode::Shadow];
        let mode = choice("options.mode", options.mode, "spw_undo_mode", &modes)?;
        undo_out.open(|| Ok(spw_undo(Recording::new(mode, tensors)?)))
    })
}

const LIMIT: u64 = 1 << 48;

/// Does `spw_adam_step` and records it in `undo`; the previously recorded step becomes permanent.
///
/// Kept: the spans of the tensors, gradients included, until this step is rolled back, redone or committed. They must not
/// move, and only Spillway may write to them.
///
/// In mode SPW_UNDO_MODE_SHADOW every tensor must have shadow spans; in the other modes no tensor may. A step with more
/// elements or tensors than the recording has room for is an error; the room may be a little larger than asked for, and
/// tensors of no elements need none. Statistics are computed if `stats_out` is not NULL.
///
/// # Safety
/// As `spw_adam_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_adam_step(
    undo: Option<&mut spw_undo>,
    options: In<spw_adam_options>,
    tensors: In<spw_tensor>,
    count: u64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    // SAFETY: the caller meets the callee's requirements.
    guard(|| unsafe { record(undo, options, tensors, count, stats_out) })
}

/// Does and records a step.
///
/// # Safety
/// As `spw_undo_adam_step`.
pub(in crate::capi) unsafe fn record<O: StepOptions>(
    undo: Option<&mut spw_undo>,
    options: In<O>,
    tensors: In<spw_tensor>,
    count: u64,
    stats_out: Out<spw_step_stats>,
) -> Result<()> {
    let undo = &mut handle::get_mut(undo)?.0;
    // SAFETY: the caller meets the callees' requirements. The recording drops the tensors when the step is over.
    unsafe {
        stats_out.check("stats_out")?;
        let tensors = table::lent(tensors, count, &table::rule(options)?, |own| table::own_rule::<O>(own))?;
        let seen = undo.record(tensors, |jobs| optim::step(jobs, !stats_out.is_null()))?;
        tensor::write_stats(seen, stats_out)
    }
}

/// Rolls back the recorded step and forgets it. param, exp_avg and exp_avg_sq get the bits from before the step
/// (SPW_UNDO_MODE_ARITHMETIC: approximately). param_copy gets the restored param, rounded. Without a recorded step the
/// call is SPW_ERR_INVALID_ARGUMENT.
///
/// In mode SPW_UNDO_MODE_SHADOW the call writes no tensor, since the step changed only the shadow spans. The caller
/// continues with the tensors' own spans. After `spw_undo_commit` instead, the shadow spans are the current set: the
/// next step names them as param, exp_avg and exp_avg_sq, and the former ones as shadow. No data is copied in either
/// case. param_copy holds the parameters that the step wrote, so a caller that may roll back also keeps two copies of
/// it.
///
/// If a framework's tensors cannot change their address, the caller has three choices:
///
/// - Let the tensors be current after every other step only.
/// - Copy the current set back before each use of the tensors, at 0.9 of the time of a step.
/// - Record with SPW_UNDO_MODE_DELTA instead.
#[unsafe(no_mangle)]
pub extern "C" fn spw_undo_rollback(undo: Option<&mut spw_undo>) -> spw_status {
    guard(|| handle::get_mut(undo)?.0.rollback(None))
}

/// Rolls back the recorded step and repeats it with `grad_scale` in place of its factor on the gradient, in one pass
/// over memory. Then it forgets the step. The result has the bits of a single step with `grad_scale`
/// (SPW_UNDO_MODE_ARITHMETIC: approximately). In mode SPW_UNDO_MODE_SHADOW the result is in the shadow spans, as after
/// the step and `spw_undo_commit`. A `grad_scale` that is not a finite f32 is an error.
#[unsafe(no_mangle)]
pub extern "C" fn spw_undo_redo(undo: Option<&mut spw_undo>, grad_scale: f64) -> spw_status {
    guard(|| {
        let grad_scale = check::finite("grad_scale", grad_scale)?;
        handle::get_mut(undo)?.0.rollback(Some(grad_scale))
    })
}

/// Forgets the recorded step, which becomes permanent. Without a recorded step it does nothing. With `release_memory` 0
/// the log keeps the memory of chunks that used at most 3 bytes per element; with 1 it returns all memory to the
/// system.
#[unsafe(no_mangle)]
pub extern "C" fn spw_undo_commit(undo: Option<&mut spw_undo>, release_memory: u32) -> spw_status {
    guard(|| {
        let undo = handle::get_mut(undo)?;
        undo.0.commit(abi_struct::flag("release_memory", release_memory)?);
        Ok(())
    })
}

/// Writes the bytes of log that the recorded step uses; 0 without a recorded step or a log.
#[unsafe(no_mangle)]
pub extern "C" fn spw_undo_get_log_bytes(undo: Option<&mut spw_undo>, bytes_out: Out<u64>) -> spw_status {
    guard(|| {
        let bytes = handle::get_mut(undo)?.0.log_used();
        bytes_out.put(bytes, "bytes_out")
    })
}

/// Frees the recording. Its step becomes permanent. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_undo_close(undo: Option<Box<spw_undo>>) -> spw_status {
    guard(|| handle::end(undo))
}
