//! Packed differences unpack to the same values on every kernel.

use crate::kernels;
use spillway_kernels::inside::{Body, MAX_LANES, Residuals, Vector, most, pack, unpack};

/// Packs and unpacks groups whose lanes cycle through a list of values.
struct RoundTrip<'a>(&'a [u32]);

impl Body for RoundTrip<'_> {
    unsafe fn run<V: Vector>(self) -> f64 {
        let values = |shift: usize| -> [u32; MAX_LANES] {
            std::array::from_fn(|lane| self.0[(lane + shift) % self.0.len()])
        };
        let mut bytes = [0xa5; most(MAX_LANES) + 64];
        let mut total = 0;
        for shift in 0..self.0.len() * self.0.len() {
            let lanes = [values(shift), values(shift / self.0.len()), values(shift / 3)];
            // SAFETY: the arrays have MAX_LANES elements, and the buffer holds the widest group and one vector.
            unsafe {
                let [param, exp_avg, exp_avg_sq] = lanes.map(|lanes| V::load_bits32(lanes.as_ptr()));
                let packed = pack::<V>(Residuals { param, exp_avg, exp_avg_sq }, bytes.as_mut_ptr());
                let (back, read) = unpack::<V>(bytes.as_ptr());
                assert!(packed == read && packed <= most(V::LANES), "{packed} {read}");
                for (bits, lanes) in [back.param, back.exp_avg, back.exp_avg_sq].into_iter().zip(lanes) {
                    let mut out = [0; MAX_LANES];
                    V::store_bits32(bits, out.as_mut_ptr());
                    assert_eq!(out[..V::LANES], lanes[..V::LANES]);
                }
                total += packed;
            }
        }
        total as f64
    }
}

#[test]
fn differences_around_every_edge_come_back_on_every_kernel() {
    let edges = [0, 1, 2, 3, 7, 8, 13, 14, 127, 128, 32767, 32768, 1 << 30, u32::MAX >> 1];
    let signed = edges.iter().flat_map(|edge| [*edge, edge.wrapping_neg(), !edge]);
    let all: Vec<u32> = signed.collect();
    let kinds = [&[0u32][..], &[0, 1, u32::MAX], &[0, 13, 100], &[0, 300], &all];
    for kernel in kernels() {
        for values in kinds {
            // SAFETY: the body accesses only its own arrays.
            unsafe { kernel.run(RoundTrip(values)) };
        }
        for value in &all {
            // SAFETY: as above.
            unsafe { kernel.run(RoundTrip(&[*value])) };
        }
    }
}
