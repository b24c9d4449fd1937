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
                let residuals = Residuals { param, exp_avg, exp_avg_sq };
                // One lane of one moment was not zero: its last one, or its first one.
                for (old, place) in [(0, V::LANES - 1), (1, 0)] {
                    let mut moments = [[0; MAX_LANES]; 2];
                    moments[old][place] = 1 << (31 * old);
                    let moments = moments.map(|lanes| V::load_bits32(lanes.as_ptr()));
                    let packed = pack::<V>(residuals, moments, bytes.as_mut_ptr());
                    let back = unpack::<V>(bytes.as_ptr());
                    assert!(packed == back.bytes && packed <= most(V::LANES), "{packed} {}", back.bytes);
                    let found = [back.residuals.param, back.residuals.exp_avg, back.residuals.exp_avg_sq];
                    assert_eq!(
                        found.map(|bits| stored::<V>(bits)),
                        lanes.map(|lanes| lanes[..V::LANES].to_vec())
                    );
                    assert_eq!(stored::<V>(back.moments), [u32::MAX].repeat(V::LANES));
                    total += packed;
                }
                // Old moments of zeros: each estimate of theirs is corrected to zero.
                let packed = pack::<V>(residuals, [V::bits_splat(0); 2], bytes.as_mut_ptr());
                let back = unpack::<V>(bytes.as_ptr());
                assert!(packed == back.bytes && packed <= 1 + 4 * V::LANES, "{packed} {}", back.bytes);
                assert_eq!(stored::<V>(back.residuals.param), lanes[0][..V::LANES]);
                for (residual, lanes) in
                    [back.residuals.exp_avg, back.residuals.exp_avg_sq].into_iter().zip(&lanes[1..])
                {
                    let estimates: Vec<u32> = lanes.iter().map(|residual| residual.wrapping_neg()).collect();
                    let estimate = V::load_bits32(estimates.as_ptr());
                    let old = V::bits_add(V::bits_and(estimate, back.moments), residual);
                    assert_eq!(stored::<V>(old), [0].repeat(V::LANES));
                }
            }
        }
        total as f64
    }
}

/// # Safety
/// Same contract as [`Vector`].
unsafe fn stored<V: Vector>(bits: V::Bits) -> Vec<u32> {
    let mut out = [0; MAX_LANES];
    // SAFETY: the array has MAX_LANES elements.
    unsafe { V::store_bits32(bits, out.as_mut_ptr()) };
    out[..V::LANES].to_vec()
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
