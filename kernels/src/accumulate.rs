//! Adds a gradient to an accumulated gradient: `dst = fma(src, scale, dst)`, rounded to nearest even.

use std::marker::PhantomData;

use super::chunk_loop::{Access, CHUNK, ChunkLoop, Op};
use super::dispatch::Kernel;
use super::element::{Bf16, Element, F16, F32};
use super::float_mode::IeeeMode;
use super::spans::AHEAD;
use super::vector::Vector;
use crate::dtype::{Floats, FloatsMut};

/// Adds `src * scale` to one chunk of `dst`. Returns the sum of squares of the stored results if `squares` is true.
/// Panics if the lengths differ, or if there are more than [`CHUNK`] elements.
pub fn accumulate(kernel: Kernel, dst: FloatsMut<'_>, src: Floats<'_>, scale: f32, squares: bool) -> f64 {
    assert!(dst.len() == src.len() && src.len() <= CHUNK, "equal lengths of at most {CHUNK} elements");
    match dst {
        FloatsMut::F32(dst) => with_dst::<F32>(kernel, dst.as_mut_ptr(), src, scale, squares),
        FloatsMut::F16(dst) => with_dst::<F16>(kernel, dst.as_mut_ptr().cast(), src, scale, squares),
        FloatsMut::Bf16(dst) => with_dst::<Bf16>(kernel, dst.as_mut_ptr().cast(), src, scale, squares),
    }
}

fn with_dst<D: Element>(kernel: Kernel, dst: *mut D::Raw, src: Floats<'_>, scale: f32, squares: bool) -> f64 {
    let n = src.len();
    match src {
        Floats::F32(src) => run(kernel, Sum::<D, F32>::new(dst, src.as_ptr(), scale), n, squares),
        Floats::F16(src) => run(kernel, Sum::<D, F16>::new(dst, src.as_ptr().cast(), scale), n, squares),
        Floats::Bf16(src) => run(kernel, Sum::<D, Bf16>::new(dst, src.as_ptr().cast(), scale), n, squares),
    }
}

fn run<D: Element, S: Element>(kernel: Kernel, op: Sum<D, S>, n: usize, squares: bool) -> f64 {
    let _mode = IeeeMode::enter();
    // SAFETY: `accumulate` checked that both spans have n elements, and borrows them, `dst` exclusively.
    unsafe {
        match squares {
            true => kernel.run(ChunkLoop::<_, true> { op, n }),
            false => kernel.run(ChunkLoop::<_, false> { op, n }),
        }
    }
}

struct Sum<D: Element, S: Element> {
    dst: *mut D::Raw,
    src: *const S::Raw,
    scale: f32,
    elements: PhantomData<(D, S)>,
}

impl<D: Element, S: Element> Sum<D, S> {
    fn new(dst: *mut D::Raw, src: *const S::Raw, scale: f32) -> Self {
        Sum { dst, src, scale, elements: PhantomData }
    }
}

impl<D: Element, S: Element> Op for Sum<D, S> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's contract covers every call below; a prefetch of any address is harmless.
        unsafe {
            V::prefetch(self.dst.wrapping_add(at + AHEAD).cast_const().cast());
            V::prefetch(self.src.wrapping_add(at + AHEAD).cast());
            let old = access.load::<D, V>(self.dst.add(at));
            let sum = access.load::<S, V>(self.src.add(at)).mul_add(V::splat(self.scale), old);
            let stored = D::encode(sum);
            access.store_bits::<D, V>(stored, self.dst.add(at));
            D::decode(stored)
        }
    }
}
