//! Closed forms for units of equal cost, transfers and recomputations that take no time, and parameters that are always
//! present in time.
//! The tests compare them with the generated schedules.
#![forbid(unsafe_code)]

use super::{Schedule, Shape};

/// Times of the passes of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Closed {
    /// Idle seconds of a device, the paper's T_bbs.
    pub bubble_seconds: f64,
    /// Seconds from the first pass to the last, T_overall.
    pub passes_seconds: f64,
}

impl Closed {
    /// Equation 3: idle time over the whole time.
    pub fn bubble_ratio(&self) -> f64 {
        if self.passes_seconds > 0.0 { self.bubble_seconds / self.passes_seconds } else { 0.0 }
    }
}

/// Times of a schedule whose forward stages take `forward` seconds per micro-batch and whose backward stages take
/// `backward`. With one stage per device these are Equations 1 and 2. `None` if the stages are not a multiple of the
/// devices, or if a decoupled backward stage is faster than a forward stage: no closed form is known then.
///
/// With v_f forward and v_b backward stages per device, and M = max(N_m, N_g):
///
/// | schedule | passes_seconds |
/// |---|---|
/// | all forward, all backward | (T_f + T_b) ((v_f - 1) M + N_m + N_g - 1) |
/// | one forward, one backward | (T_f + T_b) (v_f N_m + N_g - 1) |
/// | decoupled, T_b >= T_f | T_f v_f M + T_b ((v_b - 1) M + N_m + N_g - 1) |
pub fn passes(shape: &Shape, forward: f64, backward: f64) -> Option<Closed> {
    let devices = f64::from(shape.devices);
    if !shape.stages.is_multiple_of(shape.devices) {
        return None;
    }
    let forward_chunks = f64::from(shape.stages / shape.devices);
    let backward_chunks = f64::from(shape.backward_stages() / shape.devices);
    let micro_batches = f64::from(shape.micro_batches);
    let most = micro_batches.max(devices);
    let passes_seconds = match shape.schedule {
        Schedule::AllForwardAllBackward => {
            (forward + backward) * ((forward_chunks - 1.0) * most + micro_batches + devices - 1.0)
        }
        Schedule::OneForwardOneBackward => {
            (forward + backward) * (forward_chunks * micro_batches + devices - 1.0)
        }
        Schedule::Decoupled if backward < forward => return None,
        Schedule::Decoupled => {
            forward * forward_chunks * most
                + backward * ((backward_chunks - 1.0) * most + micro_batches + devices - 1.0)
        }
    };
    let busy = micro_batches * (forward_chunks * forward + backward_chunks * backward);
    Some(Closed { bubble_seconds: passes_seconds - busy, passes_seconds })
}
