//! The GPU's share of the update: Deep Optimizer States Eq. 1, as printed and as corrected.
//!
//! The paper uses k for two quantities. In Eq. 1, k is the number of CPU subgroups per GPU subgroup. In Algorithm 1, k
//! is the stride, which is one more. Here [`cpu_per_gpu`] is the k of Eq. 1, and the stride is called stride.
//! Definitions:
//! - A = 1/U_c + 1/D_c, the seconds of a CPU update per parameter;
//! - q = 3 words per parameter to fetch, plus the words of a fetched gradient;
//! - w = 1/2 word, a parameter in 16 bits;
//! - B = the bandwidth of the link: B_h to the device, B_d to the host.
//!
//! CPU and GPU take equally long at:
//!
//!     one slot:         k = (q/B + 1/U_g) / (A - w/B)
//!     two slots:        k = max((q/B_h) / (A - w/B_h), (3/B_d) / A, (1/U_g) / A)
//!
//! With two slots, the link transfers the next state while the GPU updates the current one, so 1/U_g is not added to
//! the link time. If a CPU update takes no longer than the upload of its parameters, the GPU cannot help: its share is
//! zero.
#![forbid(unsafe_code)]

use super::Rates;

/// f32 words per parameter of param, exp_avg and exp_avg_sq.
const STATE_WORDS: f64 = 3.0;
/// f32 words of a 16-bit parameter.
const HALF: f64 = 0.5;

/// The number of slots that the balance assumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Balance {
    /// One slot: the time of the GPU update adds to the time of the link, as in Eq. 1.
    OneSlot,
    /// Two slots or more: transfers and updates overlap.
    TwoSlots,
}

/// CPU subgroups per GPU subgroup at which both take equally long (the k of Eq. 1). `None` if a CPU update takes no
/// longer than its upload; then no subgroup should be on the GPU. `fetched_words`: f32 words per parameter of a fetched
/// gradient, 0 without one.
pub fn cpu_per_gpu(rates: &Rates, fetched_words: f64, balance: Balance) -> Option<f64> {
    let cpu = 1.0 / rates.cpu + 1.0 / rates.downscale;
    let fetch = (STATE_WORDS + fetched_words) / rates.h2d;
    let upload = HALF / rates.h2d;
    let spare = cpu - upload;
    if spare <= 0.0 {
        return None;
    }
    let update = 1.0 / rates.gpu;
    let flush = STATE_WORDS / rates.d2h;
    Some(match (balance, rates.duplex) {
        (Balance::OneSlot, true) => (fetch + update) / spare,
        (Balance::OneSlot, false) => (fetch + flush + update) / spare,
        (Balance::TwoSlots, true) => (fetch / spare).max(flush / cpu).max(update / cpu),
        (Balance::TwoSlots, false) => ((fetch + flush) / spare).max(update / cpu),
    })
}

/// Fraction of the parameters that the GPU should update, from 0 to 1.
pub fn gpu_share(rates: &Rates, fetched_words: f64, balance: Balance) -> f64 {
    cpu_per_gpu(rates, fetched_words, balance).map_or(0.0, |k| 1.0 / (1.0 + k))
}

/// The stride that follows from Eq. 1: `1 + k`, rounded. Zero (all on the CPU) if Eq. 1 has no solution.
pub fn derived_stride(rates: &Rates) -> usize {
    let duplex = Rates { duplex: true, ..*rates };
    match cpu_per_gpu(&duplex, 0.0, Balance::OneSlot) {
        Some(k) => (1.0 + k).round().clamp(1.0, super::MAX_SUBGROUPS as f64) as usize,
        None => 0,
    }
}

/// Parameters per second of an infinitely long update with the fraction `share` on the GPU.
pub fn throughput(rates: &Rates, fetched_words: f64, share: f64, balance: Balance) -> f64 {
    let rest = 1.0 - share;
    let cpu = rest * (1.0 / rates.cpu + 1.0 / rates.downscale);
    let h2d = (share * (STATE_WORDS + fetched_words) + rest * HALF) / rates.h2d;
    let d2h = share * STATE_WORDS / rates.d2h;
    let gpu = share / rates.gpu;
    let link = if rates.duplex { h2d.max(d2h) } else { h2d + d2h };
    let seconds = match balance {
        Balance::OneSlot => cpu.max(link + gpu),
        Balance::TwoSlots => cpu.max(link).max(gpu),
    };
    1.0 / seconds
}

/// Parameters per second of the paper's baseline: step, rounding and upload one after the other, without overlap.
pub fn serial_throughput(rates: &Rates) -> f64 {
    1.0 / (1.0 / rates.cpu + 1.0 / rates.downscale + HALF / rates.h2d)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The paper's machine with H100, per GPU. Rounding at 62 GB/s and the link at 55 GB/s are in f32 words per second.
    pub const H100: Rates = Rates {
        cpu: 2e9,
        downscale: 15.5e9,
        gpu: 25e9,
        h2d: 13.75e9,
        d2h: 13.75e9,
        cast: f64::INFINITY,
        dram: f64::INFINITY,
        duplex: true,
    };
    /// The paper's machine with V100.
    pub const V100: Rates = Rates { cpu: 2e9, downscale: 8.7e9, gpu: 35e9, h2d: 3e9, d2h: 3e9, ..H100 };

    fn close(value: f64, expected: f64) {
        assert!((value / expected - 1.0).abs() < 0.005, "{value} is not {expected}");
    }

    #[test]
    fn eq_1_gives_what_the_papers_own_numbers_give() {
        close(cpu_per_gpu(&H100, 0.0, Balance::OneSlot).unwrap(), 0.489);
        close(cpu_per_gpu(&V100, 0.0, Balance::OneSlot).unwrap(), 2.295);
        let halves = Rates { downscale: 31e9, ..H100 };
        close(cpu_per_gpu(&halves, 0.0, Balance::OneSlot).unwrap(), 0.521);
        // The paper prints "k = 2" for both machines.
        assert_eq!((derived_stride(&H100), derived_stride(&V100)), (1, 3));
    }

    #[test]
    fn throughput_of_each_stride_is_that_of_the_closed_form() {
        let stride = |rates, k: f64| throughput(rates, 0.0, 1.0 / k, Balance::TwoSlots) / 1e9;
        for (k, h100, v100) in [(2.0, 3.54, 1.71), (3.0, 2.66, 2.25), (4.0, 2.36, 2.17)] {
            assert!((stride(&H100, k) / h100 - 1.0).abs() < 0.01, "stride {k}: {}", stride(&H100, k));
            assert!((stride(&V100, k) / v100 - 1.0).abs() < 0.01, "stride {k}: {}", stride(&V100, k));
        }
        let one_slot = |k: f64| throughput(&V100, 0.0, 1.0 / k, Balance::OneSlot) / 1e9;
        for (k, expected) in [(2.0, 1.67), (3.0, 2.20), (4.0, 2.17), (5.0, 2.03)] {
            assert!((one_slot(k) / expected - 1.0).abs() < 0.01, "stride {k}: {}", one_slot(k));
        }
        close(serial_throughput(&H100) / 1e9, 1.66);
        close(serial_throughput(&V100) / 1e9, 1.28);
        let best = gpu_share(&H100, 0.0, Balance::TwoSlots);
        close(best, 0.708);
        close(throughput(&H100, 0.0, best, Balance::TwoSlots) / 1e9, 6.06);
    }

    #[test]
    fn a_cpu_faster_than_the_upload_leaves_the_gpu_nothing() {
        let slow_link = Rates { h2d: 0.8e9, ..H100 };
        assert_eq!(cpu_per_gpu(&slow_link, 0.0, Balance::OneSlot), None);
        assert_eq!(gpu_share(&slow_link, 0.0, Balance::TwoSlots), 0.0);
        assert_eq!(derived_stride(&slow_link), 0);
        let all_infinite = Rates { gpu: f64::MAX, h2d: f64::MAX, d2h: f64::MAX, ..H100 };
        assert!((gpu_share(&all_infinite, 0.0, Balance::OneSlot) - 1.0).abs() < 1e-12);
    }
}
