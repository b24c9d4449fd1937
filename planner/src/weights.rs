//! Whether 16-bit weights stay on the GPU or are loaded from the host for each pass (SuperOffload Eq. 1-3).
//!
//! A forward pass over P parameters computes 2 * tokens * P operations. It must load 2 bytes for each weight on the
//! host. The efficiency is compute time / (compute time + load time). If all weights are on the host, the efficiency
//! does not depend on the size of the model.
#![forbid(unsafe_code)]

use super::check;
use crate::error::Result;

/// Operations per token and parameter of a forward pass.
const FORWARD_OPS: f64 = 2.0;
/// Bytes of a 16-bit weight.
const WEIGHT_BYTES: f64 = 2.0;

/// Below this efficiency, loads take longer than computation and cannot be hidden.
pub const LEAST_EFFICIENCY: f64 = 0.5;
/// Recommended minimal efficiency, with a margin for latency and overhead.
pub const GOOD_EFFICIENCY: f64 = 0.6;

/// One GPU, its link, and its workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Operations per second that the GPU reaches in practice.
    pub peak: f64,
    /// Bandwidth of the link to the GPU, in bytes per second.
    pub link: f64,
    /// Batch size times sequence length.
    pub tokens: f64,
    /// Parameters of this rank.
    pub parameters: f64,
    /// GPU memory that is free for weights, in bytes.
    pub free_bytes: f64,
}

/// Where the weights are stored, and the efficiency of that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// Fraction of the weights on the host, from 0 to 1, loaded for each pass; 0 if all fit on the GPU.
    pub fraction: f64,
    /// Eq. 3 for this fraction: compute time / (compute time + load time).
    pub efficiency: f64,
}

/// Eq. 3 with all weights on the host. `peak` is in operations per second, `link` in bytes per second.
pub fn efficiency(peak: f64, link: f64, tokens: f64) -> f64 {
    1.0 / (1.0 + peak * WEIGHT_BYTES / (FORWARD_OPS * link * tokens))
}

/// Keeps as many weights on the GPU as fit, and places the rest on the host. Fails unless `load.free_bytes` is finite
/// and not negative and all other fields are positive and finite.
pub fn choose(load: &Load) -> Result<Weights> {
    check::positive("load.peak", load.peak)?;
    check::positive("load.link", load.link)?;
    check::positive("load.tokens", load.tokens)?;
    check::positive("load.parameters", load.parameters)?;
    check::not_negative("load.free_bytes", load.free_bytes)?;
    let fraction = (1.0 - load.free_bytes / (WEIGHT_BYTES * load.parameters)).max(0.0);
    let compute = FORWARD_OPS * load.tokens * load.parameters / load.peak;
    let moved = WEIGHT_BYTES * load.parameters * fraction / load.link;
    let whole = compute + moved;
    let efficiency = match whole.is_finite() && whole > 0.0 {
        true => compute / whole,
        // The times are out of range; their ratio is not, or goes to 0 or infinity.
        false if fraction == 0.0 => 1.0,
        false => 1.0 / (1.0 + load.peak / load.link / load.tokens * fraction),
    };
    Ok(Weights { fraction, efficiency })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gh200_needs_a_batch_of_four_at_1024_tokens_to_pass_60_percent() {
        let at = |batch: f64| efficiency(990e12, 450e9, batch * 1024.0);
        assert!(at(4.0) > GOOD_EFFICIENCY && at(3.0) < GOOD_EFFICIENCY, "{} {}", at(4.0), at(3.0));
        assert!(at(1.0) < LEAST_EFFICIENCY);
    }

    #[test]
    fn weights_that_fit_stay_and_the_rest_flows() {
        let load = Load { peak: 990e12, link: 450e9, tokens: 4096.0, parameters: 7e9, free_bytes: 14e9 };
        let fits = choose(&load).unwrap();
        assert_eq!(fits, Weights { fraction: 0.0, efficiency: 1.0 });
        let none = choose(&Load { free_bytes: 0.0, ..load }).unwrap();
        assert_eq!(none.fraction, 1.0);
        assert!((none.efficiency - efficiency(990e12, 450e9, 4096.0)).abs() < 1e-12);
        let half = choose(&Load { free_bytes: 7e9, ..load }).unwrap();
        assert_eq!(half.fraction, 0.5);
        assert!(half.efficiency > none.efficiency);
        for (peak, tokens, parameters) in
            [(1e-320, 1e308, 1.0), (1e-320, 1.0, 1e308), (1e308, 1e-308, 1e-308)]
        {
            for free_bytes in [0.0, 1.0, 1e308] {
                let extreme = Load { peak, tokens, parameters, free_bytes, ..load };
                let found = choose(&extreme).unwrap().efficiency;
                assert!((0.0..=1.0).contains(&found), "{extreme:?}: {found}");
            }
        }
        assert!(choose(&Load { tokens: 0.0, ..load }).is_err());
        assert!(choose(&Load { link: f64::NAN, ..load }).is_err());
    }
}
