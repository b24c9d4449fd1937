//! How much memory a tiered update takes, said before any of it is taken.
#![forbid(unsafe_code)]

use super::form::{self, Form};
use super::pipeline::LEAST_WORKING;
use crate::error::{Error, Result};
use crate::sys::memory::BASE_PAGE;

/// What fits into a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Bytes of one buffer: the state of the largest subgroup.
    pub buffer_bytes: u64,
    /// Buffers taken.
    pub buffers: usize,
    /// Those of them that keep their subgroup from step to step.
    pub cached: usize,
    /// Bytes of all buffers.
    pub host_bytes: u64,
    /// Bytes of all subgroups' state.
    pub state_bytes: u64,
    /// Bytes read, and as many written, in a step that finds the cache filled.
    pub step_bytes: u64,
}

/// The best use of `host_bytes` for subgroups of so many elements, over `paths` paths: enough working buffers that
/// every path can read and write at once, all others cached. `usual` is the form in which state is on the tier.
pub fn plan(subgroups: &[u64], usual: Form, paths: usize, host_bytes: u64) -> Result<Budget> {
    let too_large = || Error::invalid("subgroups", "together pass 2^64 bytes");
    let mut buffer_bytes = BASE_PAGE as u64;
    let mut state_bytes = 0u64;
    for elements in subgroups {
        let buffer = form::buffer_bytes(usual, *elements).ok_or_else(too_large)?;
        let state = form::stored_bytes(usual, *elements).ok_or_else(too_large)?;
        buffer_bytes = buffer_bytes.max(buffer);
        state_bytes = state_bytes.checked_add(state).ok_or_else(too_large)?;
    }
    let count = subgroups.len();
    let affordable = usize::try_from(host_bytes / buffer_bytes).unwrap_or(usize::MAX).min(count);
    let least = count.min(LEAST_WORKING);
    if affordable < least {
        let reason = format!(
            "is {host_bytes} bytes; {least} buffers of {buffer_bytes} bytes, the state of the largest subgroup, are needed"
        );
        return Err(Error::invalid("host_bytes", reason));
    }
    let working = (2 * paths + 1).max(LEAST_WORKING).min(affordable);
    let cached = if affordable == count { count } else { affordable - working };
    let uncached = (count - cached) as u64;
    Ok(Budget {
        buffer_bytes,
        buffers: affordable,
        cached,
        host_bytes: buffer_bytes * affordable as u64,
        state_bytes,
        step_bytes: if count == 0 {
            0
        } else {
            (u128::from(state_bytes) * u128::from(uncached) / count as u128) as u64
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn sixteen_gigabytes_in_three() {
        let subgroups = vec![10 * 1000 * 1000; 134];
        let budget = plan(&subgroups, Form::Whole, 2, 3 * GIB).unwrap();
        assert!(budget.state_bytes > 16_000_000_000 && budget.host_bytes <= 3 * GIB);
        assert_eq!((budget.buffers, budget.cached), (26, 21));
        assert!(budget.step_bytes < budget.state_bytes * 85 / 100);
    }

    #[test]
    fn a_split_master_takes_ten_bytes_on_the_tier_and_twelve_in_memory() {
        let elements = 10 * 1000 * 1000;
        let whole = plan(&[elements; 20], Form::Whole, 2, GIB).unwrap();
        let split = plan(&[elements; 20], Form::Split, 2, GIB).unwrap();
        let each = |bytes: u64| bytes as f64 / elements as f64;
        assert!((each(whole.state_bytes / 20) - 12.0).abs() < 0.01, "{whole:?}");
        assert!((each(split.state_bytes / 20) - 10.0).abs() < 0.02, "{split:?}");
        assert!(
            (each(whole.buffer_bytes) - 12.0).abs() < 0.01 && (each(split.buffer_bytes) - 12.0).abs() < 0.02
        );
    }

    #[test]
    fn all_is_cached_where_all_fits_and_too_little_is_refused_with_the_need() {
        assert_eq!(plan(&[1000; 5], Form::Whole, 1, GIB).unwrap().cached, 5);
        let refused = plan(&[GIB; 5], Form::Whole, 1, 30 * GIB).unwrap_err().to_string();
        assert!(refused.contains("3 buffers of 12884901888 bytes"), "{refused}");
        assert!(
            plan(&[u64::MAX], Form::Split, 1, GIB).is_err()
                && plan(&[1 << 61; 8], Form::Whole, 1, u64::MAX).is_err()
        );
        assert_eq!(plan(&[], Form::Whole, 1, 0).unwrap().buffers, 0);
        assert_eq!(plan(&[0, 0], Form::Split, 1, GIB).unwrap().cached, 2);
    }
}
