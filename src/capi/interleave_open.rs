//! The arguments of an interleaved update: its options, its subgroups, and the spans that the caller lends to it.
#![allow(non_camel_case_types)]

use std::ffi::c_void;
use std::sync::Arc;

use super::gpu::{floats, object, spw_gpu};
use super::plan::{parse_wire, shape_of};
use super::record::{self, Record};
use super::tensor::parse_dtype;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::gpu::kernels::DeviceFloats;
use crate::offload::interleave::Backend;
use crate::offload::interleave::device::Gpu;
use crate::offload::interleave::device_memory::{self, Grad, Pinned};
use crate::offload::interleave::host::{self, Host};
use crate::plan::interleave::{MAX_SUBGROUPS, Shape, Wire};
use crate::sys::lent::Lent;
use crate::sys::span::Span;

/// Where an interleaved update runs. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_interleave_backend {
    /// Host threads and host memory in place of the GPU, for tests and machines without a GPU. Every `stream` argument
    /// is 0.
    SPW_INTERLEAVE_HOST = 0,
    /// A GPU.
    SPW_INTERLEAVE_CUDA = 1,
}

/// Options of an interleaved update, fixed at open.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_interleave_options {
    /// `sizeof(spw_interleave_options)`
    pub struct_size: u32,
    /// An `spw_interleave_backend`.
    pub backend: u32,
    /// An `spw_plan_wire`.
    pub wire: u32,
    /// 1 if gradients of GPU subgroups wait in host memory and are fetched with the state, 0 if they stay on the GPU.
    pub fetch_gradients: u32,
    /// Number of state buffers on the GPU; 0: 2.
    pub slots: u32,
    /// `spw_dtype` of all gradients.
    pub grad_dtype: u32,
    /// `spw_dtype` of all 16-bit parameters, or SPW_DTYPE_NONE without them.
    pub copy_dtype: u32,
    /// 0
    pub reserved: u32,
    /// Parameters per copy; 0: 16 Mi.
    pub chunk: u64,
    /// The GPU for SPW_INTERLEAVE_CUDA, else NULL. It may be closed before the update.
    pub gpu: *const spw_gpu,
}

// SAFETY: integers and a pointer without padding; a null pointer is valid.
unsafe impl Record for spw_interleave_options {
    const FIRST_SIZE: usize = 48;
    const NAME: &'static str = "spw_interleave_options";
}

/// One subgroup: spans of `n` elements each, aligned to their element, not overlapping. They must not move until
/// `spw_interleave_close`. With SPW_INTERLEAVE_CUDA, host memory must be pinned (`spw_pinned_alloc`, a pool,
/// cudaHostAlloc).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_interleave_subgroup {
    /// `sizeof(spw_interleave_subgroup)`. It is also the distance in bytes between the subgroups of an array.
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Number of elements; may be 0.
    pub n: u64,
    /// Master parameter, f32, in host memory.
    pub param: *mut c_void,
    /// First moment, f32, in host memory.
    pub exp_avg: *mut c_void,
    /// Second moment, f32, in host memory.
    pub exp_avg_sq: *mut c_void,
    /// Gradient that the model produces before `spw_interleave_gradient`; with SPW_INTERLEAVE_CUDA device memory. NULL
    /// if only host_grad has it, which requires SPW_WIRE_DELIVERED and fetch_gradients. A plan with residents is then
    /// an error.
    pub grad: *mut c_void,
    /// 16-bit parameter that the model reads; with SPW_INTERLEAVE_CUDA device memory. NULL with copy_dtype
    /// SPW_DTYPE_NONE.
    pub param_copy: *mut c_void,
    /// Gradient in host memory, for SPW_INTERLEAVE_CUDA with SPW_WIRE_DELIVERED, else NULL. If the CPU updates the
    /// subgroup, or the gradient is fetched, the caller writes it before `spw_interleave_gradient`.
    pub host_grad: *mut c_void,
}

// SAFETY: integers and pointers without padding; a null pointer is valid.
unsafe impl Record for spw_interleave_subgroup {
    const FIRST_SIZE: usize = 64;
    const NAME: &'static str = "spw_interleave_subgroup";
}

/// Types and settings that all subgroups share.
#[derive(Clone, Copy)]
struct Types {
    grad: Dtype,
    copy: Option<Dtype>,
    wire: Wire,
    fetched: bool,
}

/// Whether the framework has streams, the shape of the subgroups, and the backend that runs the schedule.
pub(super) struct Parts {
    pub streams: bool,
    pub shape: Shape,
    pub backend: Box<dyn Backend>,
}

/// # Safety
/// `options` points to a struct of `struct_size` bytes, `subgroups` to `count` structs, whose spans are lent as
/// `spw_interleave_open` says.
pub(super) unsafe fn parts(
    options: *const spw_interleave_options,
    subgroups: *const spw_interleave_subgroup,
    count: usize,
) -> Result<Parts> {
    // SAFETY: the caller meets the callees' requirements.
    let (raw, subgroups) = unsafe { (record::read(options, "options")?, read_subgroups(subgroups, count)?) };
    record::zero("options.reserved", raw.reserved)?;
    let sizes = subgroups.iter().map(|subgroup| subgroup.n).collect();
    let wire = parse_wire("options.wire", raw.wire)?;
    let fetch = record::flag("options.fetch_gradients", raw.fetch_gradients)?;
    let shape = shape_of(sizes, wire, fetch, raw.slots, raw.chunk)?;
    let grad = parse_dtype(raw.grad_dtype, "options.grad_dtype")?;
    let copy = match raw.copy_dtype {
        0 => None,
        dtype => Some(parse_dtype(dtype, "options.copy_dtype")?),
    };
    let types = Types { grad, copy, wire, fetched: fetch };
    let at = |index: usize, error: Error| error.within(&format!("subgroups[{index}]."));
    let numbered = subgroups.iter().enumerate();
    let backend: Box<dyn Backend> = match raw.backend {
        0 => {
            // SAFETY: the caller lends the spans until the object is closed.
            let lent = numbered.map(|(i, raw)| unsafe { on_host(raw, types) }.map_err(|error| at(i, error)));
            Box::new(Host::new(&shape, lent.collect::<Result<_>>()?)?)
        }
        1 => {
            // SAFETY: NULL, or an open GPU by the caller's promise.
            let gpu = object(unsafe { raw.gpu.as_ref() }).map_err(|error| error.within("options."))?;
            // SAFETY: the caller lends the spans until the object is closed.
            let lent =
                numbered.map(|(i, raw)| unsafe { on_gpu(raw, types, gpu) }.map_err(|error| at(i, error)));
            Box::new(Gpu::new(
                &gpu.device,
                &gpu.kernels,
                &gpu.registry,
                &shape,
                lent.collect::<Result<_>>()?,
            )?)
        }
        other => {
            let reason = format!("{other} is not an spw_interleave_backend");
            return Err(Error::invalid("options.backend", reason));
        }
    };
    Ok(Parts { streams: raw.backend == 1, shape, backend })
}

unsafe fn read_subgroups(
    subgroups: *const spw_interleave_subgroup,
    count: usize,
) -> Result<Vec<spw_interleave_subgroup>> {
    if count > MAX_SUBGROUPS {
        return Err(Error::invalid("count", format!("is {count}, over {MAX_SUBGROUPS}")));
    }
    // SAFETY: the caller's array has `count` structs, `struct_size` bytes apart.
    unsafe { record::read_all(subgroups, count, "subgroups") }
}

unsafe fn on_host(raw: &spw_interleave_subgroup, types: Types) -> Result<host::Subgroup> {
    check(raw, types)?;
    if !raw.host_grad.is_null() {
        return Err(Error::invalid("host_grad", "is not NULL, but the gradient is in host memory"));
    }
    let lend = |argument: &'static str, start: *mut c_void, dtype: Dtype| {
        // SAFETY: the caller lends the spans until the object is closed, by the rules of spw_interleave_open.
        let lent = unsafe { Lent::new(start.cast(), dtype, raw.n as usize) };
        let reason = || format!("is no span of {} elements of {}, aligned to them", raw.n, dtype.name());
        lent.map(Arc::new).ok_or_else(|| Error::invalid(argument, reason()))
    };
    Ok(host::Subgroup {
        states: [
            lend("exp_avg", raw.exp_avg, Dtype::F32)?,
            lend("exp_avg_sq", raw.exp_avg_sq, Dtype::F32)?,
            lend("param", raw.param, Dtype::F32)?,
        ],
        grad: lend("grad", raw.grad, types.grad)?,
        copy: types.copy.map(|dtype| lend("param_copy", raw.param_copy, dtype)).transpose()?,
    })
}

unsafe fn on_gpu(
    raw: &spw_interleave_subgroup,
    types: Types,
    gpu: &spw_gpu,
) -> Result<device_memory::Subgroup> {
    check(raw, types)?;
    let pinned = |argument: &'static str, start: *mut c_void, dtype: Dtype| {
        let bytes = raw.n as usize * dtype.size();
        // SAFETY: the caller lends the spans until the object is closed, by the rules of spw_interleave_open.
        let span = unsafe { Span::new(start.cast(), bytes) };
        let span = span.ok_or_else(|| Error::invalid(argument, "is NULL"))?;
        Pinned::lent(gpu.registry.host(span, argument)?, dtype, argument)
    };
    let device = |argument: &'static str, start: *mut c_void, dtype: Dtype| -> Result<DeviceFloats> {
        let dtype = match dtype {
            Dtype::F32 => 1,
            Dtype::F16 => 2,
            Dtype::Bf16 => 3,
        };
        // SAFETY: device memory that the caller lends until the object is closed.
        unsafe { floats(start as u64, dtype, raw.n, argument) }
    };
    let grad = match (types.wire, raw.host_grad.is_null()) {
        (Wire::Delivered, _) => {
            let host = pinned("host_grad", raw.host_grad, types.grad)?;
            match raw.grad.is_null() && types.fetched {
                true => Grad::Home(host),
                false => Grad::Delivered { device: device("grad", raw.grad, types.grad)?, host },
            }
        }
        (_, true) => Grad::Device(device("grad", raw.grad, types.grad)?),
        (_, false) => {
            return Err(Error::invalid("host_grad", "is not NULL, but gradients are not delivered"));
        }
    };
    Ok(device_memory::Subgroup {
        states: [
            pinned("exp_avg", raw.exp_avg, Dtype::F32)?,
            pinned("exp_avg_sq", raw.exp_avg_sq, Dtype::F32)?,
            pinned("param", raw.param, Dtype::F32)?,
        ],
        grad,
        copy: types.copy.map(|dtype| device("param_copy", raw.param_copy, dtype)).transpose()?,
    })
}

fn check(raw: &spw_interleave_subgroup, types: Types) -> Result<()> {
    record::zero("reserved", raw.reserved)?;
    if types.copy.is_none() && !raw.param_copy.is_null() {
        return Err(Error::invalid("param_copy", "is not NULL, but copy_dtype is SPW_DTYPE_NONE"));
    }
    Ok(())
}
