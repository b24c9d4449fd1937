//! Element types in memory, and the table of type combinations that have a kernel.

use super::vector::Vector;
use crate::dtype::Dtype;

/// Conversion of one element type between memory and f32 lanes.
pub trait Element: Copy + Send + Sync {
    /// Type of one element in memory.
    type Raw: Copy + Default;

    /// Loads `V::LANES` elements.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    unsafe fn load<V: Vector>(from: *const Self::Raw) -> V;

    /// Stores `V::LANES` elements.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    unsafe fn store<V: Vector>(value: V, to: *mut Self::Raw);

    /// Loads `V::LANES` elements as bit patterns. 16-bit patterns are zero-extended to 32 bits.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    unsafe fn load_bits<V: Vector>(from: *const Self::Raw) -> V::Bits;

    /// Stores `V::LANES` bit patterns.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    unsafe fn store_bits<V: Vector>(bits: V::Bits, to: *mut Self::Raw);

    /// Stores `V::LANES` bit patterns with non-temporal stores, where the instruction set has them.
    ///
    /// # Safety
    /// Same contract as [`Vector::stream_bits32`].
    unsafe fn store_nt<V: Vector>(bits: V::Bits, to: *mut Self::Raw);

    /// Returns the bit patterns that `store` would write.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    unsafe fn encode<V: Vector>(value: V) -> V::Bits;

    /// Returns the values of bit patterns.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
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
/// An absent span: loads give zero and stores write nothing. Stands for a parameter copy that the caller did not
/// request.
#[derive(Clone, Copy)]
pub struct Absent;

/// An element type that forwards to the functions of [`Vector`] for its memory type.
macro_rules! element {
    ($name:ident, $raw:ty, $bits:ty: $load:ident $store:ident $load_bits:ident $store_bits:ident $stream:ident
     $encode:ident $decode:ident) => {
        impl Element for $name {
            type Raw = $raw;
            #[inline(always)]
            unsafe fn load<V: Vector>(from: *const $raw) -> V {
                // SAFETY: the caller upholds the callee's contract.
                unsafe { V::$load(from) }
            }
            #[inline(always)]
            unsafe fn store<V: Vector>(value: V, to: *mut $raw) {
                // SAFETY: the caller upholds the callee's contract.
                unsafe { value.$store(to) }
            }
            #[inline(always)]
            unsafe fn load_bits<V: Vector>(from: *const $raw) -> V::Bits {
                // SAFETY: the caller upholds the callee's contract.
                unsafe { V::$load_bits(from.cast::<$bits>()) }
            }
            #[inline(always)]
            unsafe fn store_bits<V: Vector>(bits: V::Bits, to: *mut $raw) {
                // SAFETY: the caller upholds the callee's contract.
                unsafe { V::$store_bits(bits, to.cast::<$bits>()) }
            }
            #[inline(always)]
            unsafe fn store_nt<V: Vector>(bits: V::Bits, to: *mut $raw) {
                // SAFETY: the caller upholds the callee's contract.
                unsafe { V::$stream(bits, to.cast::<$bits>()) }
            }
            #[inline(always)]
            unsafe fn encode<V: Vector>(value: V) -> V::Bits {
                // SAFETY: the caller upholds the callee's contract.
                unsafe { value.$encode() }
            }
            #[inline(always)]
            unsafe fn decode<V: Vector>(bits: V::Bits) -> V {
                // SAFETY: the caller upholds the callee's contract.
                unsafe { V::$decode(bits) }
            }
        }
    };
}

element!(F32, f32, u32: load_f32 store_f32 load_bits32 store_bits32 stream_bits32 to_bits from_bits);
element!(F16, u16, u16: load_f16 store_f16 load_bits16 store_bits16 stream_bits16 round_f16 widen_f16);
element!(Bf16, u16, u16: load_bf16 store_bf16 load_bits16 store_bits16 stream_bits16 round_bf16 widen_bf16);

impl Element for Absent {
    type Raw = ();
    #[inline(always)]
    unsafe fn load<V: Vector>(_: *const ()) -> V {
        // SAFETY: a splat accesses no memory; the caller upholds the callee's contract.
        unsafe { V::splat(0.0) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector>(_: V, _: *mut ()) {}
    #[inline(always)]
    unsafe fn load_bits<V: Vector>(_: *const Self::Raw) -> V::Bits {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { V::splat(0.0).to_bits() }
    }
    #[inline(always)]
    unsafe fn store_bits<V: Vector>(_: V::Bits, _: *mut ()) {}
    #[inline(always)]
    unsafe fn store_nt<V: Vector>(_: V::Bits, _: *mut ()) {}
    #[inline(always)]
    unsafe fn encode<V: Vector>(_: V) -> V::Bits {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { V::splat(0.0).to_bits() }
    }
    #[inline(always)]
    unsafe fn decode<V: Vector>(_: V::Bits) -> V {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { V::splat(0.0) }
    }
}

/// Element types of the spans of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dtypes {
    /// Type of the updated parameter.
    pub param: Dtype,
    /// Type of exp_avg and exp_avg_sq.
    pub state: Dtype,
    /// Type of the gradient.
    pub grad: Dtype,
    /// Type of the parameter copy, if the step writes one.
    pub copy: Option<Dtype>,
}

/// Generic work that [`with_types`] calls with static element types.
pub trait WithTypes {
    /// Result of the work.
    type Output;
    /// Does the work. `P`: parameter, `S`: state, `G`: gradient, `C`: parameter copy.
    fn with<P: Element, S: Element, G: Element, C: Element>(self) -> Self::Output;
}

/// Calls `work` with the static types for `dtypes`. Returns `None` if the combination has no kernel.
pub fn with_types<W: WithTypes>(dtypes: Dtypes, work: W) -> Option<W::Output> {
    use Dtype::{Bf16 as B, F16 as H, F32 as S};
    let Dtypes { param, state, grad, copy } = dtypes;
    if state == S {
        return with_f32_moments(dtypes, work);
    }
    Some(match (param, state, grad, copy) {
        (H, H, H, None) => work.with::<F16, F16, F16, Absent>(),
        (B, B, B, None) => work.with::<Bf16, Bf16, Bf16, Absent>(),
        _ => return with_bf16_moments(dtypes, work),
    })
}

/// As [`with_types`], for f32 states.
pub fn with_f32_moments<W: WithTypes>(dtypes: Dtypes, work: W) -> Option<W::Output> {
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
        (B, S, B, None) => work.with::<Bf16, F32, Bf16, Absent>(),
        _ => return None,
    })
}

/// As [`with_types`], for an f32 parameter with bf16 states.
pub fn with_bf16_moments<W: WithTypes>(dtypes: Dtypes, work: W) -> Option<W::Output> {
    use Dtype::{Bf16 as B, F32 as S};
    let Dtypes { param, state, grad, copy } = dtypes;
    Some(match (param, state, grad, copy) {
        (S, B, S, None) => work.with::<F32, Bf16, F32, Absent>(),
        (S, B, S, Some(B)) => work.with::<F32, Bf16, F32, Bf16>(),
        (S, B, B, None) => work.with::<F32, Bf16, Bf16, Absent>(),
        (S, B, B, Some(B)) => work.with::<F32, Bf16, Bf16, Bf16>(),
        _ => return None,
    })
}

/// Calls `work` for a bf16 parameter with a split master: states of f32 or bf16, a gradient of bf16 or f32, no copy.
pub fn with_split_types<W: WithTypes>(dtypes: Dtypes, work: W) -> Option<W::Output> {
    use Dtype::{Bf16 as B, F32 as S};
    let Dtypes { param, state, grad, copy } = dtypes;
    Some(match (param, state, grad, copy) {
        (B, B, B, None) => work.with::<Bf16, Bf16, Bf16, Absent>(),
        (B, B, S, None) => work.with::<Bf16, Bf16, F32, Absent>(),
        _ => return with_split_f32_moments(dtypes, work),
    })
}

/// As [`with_split_types`], for f32 states.
pub fn with_split_f32_moments<W: WithTypes>(dtypes: Dtypes, work: W) -> Option<W::Output> {
    use Dtype::{Bf16 as B, F32 as S};
    let Dtypes { param, state, grad, copy } = dtypes;
    Some(match (param, state, grad, copy) {
        (B, S, B, None) => work.with::<Bf16, F32, Bf16, Absent>(),
        (B, S, S, None) => work.with::<Bf16, F32, F32, Absent>(),
        _ => return None,
    })
}

/// True if the combination has a kernel for split masters.
pub fn supports_split(dtypes: Dtypes) -> bool {
    with_split_types(dtypes, Exists).is_some()
}

/// True if the combination has a kernel.
pub fn supported(dtypes: Dtypes) -> bool {
    with_types(dtypes, Exists).is_some()
}

/// True if the combination is one of an f32 parameter with bf16 states.
pub fn has_bf16_moments(dtypes: Dtypes) -> bool {
    with_bf16_moments(dtypes, Exists).is_some()
}

struct Exists;

impl WithTypes for Exists {
    type Output = ();
    fn with<P: Element, S: Element, G: Element, C: Element>(self) {}
}
