//! The speeds of a GPU's link and of the processor, as they are measured and kept.
#![forbid(unsafe_code)]

use crate::plan::cast::Probe;

/// Speeds in parameters per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Gradients out: widened on the GPU, f32 on the wire.
    pub out_f32: f64,
    /// Gradients out: 16 bits on the wire.
    pub out_native: f64,
    /// Parameters in: f32 on the wire, rounded on the GPU.
    pub in_f32: f64,
    /// Parameters in: 16 bits on the wire.
    pub in_native: f64,
    /// Adam on the processor, from f32 gradients.
    pub step_f32: f64,
    /// Adam on the processor, from 16-bit gradients.
    pub step_native: f64,
}

impl Link {
    /// Names of the figures, in the order of [`Link::figures`].
    pub const NAMES: [&'static str; 6] =
        ["out_f32", "out_native", "in_f32", "in_native", "step_f32", "step_native"];

    /// The figures.
    pub fn figures(&self) -> [f64; 6] {
        [self.out_f32, self.out_native, self.in_f32, self.in_native, self.step_f32, self.step_native]
    }

    /// From the figures.
    pub fn of_figures(figures: [f64; 6]) -> Link {
        let [out_f32, out_native, in_f32, in_native, step_f32, step_native] = figures;
        Link { out_f32, out_native, in_f32, in_native, step_f32, step_native }
    }

    /// What decides about the form of gradients.
    pub fn gradients(&self) -> Probe {
        Probe {
            f32_wire: self.out_f32,
            native_wire: self.out_native,
            f32_step: self.step_f32,
            native_step: self.step_native,
        }
    }
}
