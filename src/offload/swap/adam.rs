//! The Adam step of a tiered update: what is stepped with what, and the sum of squares of the whole step.
//!
//! Invariants:
//! - Everything about the parts that could fail is checked before the first subgroup is stepped.
//! - The sums of subgroups are added in the order in which one call over all of them adds those of its tensors.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::encoding::{Encoding, Master, Moments};
use super::moment::{MomentMut, Rest};
use super::{SubgroupState, Swap, Update};
use crate::dtype::{Dtype, Floats, FloatsMut, bf16};
use crate::error::{Error, Result};
use crate::kernel::squares::TILE;
use crate::kernel::{AdamRule, Arithmetic, BLOCK, CHUNK, Dtypes, States, Tensor, supports_split};
use crate::optim::parallel::{self, Job};
use crate::optim::{self, StepStats};
use crate::sys::try_vec;

/// Elements of one subgroup that are stepped with one gradient.
#[derive(Debug)]
pub struct Part<'a> {
    /// First element in the subgroup.
    pub first: usize,
    /// The gradient.
    pub grad: Floats<'a>,
    /// Receives the new param, in this type. With low bits: the new parameter, of the caller's type.
    pub copy: Option<FloatsMut<'a>>,
    /// The weights that the step before published. `None`: `copy` holds them.
    pub weights: Option<Floats<'a>>,
    /// With low bits: the sums of the parameter's tiles, as `Tensor::with_low_sums` has them. With `weights` they are only
    /// written.
    pub sums: Option<&'a mut [u64]>,
    /// Coefficients.
    pub rule: AdamRule,
    /// Number of the first element in its parameter. Stochastic rounding depends on it.
    pub number: u64,
}

impl Part<'_> {
    /// Errors: no kernel exists for the types, with states in this encoding; 8-bit moments of the part begin within a
    /// block; tiles of the part are not those of its parameter.
    pub fn check(&self, Encoding { master, moments }: Encoding) -> Result<()> {
        let copy = self.copy.as_ref().map(FloatsMut::dtype).filter(|dtype| *dtype != Dtype::F32);
        let (state, grad) = (moments.stepped_as(), self.grad.dtype());
        // The step of a split master joins it to f32 in registers.
        let is_split = master == Master::Low && copy.is_some();
        let dtypes = Dtypes { param: Dtype::F32, state, grad, copy: copy.filter(|_| master != Master::Low) };
        dtypes.check()?;
        if is_split && !supports_split(Dtypes { param: Dtype::Bf16, ..dtypes }) {
            let reason =
                format!("is {}, but must be f32 or bf16 for a bf16 param with low bits", grad.name());
            return Err(Error::invalid("grad", reason));
        }
        if self.sums.is_some() && !self.number.is_multiple_of(TILE as u64) {
            let reason = format!("is {}, but must be a multiple of {TILE} with low_sums", self.number);
            return Err(Error::invalid("options.rounding_first", reason));
        }
        if moments != Moments::Codes {
            return Ok(self.rule.check_rounding(dtypes)?);
        }
        if !self.first.is_multiple_of(BLOCK) {
            let reason = format!(
                "is {}, but 8-bit moments have one scale for {BLOCK} elements; begin each part at a multiple of {BLOCK}",
                self.first
            );
            return Err(Error::invalid("first", reason));
        }
        if self.rule.stochastic.is_some() && !self.number.is_multiple_of(BLOCK as u64) {
            let reason = format!("is {}, but must be a multiple of {BLOCK} with 8-bit moments", self.number);
            return Err(Error::invalid("options.rounding_first", reason));
        }
        Ok(())
    }

    fn range(&self) -> Range<usize> {
        self.first..self.first + self.grad.len()
    }

    /// Makes the step begin with `weights`, in `copy`. All low bits count then.
    fn take_weights(&mut self) {
        match (self.weights, &mut self.copy) {
            (Some(Floats::Bf16(from)), Some(FloatsMut::Bf16(to))) => to.copy_from_slice(from),
            (Some(Floats::F32(from)), Some(FloatsMut::F32(to))) => to.copy_from_slice(from),
            _ => return,
        }
        if let Some(sums) = &mut self.sums {
            sums.fill(0);
        }
    }

    /// The element before which the part is cut: random bits change at multiples of 2^32 elements of the parameter, and no
    /// chunk crosses one.
    fn cut(&self) -> usize {
        let aligned = self.rule.stochastic.is_none() || self.number.is_multiple_of(CHUNK as u64);
        let left = (1 << 32) - self.number % (1 << 32);
        if aligned { self.grad.len() } else { self.grad.len().min(left as usize) }
    }
}

/// The parts of each subgroup, sorted by their first element.
#[derive(Debug)]
pub struct Parts<'a>(Vec<Vec<Part<'a>>>);

impl<'a> Parts<'a> {
    /// No parts yet, for `subgroups` subgroups.
    pub fn new(subgroups: usize) -> Result<Parts<'a>> {
        Ok(Parts(try_vec::from_fn("listing the subgroups", subgroups, |_| Vec::new())?))
    }

    /// Adds a part of `subgroup`. Its elements are behind those of the part before. [`Part::check`] accepted it.
    pub fn push(&mut self, subgroup: usize, part: Part<'a>) {
        self.0[subgroup].push(part);
    }
}

/// Called with a subgroup and its new param after each subgroup's step. An error ends the update.
pub type Stepped<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Result<()>;

impl Swap {
    /// Does one Adam step of all parts. Elements without a part do not change. `squares`: sums the squares of the scaled
    /// gradients; the bits are those of one call over all subgroups if each has one part.
    pub fn adam_step(&mut self, parts: Parts<'_>, squares: bool, stepped: Stepped<'_>) -> Result<StepStats> {
        let mut update = AdamUpdate::new(parts, squares, stepped)?;
        self.update(&mut update)?;
        Ok(update.stats())
    }
}

/// One Adam step of the subgroups.
pub(super) struct AdamUpdate<'a, 's> {
    parts: Parts<'a>,
    squares: bool,
    /// Sum of squares of each subgroup with a part.
    sums: Vec<Option<f64>>,
    /// Replaces the factor of the gradients.
    factor: Option<f32>,
    /// The copies receive param as it is.
    restores: bool,
    stepped: Stepped<'s>,
}

impl<'a, 's> AdamUpdate<'a, 's> {
    /// A step of these parts.
    pub(super) fn new(parts: Parts<'a>, squares: bool, stepped: Stepped<'s>) -> Result<AdamUpdate<'a, 's>> {
        let sums = try_vec::from_fn("listing the subgroups", parts.0.len(), |_| None)?;
        Ok(AdamUpdate { parts, squares, sums, factor: None, restores: false, stepped })
    }

    /// Sets the parts of a subgroup.
    pub(super) fn put(&mut self, subgroup: usize, parts: Vec<Part<'a>>) {
        self.parts.0[subgroup] = parts;
    }

    /// True if the step of a subgroup writes copies.
    pub(super) fn publishes(&self, subgroup: usize) -> bool {
        self.parts.0[subgroup].iter().any(|part| part.copy.is_some())
    }

    /// From here on gradients have this factor.
    pub(super) fn redo(&mut self, factor: f32) {
        self.factor = Some(factor);
    }

    /// From here on copies receive param, and nothing is stepped.
    pub(super) fn restore(&mut self) {
        self.restores = true;
    }

    /// Statistics of the steps.
    pub(super) fn stats(&self) -> StepStats {
        let sums: Vec<f64> = self.sums.iter().copied().flatten().collect();
        StepStats::of(parallel::sum_of(&sums))
    }
}

impl Update for AdamUpdate<'_, '_> {
    fn weights(&self, subgroup: usize) -> &[bf16] {
        let part = self.parts.0[subgroup].first();
        match part.map(|part| (part.weights, part.copy.as_ref().map(FloatsMut::shared))) {
            Some((Some(Floats::Bf16(weights)), _)) => weights,
            Some((None, Some(Floats::Bf16(copy)))) => copy,
            _ => &[],
        }
    }

    fn keeps_state(&self) -> bool {
        self.restores
    }

    fn step(&mut self, subgroup: usize, mut state: SubgroupState<'_>) -> Result<()> {
        let parts = &mut self.parts.0[subgroup];
        let has_low = !state.low.is_empty();
        if has_low {
            parts.iter_mut().for_each(Part::take_weights);
        }
        // With low bits the copies have now what was before the step.
        if !(parts.is_empty() || self.restores && has_low) {
            let mut jobs = jobs_of(parts, &mut state)?;
            if self.restores {
                parallel::publish(&mut jobs)?;
            } else {
                if let Some(factor) = self.factor {
                    jobs.iter_mut().for_each(|job| job.optimizer = job.optimizer.with_grad_scale(factor));
                }
                self.sums[subgroup] = Some(optim::step(&mut jobs, self.squares)?.sum_squares);
            }
        }
        for part in parts.iter_mut().filter(|_| !has_low) {
            let range = part.range();
            if let Some(FloatsMut::F32(copy)) = &mut part.copy {
                copy.copy_from_slice(&state.param[range]);
            }
        }
        (self.stepped)(subgroup, state.param)
    }
}

/// The parts of one subgroup as jobs. They are sorted by their first element.
fn jobs_of<'j>(
    parts: &'j mut [Part<'_>],
    state: &'j mut SubgroupState<'_>,
) -> Result<Vec<Job<'j, AdamRule>>> {
    let mut jobs = try_vec::with_capacity("listing the parts of a subgroup", 2 * parts.len())?;
    let (mut rest_param, mut rest_low) = (&mut *state.param, &mut *state.low);
    let has_low = !rest_low.is_empty();
    let mut rest = [Rest::of(state.exp_avg.reborrow()), Rest::of(state.exp_avg_sq.reborrow())];
    let mut at = 0;
    for part in parts {
        let (range, cut, mut grad) = (part.range(), part.cut(), part.grad);
        let mut copy =
            part.copy.as_mut().map(FloatsMut::reborrow).filter(|copy| has_low || copy.dtype() != Dtype::F32);
        let mut sums = part.sums.as_deref_mut();
        let mut number = part.number;
        for elements in [cut, range.len() - cut].into_iter().filter(|elements| *elements > 0) {
            let skipped = range.start.saturating_sub(at);
            let [exp_avg, exp_avg_sq] = rest.map(|rest| rest.part(skipped, elements));
            rest = [exp_avg.1, exp_avg_sq.1];
            let (its_grad, its_copy);
            (its_grad, grad) = grad.split_at(elements);
            (its_copy, copy) = copy.map(|copy| copy.split_at_mut(elements)).unzip();
            let moments = [exp_avg.0, exp_avg_sq.0];
            let tensor = match its_copy {
                Some(param) if has_low => {
                    let (low, its_sums);
                    (low, rest_low) = rest_low.split_at_mut(skipped).1.split_at_mut(elements);
                    (its_sums, sums) = sums.map(|sums| sums.split_at_mut(elements.div_ceil(TILE))).unzip();
                    low_tensor(param, low, its_sums, moments, its_grad)?
                }
                its_copy => {
                    let param;
                    (param, rest_param) = rest_param.split_at_mut(skipped).1.split_at_mut(elements);
                    tensor_of(FloatsMut::F32(param), moments, its_grad, its_copy)?
                }
            };
            jobs.push(Job { optimizer: part.rule, tensor: tensor.numbered(number) });
            number += elements as u64;
            at += skipped + elements;
        }
    }
    Ok(jobs)
}

/// A tensor with these moments.
pub(super) fn tensor_of<'a>(
    param: FloatsMut<'a>,
    moments: [MomentMut<'a>; 2],
    grad: Floats<'a>,
    copy: Option<FloatsMut<'a>>,
) -> Result<Tensor<'a>> {
    with_moments(moments, |[exp_avg, exp_avg_sq]| {
        Ok(Tensor::new(States { param, exp_avg, exp_avg_sq }, grad, copy)?)
    })
}

/// A tensor of a parameter of the caller, which holds its master together with low bits, or is its own master if it is
/// f32.
fn low_tensor<'a>(
    param: FloatsMut<'a>,
    low: &'a mut [u16],
    sums: Option<&'a mut [u64]>,
    moments: [MomentMut<'a>; 2],
    grad: Floats<'a>,
) -> Result<Tensor<'a>> {
    with_moments(moments, |[exp_avg, exp_avg_sq]| {
        let (is_own, states) = (param.dtype() == Dtype::F32, States { param, exp_avg, exp_avg_sq });
        Ok(match sums {
            _ if is_own => Tensor::new(states, grad, None)?,
            None => Tensor::new_split(states, grad, low)?,
            Some(sums) => Tensor::new_split(states, grad, low)?.with_low_sums(sums)?,
        })
    })
}

/// The tensor that `make` returns of the moments that are numbers, with those that are codes.
fn with_moments<'a>(
    moments: [MomentMut<'a>; 2],
    make: impl FnOnce([Option<FloatsMut<'a>>; 2]) -> Result<Tensor<'a>>,
) -> Result<Tensor<'a>> {
    let (mut floats, mut codes) = ([None, None], [None, None]);
    for (place, moment) in moments.into_iter().enumerate() {
        match moment {
            MomentMut::Floats(moment) => floats[place] = Some(moment),
            MomentMut::Codes(_, moment) => codes[place] = Some(moment),
        }
    }
    let has_codes = codes.iter().any(Option::is_some);
    let tensor = make(floats)?;
    Ok(if has_codes { tensor.with_codes(codes)? } else { tensor })
}
