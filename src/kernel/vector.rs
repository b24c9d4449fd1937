//! The small set of vector operations that every kernel body is written in.
//!
//! One file per instruction set implements [`Vector`] with one-line wrappers; the bodies are written once, over it.

/// A group of f32 lanes. `scalar` has one lane, AVX2 eight, AVX-512 sixteen.
///
/// # Safety
/// Every method may execute instructions of its instruction set: calling one is sound only inside
/// [`Isa::vectorize`] of the matching set, on a processor that has it. Pointers cover `LANES` elements.
pub unsafe trait Vector: Copy {
    /// Number of f32 in the group.
    const LANES: usize;

    /// The same value in every lane.
    unsafe fn splat(value: f32) -> Self;
    /// Unaligned load.
    unsafe fn load_f32(from: *const f32) -> Self;
    /// Unaligned store.
    unsafe fn store_f32(self, to: *mut f32);
    /// Widens binary16, exactly.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Rounds to nearest even; NaN becomes 0x7e00.
    unsafe fn store_f16(self, to: *mut u16);
    /// Widens bfloat16, exactly.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Rounds to nearest even, denormals included; NaN becomes 0x7fc0.
    unsafe fn store_bf16(self, to: *mut u16);

    /// `self + other`.
    unsafe fn add(self, other: Self) -> Self;
    /// `self - other`.
    unsafe fn sub(self, other: Self) -> Self;
    /// `self * other`.
    unsafe fn mul(self, other: Self) -> Self;
    /// `self / other`, IEEE.
    unsafe fn div(self, other: Self) -> Self;
    /// Square root, IEEE.
    unsafe fn sqrt(self) -> Self;
    /// `self * factor + addend` with one rounding.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `magnitude` with the sign of `self`; zero and NaN lanes keep `self`.
    unsafe fn signum_times(self, magnitude: Self) -> Self;
    /// `lanes[i] = fma(self[i], self[i], lanes[i])` in f64.
    unsafe fn add_squares(self, lanes: *mut f64);
}

/// Work that can be run with any [`Vector`].
pub trait Body {
    /// Does the work.
    ///
    /// # Safety
    /// As [`Vector`]; implementations are `#[inline(always)]`, so that the wrappers become instructions.
    unsafe fn run<V: Vector>(self) -> f64;
}

/// An instruction set: the place where a [`Body`] is compiled with it switched on.
pub trait Isa {
    /// Runs `body` with this set's vectors.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn vectorize<B: Body>(body: B) -> f64;
}
