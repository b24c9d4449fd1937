//! Measured speeds of a GPU's link and of the CPU.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use spillway_planner::cast::Probe;

/// Speeds in parameters per second. The `rename` attributes are the keys in the stored profile.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Gradients to the host: converted to f32 on the GPU, f32 on the link.
    #[serde(rename = "out_f32")]
    pub d2h_f32: f64,
    /// Gradients to the host: 16 bits on the link.
    #[serde(rename = "out_native")]
    pub d2h_native: f64,
    /// Parameters to the device: f32 on the link, rounded to 16 bits on the GPU.
    #[serde(rename = "in_f32")]
    pub h2d_f32: f64,
    /// Parameters to the device: 16 bits on the link.
    #[serde(rename = "in_native")]
    pub h2d_native: f64,
    /// Adam on the CPU, from f32 gradients.
    pub step_f32: f64,
    /// Adam on the CPU, from 16-bit gradients.
    pub step_native: f64,
}

impl Link {
    /// False for figures that no measurement gives.
    pub fn is_plausible(&self) -> bool {
        let Link { d2h_f32, d2h_native, h2d_f32, h2d_native, step_f32, step_native } = *self;
        let all = [d2h_f32, d2h_native, h2d_f32, h2d_native, step_f32, step_native];
        all.iter().all(|speed| speed.is_finite() && *speed > 0.0)
    }

    /// The figures that determine the transfer type of gradients.
    pub fn gradients(&self) -> Probe {
        Probe {
            f32_transfer: self.d2h_f32,
            native_transfer: self.d2h_native,
            f32_step: self.step_f32,
            native_step: self.step_native,
        }
    }
}
