//! Measured speeds of a GPU's link and of the CPU.
#![forbid(unsafe_code)]

use crate::plan::cast::Probe;

/// Speeds in parameters per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Gradients to the host: converted to f32 on the GPU, f32 on the link.
    pub out_f32: f64,
    /// Gradients to the host: 16 bits on the link.
    pub out_native: f64,
    /// Parameters to the device: f32 on the link, rounded to 16 bits on the GPU.
    pub in_f32: f64,
    /// Parameters to the device: 16 bits on the link.
    pub in_native: f64,
    /// Adam on the CPU, from f32 gradients.
    pub step_f32: f64,
    /// Adam on the CPU, from 16-bit gradients.
    pub step_native: f64,
}

impl Link {
    /// Names of the figures, in the order of [`Link::figures`].
    pub const NAMES: [&'static str; 6] =
        ["out_f32", "out_native", "in_f32", "in_native", "step_f32", "step_native"];

    /// The six speeds, in the order of the fields.
    pub fn figures(&self) -> [f64; 6] {
        [self.out_f32, self.out_native, self.in_f32, self.in_native, self.step_f32, self.step_native]
    }

    /// The inverse of [`Link::figures`].
    pub fn of_figures(figures: [f64; 6]) -> Link {
        let [out_f32, out_native, in_f32, in_native, step_f32, step_native] = figures;
        Link { out_f32, out_native, in_f32, in_native, step_f32, step_native }
    }

    /// The figures that determine the transfer type of gradients.
    pub fn gradients(&self) -> Probe {
        Probe {
            f32_wire: self.out_f32,
            native_wire: self.out_native,
            f32_step: self.step_f32,
            native_step: self.step_native,
        }
    }
}
