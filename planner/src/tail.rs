//! The number of last buckets that the GPU keeps, so that backward hides the CPU's updates (SuperOffload Eq. 4-5,
//! extended to CPUs slower than backward).
//!
//! The printed condition considers only the last bucket that goes to the CPU:
//!
//!     move(grad) + step_cpu + move(param) <= bwd(n buckets) + step_gpu(n buckets)
//!
//! It assumes that the CPU keeps up with backward. On a slower CPU the buckets queue up. Buckets that the CPU cannot
//! finish within backward must stay on the GPU as well: n >= N - backward / step_cpu + 1.
//!
//! The printed time of backward, 4 * batch * sequence * parameters, is in operations. It must be divided by the rate
//! that the GPU reaches. With activation recomputation the factor is 6 instead of 4.
#![forbid(unsafe_code)]

use super::check;
use crate::error::{Error, Result};

/// Operations per token and parameter of a backward pass.
const BACKWARD_OPS: f64 = 4.0;
/// Operations per token and parameter of a backward pass with activation recomputation.
const RECOMPUTING_OPS: f64 = 6.0;

/// Seconds that each stage takes for one bucket.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bucket {
    /// Transfer of the gradient to the host.
    pub grad: f64,
    /// CPU step.
    pub step_cpu: f64,
    /// Transfer of the parameter to the GPU.
    pub param: f64,
    /// GPU step.
    pub step_gpu: f64,
    /// Backward pass.
    pub backward: f64,
}

/// Seconds of backward for `parameters` parameters and `tokens` tokens on a GPU with `peak` operations per second.
/// `recomputes`: with activation recomputation.
pub fn backward_seconds(parameters: f64, tokens: f64, peak: f64, recomputes: bool) -> f64 {
    let ops = if recomputes { RECOMPUTING_OPS } else { BACKWARD_OPS };
    ops * tokens * parameters / peak
}

/// Smallest n up to `most` that satisfies Eq. 4-5, for a CPU that keeps up with backward; `most` if none does.
fn last(bucket: &Bucket, most: usize) -> usize {
    let hidden = bucket.backward + bucket.step_gpu;
    let needed = bucket.grad + bucket.step_cpu + bucket.param;
    least(needed / hidden, most)
}

/// Smallest n that hides the CPU's updates of `count` buckets; at most `most`, the number that fits on the GPU. Fails
/// for negative or infinite times, for a backward time of zero, or if `most` exceeds `count`.
pub fn buckets(bucket: &Bucket, count: usize, most: usize) -> Result<usize> {
    for (name, seconds) in [
        ("bucket.grad", bucket.grad),
        ("bucket.step_cpu", bucket.step_cpu),
        ("bucket.param", bucket.param),
        ("bucket.step_gpu", bucket.step_gpu),
    ] {
        check::not_negative(name, seconds)?;
    }
    check::positive("bucket.backward", bucket.backward)?;
    if most > count {
        return Err(Error::invalid("most", format!("is {most}, but there are {count} buckets")));
    }
    let backward = bucket.backward * count as f64;
    let queued = match bucket.step_cpu > bucket.backward {
        true => least(count as f64 - backward / bucket.step_cpu + 1.0, most),
        false => 0,
    };
    Ok(last(bucket, most).max(queued))
}

/// `value` rounded up to an integer in `0..=most`.
fn least(value: f64, most: usize) -> usize {
    if value < most as f64 { value.max(0.0).ceil() as usize } else { most }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 300 buckets of 16 M parameters, a CPU with 8 G parameters per second, and a backward pass of 0.5 s.
    const SLOW_CPU: Bucket =
        Bucket { grad: 0.14e-3, step_cpu: 2e-3, param: 0.07e-3, step_gpu: 0.1e-3, backward: 0.5 / 300.0 };

    /// Seconds from the end of backward until all parameters are updated, with the last `kept` buckets on the GPU.
    fn exposed(bucket: &Bucket, count: usize, kept: usize) -> f64 {
        let (mut link, mut cpu, mut upload) = (0.0_f64, 0.0_f64, 0.0_f64);
        for index in 0..count - kept.min(count) {
            let arrived = bucket.backward * (index + 1) as f64;
            link = link.max(arrived) + bucket.grad;
            cpu = cpu.max(link) + bucket.step_cpu;
            upload = upload.max(cpu) + bucket.param;
        }
        let backward = bucket.backward * count as f64;
        let gpu = if kept > 0 { backward + bucket.step_gpu * kept.min(count) as f64 } else { backward };
        upload.max(gpu) - backward
    }

    #[test]
    fn the_printed_condition_misses_a_cpu_that_cannot_keep_up() {
        let printed = last(&SLOW_CPU, 300);
        assert_eq!(printed, 2);
        let late = exposed(&SLOW_CPU, 300, printed);
        assert!((late - 0.098).abs() < 0.003, "{late}");
        let mended = buckets(&SLOW_CPU, 300, 300).unwrap();
        assert_eq!(mended, 51);
        let rest = exposed(&SLOW_CPU, 300, mended) - SLOW_CPU.step_gpu * mended as f64;
        assert!(rest < 0.0005, "{rest}");
    }

    #[test]
    fn a_fast_cpu_needs_what_is_printed_and_memory_limits_it() {
        let fast = Bucket { step_cpu: 1e-3, ..SLOW_CPU };
        assert_eq!(buckets(&fast, 300, 300).unwrap(), last(&fast, 300));
        assert_eq!(buckets(&SLOW_CPU, 300, 20).unwrap(), 20);
        assert_eq!(buckets(&SLOW_CPU, 0, 0).unwrap(), 0);
        assert!(buckets(&SLOW_CPU, 3, 4).is_err());
        assert!(buckets(&Bucket { backward: 0.0, ..fast }, 3, 3).is_err());
        assert!((backward_seconds(1e9, 4096.0, 400e12, false) - 0.04096).abs() < 1e-9);
        assert!((backward_seconds(1e9, 4096.0, 400e12, true) - 0.06144).abs() < 1e-9);
    }
}
