//! Compares sums of gradients with a reference in this file, bit for bit: every kernel, every pair of types, every length
//! around the edges of lanes and tiles, special values, and the sum of squares of what is stored.

use crate::kernels;
use crate::reference::{reference_sum, same_f64};
use crate::sample::*;
use spillway_kernels::accumulate;
use spillway_kernels::dtype::{Dtype, Floats, FloatsMut};

const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

fn floats(span: &mut Span) -> Floats<'_> {
    match span.inner() {
        FloatsMut::F32(s) => Floats::F32(s),
        FloatsMut::F16(s) => Floats::F16(s),
        FloatsMut::Bf16(s) => Floats::Bf16(s),
    }
}

#[test]
fn every_kernel_has_the_bits_of_the_reference() {
    for (to, from) in ALL.into_iter().flat_map(|to| ALL.map(|from| (to, from))) {
        for (n, special) in LENGTHS.into_iter().flat_map(|n| [(n, false), (n, true)]) {
            for scale in [1.0f32, 0.37, -2.5e-3] {
                let dst = Span::of(to, &values(n, special, 5, false));
                let mut src = Span::of(from, &values(n, special, 6, false));
                let sums: Vec<f32> =
                    dst.values().iter().zip(src.values()).map(|(a, b)| b.mul_add(scale, *a)).collect();
                let expected = Span::of(to, &sums);
                let squares = reference_sum(&expected.values());
                for kernel in kernels() {
                    for wanted in [true, false] {
                        let what =
                            format!("{} {to:?} += {from:?} n={n} special={special} {scale}", kernel.name());
                        let mut found = dst.clone();
                        let sum = accumulate(kernel, found.inner(), floats(&mut src), scale, wanted);
                        assert_eq!(found.bits(), expected.bits(), "{what}");
                        assert!(same_f64(sum, if wanted { squares } else { 0.0 }), "{what}: {sum}");
                    }
                }
            }
        }
    }
}
