//! An `at::Tensor`, taken apart with the C functions that libtorch exports since version 2.3.
//!
//! In that interface a handle of a tensor is the address of an `at::Tensor`, so a C++ reference is a handle.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::library::DType;
use super::symbol::function;

/// The address of an `at::Tensor`.
pub type AtTensor = *mut c_void;

/// Contiguous memory of the processor.
#[derive(Clone, Copy)]
pub struct Span {
    pub data: *mut c_void,
    pub elements: u64,
    pub dtype: DType,
}

/// torch's functions return 0, or 1 for an exception that they caught.
type Getter<T> = unsafe extern "C" fn(AtTensor, *mut T) -> i32;

struct Torch {
    data: Getter<*mut c_void>,
    elements: Getter<i64>,
    dtype: Getter<i32>,
    device: Getter<i32>,
    dimensions: Getter<i64>,
    sizes: Getter<*mut i64>,
    strides: Getter<*mut i64>,
}

/// `c10::DeviceType::CPU`.
const CPU: i32 = 0;

/// The memory of a tensor; `Err` says why Spillway cannot step it.
///
/// # Safety
/// `tensor` is null or the address of a living `at::Tensor`.
pub unsafe fn span(tensor: AtTensor, name: &str) -> Result<Span, String> {
    static TORCH: OnceLock<Option<Torch>> = OnceLock::new();
    let torch = TORCH
        .get_or_init(open)
        .as_ref()
        .ok_or("libtorch_cpu.so has no C functions for tensors; torch 2.3 is the first with them")?;
    let failed = || format!("{name} cannot be taken apart");
    if tensor.is_null() {
        return Err(failed());
    }
    // SAFETY: the caller guarantees the tensor; each function has the type of its declaration in torch's shim.h.
    unsafe {
        if get(torch.device, tensor).ok_or_else(failed)? != CPU {
            return Err(format!("{name} is not in the processor's memory"));
        }
        let dtype = match get(torch.dtype, tensor).ok_or_else(failed)? {
            6 => DType::F32,
            5 => DType::F16,
            15 => DType::BF16,
            other => return Err(format!("{name} has torch's scalar type {other}")),
        };
        if !is_contiguous(torch, tensor).ok_or_else(failed)? {
            return Err(format!("{name} is not contiguous"));
        }
        let elements = get(torch.elements, tensor).and_then(|count| u64::try_from(count).ok());
        let data = get(torch.data, tensor);
        Ok(Span { data: data.ok_or_else(failed)?, elements: elements.ok_or_else(failed)?, dtype })
    }
}

/// # Safety
/// As `span`.
unsafe fn is_contiguous(torch: &Torch, tensor: AtTensor) -> Option<bool> {
    // SAFETY: as `span`. The arrays belong to the tensor and have one number per dimension.
    unsafe {
        let dimensions = usize::try_from(get(torch.dimensions, tensor)?).ok()?;
        let (sizes, strides) = (get(torch.sizes, tensor)?, get(torch.strides, tensor)?);
        let mut expected = 1_i64;
        for index in (0..dimensions).rev() {
            let (size, stride) = (*sizes.add(index), *strides.add(index));
            if size == 0 {
                return Some(true);
            }
            if size != 1 && stride != expected {
                return Some(false);
            }
            expected = expected.checked_mul(size)?;
        }
        Some(true)
    }
}

/// # Safety
/// `getter` is one of torch's functions, and `tensor` is as in `span`.
unsafe fn get<T>(getter: Getter<T>, tensor: AtTensor) -> Option<T> {
    let mut value = MaybeUninit::zeroed();
    // SAFETY: the caller guarantees both. Zero is a value of every `T` here: numbers and pointers.
    unsafe { (getter(tensor, value.as_mut_ptr()) == 0).then_some(value.assume_init()) }
}

fn open() -> Option<Torch> {
    // Python opens torch without adding it to the global scope, so it is found by its name.
    // SAFETY: the name ends with NUL; with NOLOAD no code runs.
    let library = unsafe { libc::dlopen(c"libtorch_cpu.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    let library = NonNull::new(library)?;
    // SAFETY: each type is the one that torch's shim.h declares for the name.
    unsafe {
        Some(Torch {
            data: function(library, c"aoti_torch_get_data_ptr")?,
            elements: function(library, c"aoti_torch_get_numel")?,
            dtype: function(library, c"aoti_torch_get_dtype")?,
            device: function(library, c"aoti_torch_get_device_type")?,
            dimensions: function(library, c"aoti_torch_get_dim")?,
            sizes: function(library, c"aoti_torch_get_sizes")?,
            strides: function(library, c"aoti_torch_get_strides")?,
        })
    }
}
