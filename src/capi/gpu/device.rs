//! GPUs: discovery, and Adam on the device.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use crate::capi::deepspeed::call::{rule_of, spw_ds_adam_call};
use crate::capi::handle::Handle;
use crate::capi::optim::adam::spw_adam_options;
use crate::capi::optim::overlap;
use crate::capi::optim::table::{own_rule, rule};
use crate::capi::optim::tensor::{self, parse_dtype, spw_dtype, spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::dtype::Dtype;
use crate::gpu::device::Device;
use crate::gpu::driver::Driver;
use crate::gpu::kernels::{
    DeviceCodes, DeviceFloats, DeviceLow, DeviceNarrow, DeviceStates, DeviceTensor, Kernels,
};
use crate::gpu::list::Job;
use crate::gpu::memory::{DeviceSpan, Registry};
use crate::gpu::steps::Steps;
use crate::gpu::stream::ForeignStream;
use crate::gpu::transfer::Transfers;
use crate::gpu::watch::Watches;
use crate::kernel::AdamRule;
use crate::optim::deepspeed::ADAM;

c_struct! { first 16;
/// The CUDA driver of this process.
pub struct spw_gpu_driver {
    /// Number of devices that this process sees.
    pub devices: u32,
    /// The newest CUDA version that the driver supports: 12040 for 12.4.
    pub cuda_version: u32,
    /// 0
    pub reserved: u32,
}
}

c_struct! { first 16;
/// Options of a GPU. Zero is a good default for every field but struct_size.
pub struct spw_gpu_options {
    /// Index of the device among those that this process sees.
    pub ordinal: u32,
    /// Bytes of a chunk of a transfer; 0: 32 MiB.
    pub chunk_bytes: u64,
}
}

c_struct! { first 56;
/// Properties of a GPU.
pub struct spw_gpu_info {
    /// Index of the device among those that this process sees.
    pub ordinal: u32,
    /// Compute capability: 90 for 9.0.
    pub capability: u32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Number of copies that can run at the same time; with 2, one in each direction.
    pub copy_engines: u32,
    /// 0
    pub reserved: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Bytes of device memory that were free at the time of the call.
    pub free_bytes: u64,
    /// Name of the device from the driver. Valid until the GPU is closed, as is `pci`.
    pub name: *const c_char,
    /// PCI address, for example "0000:17:00.0". The system lists the device's NUMA node under it.
    pub pci: *const c_char,
}
}

/// An open GPU.
pub struct spw_gpu {
    pub(in crate::capi) transfers: Arc<Transfers>,
    pub(in crate::capi) steps: Arc<Steps>,
    pub(in crate::capi) watches: Arc<Watches>,
    pub(in crate::capi) kernels: Arc<Kernels>,
    pub(in crate::capi) registry: Arc<Registry>,
    pub(in crate::capi) device: Arc<Device>,
    name: CString,
    pci: CString,
}

impl Handle for spw_gpu {
    const NAME: &'static str = "gpu";

    /// The driver belongs to the process that initialised it; a child gets SPW_ERR_GPU_FORKED.
    fn check_process(&self) -> Result<()> {
        self.device.check_process()
    }
}

/// Finds the CUDA driver and its devices, without using a device. The driver is loaded here and in `spw_gpu_open`,
/// never when this library is loaded. The environment variable `SPILLWAY_CUDA_LIBRARY` replaces libcuda.so.1.
///
/// - SPW_ERR_NO_DEVICE: there is no driver or no device.
/// - SPW_ERR_DRIVER_STUB: the library is a toolkit's stub.
/// - SPW_ERR_DRIVER_TOO_OLD: the driver is older than 525.
/// - SPW_ERR_GPU_FORKED: the process was forked after CUDA was used.
#[unsafe(no_mangle)]
pub extern "C" fn spw_gpu_probe(driver_out: Out<spw_gpu_driver>) -> spw_status {
    guard(|| {
        let found = Driver::get()?;
        let values = report!(spw_gpu_driver with {
            devices: found.device_count()?, cuda_version: found.version(), reserved: 0
        });
        driver_out.write(&values, "driver_out")
    })
}

/// Opens a GPU in its primary context, which the framework uses too, and compiles the kernels for it. The compilation
/// takes some seconds the first time on a machine; later the driver has it cached.
///
/// Errors are those of `spw_gpu_probe`, SPW_ERR_GPU_JIT, SPW_ERR_GPU_OUT_OF_MEMORY, and SPW_ERR_UNSUPPORTED for a GPU
/// below compute capability 7.0.
///
/// Calls on the GPU do not disturb a graph that another thread captures. A stream under capture, or an event recorded
/// under capture, is an error. Pinned memory of this library that a copy or an interleaved update uses is registered
/// with the driver. A child forked meanwhile does not have this memory mapped and must not touch it.
#[unsafe(no_mangle)]
pub extern "C" fn spw_gpu_open(options: In<spw_gpu_options>, gpu_out: Out<*mut spw_gpu>) -> spw_status {
    guard(|| {
        let options = options.read("options")?;
        let chunk_bytes = match options.chunk_bytes {
            0 => DEFAULT_CHUNK_BYTES,
            bytes if bytes <= MOST_CHUNK_BYTES => bytes,
            bytes => {
                return Err(Error::invalid(
                    "options.chunk_bytes",
                    format!("is {bytes}, but the limit is 2^40"),
                ));
            }
        };
        gpu_out.open(|| spw_gpu::open(options.ordinal, chunk_bytes))
    })
}

impl spw_gpu {
    fn open(ordinal: u32, chunk_bytes: u64) -> Result<spw_gpu> {
        let device = Device::open(Driver::get()?, ordinal).map_err(|error| error.within("options."))?;
        let kernels = Arc::new(Kernels::load(&device)?);
        let info = device.info()?;
        Ok(spw_gpu {
            transfers: Arc::new(Transfers::new(&device, &kernels, chunk_bytes)?),
            steps: Arc::new(Steps::new(&device, &kernels)?),
            watches: Arc::new(Watches::new(&device)),
            kernels,
            registry: Arc::new(Registry::new(&device)),
            device,
            name: CString::new(info.name).unwrap_or_default(),
            pci: CString::new(info.pci).unwrap_or_default(),
        })
    }
}

const DEFAULT_CHUNK_BYTES: u64 = 32 << 20;
const MOST_CHUNK_BYTES: u64 = 1 << 40;

/// Waits for copies and steps in flight, and closes the GPU. Interleaved updates and speculation engines that use the
/// GPU keep working. NULL does nothing. SPW_ERR_TIMEOUT if the GPU has ended nothing for 30 minutes: the handle is
/// closed, and what the GPU may still use is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn spw_gpu_close(gpu: Option<Box<spw_gpu>>) -> spw_status {
    guard(|| {
        if let Some(gpu) = handle::close(gpu) {
            for ended in [gpu.transfers.finish(), gpu.steps.finish()] {
                // A lost context has nothing to wait for.
                if let Err(error @ Error::Timeout(_)) = ended {
                    return Err(error);
                }
            }
        }
        Ok(())
    })
}

/// Reads the properties of the GPU.
#[unsafe(no_mangle)]
pub extern "C" fn spw_gpu_get_info(gpu: Option<&spw_gpu>, info_out: Out<spw_gpu_info>) -> spw_status {
    guard(|| {
        let gpu = handle::get(gpu)?;
        let found = gpu.device.info()?;
        let values = report!(spw_gpu_info from found {
            capability, multiprocessors, copy_engines, memory_bytes, free_bytes
        } with {
            ordinal: gpu.device.ordinal(), reserved: 0, name: gpu.name.as_ptr(), pci: gpu.pci.as_ptr()
        });
        info_out.write(&values, "info_out")
    })
}

/// Does `spw_adam_step` on the GPU, with the same bits. All spans of the tensors are device memory. The step runs in
/// order on `stream`. With `stats_out` the call waits for the step; with `stats_out` NULL it returns at once.
///
/// The memory of the tensors stays valid until the step has ended.
///
/// A tensor may have a split master or 8-bit moments. Beside 8-bit moments param is f32, or bf16 with param_low.
///
/// With shadow spans the old state stays unchanged. To roll the step back exactly, the caller keeps using the old
/// state. To redo it, the caller passes the old state to this call again with another factor.
///
/// # Safety
/// As `spw_adam_step`, for device memory. `stream` is 0 or a live stream of the device's primary context. The memory
/// stays valid until the step has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_adam_step(
    gpu: Option<&spw_gpu>,
    options: In<spw_adam_options>,
    tensors: In<spw_tensor>,
    count: u64,
    stream: u64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    guard(|| {
        let gpu = handle::get(gpu)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            stats_out.check("stats_out")?;
            let jobs = jobs(rule(options)?, tensors, count)?;
            let seen = gpu.steps.adam(&jobs, ForeignStream::new(stream), !stats_out.is_null())?;
            tensor::write_stats(seen, stats_out)
        }
    })
}

/// Does `spw_ds_adam_update` of one tensor in device memory, with the same bits. The step runs in order on `stream`, and
/// the call returns at once. The step of `id` advances if the call succeeds.
///
/// # Safety
/// As `spw_gpu_adam_step`, for one tensor. `call` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_gpu_ds_adam_update(
    gpu: Option<&spw_gpu>,
    id: i32,
    call: In<spw_ds_adam_call>,
    tensor: In<spw_tensor>,
    stream: u64,
) -> spw_status {
    guard(|| {
        let gpu = handle::get(gpu)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (state, rule) = rule_of(id, call)?;
            gpu.steps.adam(&jobs(rule, tensor, 1)?, ForeignStream::new(stream), false)?;
            ADAM.create(id, state);
            Ok(())
        }
    })
}

/// A span of `n` elements in device memory.
///
/// # Safety
/// As [`DeviceSpan::new`].
pub(in crate::capi) unsafe fn floats(
    address: u64,
    dtype: u32,
    n: u64,
    argument: &'static str,
) -> Result<DeviceFloats> {
    let dtype = parse_dtype(dtype, argument)?;
    let bytes = n
        .checked_mul(dtype.size() as u64)
        .ok_or_else(|| Error::invalid(argument, format!("{n} elements exceed the address space")))?;
    // SAFETY: the caller meets the callee's requirements.
    DeviceFloats::new(unsafe { DeviceSpan::new(address, bytes, argument) }?, dtype, argument)
}

/// What a split master and 8-bit moments have beside the arrays of other states.
///
/// # Safety
/// As `spw_gpu_adam_step`.
unsafe fn narrow(raw: &spw_tensor) -> Result<DeviceNarrow> {
    // SAFETY: the caller's promise.
    let span =
        |address: *const c_void, bytes, argument| unsafe { DeviceSpan::new(address as u64, bytes, argument) };
    let mut narrow = DeviceNarrow::default();
    if !raw.param_low.is_null() {
        // SAFETY: the caller's promise. The words are 16 bits, as a bf16 is.
        let bits =
            unsafe { floats(raw.param_low as u64, spw_dtype::SPW_DTYPE_BF16 as u32, raw.n, "param_low")? };
        let sums = match raw.low_sums.is_null() {
            true => None,
            false if !raw.low_sums.is_aligned() => {
                let reason = format!("address {:p} is not aligned to 8 bytes", raw.low_sums);
                return Err(Error::invalid("low_sums", reason));
            }
            false => Some(span(raw.low_sums.cast(), tensor::bytes_of_sums(raw.n), "low_sums")?),
        };
        narrow.low = Some(DeviceLow { bits, sums });
    } else if !raw.low_sums.is_null() {
        return Err(tensor::sums_of_no_low_bits());
    }
    if tensor::has_codes(raw) {
        tensor::check_scales(raw)?;
        let moment =
            |codes: *mut c_void, scales: *mut c_void, [codes_name, scales_name]: [&'static str; 2]| {
                let scales = span(scales, tensor::bytes_of_scales(raw.n), scales_name)?;
                Ok::<_, Error>(DeviceCodes {
                    codes: span(codes, raw.n, codes_name)?,
                    scales: DeviceFloats::new(scales, Dtype::Bf16, scales_name)?,
                })
            };
        narrow.codes = Some([
            moment(raw.exp_avg, raw.exp_avg_scale, ["exp_avg", "exp_avg_scale"])?,
            moment(raw.exp_avg_sq, raw.exp_avg_sq_scale, ["exp_avg_sq", "exp_avg_sq_scale"])?,
        ]);
    }
    Ok(narrow)
}

/// Reads tensors in device memory. Tensors without their own options use `shared`.
///
/// # Safety
/// As `spw_gpu_adam_step`.
pub(in crate::capi) unsafe fn jobs(
    shared: AdamRule,
    tensors: In<spw_tensor>,
    count: u64,
) -> Result<Vec<Job>> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        let raw = tensor::read_split(tensors, count)?;
        overlap::check(&raw)?;
        let job = |raw: &spw_tensor| {
            let floats = |address: *const c_void, dtype, argument| {
                // SAFETY: the caller's promise.
                floats(address as u64, dtype, raw.n, argument)
            };
            let rule =
                if raw.options.is_null() { shared } else { own_rule::<spw_adam_options>(raw.options)? };
            tensor::check_copy(raw)?;
            let copy = match raw.copy_dtype {
                0 => None,
                dtype => Some(floats(raw.param_copy, dtype, "param_copy")?),
            };
            let param = floats(raw.param, raw.param_dtype, "param")?;
            let narrow = narrow(raw)?;
            let [exp_avg, exp_avg_sq] = match narrow.codes {
                // The codes are the moments.
                Some(_) => [DeviceFloats::EMPTY; 2],
                None => [
                    floats(raw.exp_avg, raw.state_dtype, "exp_avg")?,
                    floats(raw.exp_avg_sq, raw.state_dtype, "exp_avg_sq")?,
                ],
            };
            let states = DeviceStates { param, exp_avg, exp_avg_sq };
            let shadow = match tensor::has_shadow(raw) {
                false => None,
                true => Some(DeviceStates {
                    param: floats(raw.shadow_param, raw.param_dtype, "shadow_param")?,
                    exp_avg: floats(raw.shadow_exp_avg, raw.state_dtype, "shadow_exp_avg")?,
                    exp_avg_sq: floats(raw.shadow_exp_avg_sq, raw.state_dtype, "shadow_exp_avg_sq")?,
                }),
            };
            let grad = floats(raw.grad, raw.grad_dtype, "grad")?;
            Ok(Job { rule, tensor: DeviceTensor { states, shadow, grad, param_copy: copy, narrow } })
        };
        let numbered = raw.iter().enumerate().filter(|(_, raw)| raw.n > 0);
        numbered
            .map(|(index, raw)| job(raw).map_err(|error: Error| error.within(&format!("tensors[{index}]."))))
            .collect()
    }
}
