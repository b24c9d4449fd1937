//! The data type of gradients on the link: f32, widened on the GPU, or 16 bits (SuperOffload section 4.5).
//!
//! The paper compares widening on the GPU with widening on the CPU through memory that is not pinned; there the GPU
//! wins. Here the host side is pinned memory, and the CPU step widens 16-bit gradients in its registers. That halves
//! the bytes on the link and needs less host memory. So 16 bits are the default. f32 is chosen only if the host
//! accumulates gradients in f32, or if measurements show that f32 is faster.
#![forbid(unsafe_code)]

use super::check;
use super::interleave::TransferDtype;
use crate::error::Result;

/// Measured rates of one link and CPU, in parameters per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Probe {
    /// Widening on the GPU overlapped with the transfer of f32.
    pub f32_transfer: f64,
    /// Transfer of 16 bits.
    pub native_transfer: f64,
    /// CPU step from f32 gradients.
    pub f32_step: f64,
    /// CPU step from 16-bit gradients.
    pub native_step: f64,
}

/// Chooses the faster type. Transfers overlap with CPU steps, so the slower rate of the two is compared first; a tie
/// goes to the faster transfer. `accumulates`: the host accumulates gradients, which requires f32. Fails unless all
/// rates are positive and finite.
pub fn choose(probe: &Probe, accumulates: bool) -> Result<TransferDtype> {
    check::positive("probe.f32_transfer", probe.f32_transfer)?;
    check::positive("probe.native_transfer", probe.native_transfer)?;
    check::positive("probe.f32_step", probe.f32_step)?;
    check::positive("probe.native_step", probe.native_step)?;
    if accumulates {
        return Ok(TransferDtype::F32);
    }
    let wide = (probe.f32_transfer.min(probe.f32_step), probe.f32_transfer);
    let native = (probe.native_transfer.min(probe.native_step), probe.native_transfer);
    Ok(if wide > native { TransferDtype::F32 } else { TransferDtype::Native })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_win_unless_a_measurement_or_the_host_says_otherwise() {
        let pcie = Probe { f32_transfer: 13.75e9, native_transfer: 27.5e9, f32_step: 2e9, native_step: 2e9 };
        assert_eq!(choose(&pcie, false).unwrap(), TransferDtype::Native);
        assert_eq!(choose(&pcie, true).unwrap(), TransferDtype::F32);
        let slow_widening = Probe { native_step: 1e9, ..pcie };
        assert_eq!(choose(&slow_widening, false).unwrap(), TransferDtype::F32);
        assert!(choose(&Probe { f32_transfer: 0.0, ..pcie }, false).is_err());
    }
}
