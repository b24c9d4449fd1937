//! The 16-bit weights that do not fit on the GPU: they stay in host memory and are loaded for each pass (SuperOffload
//! section 4.2).
#![forbid(unsafe_code)]

use super::case::{Case, Placement, Strategy};

const HALF: u64 = 2;
/// Windows through which weights flow: one is used while the other is loaded.
const WINDOWS: u64 = 2;

/// Keeps as many weights on the GPU as fit beside `placed.gpu`, and adds the others to host memory and traffic. All
/// bytes are integers, so that a plan that fills the GPU's memory exactly fits.
pub fn place(case: &Case, placed: &mut Placement, strategy: Strategy) {
    let memory = case.machine.gpu_memory;
    let needed = HALF * case.weights();
    // Without offload nothing is loaded from the host.
    if strategy == Strategy::Gpu || placed.gpu.total() + needed <= memory {
        placed.gpu.weights = needed;
        return;
    }
    placed.gpu.window = placed.gpu.window.max(WINDOWS * HALF * case.model.largest_module);
    let flowing = (placed.gpu.total() + needed).saturating_sub(memory).min(needed);
    let fraction = flowing as f64 / needed as f64;
    placed.flow = fraction;
    placed.gpu.weights = needed - flowing;
    placed.host.weights = match strategy {
        // The weights of the shard are in host memory already, and the first to flow.
        Strategy::TierSplitMaster => placed.host.weights.max(flowing),
        _ => placed.host.weights + flowing,
    };
    let uploaded = placed.traffic.h2d.min(HALF * case.shard);
    placed.traffic.h2d -= (fraction * uploaded as f64) as u64;
    placed.traffic.h2d += 2 * case.run.accumulation * flowing;
}
