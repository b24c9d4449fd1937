//! Copies between the framework's device memory and pinned host memory, and their measured bandwidth.

use std::ffi::c_void;

use super::device::{floats, spw_gpu};
use crate::capi::optim::tensor::parse_dtype;
use crate::capi::prelude::*;
use crate::dtype::Dtype;
use crate::gpu::profile;
use crate::gpu::speeds::Link;
use crate::gpu::stream::{ForeignEvent, ForeignStream};
use crate::gpu::transfer::{After, Copy, Direction};
use crate::sys::span::Span;
use spillway_planner::cast;
use spillway_planner::interleave::TransferDtype;

/// Direction of a copy. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_gpu_direction {
    /// From the device to the host: gradients.
    SPW_GPU_DIRECTION_D2H = 0,
    /// From the host to the device: parameters.
    SPW_GPU_DIRECTION_H2D = 1,
}

/// What a copy waits for on the device before it starts. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_gpu_after {
    /// Nothing.
    SPW_GPU_AFTER_NOTHING = 0,
    /// The event `handle` (`event.cuda_event` in torch, a `CUevent` or `cudaEvent_t` in C), as last recorded.
    SPW_GPU_AFTER_EVENT = 1,
    /// All work queued on the stream `handle` (`stream.cuda_stream` in torch, a `CUstream` or `cudaStream_t` in C); 0
    /// is the legacy default stream.
    SPW_GPU_AFTER_STREAM = 2,
}

c_struct! { first 56;
/// One copy between the framework's device memory and pinned host memory.
///
/// host_dtype is device_dtype or f32. If it is f32 and the device has 16 bits, the GPU converts (rounding to nearest
/// even towards the device) and f32 crosses the link (SuperOffload section 4.5). With 16 bits on both sides half the
/// bytes cross the link, and the CPU step converts in its registers.
pub struct spw_gpu_copy {
    /// `spw_gpu_direction`
    pub direction: u32,
    /// `spw_dtype` of the elements in device memory.
    pub device_dtype: u32,
    /// `spw_dtype` of the elements in host memory.
    pub host_dtype: u32,
    /// `spw_gpu_after`
    pub after: u32,
    /// 0
    pub reserved: u32,
    /// Number of elements.
    pub n: u64,
    /// Address in device memory (`tensor.data_ptr()` in torch).
    pub device: u64,
    /// Pinned host memory: from `spw_pinned_alloc`, or page-locked through CUDA. Other memory is an error.
    pub host: *mut c_void,
    /// The event or the stream that `after` selects.
    pub handle: u64,
}
}

/// The type in which gradients are transferred to the host. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_transfer_dtype {
    /// The type of the gradient. 16-bit gradients are converted in the registers of the CPU step.
    SPW_TRANSFER_DTYPE_NATIVE = 0,
    /// f32, converted on the GPU.
    SPW_TRANSFER_DTYPE_F32 = 1,
    /// The caller transfers gradients to the host. Only for an interleaved update.
    SPW_TRANSFER_DTYPE_DELIVERED = 2,
}

c_struct! { first 56;
/// Measured rates of a GPU's link and of the CPU's step, in parameters per second.
pub struct spw_gpu_link {
    /// The faster `spw_transfer_dtype` for gradients.
    pub transfer_dtype: u32,
    /// Gradients to the host, transferred as f32.
    pub d2h_f32: f64,
    /// Gradients to the host, transferred as 16 bits.
    pub d2h_native: f64,
    /// Parameters to the device, transferred as f32.
    pub h2d_f32: f64,
    /// Parameters to the device, transferred as 16 bits.
    pub h2d_native: f64,
    /// Adam step on the CPU from f32 gradients.
    pub step_f32: f64,
    /// Adam step on the CPU from 16-bit gradients.
    pub step_native: f64,
}
}

/// Queues a copy, in chunks on the library's own streams, and returns. `ticket_out` (may be NULL) receives its ticket.
/// Copies of one direction run in the order of the calls; the two directions run concurrently. To wait,
/// use `spw_gpu_copy_wait` or `spw_gpu_copy_stream_wait`. A wait of CUDA, such as cuCtxSynchronize, does not cover copies
/// that a thread of the library has not given to the driver yet.
///
/// The call waits neither for copies before it, nor for space for the copy in the driver's queues, nor for the driver to
/// page-lock memory at its first copy. It queues the mark of what the copy waits for: one event on the stream `handle`.
/// An error of the driver in a copy is the result of the waits for the copy. SPW_ERR_LIMIT_REACHED if 65,536
/// copies have not ended, or have failed.
///
/// Kept: the host memory, pinned and unused, and the device memory, until the copy ends.
///
/// # Safety
/// `copy` points to a struct of `struct_size` bytes. Its device memory, host memory and handle stay valid until the
/// copy ends. `ticket_out` is NULL or points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_copy_start(
    gpu: Option<&spw_gpu>,
    copy: In<spw_gpu_copy>,
    ticket_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let gpu = handle::get(gpu)?;
        let raw = copy.read("copy")?;
        // SAFETY: the caller lends the memory and the handle of the copy.
        let copy = unsafe { copy_of(gpu, &raw) }?;
        ticket_out.put_optional(gpu.transfers.start(&copy)?);
        Ok(())
    })
}

/// Waits for a copy for up to `timeout_ms` milliseconds (0: poll; negative: without limit). SPW_ERR_TIMEOUT if it has
/// not ended by then.
#[unsafe(no_mangle)]
pub extern "C" fn spw_gpu_copy_wait(gpu: Option<&spw_gpu>, ticket: u64, timeout_ms: i64) -> spw_status {
    guard(|| handle::get(gpu)?.transfers.wait(ticket, timeout(timeout_ms)))
}

/// Makes work queued later on `stream` wait, on the device, for a copy. The call blocks until the driver has the copy: about
/// 100 small copies of a direction are with the driver at a time, and the others follow as those end.
///
/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_copy_stream_wait(
    gpu: Option<&spw_gpu>,
    ticket: u64,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise.
        handle::get(gpu)?.transfers.stream_wait(ticket, unsafe { ForeignStream::new(stream) })
    })
}

/// Returns the rates of the link and the type in which gradients should cross it (SuperOffload section 4.5). The type
/// is f32 if the host accumulates gradients (`accumulates` 1), else the faster one when copies and CPU steps overlap.
///
/// The first call on a machine measures, which takes about a second and 200 MiB, and stores the rates in a profile. The
/// profile is the path in `SPILLWAY_PROFILE`, else `spillway/profile` in `XDG_CACHE_HOME` or `~/.cache`. If the
/// variable is empty, every call measures. `again` 1 measures again.
#[unsafe(no_mangle)]
pub extern "C" fn spw_gpu_measure_link(
    gpu: Option<&spw_gpu>,
    accumulates: u32,
    again: u32,
    link_out: Out<spw_gpu_link>,
) -> spw_status {
    guard(|| {
        let gpu = handle::get(gpu)?;
        let (accumulates, again) =
            (abi_struct::flag("accumulates", accumulates)?, abi_struct::flag("again", again)?);
        let found = Link::get(&gpu.device, &gpu.transfers, profile::default_path().as_deref(), again)?;
        let transfer_dtype = match cast::choose(&found.gradients(), accumulates)? {
            TransferDtype::Native | TransferDtype::Delivered => spw_transfer_dtype::SPW_TRANSFER_DTYPE_NATIVE,
            TransferDtype::F32 => spw_transfer_dtype::SPW_TRANSFER_DTYPE_F32,
        };
        let values = report!(spw_gpu_link from found {
            d2h_f32, d2h_native, h2d_f32, h2d_native, step_f32, step_native
        } with {
            transfer_dtype: transfer_dtype as u32
        });
        link_out.write(&values, "link_out")
    })
}

/// # Safety
/// As `spw_gpu_copy_start`.
pub(in crate::capi) unsafe fn copy_of(gpu: &spw_gpu, raw: &spw_gpu_copy) -> Result<Copy> {
    let within = |error: Error| error.within("copy.");
    abi_struct::zero("copy.reserved", raw.reserved)?;
    let toward_device = abi_struct::flag("copy.direction", raw.direction)?;
    let direction = if toward_device { Direction::H2d } else { Direction::D2h };
    let after = match raw.after {
        0 => After::Now,
        // SAFETY: the caller's promise.
        1 => After::Event(unsafe { ForeignEvent::new(raw.handle, "copy.handle") }?),
        // SAFETY: the caller's promise.
        2 => After::Stream(unsafe { ForeignStream::new(raw.handle) }),
        other => return Err(Error::invalid("copy.after", format!("{other} is not an spw_gpu_after"))),
    };
    let host_dtype = parse_dtype(raw.host_dtype, "copy.host_dtype")?;
    // SAFETY: the caller's promise.
    let device = unsafe { floats(raw.device, raw.device_dtype, raw.n, "device") }.map_err(within)?;
    let bytes = host_bytes(raw.n, host_dtype)?;
    // SAFETY: the caller's promise.
    let host = unsafe { Span::new(raw.host.cast(), bytes) };
    let host = host.ok_or_else(|| Error::invalid("copy.host", "is NULL"))?;
    let host = gpu.registry.lockable(host, "copy.host")?;
    Ok(Copy { direction, device, host, host_dtype, after })
}

fn host_bytes(n: u64, dtype: Dtype) -> Result<usize> {
    let bytes = n.checked_mul(dtype.size() as u64).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| Error::invalid("copy.n", format!("{n} elements exceed the address space")))
}
