//! GPUs: what is there, copies to and from pinned memory, and Adam on the device.
#![allow(non_camel_case_types)]

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::adam::{parse, rule, spw_adam_options};
use super::guard::guard;
use super::library::out;
use super::record::{self, Record};
use super::status::spw_status;
use super::tensor::{self, parse_dtype, spw_step_stats, spw_tensor};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::gpu::device::Device;
use crate::gpu::driver::Driver;
use crate::gpu::kernels::{DeviceFloats, DeviceStates, DeviceTensor, Kernels};
use crate::gpu::link::Link;
use crate::gpu::memory::{DeviceSpan, Registry};
use crate::gpu::profile;
use crate::gpu::steps::{Job, Steps};
use crate::gpu::stream::{ForeignEvent, ForeignStream};
use crate::gpu::transfer::{After, Copy, Direction, Transfers};
use crate::plan::cast;
use crate::plan::interleave::Wire;
use crate::sys::span::Span;

/// The CUDA driver of this process.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_gpu_driver {
    /// `sizeof(spw_gpu_driver)`
    pub struct_size: u32,
    /// Devices that this process sees.
    pub devices: u32,
    /// The newest CUDA that the driver speaks: 12040 for 12.4.
    pub cuda_version: u32,
    /// 0
    pub reserved: u32,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_gpu_driver {
    const FIRST_SIZE: usize = 16;
    const NAME: &'static str = "spw_gpu_driver";
}

/// How to use a GPU. Zeros are a good choice.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_gpu_options {
    /// `sizeof(spw_gpu_options)`
    pub struct_size: u32,
    /// Which of the devices that this process sees.
    pub ordinal: u32,
    /// Bytes of a chunk on the wire; 0 is 32 MiB.
    pub chunk_bytes: u64,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_gpu_options {
    const FIRST_SIZE: usize = 16;
    const NAME: &'static str = "spw_gpu_options";
}

/// What a GPU is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_gpu_info {
    /// `sizeof(spw_gpu_info)`
    pub struct_size: u32,
    /// Which of the devices that this process sees.
    pub ordinal: u32,
    /// Compute capability: 90 for 9.0.
    pub capability: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Copies that can run at the same time; with 2, one in each direction.
    pub copy_engines: u32,
    /// 0
    pub reserved: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Those of them that were free when this was asked.
    pub free_bytes: u64,
    /// As the driver calls it. Good until the GPU is closed, as `pci` is.
    pub name: *const c_char,
    /// "0000:17:00.0", the name under which the system files its NUMA node.
    pub pci: *const c_char,
}

// SAFETY: integers and pointers without padding; a null pointer is valid.
unsafe impl Record for spw_gpu_info {
    const FIRST_SIZE: usize = 56;
    const NAME: &'static str = "spw_gpu_info";
}

/// Which way a copy goes. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_gpu_direction {
    /// From the device to the host: gradients.
    SPW_GPU_OUT = 0,
    /// From the host to the device: parameters.
    SPW_GPU_IN = 1,
}

/// What a copy waits for on the device. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_gpu_after {
    /// Nothing.
    SPW_GPU_AFTER_NOTHING = 0,
    /// The event `handle` (`event.cuda_event` of torch, a `CUevent` or `cudaEvent_t` of C), as it was last recorded.
    SPW_GPU_AFTER_EVENT = 1,
    /// All that is queued on the stream `handle` (`stream.cuda_stream` of torch, a `CUstream` or `cudaStream_t` of
    /// C); 0 is the legacy default stream.
    SPW_GPU_AFTER_STREAM = 2,
}

/// One copy between device memory of the framework and pinned host memory.
///
/// The host has the device's type, or f32: then the GPU converts, rounding to nearest even on the way in, and f32
/// crosses the link (SuperOffload section 4.5). With 16 bits on both sides half the bytes cross it, and the CPU step
/// converts in its registers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_gpu_copy {
    /// `sizeof(spw_gpu_copy)`
    pub struct_size: u32,
    /// `spw_gpu_direction`
    pub direction: u32,
    /// `spw_dtype` in device memory.
    pub device_dtype: u32,
    /// `spw_dtype` in host memory.
    pub host_dtype: u32,
    /// `spw_gpu_after`
    pub after: u32,
    /// 0
    pub reserved: u32,
    /// Number of elements.
    pub n: u64,
    /// Address in device memory: `tensor.data_ptr()`.
    pub device: u64,
    /// Pinned host memory: of `spw_pinned_alloc`, of a pool, or page-locked through CUDA. Any other is refused.
    pub host: *mut c_void,
    /// The event or the stream.
    pub handle: u64,
}

// SAFETY: integers and pointers without padding; a null pointer is valid.
unsafe impl Record for spw_gpu_copy {
    const FIRST_SIZE: usize = 56;
    const NAME: &'static str = "spw_gpu_copy";
}

/// In which form gradients leave the device. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_gpu_wire {
    /// 16 bits, as the device has them; the CPU step converts in its registers.
    SPW_GPU_WIRE_NATIVE = 0,
    /// f32, converted on the GPU.
    SPW_GPU_WIRE_F32 = 1,
}

/// How fast parameters cross the link of a GPU, and how fast the processor steps them: each in parameters per second.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_gpu_link {
    /// `sizeof(spw_gpu_link)`
    pub struct_size: u32,
    /// The faster `spw_gpu_wire` for gradients.
    pub wire: u32,
    /// Gradients out, f32 on the wire.
    pub out_f32: f64,
    /// Gradients out, 16 bits on the wire.
    pub out_native: f64,
    /// Parameters in, f32 on the wire.
    pub in_f32: f64,
    /// Parameters in, 16 bits on the wire.
    pub in_native: f64,
    /// Adam on the processor, from f32 gradients.
    pub step_f32: f64,
    /// Adam on the processor, from 16-bit gradients.
    pub step_native: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_gpu_link {
    const FIRST_SIZE: usize = 56;
    const NAME: &'static str = "spw_gpu_link";
}

/// A GPU in use. Any number of threads may use one at a time.
pub struct spw_gpu {
    // In this order they go: copies and steps finish before what they use.
    transfers: Transfers,
    steps: Steps,
    registry: Registry,
    device: Arc<Device>,
    name: CString,
    pci: CString,
}

/// Looks for the CUDA driver and its devices, without touching any device. SPW_ERR_NO_DEVICE if there is no driver or
/// no device, SPW_ERR_DRIVER_STUB, SPW_ERR_DRIVER_TOO_OLD (before 525), SPW_ERR_GPU_FORKED. The driver is looked for
/// here and in `spw_gpu_open`, never when this library is loaded. `SPILLWAY_CUDA_LIBRARY` names another library than
/// libcuda.so.1. Set `driver->struct_size` first.
///
/// # Safety
/// `driver` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_probe(driver: *mut spw_gpu_driver) -> spw_status {
    guard(|| {
        let found = Driver::get()?;
        let values = spw_gpu_driver {
            struct_size: 0,
            devices: found.device_count()?,
            cuda_version: found.version(),
            reserved: 0,
        };
        // SAFETY: the caller's promise is the callee's.
        unsafe { record::write(&values, driver, "driver") }
    })
}

/// Uses a GPU through its primary context, the one that the framework uses, and compiles the kernels for it (about a
/// second the first time on a machine, then the driver has them). Errors as `spw_gpu_probe`; SPW_ERR_UNSUPPORTED for
/// a GPU before compute capability 7.0, SPW_ERR_GPU_JIT, SPW_ERR_GPU_OUT_OF_MEMORY.
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes, `gpu_out` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_open(
    options: *const spw_gpu_options,
    gpu_out: *mut *mut spw_gpu,
) -> spw_status {
    guard(|| {
        let gpu_out = out(gpu_out, "gpu_out")?;
        // SAFETY: the caller's promise is the callee's.
        let options = unsafe { record::read(options, "options") }?;
        let chunk_bytes = match options.chunk_bytes {
            0 => DEFAULT_CHUNK_BYTES,
            bytes if bytes <= MOST_CHUNK_BYTES => bytes,
            bytes => return Err(Error::invalid("options.chunk_bytes", format!("is {bytes}, over 2^40"))),
        };
        let device =
            Device::open(Driver::get()?, options.ordinal).map_err(|error| error.within("options."))?;
        let kernels = Arc::new(Kernels::load(&device)?);
        let info = device.info()?;
        let gpu = spw_gpu {
            transfers: Transfers::new(&device, &kernels, chunk_bytes)?,
            steps: Steps::new(&device, &kernels)?,
            registry: Registry::new(&device),
            device,
            name: CString::new(info.name).unwrap_or_default(),
            pci: CString::new(info.pci).unwrap_or_default(),
        };
        // SAFETY: not NULL, and the caller's promise.
        unsafe { gpu_out.write(Box::into_raw(Box::new(gpu))) };
        Ok(())
    })
}

const DEFAULT_CHUNK_BYTES: u64 = 32 << 20;
const MOST_CHUNK_BYTES: u64 = 1 << 40;

/// Waits for the copies and steps under way, and lets go of the GPU. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_gpu_close(gpu: Option<Box<spw_gpu>>) -> spw_status {
    guard(|| {
        drop(gpu);
        Ok(())
    })
}

/// Reads what the GPU is. Set `info->struct_size` first.
///
/// # Safety
/// `info` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_info_get(gpu: Option<&spw_gpu>, info: *mut spw_gpu_info) -> spw_status {
    guard(|| {
        let gpu = object(gpu)?;
        let found = gpu.device.info()?;
        let values = spw_gpu_info {
            struct_size: 0,
            ordinal: gpu.device.ordinal(),
            capability: found.capability,
            multiprocessors: found.multiprocessors,
            copy_engines: found.copy_engines,
            reserved: 0,
            memory_bytes: found.memory_bytes,
            free_bytes: found.free_bytes,
            name: gpu.name.as_ptr(),
            pci: gpu.pci.as_ptr(),
        };
        // SAFETY: the caller's promise is the callee's.
        unsafe { record::write(&values, info, "info") }
    })
}

/// Queues a copy in chunks on streams of its own and returns; `ticket_out` gets its number, or is NULL. Copies of one
/// direction run in the order in which they were queued, both directions at the same time. Until the copy is over the
/// host memory stays pinned and untouched, and the framework leaves the device memory alone: wait for the ticket, or make
/// a stream wait for it.
///
/// # Safety
/// `copy` points to a struct of `struct_size` bytes, whose device memory, host memory and handle are good until the copy
/// is over; `ticket_out` is NULL or points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_copy_start(
    gpu: Option<&spw_gpu>,
    copy: *const spw_gpu_copy,
    ticket_out: *mut u64,
) -> spw_status {
    guard(|| {
        let gpu = object(gpu)?;
        // SAFETY: the caller's promise is the callees'.
        let ticket = gpu.transfers.start(&unsafe { copy_of(gpu, copy) }?)?;
        if !ticket_out.is_null() {
            // SAFETY: not NULL, and the caller's promise.
            unsafe { ticket_out.write(ticket) };
        }
        Ok(())
    })
}

/// Waits for a copy, at the longest `timeout_ms` milliseconds (0: only looks; negative: for ever). SPW_ERR_TIMEOUT if
/// it is not over by then.
#[unsafe(no_mangle)]
pub extern "C" fn spw_gpu_copy_wait(gpu: Option<&spw_gpu>, ticket: u64, timeout_ms: i64) -> spw_status {
    guard(|| {
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        object(gpu)?.transfers.wait(ticket, timeout)
    })
}

/// Makes what is queued on `stream` from now on wait for a copy, on the device.
///
/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_stream_wait(gpu: Option<&spw_gpu>, ticket: u64, stream: u64) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise.
        object(gpu)?.transfers.stream_wait(ticket, unsafe { ForeignStream::new(stream) })
    })
}

/// Speeds of the link, and the form in which gradients should cross it (SuperOffload section 4.5): f32 if the host adds
/// gradients up (`accumulates` 1), else what is faster once the copy and the CPU step overlap. Measured at the first
/// call on a machine, which takes about a second and 200 MiB, and kept in a profile: the file that `SPILLWAY_PROFILE`
/// names, else spillway/profile in the user's cache folder. `again` 1 measures anew. Set `link->struct_size` first.
///
/// # Safety
/// `link` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_link_get(
    gpu: Option<&spw_gpu>,
    accumulates: u32,
    again: u32,
    link: *mut spw_gpu_link,
) -> spw_status {
    guard(|| {
        let gpu = object(gpu)?;
        let (accumulates, again) = (record::flag("accumulates", accumulates)?, record::flag("again", again)?);
        let found = Link::get(&gpu.device, &gpu.transfers, profile::default_path().as_deref(), again)?;
        let wire = match cast::choose(&found.gradients(), accumulates)? {
            Wire::Native | Wire::Delivered => spw_gpu_wire::SPW_GPU_WIRE_NATIVE,
            Wire::F32 => spw_gpu_wire::SPW_GPU_WIRE_F32,
        };
        let Link { out_f32, out_native, in_f32, in_native, step_f32, step_native } = found;
        let values = spw_gpu_link {
            struct_size: 0,
            wire: wire as u32,
            out_f32,
            out_native,
            in_f32,
            in_native,
            step_f32,
            step_native,
        };
        // SAFETY: the caller's promise is the callee's.
        unsafe { record::write(&values, link, "link") }
    })
}

/// `spw_adam_step` on the GPU, with the same bits: all spans of the tensors are device memory. It comes after what is
/// queued on `stream`, and what is queued there later comes after it. With `stats` the call waits for the step; without,
/// it returns at once.
///
/// # Safety
/// As `spw_adam_step`, for device memory; `stream` is 0 or a live stream of the device's primary context, and the
/// memory is good until the step is over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_adam_step(
    gpu: Option<&spw_gpu>,
    options: *const spw_adam_options,
    tensors: *const spw_tensor,
    count: usize,
    stream: u64,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        let gpu = object(gpu)?;
        // SAFETY: the caller's promise is the callees'.
        unsafe {
            record::check_output(stats, "stats")?;
            let jobs = jobs(options, tensors, count)?;
            let seen = gpu.steps.adam(&jobs, ForeignStream::new(stream), !stats.is_null())?;
            tensor::write_stats(seen, stats)
        }
    })
}

fn object(gpu: Option<&spw_gpu>) -> Result<&spw_gpu> {
    gpu.ok_or_else(|| Error::invalid("gpu", "is NULL"))
}

unsafe fn copy_of(gpu: &spw_gpu, copy: *const spw_gpu_copy) -> Result<Copy> {
    let within = |error: Error| error.within("copy.");
    // SAFETY: the caller's promise is the callee's.
    let raw = unsafe { record::read(copy, "copy") }?;
    record::zero("copy.reserved", raw.reserved)?;
    let direction = match record::flag("copy.direction", raw.direction)? {
        false => Direction::Out,
        true => Direction::In,
    };
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
    let host = gpu.registry.host(host, "copy.host")?;
    Ok(Copy { direction, device, host, host_dtype, after })
}

fn host_bytes(n: u64, dtype: Dtype) -> Result<usize> {
    let bytes = n.checked_mul(dtype.size() as u64).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| Error::invalid("copy.n", format!("{n} elements pass the address space")))
}

/// Device memory of `n` elements.
///
/// # Safety
/// As [`DeviceSpan::new`].
unsafe fn floats(address: u64, dtype: u32, n: u64, argument: &'static str) -> Result<DeviceFloats> {
    let dtype = parse_dtype(dtype, argument)?;
    let bytes = n
        .checked_mul(dtype.size() as u64)
        .ok_or_else(|| Error::invalid(argument, format!("{n} elements pass the address space")))?;
    // SAFETY: the caller's promise is the callee's.
    DeviceFloats::new(unsafe { DeviceSpan::new(address, bytes, argument) }?, dtype, argument)
}

unsafe fn jobs(
    options: *const spw_adam_options,
    tensors: *const spw_tensor,
    count: usize,
) -> Result<Vec<Job>> {
    // SAFETY: the caller's promise is the callees'.
    unsafe {
        let shared = rule(&parse(options)?)?;
        let raw = tensor::read_all(tensors, count)?;
        let job = |raw: &spw_tensor| {
            let floats = |address: *const c_void, dtype, argument| {
                // SAFETY: the caller's promise.
                floats(address as u64, dtype, raw.n, argument)
            };
            let rule = if raw.options.is_null() { shared } else { rule(&parse(raw.options.cast())?)? };
            let copy = match raw.copy_dtype {
                0 => None,
                dtype => Some(floats(raw.param_copy, dtype, "param_copy")?),
            };
            let states = DeviceStates {
                param: floats(raw.param, raw.param_dtype, "param")?,
                exp_avg: floats(raw.exp_avg, raw.state_dtype, "exp_avg")?,
                exp_avg_sq: floats(raw.exp_avg_sq, raw.state_dtype, "exp_avg_sq")?,
            };
            let grad = floats(raw.grad, raw.grad_dtype, "grad")?;
            Ok(Job { rule, tensor: DeviceTensor { states, shadow: None, grad, param_copy: copy } })
        };
        let numbered = raw.iter().enumerate().filter(|(_, raw)| raw.n > 0);
        numbered
            .map(|(index, raw)| job(raw).map_err(|error: Error| error.within(&format!("tensors[{index}]."))))
            .collect()
    }
}
