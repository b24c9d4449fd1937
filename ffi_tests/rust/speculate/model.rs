//! A model of random tensors, and the C calls that the tests use most.

use std::ffi::c_void;
use std::ptr;

use spillway::capi::base::spw_status;
use spillway::capi::optim::{spw_adam_options, spw_adam_step, spw_step_stats, spw_tensor};
use spillway::capi::speculate::{spw_spec, spw_spec_get_stats, spw_spec_stats};
use spillway::capi::{In, Out};
use spillway::optim::adam::AdamOptions;

const F32: u32 = 1;
const BF16: u32 = 3;

pub fn ok(status: spw_status) {
    assert_eq!(status, spw_status::SPW_OK, "{}", last_error());
}

pub fn last_error() -> String {
    // SAFETY: the message is a C string that lives until the next error of this thread.
    unsafe { std::ffi::CStr::from_ptr(spillway::capi::base::spw_last_error()) }.to_string_lossy().into_owned()
}

/// The SplitMix64 generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub fn below(&mut self, end: u64) -> usize {
        (self.next() % end) as usize
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    /// A random number from -1 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 8_388_608.0 - 1.0
    }
}

pub fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[derive(Clone)]
pub struct Tensor {
    pub param: Vec<f32>,
    pub exp_avg: Vec<f32>,
    pub exp_avg_sq: Vec<f32>,
    pub copy: Vec<u16>,
    pub grad: Vec<f32>,
    pub grad_half: Vec<u16>,
    pub half: bool,
    /// The spans that steps write to if the engine rolls back by shadows: param, exp_avg, exp_avg_sq.
    pub shadow: Option<[Vec<f32>; 3]>,
}

impl Tensor {
    pub fn random(random: &mut Random, length: usize) -> Tensor {
        let param: Vec<f32> = (0..length).map(|_| random.unit()).collect();
        Tensor {
            copy: param.iter().map(|value| bf16(*value)).collect(),
            param,
            exp_avg: vec![0.0; length],
            exp_avg_sq: vec![0.0; length],
            grad: vec![0.0; length],
            grad_half: vec![0; length],
            half: random.chance(50),
            shadow: None,
        }
    }

    /// After a step that counts, the shadow spans hold the state.
    pub fn flip(&mut self) {
        if let Some([param, exp_avg, exp_avg_sq]) = &mut self.shadow {
            std::mem::swap(&mut self.param, param);
            std::mem::swap(&mut self.exp_avg, exp_avg);
            std::mem::swap(&mut self.exp_avg_sq, exp_avg_sq);
        }
    }

    pub fn raw(&mut self) -> spw_tensor {
        let shadow = |at: usize, of: &mut Option<[Vec<f32>; 3]>| -> *mut c_void {
            of.as_mut().map_or(ptr::null_mut(), |spans| spans[at].as_mut_ptr().cast())
        };
        let grad: *const c_void =
            if self.half { self.grad_half.as_ptr().cast() } else { self.grad.as_ptr().cast() };
        spw_tensor {
            struct_size: size_of::<spw_tensor>() as u32,
            param_dtype: F32,
            state_dtype: F32,
            grad_dtype: if self.half { BF16 } else { F32 },
            copy_dtype: BF16,
            take_copy: 0,
            n: self.param.len() as u64,
            param: self.param.as_mut_ptr().cast(),
            grad,
            exp_avg: self.exp_avg.as_mut_ptr().cast(),
            exp_avg_sq: self.exp_avg_sq.as_mut_ptr().cast(),
            param_copy: self.copy.as_mut_ptr().cast(),
            options: ptr::null(),
            shadow_param: shadow(0, &mut self.shadow),
            shadow_exp_avg: shadow(1, &mut self.shadow),
            shadow_exp_avg_sq: shadow(2, &mut self.shadow),
            param_low: ptr::null_mut(),
            low_sums: ptr::null_mut(),
            exp_avg_scale: ptr::null_mut(),
            exp_avg_sq_scale: ptr::null_mut(),
        }
    }

    pub fn fill_grad(&mut self, random: &mut Random, size: f32) {
        for (grad, half) in self.grad.iter_mut().zip(&mut self.grad_half) {
            *grad = random.unit() * size;
            *half = bf16(*grad);
        }
    }

    pub fn overflow(&mut self, random: &mut Random) {
        let at = random.below(self.grad.len() as u64);
        self.grad[at] = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN][random.below(3)];
        self.grad_half[at] = [0x7f80, 0xff80, 0x7fc1][random.below(3)];
    }

    pub fn same(&self, other: &Tensor) -> bool {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
        bits(&self.param) == bits(&other.param)
            && bits(&self.exp_avg) == bits(&other.exp_avg)
            && bits(&self.exp_avg_sq) == bits(&other.exp_avg_sq)
            && self.copy == other.copy
    }
}

pub type Buckets = Vec<Vec<Tensor>>;

pub fn table(bucket: &mut [Tensor]) -> Vec<spw_tensor> {
    bucket.iter_mut().map(Tensor::raw).collect()
}

pub fn adam(options: &spw_adam_options, bucket: &mut [Tensor]) -> spw_step_stats {
    let tensors = table(bucket);
    let mut stats = spw_step_stats { struct_size: 16, nonfinite: 0, sum_squares: 0.0 };
    // SAFETY: this test owns the tensors.
    ok(unsafe {
        let (first, count) = (In::new(tensors.as_ptr()), tensors.len() as u64);
        spw_adam_step(In::new(options), first, count, Out::new(&raw mut stats))
    });
    stats
}

pub fn adam_defaults() -> spw_adam_options {
    let AdamOptions { step, lr, beta1, beta2, eps, weight_decay, grad_scale, .. } = AdamOptions::default();
    let struct_size = size_of::<spw_adam_options>() as u32;
    spw_adam_options { struct_size, step, lr, beta1, beta2, eps, weight_decay, grad_scale, ..zeros() }
}

pub fn zeros<T: Copy>() -> T {
    // SAFETY: only structs of the C interface are created, and all bytes zero are a valid value of them.
    unsafe { std::mem::zeroed() }
}

/// The handle in the form that the C functions take.
///
/// # Safety
/// `spec` is an open engine.
pub unsafe fn shared<'a>(spec: *const spw_spec) -> Option<&'a spw_spec> {
    // SAFETY: the caller's promise.
    unsafe { spec.as_ref() }
}

pub fn stats_of(spec: *mut spw_spec) -> spw_spec_stats {
    let mut stats = spw_spec_stats { struct_size: 88, ..zeros() };
    // SAFETY: the engine is open.
    ok(unsafe { spw_spec_get_stats(shared(spec), Out::new(&raw mut stats)) });
    stats
}
