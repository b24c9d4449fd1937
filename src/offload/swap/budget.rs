//! The memory that a tiered update needs, computed before any of it is allocated.
#![forbid(unsafe_code)]

use super::encoding::{self, Encoding, Master};
use super::pipeline::LEAST_WORKING;
use crate::error::{Error, Result};
use crate::sys::memory::BASE_PAGE;

/// Use of a memory budget. "Master" is the full f32 param of a subgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Bytes of one buffer: the state of the largest subgroup, in the encoding in which the tier stores it.
    pub buffer_bytes: u64,
    /// Number of buffers.
    pub buffers: usize,
    /// Number of buffers that keep their subgroup from step to step.
    pub cached: usize,
    /// Bytes of one master: the param of the largest subgroup.
    pub master_bytes: u64,
    /// Number of masters in memory at a time; 0 if every buffer has room for its own.
    pub masters: usize,
    /// Bytes of all buffers and masters.
    pub host_bytes: u64,
    /// Bytes with which every path can read and write at once, without buffers for caching.
    pub working_bytes: u64,
    /// Bytes of the state of all subgroups.
    pub state_bytes: u64,
    /// Bytes read, and as many written, in a step that starts with a full cache.
    pub step_bytes: u64,
}

/// Masters for subgroups in motion: one for the subgroup being stepped, others for written subgroups that cannot be
/// split. With little memory a single master is enough.
pub const MASTERS_IN_MOTION: usize = 3;

/// The best use of `host_memory` for subgroups of these numbers of elements over `paths` paths. Enough buffers are
/// working buffers that every path can read and write at once; all others cache subgroups. `usual` is the encoding of
/// state on the tier. Errors: `host_memory` is too small (the error says what is needed), or sizes overflow 64 bits.
pub fn plan(subgroups: &[u64], usual: Encoding, paths: usize, host_memory: u64) -> Result<Budget> {
    let too_large = || Error::invalid("subgroups", "together exceed 2^64 bytes");
    let count = subgroups.len();
    let mut buffer_bytes = BASE_PAGE as u64;
    let mut state_bytes = 0u64;
    for elements in subgroups {
        let state = encoding::stored_bytes(usual, *elements).ok_or_else(too_large)?;
        buffer_bytes = buffer_bytes.max(state);
        state_bytes = state_bytes.checked_add(state).ok_or_else(too_large)?;
    }
    let largest = subgroups.iter().copied().max().unwrap_or(0);
    let master_bytes = encoding::master_bytes(largest).ok_or_else(too_large)?;
    let affordable = |masters: usize| {
        let left = host_memory.saturating_sub(master_bytes.saturating_mul(masters as u64));
        fits(left, buffer_bytes).min(count)
    };
    let least = count.min(LEAST_WORKING);
    let (one, in_motion) = match usual.master {
        Master::Full | Master::Low => (0, 0),
        Master::Split => (count.min(1), count.min(MASTERS_IN_MOTION)),
    };
    let masters = if affordable(one) == count || affordable(in_motion) < least { one } else { in_motion };
    let buffers = affordable(masters);
    if buffers < least {
        let masters = match masters {
            0 => String::new(),
            _ => format!(", and one of {master_bytes} bytes for its master weights"),
        };
        let reason = format!(
            "is {host_memory} bytes, but at least {least} buffers of {buffer_bytes} bytes are needed for \
             the state of the largest subgroup{masters}"
        );
        return Err(Error::invalid("host_memory", reason));
    }
    let masters = match buffers == count && usual.master == Master::Split {
        true => fits(host_memory - count as u64 * buffer_bytes, master_bytes).min(count),
        false => masters,
    };
    let working = (2 * paths + 1).max(LEAST_WORKING).min(count);
    let cached = if buffers == count { count } else { buffers - working.min(buffers) };
    let bytes = |buffers: usize, masters: usize| {
        let masters = master_bytes.saturating_mul(masters as u64);
        buffer_bytes.saturating_mul(buffers as u64).saturating_add(masters)
    };
    let uncached = (count - cached) as u64;
    Ok(Budget {
        buffer_bytes,
        buffers,
        cached,
        master_bytes,
        masters,
        host_bytes: bytes(buffers, masters),
        working_bytes: bytes(working, in_motion),
        state_bytes,
        step_bytes: if count == 0 {
            0
        } else {
            (u128::from(state_bytes) * u128::from(uncached) / count as u128) as u64
        },
    })
}

fn fits(bytes: u64, each: u64) -> usize {
    usize::try_from(bytes / each).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn sixteen_gigabytes_in_three() {
        let subgroups = vec![10 * 1000 * 1000; 134];
        let budget = plan(&subgroups, Encoding::FULL, 2, 3 * GIB).unwrap();
        assert!(budget.state_bytes > 16_000_000_000 && budget.host_bytes <= 3 * GIB);
        assert_eq!((budget.buffers, budget.cached), (26, 21));
        assert!(budget.step_bytes < budget.state_bytes * 85 / 100);
    }

    #[test]
    fn a_split_master_takes_ten_bytes_on_the_tier_and_in_memory() {
        let elements = 10 * 1000 * 1000;
        let whole = plan(&[elements; 20], Encoding::FULL, 2, GIB).unwrap();
        let split = plan(&[elements; 20], Encoding::SPLIT, 2, GIB).unwrap();
        let each = |bytes: u64| bytes as f64 / elements as f64;
        for (budget, expected) in [(whole, 12.0), (split, 10.0)] {
            assert!((each(budget.state_bytes / 20) - expected).abs() < 0.02, "{budget:?}");
            assert!((each(budget.buffer_bytes) - expected).abs() < 0.02, "{budget:?}");
        }
        assert_eq!((whole.buffers, whole.masters, split.buffers, split.masters), (8, 0, 9, 3));
        assert!(split.host_bytes <= GIB && (each(split.working_bytes) - 62.0).abs() < 0.1);
    }

    #[test]
    fn masters_stay_whole_as_far_as_there_is_room() {
        const MIB: u64 = 1 << 20;
        for (mib, expected) in [
            (103, (9, 4, 3)),
            (105, (10, 10, 1)),
            (113, (10, 10, 3)),
            (117, (10, 10, 4)),
            (141, (10, 10, 10)),
            (999, (10, 10, 10)),
        ] {
            let budget = plan(&[MIB; 10], Encoding::SPLIT, 2, mib * MIB).unwrap();
            assert_eq!((budget.buffers, budget.cached, budget.masters), expected, "{mib} MiB");
            assert!(budget.host_bytes <= mib * MIB);
        }
    }

    #[test]
    fn all_is_cached_where_all_fits_and_too_little_is_refused_with_the_need() {
        assert_eq!(plan(&[1000; 5], Encoding::FULL, 1, GIB).unwrap().cached, 5);
        let refused = plan(&[GIB; 5], Encoding::FULL, 1, 30 * GIB).unwrap_err().to_string();
        assert!(refused.contains("3 buffers of 12884901888 bytes"), "{refused}");
        assert!(
            plan(&[u64::MAX], Encoding::SPLIT, 1, GIB).is_err()
                && plan(&[1 << 61; 8], Encoding::FULL, 1, u64::MAX).is_err()
        );
        assert_eq!(plan(&[], Encoding::FULL, 1, 0).unwrap().buffers, 0);
        assert_eq!(plan(&[0, 0], Encoding::SPLIT, 1, GIB).unwrap().cached, 2);
        let short = plan(&[1 << 20; 4], Encoding::SPLIT, 1, 35 << 20).unwrap();
        assert_eq!((short.buffers, short.masters), (3, 1));
        assert!(plan(&[17 * 10u64.pow(17), 1, 1], Encoding::SPLIT, 1, u64::MAX).is_err());
    }
}
