//! The tensors of a tiered update as parts of its subgroups. Each tensor is checked and converted here, once.

use std::ffi::c_void;

use crate::capi::deepspeed::ids::options_of_id;
use crate::capi::optim::adam::spw_adam_options;
use crate::capi::optim::overlap;
use crate::capi::optim::tensor::{self, at, parse_copy_dtype, parse_dtype, spw_dtype, spw_tensor};
use crate::capi::prelude::*;
use crate::dtype::{Dtype, Floats, bf16};
use crate::kernel::AdamRule;
use crate::offload::swap::Layout;
use crate::offload::swap::adam::{Part, Parts};
use crate::offload::swap::encoding::{Encoding, Master, Moments};
use crate::optim::deepspeed::AdamState;

/// The coefficients of an update beside the caller.
pub(in crate::capi) enum Rules {
    /// No update was begun.
    None,
    /// Of all tensors without options of their own.
    One(PartRule),
    /// Of each subgroup, from an id of DeepSpeed, and the state of the id after the step.
    Each { rules: Vec<AdamRule>, id: i32, state: AdamState },
}

/// Coefficients, and the number of a tensor's first element in its parameter.
#[derive(Clone, Copy)]
pub(in crate::capi) struct PartRule {
    rule: AdamRule,
    number: u64,
}

/// The coefficients of a call.
pub(in crate::capi) fn of_call(options: In<spw_adam_options>) -> Result<PartRule> {
    let raw = options.read("options")?;
    Ok(PartRule { rule: raw.rule_of_part()?, number: raw.rounding_first })
}

/// The coefficients of each tensor: its own options, or those of the call.
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes, as do the options of each tensor.
pub(in crate::capi) unsafe fn rules_of(
    options: In<spw_adam_options>,
) -> Result<impl Fn(usize, &spw_tensor) -> Result<PartRule>> {
    let shared = of_call(options)?;
    // SAFETY: the caller meets the callee's requirements.
    Ok(move |_, raw: &spw_tensor| unsafe { own_rule(raw, shared) })
}

/// # Safety
/// The options of the tensor are NULL, or a struct of `struct_size` bytes.
unsafe fn own_rule(raw: &spw_tensor, shared: PartRule) -> Result<PartRule> {
    match raw.options.is_null() {
        true => Ok(shared),
        // SAFETY: the caller's promise.
        false => of_call(unsafe { In::new(raw.options.cast()) }),
    }
}

/// The coefficients of a subgroup's tensor, from an id of DeepSpeed. Errors: the tensor has options of its own.
pub(in crate::capi) fn rule_of_id(rules: &[AdamRule], subgroup: usize, raw: &spw_tensor) -> Result<PartRule> {
    match raw.options.is_null() {
        true => Ok(PartRule { rule: rules[subgroup], number: 0 }),
        false => Err(options_of_id()),
    }
}

/// One tensor for each subgroup, with the coefficients that `rule` returns.
///
/// # Safety
/// `tensors` points to `count` structs, `struct_size` bytes apart. Their spans are lent for `'a`.
pub(in crate::capi) unsafe fn whole<'a>(
    layout: &Layout,
    tensors: In<spw_tensor>,
    count: u64,
    rule: impl Fn(usize, &spw_tensor) -> Result<PartRule>,
) -> Result<Parts<'a>> {
    if count != layout.len() as u64 {
        let reason = format!("is {count}, but there are {} subgroups", layout.len());
        return Err(Error::invalid("count", reason));
    }
    let raw = read(layout, tensors, count)?;
    for (index, raw) in raw.iter().enumerate() {
        let elements = layout.elements(index)? as u64;
        if raw.n != elements {
            let reason = format!("is {}, but the subgroup has {elements} elements", raw.n);
            return Err(at(index, Error::invalid("n", reason)));
        }
    }
    let f32 = spw_dtype::SPW_DTYPE_F32 as u32;
    if let Some(index) = raw.iter().position(|raw| raw.n > 0 && raw.copy_dtype == f32) {
        let reason = "must be of 16 bits; spw_swap_adam_step_parts also takes SPW_DTYPE_F32";
        return Err(at(index, Error::invalid("copy_dtype", reason)));
    }
    check(&raw, layout.usual())?;
    let mut parts = Parts::new(layout.len())?;
    for (index, raw) in raw.iter().enumerate() {
        if raw.n > 0 {
            // SAFETY: `check` accepted the tensors; the caller lends their spans for `'a`.
            let part = rule(index, raw).and_then(|rule| unsafe { part_of(raw, layout.usual(), 0, rule) });
            parts.push(index, part.map_err(|error| at(index, error))?);
        }
    }
    Ok(parts)
}

/// Each tensor as a part of subgroup `subgroups[i]`, from element `firsts[i]` on.
///
/// # Safety
/// As [`whole`]; `subgroups` and `firsts` point to `count` numbers.
pub(in crate::capi) unsafe fn parts<'a>(
    layout: &Layout,
    tensors: In<spw_tensor>,
    [subgroups, firsts]: [In<u64>; 2],
    count: u64,
    rule: impl Fn(usize, &spw_tensor) -> Result<PartRule>,
) -> Result<Parts<'a>> {
    let (raw, subgroups, firsts) =
        (read(layout, tensors, count)?, subgroups.array(count, "subgroups")?, firsts.array(count, "firsts")?);
    if layout.usual().master == Master::Split {
        let reason = "the masters of this update are split; call spw_swap_adam_step";
        return Err(Error::Unsupported(reason.to_string()));
    }
    check(&raw, layout.usual())?;
    let mut parts = Parts::new(layout.len())?;
    let places = subgroups.iter().copied().zip(firsts.iter().copied());
    // SAFETY: `check` accepted the tensors; the caller lends their spans for `'a`.
    unsafe { convert(layout, &raw, places, rule, |subgroup, part| parts.push(subgroup, part)) }?;
    Ok(parts)
}

/// The tensors of one subgroup as its parts, from the elements `firsts[i]` on; NULL: one tensor for all elements.
/// `speculative`: the weights of the step before are needed afterwards.
///
/// # Safety
/// As [`whole`]; `firsts` is NULL or points to `count` numbers.
pub(in crate::capi) unsafe fn of_subgroup<'a>(
    layout: &Layout,
    subgroup: usize,
    tensors: In<spw_tensor>,
    firsts: In<u64>,
    count: u64,
    rules: &Rules,
    speculative: bool,
) -> Result<Vec<Part<'a>>> {
    let (raw, elements) = (read(layout, tensors, count)?, layout.elements(subgroup)? as u64);
    let split = layout.usual().master == Master::Split;
    let needs_whole = if split { elements > 0 } else { firsts.is_null() && !raw.is_empty() };
    let firsts =
        if firsts.is_null() { &[0; 1][..raw.len().min(1)] } else { firsts.array(count, "firsts")? };
    if needs_whole && !(matches!(&raw[..], [raw] if raw.n == elements) && *firsts == [0]) {
        let why = if split { "the master weights are split" } else { "firsts is NULL" };
        return Err(Error::invalid("count", format!("must be 1, for a tensor of all elements: {why}")));
    }
    check(&raw, layout.usual())?;
    let keeps = layout.usual().master != Master::Full && speculative;
    if keeps && raw.iter().any(|raw| raw.n > 0 && raw.param.is_null()) {
        let reason =
            "must name the weights of the step before, apart from param_copy: the update is speculative";
        return Err(at(0, Error::invalid("param", reason)));
    }
    let mut parts = Vec::new();
    let places = firsts.iter().map(|first| (subgroup as u64, *first));
    let rule = |_, raw: &spw_tensor| match rules {
        Rules::None => Err(Error::Internal("an update without coefficients".to_string())),
        // SAFETY: the caller lends the options for the call.
        Rules::One(rule) => unsafe { own_rule(raw, *rule) },
        Rules::Each { rules, .. } => rule_of_id(rules, subgroup, raw),
    };
    // SAFETY: `check` accepted the tensors; the caller lends their spans for `'a`.
    unsafe { convert(layout, &raw, places, rule, |_, part| parts.push(part)) }?;
    Ok(parts)
}

/// Passes each tensor to `push` as a part of its subgroup. `places`: subgroup and first element of each tensor.
///
/// # Safety
/// [`check`] accepted the tensors, and the caller lends their spans for `'a`.
unsafe fn convert<'a>(
    layout: &Layout,
    raw: &[spw_tensor],
    places: impl Iterator<Item = (u64, u64)>,
    rule: impl Fn(usize, &spw_tensor) -> Result<PartRule>,
    mut push: impl FnMut(usize, Part<'a>),
) -> Result<()> {
    let mut end = (0, 0);
    for (index, (raw, (subgroup, first))) in raw.iter().zip(places).enumerate() {
        let (subgroup, after) = place(layout, index, raw.n, subgroup, first)?;
        if (subgroup, first) < end {
            let reason =
                "must not be below the end of the part before: sort the parts by subgroup and element";
            return Err(Error::invalid(format!("firsts[{index}]"), reason));
        }
        end = (subgroup, after);
        if raw.n > 0 {
            // SAFETY: the caller meets the callee's requirements.
            let part = rule(index, raw)
                .and_then(|rule| unsafe { part_of(raw, layout.usual(), first as usize, rule) });
            push(subgroup, part.map_err(|error| at(index, error))?);
        }
    }
    Ok(())
}

/// The subgroup of a part, and the element behind the part.
fn place(layout: &Layout, index: usize, n: u64, subgroup: u64, first: u64) -> Result<(usize, u64)> {
    let Some(subgroup) = usize::try_from(subgroup).ok().filter(|subgroup| *subgroup < layout.len()) else {
        let reason = format!("must be less than the {} subgroups", layout.len());
        return Err(Error::invalid(format!("subgroups[{index}]"), reason));
    };
    let elements = layout.elements(subgroup)?;
    match first.checked_add(n).filter(|after| *after <= elements as u64) {
        Some(after) => Ok((subgroup, after)),
        None => {
            let reason =
                format!("plus tensors[{index}].n exceeds the {elements} elements of subgroup {subgroup}");
            Err(Error::invalid(format!("firsts[{index}]"), reason))
        }
    }
}

/// Copies the tensors of a call. Rejects param_low, and low_sums without low bits on the tier.
fn read(layout: &Layout, tensors: In<spw_tensor>, count: u64) -> Result<Vec<spw_tensor>> {
    if layout.usual().master != Master::Low {
        return tensor::read_all(tensors, count);
    }
    let raw = tensor::read_split(tensors, count)?;
    match raw.iter().position(|raw| raw.n > 0 && !raw.param_low.is_null()) {
        Some(index) => {
            Err(at(index, Error::invalid("param_low", "must be NULL: the tier stores the low bits")))
        }
        None => Ok(raw),
    }
}

/// Rejects tensors that are no parts, before any is converted. With a split master, and with low bits, a tensor names the
/// weights of the step before.
fn check(raw: &[spw_tensor], usual: Encoding) -> Result<()> {
    for (index, raw) in raw.iter().enumerate().filter(|(_, raw)| raw.n > 0) {
        check_fields(raw, usual).map_err(|error| at(index, error))?;
    }
    tensor::no_shadows(raw)?;
    overlap::check(raw)
}

fn check_fields(raw: &spw_tensor, usual: Encoding) -> Result<()> {
    let split = usual.master == Master::Split;
    let [f32, bf16, codes] =
        [spw_dtype::SPW_DTYPE_F32, spw_dtype::SPW_DTYPE_BF16, spw_dtype::SPW_DTYPE_CODES]
            .map(|dtype| dtype as u32);
    let low = usual.master == Master::Low;
    let weights = low || split && raw.param_dtype == bf16;
    if low {
        check_outer(raw, [f32, bf16])?;
    } else if raw.param_dtype != f32 && !weights {
        return Err(Error::invalid("param_dtype", "must be SPW_DTYPE_F32"));
    }
    let (moments, name) = match usual.moments {
        Moments::F32 => (f32, "SPW_DTYPE_F32"),
        Moments::Bf16 => (bf16, "SPW_DTYPE_BF16"),
        Moments::Codes => (codes, "SPW_DTYPE_CODES"),
    };
    if raw.state_dtype != moments {
        return Err(Error::invalid("state_dtype", format!("must be {name}, as the update was opened")));
    }
    if split && (raw.copy_dtype != bf16 || raw.param_copy.is_null()) {
        let reason = "must not be NULL, and copy_dtype must be SPW_DTYPE_BF16: the master weights are split";
        return Err(Error::invalid("param_copy", reason));
    }
    let scales = [raw.exp_avg_scale, raw.exp_avg_sq_scale];
    if !raw.param.is_null() && !weights
        || !raw.exp_avg.is_null()
        || !raw.exp_avg_sq.is_null()
        || scales.iter().any(|scale| !scale.is_null())
    {
        let reason = "must be NULL, exp_avg, exp_avg_sq and their scales too: the tier stores them";
        return Err(Error::invalid("param", reason));
    }
    tensor::check_copy(raw)
}

/// Checks a tensor whose parameter the caller has, beside low bits.
fn check_outer(raw: &spw_tensor, [f32, bf16]: [u32; 2]) -> Result<()> {
    if raw.param_copy.is_null() || ![f32, bf16].contains(&raw.copy_dtype) {
        let reason = "must not be NULL, and copy_dtype must be SPW_DTYPE_BF16 or SPW_DTYPE_F32: the tier stores low bits";
        return Err(Error::invalid("param_copy", reason));
    }
    if raw.param_dtype != raw.copy_dtype {
        return Err(Error::invalid("param_dtype", "must be copy_dtype: the tier stores low bits"));
    }
    if raw.copy_dtype == f32 && !raw.low_sums.is_null() {
        return Err(Error::invalid("low_sums", "is set, but the parameter is f32, which has no low bits"));
    }
    Ok(())
}

/// A tensor as a part.
///
/// # Safety
/// [`check`] accepted the tensor, and the caller lends the spans for `'a`.
unsafe fn part_of<'a>(
    raw: &spw_tensor,
    usual: Encoding,
    first: usize,
    PartRule { rule, number }: PartRule,
) -> Result<Part<'a>> {
    if number.checked_add(raw.n).is_none() {
        return Err(Error::invalid("options.rounding_first", "plus n exceeds 2^64"));
    }
    let copy_dtype = parse_copy_dtype(raw.copy_dtype, "copy_dtype")?;
    // SAFETY: the caller meets the callees' requirements.
    let part = unsafe {
        Part {
            first,
            grad: tensor::span(raw.grad, parse_dtype(raw.grad_dtype, "grad_dtype")?, raw.n, "grad")?,
            copy: tensor::optional_span(raw.param_copy, copy_dtype, raw.n, "param_copy")?,
            weights: outer_weights(raw)?,
            sums: tensor::low_sums(raw)?,
            rule,
            number,
        }
    };
    part.check(usual)?;
    Ok(part)
}

/// The weights that a tensor names; `None` for NULL.
///
/// # Safety
/// As [`part_of`].
unsafe fn outer_weights<'a>(raw: &spw_tensor) -> Result<Option<Floats<'a>>> {
    let dtype = parse_dtype(raw.param_dtype, "param_dtype")?;
    match raw.param.is_null() {
        true => Ok(None),
        // SAFETY: the caller meets the callee's requirements.
        false => unsafe { tensor::span(raw.param, dtype, raw.n, "param") }.map(Some),
    }
}

/// The caller's bf16 weights; `None` for NULL.
///
/// # Safety
/// `from` is NULL or points to `n` bf16 numbers, which no code writes during `'a`.
pub(in crate::capi) unsafe fn weights_of<'a>(
    from: *const c_void,
    n: u64,
    argument: &'static str,
) -> Result<Option<&'a [bf16]>> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller meets the callee's requirements.
    match unsafe { tensor::span(from, Dtype::Bf16, n, argument) }? {
        Floats::Bf16(weights) => Ok(Some(weights)),
        _ => Ok(None),
    }
}
