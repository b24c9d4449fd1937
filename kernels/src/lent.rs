//! A tensor whose owner lends its memory for longer than one borrow.
//!
//! Invariant: until the tensor is dropped, its memory stays in place and is its own. The caller of [`LentTensor::new`]
//! promises it. So each borrow of the tensor is a valid borrow of the memory.

use std::ffi::c_void;

use super::coded::{BLOCK, Codes};
use super::squares::TILE;
use super::tensor::{States, Tensor};
use crate::dtype::{Dtype, Floats, FloatsMut, bf16};

/// The addresses, types and length of a [`Tensor`], to be borrowed again later. It has no log.
#[derive(Debug)]
pub struct LentTensor {
    n: usize,
    states: RawStates,
    grad: RawSpan,
    param_copy: Option<RawSpan>,
    shadow: Option<RawStates>,
    takes_copy: bool,
    low: Option<*mut u16>,
    low_sums: *mut u64,
    codes: Option<Box<[Option<RawCodes>; 2]>>,
}

#[derive(Debug, Clone, Copy)]
struct RawCodes {
    codes: *mut u8,
    scales: *mut bf16,
}

#[derive(Debug, Clone, Copy)]
struct RawStates {
    param: RawSpan,
    exp_avg: Option<RawSpan>,
    exp_avg_sq: Option<RawSpan>,
}

#[derive(Debug, Clone, Copy)]
struct RawSpan {
    address: *mut u8,
    dtype: Dtype,
}

// SAFETY: the addresses are used by `borrow` alone, and the memory was lent to all threads (`new`).
unsafe impl Send for LentTensor {}

impl LentTensor {
    /// Keeps the addresses of `tensor`. Its log is left out.
    ///
    /// # Safety
    /// Until the result is dropped, the memory of `tensor` stays in place, any thread may use it through the result, and
    /// no other code uses it while a borrow of the result is alive, except that other code may read the gradient.
    pub unsafe fn new(tensor: &mut Tensor<'_>) -> LentTensor {
        LentTensor {
            n: tensor.len(),
            states: RawStates::of(&mut tensor.states),
            grad: RawSpan { address: tensor.grad.address().cast_mut(), dtype: tensor.grad.dtype() },
            param_copy: tensor.param_copy.as_mut().map(RawSpan::of),
            shadow: tensor.shadow_mut().map(RawStates::of),
            takes_copy: tensor.takes_copy(),
            low: tensor.is_split().then(|| tensor.low_address()),
            low_sums: tensor.low_sums_address(),
            codes: tensor
                .codes_mut()
                .map(|codes| Box::new(codes.each_mut().map(|codes| codes.as_mut().map(RawCodes::of)))),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.n
    }

    /// True for no elements.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Types of param, gradient and both states.
    pub fn types(&self) -> [Option<Dtype>; 4] {
        let RawStates { param, exp_avg, exp_avg_sq } = self.states;
        [Some(param), Some(self.grad), exp_avg, exp_avg_sq].map(|span| span.map(|span| span.dtype))
    }

    /// True if the tensor has shadow spans.
    pub fn has_shadow(&self) -> bool {
        self.shadow.is_some()
    }

    /// True if a step takes what other code has written to the 16-bit copy.
    pub fn takes_copy(&self) -> bool {
        self.takes_copy
    }

    /// Address and bytes of the 16-bit copy of param, if there is one.
    pub fn param_copy(&self) -> Option<(usize, usize)> {
        self.param_copy.map(|copy| (copy.address.addr(), self.n * copy.dtype.size()))
    }

    /// The tensor.
    pub fn borrow(&mut self) -> Tensor<'_> {
        self.borrow_with(self.param_copy, self.shadow)
    }

    /// The tensor without its 16-bit copy.
    pub fn borrow_without_copy(&mut self) -> Tensor<'_> {
        self.borrow_with(None, self.shadow)
    }

    /// The tensor without its shadow spans.
    pub fn borrow_without_shadow(&mut self) -> Tensor<'_> {
        self.borrow_with(self.param_copy, None)
    }

    fn borrow_with(&mut self, param_copy: Option<RawSpan>, shadow: Option<RawStates>) -> Tensor<'_> {
        let n = self.n;
        // SAFETY: `new` took the addresses from slices of `n` elements that do not overlap. The memory is lent until
        // `self` is dropped, and the result borrows `self` exclusively.
        unsafe {
            let tensor = Tensor::of_checked(
                self.states.borrow(n),
                self.grad.borrow(n),
                param_copy.map(|copy| copy.borrow_mut(n)),
                shadow.map(|shadow| shadow.borrow(n)),
                self.low.map(|low| std::slice::from_raw_parts_mut(low, n)),
                self.takes_copy && param_copy.is_some(),
            );
            let tensor = match &self.codes {
                Some(codes) => tensor.of_checked_codes(codes.map(|codes| codes.map(|codes| codes.borrow(n)))),
                None => tensor,
            };
            match self.low_sums.is_null() {
                true => tensor,
                false => {
                    tensor.of_checked_sums(std::slice::from_raw_parts_mut(self.low_sums, n.div_ceil(TILE)))
                }
            }
        }
    }
}

impl<'a> Floats<'a> {
    /// The `n` elements at an address.
    ///
    /// # Safety
    /// The address is not null, is aligned to `dtype`, and has `n` elements, which no code writes during `'a`.
    #[inline]
    pub unsafe fn from_raw(from: *const c_void, dtype: Dtype, n: usize) -> Floats<'a> {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            match dtype {
                Dtype::F32 => Floats::F32(std::slice::from_raw_parts(from.cast(), n)),
                Dtype::F16 => Floats::F16(std::slice::from_raw_parts(from.cast(), n)),
                Dtype::Bf16 => Floats::Bf16(std::slice::from_raw_parts(from.cast(), n)),
            }
        }
    }
}

impl<'a> FloatsMut<'a> {
    /// As [`Floats::from_raw`].
    ///
    /// # Safety
    /// As [`Floats::from_raw`]; the elements are lent for `'a` to the result alone.
    #[inline]
    pub unsafe fn from_raw(to: *mut c_void, dtype: Dtype, n: usize) -> FloatsMut<'a> {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            match dtype {
                Dtype::F32 => FloatsMut::F32(std::slice::from_raw_parts_mut(to.cast(), n)),
                Dtype::F16 => FloatsMut::F16(std::slice::from_raw_parts_mut(to.cast(), n)),
                Dtype::Bf16 => FloatsMut::Bf16(std::slice::from_raw_parts_mut(to.cast(), n)),
            }
        }
    }
}

impl RawStates {
    fn of(states: &mut States<'_>) -> RawStates {
        RawStates {
            param: RawSpan::of(&mut states.param),
            exp_avg: states.exp_avg.as_mut().map(RawSpan::of),
            exp_avg_sq: states.exp_avg_sq.as_mut().map(RawSpan::of),
        }
    }

    /// # Safety
    /// The spans have `n` elements, which are lent for `'a` to the result alone.
    unsafe fn borrow<'a>(self, n: usize) -> States<'a> {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            States {
                param: self.param.borrow_mut(n),
                exp_avg: self.exp_avg.map(|span| span.borrow_mut(n)),
                exp_avg_sq: self.exp_avg_sq.map(|span| span.borrow_mut(n)),
            }
        }
    }
}

impl RawCodes {
    fn of(codes: &mut Codes<'_>) -> RawCodes {
        RawCodes { codes: codes.codes.as_mut_ptr(), scales: codes.scales.as_mut_ptr() }
    }

    /// # Safety
    /// There are `n` codes with their scales, which are lent for `'a` to the result alone.
    unsafe fn borrow<'a>(self, n: usize) -> Codes<'a> {
        // SAFETY: the addresses come from slices of these lengths; valid and exclusive by the caller's promise.
        unsafe {
            Codes {
                codes: std::slice::from_raw_parts_mut(self.codes, n),
                scales: std::slice::from_raw_parts_mut(self.scales, n.div_ceil(BLOCK)),
            }
        }
    }
}

impl RawSpan {
    fn of(span: &mut FloatsMut<'_>) -> RawSpan {
        RawSpan { dtype: span.dtype(), address: span.address() }
    }

    /// # Safety
    /// The span has `n` elements, which no code writes during `'a`.
    unsafe fn borrow<'a>(self, n: usize) -> Floats<'a> {
        // SAFETY: not null and aligned, since it comes from a slice of this type; valid by the caller's promise.
        unsafe { Floats::from_raw(self.address.cast(), self.dtype, n) }
    }

    /// # Safety
    /// The span has `n` elements, which are lent for `'a` to the result alone.
    unsafe fn borrow_mut<'a>(self, n: usize) -> FloatsMut<'a> {
        // SAFETY: as in `borrow`, and exclusive by the caller's promise.
        unsafe { FloatsMut::from_raw(self.address.cast(), self.dtype, n) }
    }
}
