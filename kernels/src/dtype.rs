//! Element types, and slices whose element type is known only at run time.
#![forbid(unsafe_code)]

pub use half::{bf16, f16};
use zerocopy::{FromBytes, IntoBytes};

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper 16 bits of binary32.
    Bf16,
}

impl Dtype {
    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// Name of the type in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

/// The memory of these numbers as twice as many bf16 numbers.
pub fn as_bf16(numbers: &mut [f32]) -> &mut [bf16] {
    <[bf16]>::mut_from_bytes(numbers.as_mut_bytes()).unwrap_or_default()
}

/// The memory of these numbers as words of 16 bits.
pub fn as_words(numbers: &mut [f32]) -> &mut [u16] {
    <[u16]>::mut_from_bytes(numbers.as_mut_bytes()).unwrap_or_default()
}

/// The first `bytes` bytes of this memory, which are an even number, and `numbers` bf16 numbers behind them. Panics if the
/// memory is smaller.
pub(crate) fn codes_in(memory: &mut [f32], bytes: usize, numbers: usize) -> (&mut [u8], &mut [bf16]) {
    let (first, rest) = memory.as_mut_bytes().split_at_mut(bytes);
    let numbers = <[bf16]>::mut_from_bytes(&mut rest[..2 * numbers]);
    (first, numbers.unwrap_or_default())
}

/// Shared slice whose element type is known at run time.
#[derive(Debug, Clone, Copy)]
pub enum Floats<'a> {
    /// binary32 elements.
    F32(&'a [f32]),
    /// binary16 elements.
    F16(&'a [f16]),
    /// bfloat16 elements.
    Bf16(&'a [bf16]),
}

/// Exclusive slice whose element type is known at run time.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// binary32 elements.
    F32(&'a mut [f32]),
    /// binary16 elements.
    F16(&'a mut [f16]),
    /// bfloat16 elements.
    Bf16(&'a mut [bf16]),
}

impl<'a> Floats<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Floats::F32(s) => s.len(),
            Floats::F16(s) => s.len(),
            Floats::Bf16(s) => s.len(),
        }
    }

    /// True for no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Floats::F32(_) => Dtype::F32,
            Floats::F16(_) => Dtype::F16,
            Floats::Bf16(_) => Dtype::Bf16,
        }
    }

    /// The bytes of the elements in memory.
    pub fn bytes(&self) -> &'a [u8] {
        match self {
            Floats::F32(s) => s.as_bytes(),
            Floats::F16(s) => s.as_bytes(),
            Floats::Bf16(s) => s.as_bytes(),
        }
    }

    /// The address of the first element.
    pub fn address(&self) -> *const u8 {
        match self {
            Floats::F32(s) => s.as_ptr().cast(),
            Floats::F16(s) => s.as_ptr().cast(),
            Floats::Bf16(s) => s.as_ptr().cast(),
        }
    }

    /// The first `mid` elements and the rest.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Floats::F32(s) => pair(s.split_at(mid), Floats::F32),
            Floats::F16(s) => pair(s.split_at(mid), Floats::F16),
            Floats::Bf16(s) => pair(s.split_at(mid), Floats::Bf16),
        }
    }
}

impl<'a> FloatsMut<'a> {
    /// The bytes of the elements in memory.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            FloatsMut::F32(s) => s.as_mut_bytes(),
            FloatsMut::F16(s) => s.as_mut_bytes(),
            FloatsMut::Bf16(s) => s.as_mut_bytes(),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            FloatsMut::F32(s) => s.len(),
            FloatsMut::F16(s) => s.len(),
            FloatsMut::Bf16(s) => s.len(),
        }
    }

    /// True for no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            FloatsMut::F32(_) => Dtype::F32,
            FloatsMut::F16(_) => Dtype::F16,
            FloatsMut::Bf16(_) => Dtype::Bf16,
        }
    }

    /// The address of the first element.
    pub fn address(&mut self) -> *mut u8 {
        match self {
            FloatsMut::F32(s) => s.as_mut_ptr().cast(),
            FloatsMut::F16(s) => s.as_mut_ptr().cast(),
            FloatsMut::Bf16(s) => s.as_mut_ptr().cast(),
        }
    }

    /// A read-only view of the slice.
    pub fn shared(&self) -> Floats<'_> {
        match self {
            FloatsMut::F32(s) => Floats::F32(s),
            FloatsMut::F16(s) => Floats::F16(s),
            FloatsMut::Bf16(s) => Floats::Bf16(s),
        }
    }

    /// The same slice with a shorter lifetime.
    pub fn reborrow(&mut self) -> FloatsMut<'_> {
        match self {
            FloatsMut::F32(s) => FloatsMut::F32(s),
            FloatsMut::F16(s) => FloatsMut::F16(s),
            FloatsMut::Bf16(s) => FloatsMut::Bf16(s),
        }
    }

    /// The first `mid` elements and the rest.
    pub fn split_at_mut(self, mid: usize) -> (Self, Self) {
        match self {
            FloatsMut::F32(s) => pair(s.split_at_mut(mid), FloatsMut::F32),
            FloatsMut::F16(s) => pair(s.split_at_mut(mid), FloatsMut::F16),
            FloatsMut::Bf16(s) => pair(s.split_at_mut(mid), FloatsMut::Bf16),
        }
    }
}

fn pair<S, T>((left, right): (S, S), wrap: impl Fn(S) -> T) -> (T, T) {
    (wrap(left), wrap(right))
}
