//! How a chunk is walked.
//!
//! A chunk is at most [`CHUNK`] elements: what one thread does before it looks for other work, and what stays on the
//! caller's thread. Within it whole vectors come first; the rest goes through a vector padded with zeros, so that
//! every element gets the same instructions and the bits do not depend on where a span ends.

use std::marker::PhantomData;

use super::element::{Bf16, Element, F16, F32, WithTypes, with_types};
use super::float_mode::IeeeMode;
use super::rules::Rule;
use super::select::Kernel;
use super::squares::{self, LANES, TILE};
use super::tensor::{Spans, Tensor};
use super::vector::{Body, Vector};
use crate::dtype::Floats;
use crate::error::{Error, Result};

/// Most elements of one kernel call; a power-of-two number of tiles, so that sums do not depend on the split.
pub const CHUNK: usize = 16 * TILE;

/// Steps one chunk (at most [`CHUNK`] elements) and returns the sum of squares of the scaled gradient, or 0 when
/// `squares` is false.
pub fn step<R: Rule>(kernel: Kernel, rule: R, mut tensor: Tensor<'_>, squares: bool) -> Result<f64> {
    assert!(tensor.len() <= CHUNK, "a chunk is at most {CHUNK} elements");
    let dtypes = tensor.dtypes()?;
    #[cfg(target_arch = "aarch64")]
    if let (Some(body), Some(adam)) = (kernel.adam_body(), rule.as_adam())
        && let Some(sum) = super::sve::step(body, adam, dtypes, &mut tensor, squares)
    {
        return Ok(sum);
    }
    let work = StepChunk { kernel, rule, tensor: &mut tensor, squares };
    with_types(dtypes, work).ok_or_else(|| Error::Unsupported(format!("no kernel for {dtypes:?}")))
}

/// Sum of squares of one chunk of a gradient times `scale`.
pub fn grad_squares(kernel: Kernel, grad: Floats<'_>, scale: f32) -> f64 {
    assert!(grad.len() <= CHUNK, "a chunk is at most {CHUNK} elements");
    let n = grad.len();
    let _mode = IeeeMode::enter();
    // SAFETY: each pointer covers the n elements of the slice it comes from.
    unsafe {
        match grad {
            Floats::F32(g) => kernel.run(Walk::<_, true> { op: Scaled::<F32>::new(g.as_ptr(), scale), n }),
            Floats::F16(g) => {
                kernel.run(Walk::<_, true> { op: Scaled::<F16>::new(g.as_ptr().cast(), scale), n })
            }
            Floats::Bf16(g) => {
                kernel.run(Walk::<_, true> { op: Scaled::<Bf16>::new(g.as_ptr().cast(), scale), n })
            }
        }
    }
}

struct StepChunk<'t, 'a, R> {
    kernel: Kernel,
    rule: R,
    tensor: &'t mut Tensor<'a>,
    squares: bool,
}

impl<R: Rule> WithTypes for StepChunk<'_, '_, R> {
    type Output = f64;
    fn with<P: Element, S: Element, G: Element, C: Element>(self) -> f64 {
        let n = self.tensor.len();
        let op = Update { rule: self.rule, spans: Spans::<P, S, G, C>::of(self.tensor) };
        let _mode = IeeeMode::enter();
        // SAFETY: the tensor's dtypes chose these types, its constructor checked that every span has n elements.
        unsafe {
            match self.squares {
                true => self.kernel.run(Walk::<_, true> { op, n }),
                false => self.kernel.run(Walk::<_, false> { op, n }),
            }
        }
    }
}

/// How a group of elements is read and written: whole, or a first part of it.
pub trait Access: Copy {
    /// Loads the group; lanes outside it are zero.
    ///
    /// # Safety
    /// As [`Vector`], for the elements inside the group.
    unsafe fn load<E: Element, V: Vector>(self, from: *const E::Raw) -> V;
    /// Stores the lanes inside the group.
    ///
    /// # Safety
    /// As [`Vector`], for the elements inside the group.
    unsafe fn store<E: Element, V: Vector>(self, value: V, to: *mut E::Raw);
}

/// All lanes.
#[derive(Clone, Copy)]
struct Whole;

/// The first so many lanes.
#[derive(Clone, Copy)]
struct First(usize);

const MAX_LANES: usize = 16;

impl Access for Whole {
    #[inline(always)]
    unsafe fn load<E: Element, V: Vector>(self, from: *const E::Raw) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { E::load(from) }
    }
    #[inline(always)]
    unsafe fn store<E: Element, V: Vector>(self, value: V, to: *mut E::Raw) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { E::store(value, to) }
    }
}

impl Access for First {
    #[inline(always)]
    unsafe fn load<E: Element, V: Vector>(self, from: *const E::Raw) -> V {
        let mut padded = [E::Raw::default(); MAX_LANES];
        // SAFETY: the group has self.0 <= MAX_LANES elements, and the padded array a whole vector.
        unsafe {
            std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), self.0);
            E::load(padded.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store<E: Element, V: Vector>(self, value: V, to: *mut E::Raw) {
        let mut padded = [E::Raw::default(); MAX_LANES];
        // SAFETY: the group has self.0 <= MAX_LANES elements, and the padded array a whole vector.
        unsafe {
            E::store(value, padded.as_mut_ptr());
            std::ptr::copy_nonoverlapping(padded.as_ptr(), to, self.0);
        }
    }
}

/// Work on one group of elements, giving the gradient whose squares are summed.
trait Op {
    /// # Safety
    /// As [`Vector`], for the group that `access` reads and writes at `at`.
    unsafe fn apply<V: Vector, A: Access>(&self, at: usize, access: A) -> V;
}

struct Update<R, P: Element, S: Element, G: Element, C: Element> {
    rule: R,
    spans: Spans<P, S, G, C>,
}

impl<R: Rule, P: Element, S: Element, G: Element, C: Element> Op for Update<R, P, S, G, C> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&self, at: usize, access: A) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.rule.apply(&self.spans, at, access) }
    }
}

struct Scaled<G: Element> {
    grad: *const G::Raw,
    scale: f32,
    element: PhantomData<G>,
}

impl<G: Element> Scaled<G> {
    fn new(grad: *const G::Raw, scale: f32) -> Self {
        Scaled { grad, scale, element: PhantomData }
    }
}

impl<G: Element> Op for Scaled<G> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&self, at: usize, access: A) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { access.load::<G, V>(self.grad.add(at)).mul(V::splat(self.scale)) }
    }
}

struct Walk<O, const SQUARES: bool> {
    op: O,
    n: usize,
}

impl<O: Op, const SQUARES: bool> Body for Walk<O, SQUARES> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f64 {
        let Walk { op, n } = self;
        let mut sums = [0.0; CHUNK / TILE];
        let mut lanes = [0.0; LANES];
        let mut at = 0;
        while at < n {
            let tile = at / TILE;
            let end = n.min(at + TILE);
            // SAFETY: every group lies below n; at % LANES is a multiple of V::LANES, which divides LANES.
            unsafe {
                while at + V::LANES <= end {
                    let grad: V = op.apply(at, Whole);
                    if SQUARES {
                        grad.add_squares(lanes.as_mut_ptr().add(at % LANES));
                    }
                    at += V::LANES;
                }
                if at < end {
                    let grad: V = op.apply(at, First(end - at));
                    if SQUARES {
                        grad.add_squares(lanes.as_mut_ptr().add(at % LANES));
                    }
                    at = end;
                }
            }
            if SQUARES {
                sums[tile] = squares::tile_sum(&mut lanes);
                lanes = [0.0; LANES];
            }
        }
        if SQUARES { squares::tree_sum(&sums[..n.div_ceil(TILE)]) } else { 0.0 }
    }
}
