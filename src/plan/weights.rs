//! Whether 16-bit weights stay on the GPU or flow through it (SuperOffload Eq. 1-3).
//!
//! A forward pass computes 2 * tokens * P operations on P parameters and must load 2 * P bytes of those weights that
//! live on the host. With the computation fixed, efficiency = compute / (compute + load); the size of the model drops
//! out when all weights flow.
#![forbid(unsafe_code)]

use super::check;
use crate::error::Result;

/// Operations per token and parameter of a forward pass.
const FORWARD_OPS: f64 = 2.0;
/// Bytes of a 16-bit weight.
const WEIGHT_BYTES: f64 = 2.0;

/// Below this efficiency loads cannot hide behind computation.
pub const LEAST_EFFICIENCY: f64 = 0.5;
/// With latency and overhead counted, this is wanted.
pub const GOOD_EFFICIENCY: f64 = 0.6;

/// One GPU, its link, and what runs on it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Operations per second that the GPU really reaches.
    pub peak: f64,
    /// Bytes per second to the GPU.
    pub link: f64,
    /// Batch size times sequence length.
    pub tokens: f64,
    /// Parameters of this rank.
    pub parameters: f64,
    /// GPU memory left for weights, in bytes.
    pub free_bytes: f64,
}

/// Where weights live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// All on the GPU.
    Stationary,
    /// Some on the host, loaded for each pass.
    Flow,
}

/// The policy and what it costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// Stationary wherever all weights fit.
    pub policy: Policy,
    /// Part of the weights that flows, from 0 to 1.
    pub fraction: f64,
    /// Eq. 3 for that part: computation over computation and load.
    pub efficiency: f64,
}

/// Eq. 3 when all weights flow.
pub fn efficiency(peak: f64, link: f64, tokens: f64) -> f64 {
    1.0 / (1.0 + peak * WEIGHT_BYTES / (FORWARD_OPS * link * tokens))
}

/// Keeps on the GPU what fits there, and lets the rest flow.
pub fn choose(load: &Load) -> Result<Weights> {
    check::positive("load.peak", load.peak)?;
    check::positive("load.link", load.link)?;
    check::positive("load.tokens", load.tokens)?;
    check::positive("load.parameters", load.parameters)?;
    check::not_negative("load.free_bytes", load.free_bytes)?;
    let fraction = (1.0 - load.free_bytes / (WEIGHT_BYTES * load.parameters)).max(0.0);
    let compute = FORWARD_OPS * load.tokens * load.parameters / load.peak;
    let moved = WEIGHT_BYTES * load.parameters * fraction / load.link;
    let policy = if fraction > 0.0 { Policy::Flow } else { Policy::Stationary };
    Ok(Weights { policy, fraction, efficiency: compute / (compute + moved) })
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
        assert_eq!(fits, Weights { policy: Policy::Stationary, fraction: 0.0, efficiency: 1.0 });
        let none = choose(&Load { free_bytes: 0.0, ..load }).unwrap();
        assert_eq!((none.policy, none.fraction), (Policy::Flow, 1.0));
        assert!((none.efficiency - efficiency(990e12, 450e9, 4096.0)).abs() < 1e-12);
        let half = choose(&Load { free_bytes: 7e9, ..load }).unwrap();
        assert_eq!(half.fraction, 0.5);
        assert!(half.efficiency > none.efficiency);
        assert!(choose(&Load { tokens: 0.0, ..load }).is_err());
        assert!(choose(&Load { link: f64::NAN, ..load }).is_err());
    }
}
