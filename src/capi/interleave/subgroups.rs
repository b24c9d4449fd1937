//! The arguments of an interleaved update: its options, its subgroups, and the spans that the caller lends to it.

use std::ffi::c_void;
use std::sync::Arc;

use super::plan::{parse_transfer_dtype, shape_of};
use crate::capi::gpu::device::{floats, spw_gpu};
use crate::capi::optim::tensor::{parse_copy_dtype, parse_dtype};
use crate::capi::prelude::*;
use crate::dtype::Dtype;
use crate::gpu::kernels::DeviceFloats;
use crate::offload::interleave::Backend;
use crate::offload::interleave::device::Gpu;
use crate::offload::interleave::device_memory::{self, Grad, Pinned};
use crate::offload::interleave::host::{self, Host};
use crate::sys::shared_slice::SharedSlice;
use crate::sys::span::Span;
use spillway_planner::interleave::{MAX_SUBGROUPS, Shape, TransferDtype};

/// Where an interleaved update runs. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_interleave_backend {
    /// Host threads and host memory in place of the GPU, for tests and machines without a GPU. Every `stream` argument
    /// is 0.
    SPW_INTERLEAVE_BACKEND_HOST = 0,
    /// A GPU.
    SPW_INTERLEAVE_BACKEND_CUDA = 1,
}

c_struct! { first 48;
/// Options of an interleaved update, fixed at open.
pub struct spw_interleave_options {
    /// An `spw_interleave_backend`.
    pub backend: u32,
    /// An `spw_transfer_dtype`.
    pub transfer_dtype: u32,
    /// 1 if gradients of GPU subgroups wait in host memory and are fetched with the state, 0 if they stay on the GPU.
    pub fetch_gradients: u32,
    /// Number of state buffers on the GPU, at most 8; 0: 3. Each takes 12 bytes per parameter of the largest subgroup,
    /// and the bytes of a fetched gradient. A plan takes at most as many as it has SPW_PLACEMENT_GPU subgroups. With 2,
    /// prefetches wait for flushes.
    pub slots: u32,
    /// `spw_dtype` of all gradients.
    pub grad_dtype: u32,
    /// `spw_dtype` of all 16-bit parameters, or SPW_DTYPE_NONE without them.
    pub copy_dtype: u32,
    /// 0
    pub reserved: u32,
    /// Parameters per copy; 0: 16 Mi.
    pub chunk: u64,
    /// The GPU for SPW_INTERLEAVE_BACKEND_CUDA, else NULL. It may be closed before the update.
    pub gpu: *const spw_gpu,
}
}

c_struct! { first 64;
/// One subgroup: spans of `n` elements each, aligned to their element, not overlapping. They must not move until
/// `spw_interleave_close`. `struct_size` is also the distance in bytes between the subgroups of an array. With
/// SPW_INTERLEAVE_BACKEND_CUDA, host memory must be pinned (`spw_pinned_alloc`, cudaHostAlloc).
pub struct spw_interleave_subgroup {
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
    /// Gradient that the model produces before `spw_interleave_grad_ready`; with SPW_INTERLEAVE_BACKEND_CUDA device
    /// memory. NULL if only host_grad has it, which requires SPW_TRANSFER_DTYPE_DELIVERED and fetch_gradients. A plan
    /// with residents is then an error.
    pub grad: *mut c_void,
    /// 16-bit parameter that the model reads; with SPW_INTERLEAVE_BACKEND_CUDA device memory. NULL with copy_dtype
    /// SPW_DTYPE_NONE.
    pub param_copy: *mut c_void,
    /// Gradient in host memory, for SPW_INTERLEAVE_BACKEND_CUDA with SPW_TRANSFER_DTYPE_DELIVERED, else NULL. If the
    /// CPU updates the subgroup, or the gradient is fetched, the caller writes it before `spw_interleave_grad_ready`.
    pub host_grad: *mut c_void,
}
}

/// Types and settings that all subgroups share.
#[derive(Clone, Copy)]
struct Types {
    grad: Dtype,
    copy: Option<Dtype>,
    transfer_dtype: TransferDtype,
    fetched: bool,
}

/// Whether the framework has streams, the shape of the subgroups, and the backend that runs the schedule.
pub(in crate::capi) struct InterleaveSetup {
    pub streams: bool,
    pub shape: Shape,
    pub backend: Box<dyn Backend>,
}

/// # Safety
/// `options` points to a struct of `struct_size` bytes, `subgroups` to `count` structs, whose spans are lent as
/// `spw_interleave_open` says.
pub(in crate::capi) unsafe fn parts(
    options: In<spw_interleave_options>,
    subgroups: In<spw_interleave_subgroup>,
    count: u64,
) -> Result<InterleaveSetup> {
    let (raw, subgroups) = (options.read("options")?, read_subgroups(subgroups, count)?);
    abi_struct::zero("options.reserved", raw.reserved)?;
    let sizes = subgroups.iter().map(|subgroup| subgroup.n).collect();
    let transfer_dtype = parse_transfer_dtype("options.transfer_dtype", raw.transfer_dtype)?;
    let fetch = abi_struct::flag("options.fetch_gradients", raw.fetch_gradients)?;
    let shape = shape_of(sizes, transfer_dtype, fetch, raw.slots, raw.chunk).map_err(as_arguments)?;
    let grad = parse_dtype(raw.grad_dtype, "options.grad_dtype")?;
    let copy = parse_copy_dtype(raw.copy_dtype, "options.copy_dtype")?;
    let types = Types { grad, copy, transfer_dtype, fetched: fetch };
    let at = |index: usize, error: Error| error.within(&format!("subgroups[{index}]."));
    let numbered = subgroups.iter().enumerate();
    let backend: Box<dyn Backend> = match raw.backend {
        0 => {
            // SAFETY: the caller lends the spans until the object is closed.
            let slices =
                numbered.map(|(i, raw)| unsafe { on_host(raw, types) }.map_err(|error| at(i, error)));
            Box::new(Host::new(&shape, slices.collect::<Result<_>>()?)?)
        }
        1 => {
            // SAFETY: NULL, or an open GPU by the caller's promise.
            let gpu = handle::get(unsafe { raw.gpu.as_ref() }).map_err(|error| error.within("options."))?;
            // SAFETY: the caller lends the spans until the object is closed.
            let slices =
                numbered.map(|(i, raw)| unsafe { on_gpu(raw, types, gpu) }.map_err(|error| at(i, error)));
            Box::new(Gpu::new(
                &gpu.device,
                &gpu.kernels,
                &gpu.registry,
                &shape,
                slices.collect::<Result<_>>()?,
            )?)
        }
        other => {
            let reason = format!("{other} is not an spw_interleave_backend");
            return Err(Error::invalid("options.backend", reason));
        }
    };
    Ok(InterleaveSetup { streams: raw.backend == 1, shape, backend })
}

fn read_subgroups(
    subgroups: In<spw_interleave_subgroup>,
    count: u64,
) -> Result<Vec<spw_interleave_subgroup>> {
    if count > MAX_SUBGROUPS as u64 {
        return Err(Error::invalid("count", format!("is {count}, but the limit is {MAX_SUBGROUPS}")));
    }
    subgroups.read_all(count, "subgroups")
}

unsafe fn on_host(raw: &spw_interleave_subgroup, types: Types) -> Result<host::Subgroup> {
    check(raw, types)?;
    if !raw.host_grad.is_null() {
        return Err(Error::invalid("host_grad", "must be NULL: without a GPU, grad is in host memory"));
    }
    let lend = |argument: &'static str, start: *mut c_void, dtype: Dtype| {
        // SAFETY: the caller lends the spans until the object is closed, by the rules of spw_interleave_open.
        let slice = unsafe { SharedSlice::new(start.cast(), dtype, raw.n as usize) };
        let reason = || format!("must point to {} elements of {}, with their alignment", raw.n, dtype.name());
        slice.map(Arc::new).ok_or_else(|| Error::invalid(argument, reason()))
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
        Pinned::from_span(gpu.registry.host(span, argument)?, dtype, argument)
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
    let grad = match (types.transfer_dtype, raw.host_grad.is_null()) {
        (TransferDtype::Delivered, _) => {
            let host = pinned("host_grad", raw.host_grad, types.grad)?;
            match raw.grad.is_null() && types.fetched {
                true => Grad::Home(host),
                false => Grad::Delivered { device: device("grad", raw.grad, types.grad)?, host },
            }
        }
        (_, true) => Grad::Device(device("grad", raw.grad, types.grad)?),
        (_, false) => {
            return Err(Error::invalid("host_grad", "must be NULL unless gradients are delivered"));
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
    abi_struct::zero("reserved", raw.reserved)?;
    if types.copy.is_none() && !raw.param_copy.is_null() {
        return Err(Error::invalid(
            "param_copy",
            "is not NULL, but copy_dtype is SPW_DTYPE_NONE; set both or neither",
        ));
    }
    Ok(())
}

/// An error of a shape, with the names of the call's arguments.
fn as_arguments(error: Error) -> Error {
    match error {
        Error::InvalidArgument { argument, reason } if argument == "sizes" => {
            Error::invalid("subgroups", reason)
        }
        Error::InvalidArgument { argument, reason } if argument == "count" => Error::invalid("count", reason),
        other => other.within("options."),
    }
}
