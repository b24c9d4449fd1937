//! A step of a tensor whose 16-bit copy counts begins with what other code has written to the copy.

use crate::kernels;
use spillway_kernels::dtype::{Floats, FloatsMut, bf16, f16};
use spillway_kernels::inside::take_copy;
use spillway_kernels::{CHUNK, Kernel, LionRule, Optimizer, States, Tensor};

const LION: LionRule = LionRule {
    grad_scale: 0.37,
    lr: 1e-4,
    beta1: 0.9,
    one_minus_beta1: 0.1,
    beta2: 0.99,
    one_minus_beta2: 0.01,
    decay_factor: -1e-5,
};

/// A 16-bit type, as the half crate converts it.
trait Half: Copy {
    fn of(value: f32) -> Self;
    fn bits(self) -> u16;
    fn wide(self) -> f32;
    fn from_bits(bits: u16) -> Self;
    /// True if a number may have been rounded to this one.
    fn is_of(self, value: f32) -> bool;
    fn span(copy: &mut [Self]) -> FloatsMut<'_>;
}

macro_rules! half {
    ($type:ty, $variant:ident, $is_of:expr) => {
        impl Half for $type {
            fn of(value: f32) -> Self {
                <$type>::from_f32(value)
            }
            fn bits(self) -> u16 {
                self.to_bits()
            }
            fn wide(self) -> f32 {
                self.to_f32()
            }
            fn from_bits(bits: u16) -> Self {
                <$type>::from_bits(bits)
            }
            fn is_of(self, value: f32) -> bool {
                $is_of(value, self)
            }
            fn span(copy: &mut [Self]) -> FloatsMut<'_> {
                FloatsMut::$variant(copy)
            }
        }
    };
}
half!(f16, F16, |value, own: f16| f16::from_f32(value).to_bits() == own.to_bits());
// Either neighbour of a tie.
half!(bf16, Bf16, |value: f32, own: bf16| {
    i64::from(value.to_bits()).abs_diff(i64::from(own.to_bits()) << 16) <= 0x8000
});

/// A number of every kind: all exponents, zeros, denormal numbers, infinities and NaN.
fn pattern(index: usize) -> f32 {
    f32::from_bits((index as u32).wrapping_mul(0x9e37_79b9).rotate_left(7))
}

/// The copy of `param`, with other words at every `each`-th element.
fn written<H: Half>(param: &[f32], each: usize) -> Vec<H> {
    let word = |(index, value): (usize, &f32)| match index % each {
        0 => H::from_bits((index as u16).wrapping_mul(0x9e37)),
        _ => H::of(*value),
    };
    param.iter().enumerate().map(word).collect()
}

fn expected<H: Half>(param: f32, copy: H) -> f32 {
    let same = copy.is_of(param) || (param.is_nan() && copy.wide().is_nan());
    if same { param } else { copy.wide() }
}

/// Does `work` on the tensor of param, moment and a copy that counts if `takes`.
fn on<H: Half>(
    [param, moment]: &mut [Vec<f32>; 2],
    copy: &mut [H],
    takes: bool,
    work: impl FnOnce(Tensor<'_>),
) {
    let n = copy.len();
    let grad: Vec<f32> = (0..n).map(|index| (index % 7) as f32 - 3.0).collect();
    let [param, moment] = [param, moment].map(|span| FloatsMut::F32(&mut span[..n]));
    let states = States { param, exp_avg: Some(moment), exp_avg_sq: None };
    let tensor = Tensor::new(states, Floats::F32(&grad), Some(H::span(copy))).unwrap();
    work(if takes { tensor.with_copy_taken().unwrap() } else { tensor });
}

fn bits(values: &[f32]) -> Vec<u32> {
    // Which NaN a processor returns is not promised.
    values.iter().map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect()
}

fn check<H: Half>(kernel: Kernel, n: usize, each: usize) {
    let before: Vec<f32> = (0..n + 1).map(pattern).collect();
    let copy = written::<H>(&before[..n], each);
    let mut wanted = before.clone();
    for (param, copy) in wanted.iter_mut().zip(&copy) {
        *param = expected(*param, *copy);
    }

    let (mut taken, mut copy_now) = ([before.clone(), vec![1.0; n]], copy.clone());
    on(&mut taken, &mut copy_now, true, |mut tensor| take_copy(kernel, &mut tensor));
    assert_eq!(bits(&taken[0]), bits(&wanted), "{kernel:?}, {n} elements, each {each}");

    // The step of values that were taken before it has the same bits.
    let (mut one, mut one_copy) = ([before, vec![0.5; n]], copy.clone());
    let (mut other, mut other_copy) = ([wanted, vec![0.5; n]], copy);
    let step = |tensor: Tensor<'_>| LION.step(kernel, tensor, false).map(drop).unwrap();
    on(&mut one, &mut one_copy, true, step);
    on(&mut other, &mut other_copy, false, step);
    assert_eq!(one.each_ref().map(|values| bits(values)), other.each_ref().map(|values| bits(values)));
    assert!(one_copy.iter().map(|word| word.bits()).eq(other_copy.iter().map(|word| word.bits())));
}

#[test]
fn written_elements_of_a_copy_are_taken_on_every_kernel_and_at_every_edge() {
    for kernel in kernels() {
        for n in [0, 1, 7, 15, 16, 17, 255, 4097, CHUNK] {
            for each in [1, 5, 1009, usize::MAX] {
                check::<f16>(kernel, n, each);
                check::<bf16>(kernel, n, each);
            }
        }
    }
}

#[test]
fn only_a_copy_without_a_shadow_can_count() {
    fn states(memory: &mut [f32]) -> States<'_> {
        States { param: FloatsMut::F32(memory), exp_avg: None, exp_avg_sq: None }
    }
    let (mut param, mut shadow, grad, mut copy) = ([0.0; 4], [0.0; 4], [0.0; 4], [bf16::ONE; 4]);
    let without = Tensor::new(states(&mut param), Floats::F32(&grad), None).unwrap();
    assert!(without.with_copy_taken().unwrap_err().to_string().contains("no param_copy"));
    let copy = Some(FloatsMut::Bf16(&mut copy));
    let both = Tensor::new(states(&mut param), Floats::F32(&grad), copy).unwrap();
    let both = both.with_shadow(states(&mut shadow)).unwrap();
    assert!(both.with_copy_taken().unwrap_err().to_string().contains("shadow"));
}
