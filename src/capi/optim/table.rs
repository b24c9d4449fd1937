//! The options and tensors of a call as jobs: checked, each tensor with its coefficients.

use std::ffi::c_void;
use std::ptr;

use super::overlap;
use super::tensor::{self, at, no_codes, no_low_bits, spw_step_stats, spw_tensor, tensor_of};
use crate::capi::abi_struct::AbiStruct;
use crate::capi::prelude::*;
use crate::kernel::{LentTensor, Optimizer};
use crate::optim::lent::Lent;
use crate::optim::parallel::Job;
use crate::optim::{self, Family};
use crate::sys::bump::{self, Bump};

/// The option struct of an optimizer: that of a call, and the struct that a tensor may name as its own.
pub(in crate::capi) trait StepOptions: AbiStruct {
    /// Coefficients of a step.
    type Rule: Family;

    /// Sets the options whose default is not 0.
    fn set_defaults(&mut self);

    /// The coefficients. An error names the option.
    fn rule(&self) -> Result<Self::Rule>;

    /// The factor on the gradient, before it is rounded.
    fn grad_scale(&self) -> f64;
}

/// Implements [`StepOptions`] for structs whose options are the fields of a struct of `optim`, with that struct's defaults
/// and its check. Lists them in `option_structs`.
macro_rules! step_options {
    ($($options:ident from $parsed:ident { $($field:ident),* } for $rule:ident;)*) => {
        $(impl StepOptions for $options {
            type Rule = $rule;

            fn set_defaults(&mut self) {
                let $parsed { $($field),* } = $parsed::default();
                *self = $options { $($field,)* ..*self };
            }

            fn rule(&self) -> Result<$rule> {
                abi_struct::zero("options.reserved", self.reserved)?;
                abi_struct::initialised::<Self>("options.grad_scale", self.grad_scale == 0.0)?;
                let options = parsed!($parsed from self { $($field),* });
                options.rule().map_err(|error| error.within("options."))
            }

            fn grad_scale(&self) -> f64 {
                self.grad_scale
            }
        })*

        /// The structs above, for the list of all.
        pub(in crate::capi) fn option_structs() -> Vec<CStruct> {
            vec![$(CStruct::of::<$options>(),)*]
        }
    };
}
pub(in crate::capi) use step_options;

/// The calls of an optimizer, with the text about its step. The tool that writes the headers expands the text between the
/// braces, and puts each call of another header behind Adam's call of its kind.
macro_rules! optimizer_calls {
    ($(#[$about:meta])* $options:ident: $step:ident, $check:ident, $recorded_step:ident, $begin_round:ident) => {
        $(#[$about])*
        ///
        /// # Safety
        /// As `spw_adam_step`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $step(
            options: In<$options>,
            tensors: In<spw_tensor>,
            count: u64,
            stats_out: Out<spw_step_stats>,
        ) -> spw_status {
            // SAFETY: the caller meets the callee's requirements.
            guard_step(|| unsafe { table::step(options, tensors, count, stats_out) })
        }

        /// Checks the arguments of the step, and changes nothing: fails as the step would, with the same message. See
        /// `spw_adam_check`.
        ///
        /// # Safety
        /// As `spw_adam_step`; the spans are not accessed.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $check(
            options: In<$options>,
            tensors: In<spw_tensor>,
            count: u64,
        ) -> spw_status {
            // SAFETY: the caller meets the callee's requirements.
            guard(|| unsafe { table::check(options, tensors, count) })
        }

        /// Does the step of these options and records it, as `spw_undo_adam_step`.
        ///
        /// # Safety
        /// As `spw_adam_step`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $recorded_step(
            undo: Option<&mut spw_undo>,
            options: In<$options>,
            tensors: In<spw_tensor>,
            count: u64,
            stats_out: Out<spw_step_stats>,
        ) -> spw_status {
            // SAFETY: the caller meets the callee's requirements.
            guard(|| unsafe { undo::record(undo, options, tensors, count, stats_out) })
        }

        /// Opens a round of steps with these options, as `spw_spec_begin_adam`.
        #[unsafe(no_mangle)]
        pub extern "C" fn $begin_round(
            spec: Option<&spw_spec>,
            options: In<$options>,
            max_norm: f64,
        ) -> spw_status {
            guard(|| engine::begin(spec, options, max_norm))
        }
    };
}
pub(in crate::capi) use optimizer_calls;

/// The coefficients of options.
pub(in crate::capi) fn rule<O: StepOptions>(options: In<O>) -> Result<O::Rule> {
    options.read("options")?.rule()
}

/// [`rule`] of the options that a tensor names as its own.
///
/// # Safety
/// `options` is NULL, which is an error, or points to a struct of `struct_size` bytes.
pub(in crate::capi) unsafe fn own_rule<O: StepOptions>(options: *const c_void) -> Result<O::Rule> {
    // SAFETY: the caller's promise.
    rule(unsafe { In::<O>::new(options.cast()) })
}

/// Steps the tensors of a call, and writes the statistics if the caller wants them.
///
/// # Safety
/// `options` and `stats_out` are NULL or point to structs of `struct_size` bytes, `tensors` to `count` tensors. No other
/// code uses their spans during the call.
pub(in crate::capi) unsafe fn step<O: StepOptions>(
    options: In<O>,
    tensors: In<spw_tensor>,
    count: u64,
    stats_out: Out<spw_step_stats>,
) -> Result<()> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        stats_out.check("stats_out")?;
        let step = |jobs: &mut [Job<'_, O::Rule>]| optim::step(jobs, !stats_out.is_null());
        let seen = with_jobs(tensors, count, &rule(options)?, |own| own_rule::<O>(own), step)?;
        tensor::write_stats(seen, stats_out)
    }
}

/// Fails as [`step`] would, and changes nothing.
///
/// # Safety
/// As [`step`].
pub(in crate::capi) unsafe fn check<O: StepOptions>(
    options: In<O>,
    tensors: In<spw_tensor>,
    count: u64,
) -> Result<()> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        let known = |_: &mut [Job<'_, O::Rule>]| optim::kernel().map(drop);
        with_jobs(tensors, count, &rule(options)?, |own| own_rule::<O>(own), known)
    }
}

/// Calls `work` with the tensors of a call as jobs. `own` makes coefficients from a tensor's own options. The list lasts
/// for the call only, so it costs no allocation. Tensors of no elements are left out.
///
/// # Safety
/// As [`step`].
pub(in crate::capi) unsafe fn with_jobs<R: Optimizer, T>(
    tensors: In<spw_tensor>,
    count: u64,
    optimizer: &R,
    own: impl Fn(*const c_void) -> Result<R>,
    work: impl FnOnce(&mut [Job<'_, R>]) -> Result<T>,
) -> Result<T> {
    bump::with(|bump| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let raw = tensors.all_in(bump, count, "tensors")?;
            let mut jobs = bump::with_capacity(bump, "listing the tensors", raw.len())?;
            make_jobs(bump, raw, optimizer, own, |_, job| jobs.push(job))?;
            work(&mut jobs)
        }
    })
}

/// As [`with_jobs`], for longer than the call.
///
/// # Safety
/// `tensors` points to `count` tensors. Until the result is dropped, any thread may use their spans, and no other code
/// uses them.
pub(in crate::capi) unsafe fn lent<R: Optimizer>(
    tensors: In<spw_tensor>,
    count: u64,
    optimizer: &R,
    own: impl Fn(*const c_void) -> Result<R>,
) -> Result<Lent<R>> {
    // SAFETY: the caller meets the callee's requirements.
    unsafe { lent_if(|_| Ok(()), tensors, count, optimizer, own) }
}

/// Rejects param_low and 8-bit moments.
pub(in crate::capi) fn whole_states(tensors: &[spw_tensor]) -> Result<()> {
    no_low_bits(tensors)?;
    no_codes(tensors)
}

/// As [`lent`], of tensors that `check` accepts.
///
/// # Safety
/// As [`lent`].
pub(in crate::capi) unsafe fn lent_if<R: Optimizer>(
    check: impl Fn(&[spw_tensor]) -> Result<()>,
    tensors: In<spw_tensor>,
    count: u64,
    optimizer: &R,
    own: impl Fn(*const c_void) -> Result<R>,
) -> Result<Lent<R>> {
    bump::with(|bump| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let raw = tensors.all_in(bump, count, "tensors")?;
            check(raw)?;
            let mut lent = Lent::with_capacity(raw.len())?;
            make_jobs(bump, raw, optimizer, own, |index, mut job| {
                lent.push(index, LentTensor::new(&mut job.tensor), job.optimizer);
            })?;
            Ok(lent)
        }
    })
}

/// # Safety
/// As [`step`], for `'a`.
unsafe fn make_jobs<'a, R: Optimizer>(
    bump: &Bump,
    raw: &[spw_tensor],
    optimizer: &R,
    own: impl Fn(*const c_void) -> Result<R>,
    mut push: impl FnMut(usize, Job<'a, R>),
) -> Result<()> {
    overlap::check_in(bump, raw)?;
    // Many tensors have the options of the tensor before them.
    let (mut known, mut of) = (*optimizer, ptr::null());
    for (index, raw) in raw.iter().enumerate().filter(|(_, raw)| raw.n > 0) {
        if raw.options != of {
            let own = if raw.options.is_null() { Ok(*optimizer) } else { own(raw.options) };
            (known, of) = (own.map_err(|error| at(index, error))?, raw.options);
        }
        let job = || {
            // SAFETY: the spans do not overlap, and the caller lends them for 'a.
            let mut tensor = unsafe { tensor_of(raw) }?;
            tensor.require_states(R::EXP_AVG, R::EXP_AVG_SQ)?;
            known.check_types(&tensor)?;
            Ok(Job { optimizer: known, tensor })
        };
        push(index, job().map_err(|error| at(index, error))?);
    }
    Ok(())
}
