//! In which form gradients cross the link: widened on the GPU to f32, or as 16 bits (SuperOffload section 4.5).
//!
//! The paper compares widening on the GPU with widening on the CPU through memory that is not pinned, where the former
//! wins. Here 16 bits travel from and to pinned memory and are widened in the registers of the CPU step: half the
//! bytes on the link, and less of the host's memory. So 16 bits are the rule, and f32 wins only where the
//! host adds gradients up in f32, or where a measurement says so.
#![forbid(unsafe_code)]

use super::check;
use super::interleave::Wire;
use crate::error::Result;

/// What a probe of one link measured, in parameters per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Probe {
    /// Widening on the GPU and moving f32, overlapped.
    pub f32_wire: f64,
    /// Moving 16 bits.
    pub native_wire: f64,
    /// CPU step from f32 gradients.
    pub f32_step: f64,
    /// CPU step from 16-bit gradients.
    pub native_step: f64,
}

impl Probe {
    /// What a link of `link` bytes per second and a GPU that widens `cast` parameters per second should measure, with a
    /// step that costs the same from either form.
    pub fn expected(link: f64, cast: f64, step: f64) -> Probe {
        Probe { f32_wire: (link / 4.0).min(cast), native_wire: link / 2.0, f32_step: step, native_step: step }
    }
}

/// The faster form: gradients cross the link while the CPU steps, so the slower of the two counts, then the
/// faster link. `accumulates` is that the host adds gradients up, which it does in f32.
pub fn choose(probe: &Probe, accumulates: bool) -> Result<Wire> {
    check::positive("probe.f32_wire", probe.f32_wire)?;
    check::positive("probe.native_wire", probe.native_wire)?;
    check::positive("probe.f32_step", probe.f32_step)?;
    check::positive("probe.native_step", probe.native_step)?;
    if accumulates {
        return Ok(Wire::F32);
    }
    let wide = (probe.f32_wire.min(probe.f32_step), probe.f32_wire);
    let native = (probe.native_wire.min(probe.native_step), probe.native_wire);
    Ok(if wide > native { Wire::F32 } else { Wire::Native })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_win_unless_a_measurement_or_the_host_says_otherwise() {
        let pcie = Probe::expected(55e9, 300e9, 2e9);
        assert_eq!(choose(&pcie, false).unwrap(), Wire::Native);
        assert_eq!(choose(&pcie, true).unwrap(), Wire::F32);
        let slow_widening = Probe { native_step: 1e9, ..pcie };
        assert_eq!(choose(&slow_widening, false).unwrap(), Wire::F32);
        assert!(choose(&Probe { f32_wire: 0.0, ..pcie }, false).is_err());
    }
}
