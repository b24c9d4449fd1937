//! The log of a step that no formula inverts: the old values themselves, of split masters and 8-bit moments.
//!
//! Invariants:
//! - A log has room for 13 bytes of each element; the values of no tensor take more.
//! - The values are those of the parameter, the moments, the low bits with their sums, and the codes with their scales.
//! - What other code has written to a copy that counts is taken before the values are kept. So a rollback keeps it.
#![forbid(unsafe_code)]

use zerocopy::IntoBytes;

use super::coded::Codes;
use super::log::{HEADER, VALUES, log_has_values};
use super::tensor::{Tensor, log_too_small};
use crate::dtype::FloatsMut;
use crate::error::Result;

/// Copies the values of a chunk to its log, which it takes from the tensor. Fails, and changes nothing, if the log is too
/// small. Does nothing without a log.
pub fn keep(tensor: &mut Tensor<'_>) -> Result<()> {
    let Some(log) = tensor.take_log() else { return Ok(()) };
    let used = walk(tensor, log, HEADER, |value, log| log.copy_from_slice(value))?;
    let header = log.first_chunk_mut::<HEADER>().ok_or_else(log_too_small)?;
    *header = (used as u64 | VALUES).to_ne_bytes();
    Ok(())
}

/// Copies the values of a chunk from its log, which it takes from the tensor. False if the log holds no values.
pub fn restore(tensor: &mut Tensor<'_>) -> Result<bool> {
    let Some(log) = tensor.take_log() else { return Ok(false) };
    if !log_has_values(log) {
        return Ok(false);
    }
    walk(tensor, log, HEADER, |value, log| value.copy_from_slice(log))?;
    Ok(true)
}

/// Calls `work` with the bytes of each span of values and their place in the log; returns where the last one ends.
fn walk(
    tensor: &mut Tensor<'_>,
    log: &mut [u8],
    mut at: usize,
    work: impl Fn(&mut [u8], &mut [u8]),
) -> Result<usize> {
    let mut next = |value: &mut [u8]| {
        let end = at + value.len();
        let place = log.get_mut(at..end).ok_or_else(log_too_small)?;
        work(value, place);
        at = end;
        Ok(())
    };
    let states = &mut tensor.states;
    for floats in [Some(&mut states.param), states.exp_avg.as_mut(), states.exp_avg_sq.as_mut()] {
        floats.map(FloatsMut::bytes_mut).map_or(Ok(()), &mut next)?;
    }
    for moment in tensor.codes_mut().into_iter().flatten().flatten() {
        let Codes { codes, scales } = moment;
        next(codes)?;
        next(scales.as_mut_bytes())?;
    }
    let (low, sums) = tensor.low_mut();
    next(low.as_mut_bytes())?;
    next(sums.as_mut_bytes())?;
    Ok(at)
}
