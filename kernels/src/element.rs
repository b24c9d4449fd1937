//! Element types as they lie in memory, and the table of combinations that have a kernel.

use super::vector::Vector;
use crate::dtype::Dtype;

/// How one element type is loaded into and stored from f32 lanes.
pub trait Element: Copy + Send + Sync {
    /// The bits in memory.
    type Raw: Copy + Default;

    /// Loads `V::LANES` elements.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn load<V: Vector>(from: *const Self::Raw) -> V;

    /// Stores `V::LANES` elements.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn store<V: Vector>(value: V, to: *mut Self::Raw);

    /// Loads `V::LANES` elements as patterns, those of 16 bits widened with zeros.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn load_bits<V: Vector>(from: *const Self::Raw) -> V::Bits;

    /// Stores `V::LANES` patterns.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn store_bits<V: Vector>(bits: V::Bits, to: *mut Self::Raw);

    /// Stores `V::LANES` patterns past the caches.
    ///
    /// # Safety
    /// As [`Vector::stream_bits32`].
    unsafe fn stream_bits<V: Vector>(bits: V::Bits, to: *mut Self::Raw);

    /// The patterns that `store` would write.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn encode<V: Vector>(value: V) -> V::Bits;

    /// The values of patterns.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn decode<V: Vector>(bits: V::Bits) -> V;
}

/// binary32.
#[derive(Clone, Copy)]
pub struct F32;
/// binary16.
#[derive(Clone, Copy)]
pub struct F16;
/// bfloat16.
#[derive(Clone, Copy)]
pub struct Bf16;
/// No memory at all: the parameter copy that was not asked for.
#[derive(Clone, Copy)]
pub struct Absent;

impl Element for F32 {
    type Raw = f32;
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f32) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::load_f32(from) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector>(value: V, to: *mut f32) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { value.store_f32(to) }
    }
    #[inline(always)]
    unsafe fn load_bits<V: Vector>(from: *const Self::Raw) -> V::Bits {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::load_bits32(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store_bits<V: Vector>(bits: V::Bits, to: *mut Self::Raw) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::store_bits32(bits, to.cast()) }
    }
    #[inline(always)]
    unsafe fn stream_bits<V: Vector>(bits: V::Bits, to: *mut Self::Raw) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::stream_bits32(bits, to.cast()) }
    }
    #[inline(always)]
    unsafe fn encode<V: Vector>(value: V) -> V::Bits {
        // SAFETY: the caller's promise is the callee's.
        unsafe { value.to_bits() }
    }
    #[inline(always)]
    unsafe fn decode<V: Vector>(bits: V::Bits) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::from_bits(bits) }
    }
}

impl Element for F16 {
    type Raw = u16;
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u16) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::load_f16(from) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector>(value: V, to: *mut u16) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { value.store_f16(to) }
    }
    #[inline(always)]
    unsafe fn load_bits<V: Vector>(from: *const Self::Raw) -> V::Bits {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::load_bits16(from) }
    }
    #[inline(always)]
    unsafe fn store_bits<V: Vector>(bits: V::Bits, to: *mut Self::Raw) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::store_bits16(bits, to) }
    }
    #[inline(always)]
    unsafe fn stream_bits<V: Vector>(bits: V::Bits, to: *mut Self::Raw) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::stream_bits16(bits, to) }
    }
    #[inline(always)]
    unsafe fn encode<V: Vector>(value: V) -> V::Bits {
        // SAFETY: the caller's promise is the callee's.
        unsafe { value.round_f16() }
    }
    #[inline(always)]
    unsafe fn decode<V: Vector>(bits: V::Bits) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::widen_f16(bits) }
    }
}

impl Element for Bf16 {
    type Raw = u16;
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u16) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector>(value: V, to: *mut u16) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { value.store_bf16(to) }
    }
    #[inline(always)]
    unsafe fn load_bits<V: Vector>(from: *const Self::Raw) -> V::Bits {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::load_bits16(from) }
    }
    #[inline(always)]
    unsafe fn store_bits<V: Vector>(bits: V::Bits, to: *mut Self::Raw) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::store_bits16(bits, to) }
    }
    #[inline(always)]
    unsafe fn stream_bits<V: Vector>(bits: V::Bits, to: *mut Self::Raw) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::stream_bits16(bits, to) }
    }
    #[inline(always)]
    unsafe fn encode<V: Vector>(value: V) -> V::Bits {
        // SAFETY: the caller's promise is the callee's.
        unsafe { value.round_bf16() }
    }
    #[inline(always)]
    unsafe fn decode<V: Vector>(bits: V::Bits) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::widen_bf16(bits) }
    }
}

impl Element for Absent {
    type Raw = ();
    #[inline(always)]
    unsafe fn load<V: Vector>(_: *const ()) -> V {
        // SAFETY: a splat touches no memory.
        unsafe { V::splat(0.0) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector>(_: V, _: *mut ()) {}
    #[inline(always)]
    unsafe fn load_bits<V: Vector>(_: *const Self::Raw) -> V::Bits {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::splat(0.0).to_bits() }
    }
    #[inline(always)]
    unsafe fn store_bits<V: Vector>(_: V::Bits, _: *mut ()) {}
    #[inline(always)]
    unsafe fn stream_bits<V: Vector>(_: V::Bits, _: *mut ()) {}
    #[inline(always)]
    unsafe fn encode<V: Vector>(_: V) -> V::Bits {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::splat(0.0).to_bits() }
    }
    #[inline(always)]
    unsafe fn decode<V: Vector>(_: V::Bits) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { V::splat(0.0) }
    }
}

/// The element types of one tensor's step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dtypes {
    /// Of the parameter that is updated.
    pub param: Dtype,
    /// Of exp_avg and exp_avg_sq.
    pub state: Dtype,
    /// Of the gradient.
    pub grad: Dtype,
    /// Of the extra copy of the parameter, if one is written.
    pub copy: Option<Dtype>,
}

/// Something to do with the element types known at compile time.
pub trait WithTypes {
    /// What it gives.
    type Output;
    /// `P` parameter, `S` state, `G` gradient, `C` copy.
    fn with<P: Element, S: Element, G: Element, C: Element>(self) -> Self::Output;
}

/// Calls `work` with the types that `dtypes` names; `None` if that combination has no kernel.
pub fn with_types<W: WithTypes>(dtypes: Dtypes, work: W) -> Option<W::Output> {
    use Dtype::{Bf16 as B, F16 as H, F32 as S};
    let Dtypes { param, state, grad, copy } = dtypes;
    Some(match (param, state, grad, copy) {
        (S, S, S, None) => work.with::<F32, F32, F32, Absent>(),
        (S, S, S, Some(H)) => work.with::<F32, F32, F32, F16>(),
        (S, S, S, Some(B)) => work.with::<F32, F32, F32, Bf16>(),
        (S, S, H, None) => work.with::<F32, F32, F16, Absent>(),
        (S, S, H, Some(H)) => work.with::<F32, F32, F16, F16>(),
        (S, S, H, Some(B)) => work.with::<F32, F32, F16, Bf16>(),
        (S, S, B, None) => work.with::<F32, F32, Bf16, Absent>(),
        (S, S, B, Some(H)) => work.with::<F32, F32, Bf16, F16>(),
        (S, S, B, Some(B)) => work.with::<F32, F32, Bf16, Bf16>(),
        (H, S, H, None) => work.with::<F16, F32, F16, Absent>(),
        (H, H, H, None) => work.with::<F16, F16, F16, Absent>(),
        (B, S, B, None) => work.with::<Bf16, F32, Bf16, Absent>(),
        (B, B, B, None) => work.with::<Bf16, Bf16, Bf16, Absent>(),
        _ => return None,
    })
}

/// True if the combination has a kernel.
pub fn supported(dtypes: Dtypes) -> bool {
    struct Exists;
    impl WithTypes for Exists {
        type Output = ();
        fn with<P: Element, S: Element, G: Element, C: Element>(self) {}
    }
    with_types(dtypes, Exists).is_some()
}
