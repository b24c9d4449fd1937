//! The step with 8-bit moments.
//!
//! A group's codes become values in registers, which the step of the group takes. Its new moments go to a strip of values in the nearest
//! cache, because the scale of a block follows from all of its values. At the end of a strip its moments are encoded. So every rule, type
//! combination and instruction set has 8-bit moments, with the bits of a step of the decoded moments.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::chunk_loop::{Access, ChunkLoop, Op, StepOp};
use super::coded::{BLOCK, Codes, Moments};
use super::codes::{Encode, STRIP, scale_at, value_of};
use super::dispatch::Kernel;
use super::element::{Element, WithTypes, with_f32_moments, with_split_f32_moments};
use super::float_mode::IeeeMode;
use super::rules::Arithmetic;
use super::spans::Spans;
use super::split::{Split, Summed};
use super::step::Update;
use super::stochastic::RandomBits;
use super::tensor::{Tensor, codes_stand_alone, no_kernel, no_split_kernel};
use super::vector::Vector;
use crate::error::Result;

/// Steps one chunk with 8-bit moments, which are rounded to nearest, or with `random` at random. Not inlined: every step
/// would touch the pages of its strip on the stack.
#[inline(never)]
pub fn step_coded<R: Arithmetic>(
    kernel: Kernel,
    rule: R,
    tensor: &mut Tensor<'_>,
    squares: bool,
    random: Option<RandomBits>,
) -> Result<f64> {
    if tensor.has_shadow() {
        return Err(codes_stand_alone());
    }
    let dtypes = tensor.dtypes()?;
    let mut strip = MaybeUninit::uninit();
    let moments = tensor.take_codes();
    let coding = Coding { kernel, moments: addresses(moments), random, strip: &raw mut strip };
    if tensor.is_split() {
        let work = CodedStep::<_, true> { rule, tensor, squares, coding };
        return with_split_f32_moments(dtypes, work).ok_or_else(|| no_split_kernel(dtypes));
    }
    let work = CodedStep::<_, false> { rule, tensor, squares, coding };
    with_f32_moments(dtypes, work).ok_or_else(|| no_kernel(dtypes))
}

/// Values of a strip, which a group has written before they are read.
#[repr(align(64))]
struct Strip {
    moments: [[f32; STRIP]; 2],
    random: [u32; STRIP],
}

/// Where the moments of a chunk are, and how they are encoded. A moment that the rule does not keep is null.
#[derive(Clone, Copy)]
struct Coding {
    kernel: Kernel,
    moments: [(*mut u8, *mut u16); 2],
    random: Option<RandomBits>,
    strip: *mut MaybeUninit<Strip>,
}

fn addresses(moments: Moments<'_>) -> [(*mut u8, *mut u16); 2] {
    let null = (std::ptr::null_mut(), std::ptr::null_mut());
    moments.map(|moment| {
        moment.map_or(null, |Codes { codes, scales }| (codes.as_mut_ptr(), scales.as_mut_ptr().cast()))
    })
}

/// The step of one chunk, whose master is `SPLIT` or whole.
struct CodedStep<'t, 'a, R, const SPLIT: bool> {
    rule: R,
    tensor: &'t mut Tensor<'a>,
    squares: bool,
    coding: Coding,
}

impl<R: Arithmetic> WithTypes for CodedStep<'_, '_, R, false> {
    type Output = f64;
    fn with<P: Element, S: Element, G: Element, C: Element>(self) -> f64 {
        let CodedStep { rule, tensor, squares, coding } = self;
        let n = tensor.len();
        let op = Update::<_, _, _, _, _, true> { rule, spans: Spans::<P, S, G, C>::of(tensor) };
        // SAFETY: `with_f32_moments` chose P, G and C by the tensor's dtypes, so the addresses point to elements of these
        // types, and `Tensor::new` checked that every span has n of them. `with_codes` checked the same of codes and
        // scales, and `check_states` that no moment of the rule is missing. The tensor borrows all of them, and
        // exclusively those that are written, for longer than this call.
        unsafe { run::<R, _>(op, n, squares, coding) }
    }
}

impl<R: Arithmetic> WithTypes for CodedStep<'_, '_, R, true> {
    type Output = f64;
    fn with<P: Element, S: Element, G: Element, C: Element>(self) -> f64 {
        let CodedStep { rule, tensor, squares, coding } = self;
        let (n, sums) = (tensor.len(), tensor.low_sums_address());
        let split = Split::<R, S, G>::of(rule, tensor);
        // SAFETY: as of a whole master, with `Tensor::new_split` in place of `Tensor::new`; `with_low_sums` checked that there
        // is a sum for each tile.
        unsafe {
            match sums.is_null() {
                true => run::<R, _>(split, n, squares, coding),
                false => run::<R, _>(Summed::new(split, sums, n), n, squares, coding),
            }
        }
    }
}

/// # Safety
/// `op` steps spans of `n` elements, and `coding` has their codes, scales and a strip.
unsafe fn run<R: Arithmetic, O: StepOp>(op: O, n: usize, squares: bool, coding: Coding) -> f64 {
    let _mode = IeeeMode::enter();
    let kernel = coding.kernel;
    let op = CodedOp { op, coding, n, rule: PhantomData::<R> };
    // SAFETY: the caller's promise.
    unsafe {
        match squares {
            true => kernel.run(ChunkLoop::<_, true> { op, n }),
            false => kernel.run(ChunkLoop::<_, false> { op, n }),
        }
    }
}

struct CodedOp<R, O> {
    op: O,
    coding: Coding,
    n: usize,
    rule: PhantomData<R>,
}

impl<R: Arithmetic, O: StepOp> Op for CodedOp<R, O> {
    #[inline(always)]
    unsafe fn begin_tile<V: Vector>(&mut self, at: usize) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { self.op.begin_tile::<V>(at) }
    }

    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's contract covers every call below. A strip has whole groups of every vector.
        unsafe {
            let old = [
                if R::EXP_AVG { self.coding.value::<V, A, true>(at, access) } else { V::splat(0.0) },
                if R::EXP_AVG_SQ { self.coding.value::<V, A, false>(at, access) } else { V::splat(0.0) },
            ];
            let (grad, [exp_avg, exp_avg_sq]) = self.op.advance(at, access, old);
            let (strip, place) = (self.coding.strip.cast::<Strip>(), at % STRIP);
            if R::EXP_AVG {
                exp_avg.store_f32((&raw mut (*strip).moments[0]).cast::<f32>().add(place));
            }
            if R::EXP_AVG_SQ {
                exp_avg_sq.store_f32((&raw mut (*strip).moments[1]).cast::<f32>().add(place));
            }
            if let Some(random) = &self.coding.random {
                V::store_bits32(random.bits::<V>(at), (&raw mut (*strip).random).cast::<u32>().add(place));
            }
            let end = if A::WHOLE { at + V::LANES } else { self.n };
            if end.is_multiple_of(STRIP) || end == self.n {
                self.coding.encode::<R>(at - place, end);
            }
            grad
        }
    }

    #[inline(always)]
    unsafe fn end_tile<V: Vector>(&mut self, at: usize, count: usize) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { self.op.end_tile::<V>(at, count) }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector>(&mut self) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { self.op.finish::<V>() }
    }
}

impl Coding {
    /// The values of the group at element `at`, which is in one block.
    #[inline(always)]
    unsafe fn value<V: Vector, A: Access, const FIRST: bool>(&self, at: usize, access: A) -> V {
        let (codes, scales) = self.moments[usize::from(!FIRST)];
        // SAFETY: the caller upholds the callees' contracts.
        unsafe { value_of::<V, FIRST>(access.load_bytes::<V>(codes.add(at)), scale_at(scales, at)) }
    }

    /// Encodes the strip from element `at` to `end`. A call of its own for each instruction set: in each body of a step it
    /// would take more room than the step.
    #[inline(never)]
    unsafe fn encode<R: Arithmetic>(self, at: usize, end: usize) {
        let (strip, n) = (self.strip.cast::<Strip>(), end - at);
        // SAFETY: the groups of the strip have written its values. They are n elements of the chunk, and begin with a block.
        unsafe {
            let random = self.random.map(|_| (&raw const (*strip).random).cast());
            let place = |moment: usize| {
                let (codes, scales) = self.moments[moment];
                let from: *const f32 = (&raw const (*strip).moments[moment]).cast();
                (from, codes.add(at), scales.add(at / BLOCK))
            };
            if R::EXP_AVG {
                let (from, codes, scales) = place(0);
                self.kernel.run(Encode::<true> { from, codes, scales, n, random });
            }
            if R::EXP_AVG_SQ {
                let (from, codes, scales) = place(1);
                self.kernel.run(Encode::<false> { from, codes, scales, n, random });
            }
        }
    }
}
