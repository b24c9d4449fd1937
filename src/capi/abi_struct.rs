//! Extensible structs that C passes by pointer, and values of their fields. The structs begin with `struct_size`.
//!
//! A caller compiled with an older header passes a shorter struct: the missing fields count as zero. Such a struct ends
//! with a field, because every field that a header adds begins where the struct of the header before ended. A
//! `struct_size` in the middle of a field is an error. A caller compiled
//! with a newer header passes a longer struct: the call fails if a field unknown to this library is not zero. In an
//! output struct, fields unknown to this library become zero.
//!
//! A struct of zeros never runs with wrong options. If a field has an initial value other than 0, a 0 in it is an error
//! that names the field, unless callers may want 0.

use std::borrow::Cow;
use std::time::Duration;

use crate::error::{Error, Result};

/// A `#[repr(C)]` struct whose first field is `struct_size: u32`. Only [`c_struct`] implements it.
///
/// # Safety
/// All bytes zero, and any bytes a C caller can write, are valid values; there is no padding.
pub unsafe trait AbiStruct: Copy {
    /// Size in the first release with this struct. A smaller `struct_size` is an error.
    const FIRST_SIZE: usize;
    /// The struct's name in C.
    const NAME: &'static str;
    /// Name, offset and size of each field.
    const FIELDS: &'static [(&'static str, usize, usize)];

    /// Sets the fields of a zeroed struct whose initial value is not 0.
    fn set_defaults(&mut self) {}

    /// The struct as its initialiser makes it.
    fn initial() -> Self {
        // SAFETY: all bytes zero are a valid value; a struct begins with its size.
        unsafe {
            let mut value = std::mem::zeroed::<Self>();
            (&raw mut value).cast::<u32>().write(size_of::<Self>() as u32);
            value.set_defaults();
            value
        }
    }
}

/// A field type of an [`AbiStruct`].
///
/// # Safety
/// Any bytes are a valid value.
pub unsafe trait Plain: Copy {}

// SAFETY: any bytes are a valid number.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}
// SAFETY: any bytes are a valid raw pointer, which is not necessarily one that may be followed.
unsafe impl<T> Plain for *const T {}
// SAFETY: as above.
unsafe impl<T> Plain for *mut T {}

/// Size of the field that `_field` selects. Its type is [`Plain`].
pub const fn plain_size<T, F: Plain>(_field: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Implements [`AbiStruct`]: `abi_struct!(name, first size; field, field, ...)`. The build fails if a field is missing
/// from the list, if the struct has padding, or if a field is neither a number nor a pointer.
macro_rules! abi_struct {
    ($name:ident, $first:literal $($defaults:expr)?; $($field:ident),* $(,)?) => {
        const _: () = {
            let sum = 0 $(+ $crate::capi::abi_struct::plain_size(|value: &$name| &value.$field))*;
            assert!(sum == size_of::<$name>(), "padding, or a field that the list lacks");
            assert!($first <= size_of::<$name>() && std::mem::offset_of!($name, struct_size) == 0);
            let ends = false $(|| std::mem::offset_of!($name, $field)
                + $crate::capi::abi_struct::plain_size(|value: &$name| &value.$field) == $first)*;
            assert!(ends, "the first size is in the middle of a field");
        };
        // SAFETY: every field takes any bytes, and the sizes of the fields add up to the size of the struct.
        unsafe impl $crate::capi::abi_struct::AbiStruct for $name {
            const FIRST_SIZE: usize = $first;
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [(&'static str, usize, usize)] = &[$((
                stringify!($field),
                std::mem::offset_of!($name, $field),
                $crate::capi::abi_struct::plain_size(|value: &$name| &value.$field),
            )),*];

            $(fn set_defaults(&mut self) {
                let set: fn(&mut $name) = $defaults;
                set(self);
            })?
        }
    };
}
pub(in crate::capi) use abi_struct;

/// Declares a struct of the header and implements [`AbiStruct`] for it: `c_struct! { first BYTES;`, then the struct without
/// its `struct_size`, which is added here. BYTES is its size in the first release. `initial FUNCTION` after BYTES names the
/// function that sets the fields whose initial value is not 0. The tool that writes the headers reads the struct inside the
/// braces.
macro_rules! c_struct {
    (first $first:literal $(, initial $defaults:expr)?; $(#[$about:meta])* pub struct $name:ident {
        $($(#[$field_about:meta])* pub $field:ident: $type:ty),* $(,)?
    }) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            #[doc = concat!("`sizeof(", stringify!($name), ")`")]
            pub struct_size: u32,
            $($(#[$field_about])* pub $field: $type,)*
        }
        $crate::capi::abi_struct::abi_struct!($name, $first $($defaults)?; struct_size, $($field),*);
    };
}
pub(in crate::capi) use c_struct;

/// A struct of the header that a call writes: `report!(spw_x from found { a, b } with { c: 1 })` takes a and b from the
/// fields of these names. A field that is named in neither list does not compile.
macro_rules! report {
    ($name:ident $(from $found:ident { $($same:ident),* })?
        $(with { $($field:ident $(: $value:expr)?),* $(,)? })?) => {
        $name {
            struct_size: 0,
            $($($same: $crate::capi::abi_struct::ToField::to_field($found.$same),)*)?
            $($($field $(: $value)?,)*)?
        }
    };
}
pub(in crate::capi) use report;

/// A struct of a layer below from a struct of the header, as [`report`] in the other direction.
macro_rules! parsed {
    ($name:ident from $raw:ident { $($same:ident),* } $(with { $($field:ident $(: $value:expr)?),* $(,)? })?) => {
        $name { $($same: $raw.$same,)* $($($field $(: $value)?,)*)? }
    };
}
pub(in crate::capi) use parsed;

/// A number of the library in the type of a field of the header.
pub trait ToField<T> {
    /// The number. A `usize` fits: it counts what is in memory.
    fn to_field(self) -> T;
}

macro_rules! to_field {
    ($($from:ty => $to:ty),*) => {
        $(impl ToField<$to> for $from {
            fn to_field(self) -> $to {
                self as $to
            }
        })*
    };
}
to_field!(u32 => u32, i32 => i32, u64 => u64, f32 => f32, f64 => f64, bool => u32, u32 => u64, usize => u32, usize => u64);

/// Rejects 0 in a field that `T`'s initialiser sets to another value, and that no caller sets to 0: the struct was never
/// initialised.
pub fn initialised<T: AbiStruct>(argument: &'static str, is_zero: bool) -> Result<()> {
    if !is_zero {
        return Ok(());
    }
    let name = T::NAME;
    let reason = format!(
        "is 0, as in a {name} that was never initialised; begin with {}_INIT or spw_struct_init, which set the defaults",
        name.to_uppercase()
    );
    Err(Error::invalid(argument, reason))
}

/// Reads a flag word: an error for bits above `known`.
pub fn flags(argument: &'static str, value: u32, known: u32) -> Result<u32> {
    match value & !known {
        0 => Ok(value),
        _ => Err(Error::invalid(argument, format!("{value:#x} has unknown bits"))),
    }
}

/// Rejects a reserved field that is set.
pub fn zero(argument: &'static str, value: u32) -> Result<()> {
    match value {
        0 => Ok(()),
        _ => Err(Error::invalid(argument, "must be 0")),
    }
}

/// Reads a field that must be 0 or 1.
pub fn flag(argument: &'static str, value: u32) -> Result<bool> {
    match value {
        0 | 1 => Ok(value == 1),
        _ => Err(Error::invalid(argument, format!("is {value}, but must be 0 or 1"))),
    }
}

/// Reads a value of the enum `name` of the header, which counts from 0: `all` has what each value means.
pub fn choice<T: Copy>(
    argument: impl Into<Cow<'static, str>>,
    value: u32,
    name: &str,
    all: &[T],
) -> Result<T> {
    let found = all.get(value as usize).copied();
    found.ok_or_else(|| Error::invalid(argument, format!("{value} is not an {name}")))
}

/// `None`, which waits without limit, if negative.
pub fn timeout(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}
