//! What the arrays of all backends have in common: their check, and a step on the CPU.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::kernel::{AdamRule, States, Tensor};
use crate::optim;
use crate::optim::parallel::Job;
use crate::sys::shared_slice::SharedSlice;
use spillway_planner::interleave::Shape;

/// Checks that there is a subgroup for each of `shape`, and that all have their sizes. `misfit` names the array of a
/// subgroup of this size that has another type or length than needed.
pub(super) fn check<S>(
    shape: &Shape,
    subgroups: &[S],
    misfit: impl Fn(&S, u64) -> Option<&'static str>,
) -> Result<()> {
    if subgroups.len() != shape.count() {
        let reason = format!("there are {}, but the shape has {}", subgroups.len(), shape.count());
        return Err(Error::invalid("subgroups", reason));
    }
    for (index, (subgroup, size)) in subgroups.iter().zip(&shape.sizes).enumerate() {
        if let Some(what) = misfit(subgroup, *size) {
            let reason = "has another type or length than needed";
            return Err(Error::invalid(format!("subgroups[{index}].{what}"), reason));
        }
    }
    Ok(())
}

/// The coefficients of a subgroup. A single entry applies to all subgroups.
pub(super) fn rule_of(rules: &[AdamRule], subgroup: usize) -> Result<AdamRule> {
    let rule = rules.get(subgroup).or(rules.first()).copied();
    rule.ok_or_else(|| Error::invalid("rules", "no optimizer options were passed"))
}

/// Updates the first `len` elements of first moment, second moment and parameter, on the CPU.
pub(super) fn step(
    rule: AdamRule,
    len: usize,
    [m, v, p]: [&SharedSlice; 3],
    grad: &SharedSlice,
    copy: Option<&SharedSlice>,
) -> Result<()> {
    let (mut m, mut v, mut p, grad) = (m.write()?, v.write()?, p.write()?, grad.read()?);
    let mut copy = copy.map(SharedSlice::write).transpose()?;
    let states = States {
        param: p.floats().split_at_mut(len).0,
        exp_avg: Some(m.floats().split_at_mut(len).0),
        exp_avg_sq: Some(v.floats().split_at_mut(len).0),
    };
    let copy = copy.as_mut().map(|copy| copy.floats().split_at_mut(len).0);
    let tensor = Tensor::new(states, grad.floats().split_at(len).0, copy)?;
    optim::step(&mut [Job { optimizer: rule, tensor }], false).map(drop)
}
