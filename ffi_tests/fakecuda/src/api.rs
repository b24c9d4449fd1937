//! The driver's functions with their C signatures. A handle combines the device's number, counted from 1, with an
//! object's number in the lower bits.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::MutexGuard;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUgraph, CUjit_option,
    CUmodule, CUpointer_attribute, CUresult, CUstream,
};

use crate::capture;
use crate::code::{Code, INVALID_VALUE};
use crate::gpu::{self, DEVICES, Gpu, unless_stalled};

const SUCCESS: Code = CUresult::CUDA_SUCCESS as Code;
const INVALID_CONTEXT: Code = CUresult::CUDA_ERROR_INVALID_CONTEXT as Code;
const INVALID_DEVICE: Code = CUresult::CUDA_ERROR_INVALID_DEVICE as Code;

/// Address of a function.
pub struct Address(pub *mut c_void);
// SAFETY: the address of code, which every thread may call.
unsafe impl Sync for Address {}

/// The type of an argument in cudarc's binding: the second type, if there are two.
macro_rules! bound {
    ($kind:ty) => {
        $kind
    };
    ($kind:ty, $bound:ty) => {
        $bound
    };
}

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $kind:ty $(as $bound:ty)?),* $(,)?) $body:block)*) => {
        $(
            // Does not compile if the signature differs from cudarc's binding. Enums that another version of CUDA may
            // extend are integers here.
            const _: unsafe fn($(bound!($kind $(, $bound)?)),*) -> CUresult = sys::$name;

            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, reason = "some need none")]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> Code {
                // SAFETY: the callers pass valid pointers, as the driver API requires.
                let outcome: Result<(), Code> = (|| unsafe { $body })();
                outcome.err().unwrap_or(SUCCESS)
            }
        )*
        /// Every function by its name.
        pub static FUNCTIONS: &[(&str, Address)] = &[$((stringify!($name), Address($name as *mut c_void))),*];
    };
}

thread_local! {
    static CONTEXTS: RefCell<Vec<CUcontext>> = const { RefCell::new(Vec::new()) };
}

fn setting(name: &str, default: i32) -> i32 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

pub(crate) fn number<T>(handle: *mut T) -> usize {
    gpu::number(handle.addr())
}

fn handle<T>(ordinal: usize, number: usize) -> *mut T {
    ptr::without_provenance_mut((ordinal + 1) << 32 | number)
}

/// The GPU of a handle; the current GPU for handle 0.
fn of<T>(object: *mut T, call: &'static str) -> Result<(usize, MutexGuard<'static, Gpu>), Code> {
    let owner = match object.addr() {
        0 => CONTEXTS.with_borrow(|stack| stack.last().copied()).ok_or(INVALID_CONTEXT)?.addr(),
        object => object,
    };
    let ordinal = (owner >> 32).checked_sub(1).filter(|ordinal| *ordinal < DEVICES).ok_or(INVALID_VALUE)?;
    let mut gpu = gpu::lock(ordinal as u32);
    gpu.enter(call)?;
    Ok((ordinal, unless_stalled(ordinal, gpu, |gpu| gpu.held.contains(&call))))
}

fn current(call: &'static str) -> Result<(usize, MutexGuard<'static, Gpu>), Code> {
    of(ptr::null_mut::<c_void>(), call)
}

unsafe fn write_text(text: &str, to: *mut c_char, room: c_int) {
    let bytes = text.len().min(room as usize - 1);
    // SAFETY: the caller provides memory of this size.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), bytes);
        to.add(bytes).write(0);
    }
}

functions! {
    fn cuInit(_flags: c_uint) {
        match setting("FAKECUDA_INIT", 0) {
            0 => Ok(()),
            code => Err(code),
        }
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        if setting("FAKECUDA_INIT", 0) == 34 {
            return Err(34);
        }
        version.write(setting("FAKECUDA_VERSION", 12_040));
        Ok(())
    }

    fn cuGetErrorName(code: Code as CUresult, name: *mut *const c_char) {
        let known = match code {
            1 => c"CUDA_ERROR_INVALID_VALUE",
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            34 => c"CUDA_ERROR_STUB_LIBRARY",
            100 => c"CUDA_ERROR_NO_DEVICE",
            218 => c"CUDA_ERROR_INVALID_PTX",
            221 => c"CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
            222 => c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            719 => c"CUDA_ERROR_LAUNCH_FAILED",
            803 => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            _ => return Err(INVALID_VALUE),
        };
        name.write(known.as_ptr());
        Ok(())
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        count.write(setting("FAKECUDA_DEVICES", DEVICES as i32));
        Ok(())
    }

    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        if !(0..DEVICES as c_int).contains(&ordinal) {
            return Err(INVALID_DEVICE);
        }
        device.write(ordinal);
        Ok(())
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int as CUdevice_attribute, _device: CUdevice) {
        use CUdevice_attribute as Attribute;

        const MULTIPROCESSORS: c_int = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as c_int;
        const COPY_ENGINES: c_int = Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT as c_int;
        const MAJOR: c_int = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as c_int;
        const MINOR: c_int = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as c_int;
        value.write(match attribute {
            MULTIPROCESSORS => 1,
            COPY_ENGINES => 2,
            MAJOR => setting("FAKECUDA_CAPABILITY", 90) / 10,
            MINOR => setting("FAKECUDA_CAPABILITY", 90) % 10,
            _ => return Err(INVALID_VALUE),
        });
        Ok(())
    }

    fn cuDeviceGetName(name: *mut c_char, room: c_int, _device: CUdevice) {
        write_text("Fake GPU", name, room);
        Ok(())
    }

    fn cuDeviceGetPCIBusId(name: *mut c_char, room: c_int, device: CUdevice) {
        write_text(&format!("0000:{device:02X}:00.0"), name, room);
        Ok(())
    }

    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) {
        let mut gpu = gpu::lock(device as u32);
        gpu.enter("cuDevicePrimaryCtxRetain")?;
        gpu.retained += 1;
        context.write(handle(device as usize, 0));
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) {
        gpu::lock(device as u32).retained -= 1;
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        CONTEXTS.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: *mut CUcontext) {
        context.write(CONTEXTS.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?);
        Ok(())
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (_, gpu) = current("cuMemGetInfo_v2")?;
        let total_bytes = gpu.queues.limits.memory_bytes;
        free.write(total_bytes.saturating_sub(gpu.memory_used()) as usize);
        total.write(total_bytes as usize);
        Ok(())
    }

    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) {
        let (_, mut gpu) = current("cuMemAlloc_v2")?;
        address.write(gpu.queues.allocate(bytes)?);
        Ok(())
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        let (ordinal, gpu) = current("cuMemFree_v2")?;
        unless_stalled(ordinal, gpu, |gpu| gpu.queued() > 0).queues.free(address)
    }

    fn cuMemHostRegister_v2(start: *mut c_void, bytes: usize, _flags: c_uint) {
        let (ordinal, gpu) = current("cuMemHostRegister_v2")?;
        unless_stalled(ordinal, gpu, |gpu| gpu.queued() > 0).queues.reach.register(start as u64, bytes as u64)
    }

    fn cuMemHostUnregister(start: *mut c_void) {
        let (ordinal, gpu) = current("cuMemHostUnregister")?;
        unless_stalled(ordinal, gpu, |gpu| gpu.queued() > 0).queues.reach.unregister(start as u64)
    }

    fn cuPointerGetAttributes(
        count: c_uint,
        attributes: *mut c_int as *mut CUpointer_attribute,
        values: *mut *mut c_void,
        address: CUdeviceptr,
    ) {
        let (_, gpu) = current("cuPointerGetAttributes")?;
        if count != 1 || attributes.read() != CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as c_int {
            return Err(INVALID_VALUE);
        }
        values.read().cast::<c_uint>().write(gpu.queues.reach.kind(address));
        Ok(())
    }

    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) {
        let (ordinal, gpu) = of(stream, "cuMemcpyHtoDAsync_v2")?;
        unless_stalled(ordinal, gpu, Gpu::is_full).copy(number(stream), from as u64, to, bytes, 0)
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        let (ordinal, gpu) = of(stream, "cuMemcpyDtoHAsync_v2")?;
        unless_stalled(ordinal, gpu, Gpu::is_full).copy(number(stream), from, to as u64, bytes, 1)
    }

    fn cuStreamCreateWithPriority(stream: *mut CUstream, _flags: c_uint, _priority: c_int) {
        let (ordinal, mut gpu) = current("cuStreamCreateWithPriority")?;
        stream.write(handle(ordinal, gpu.stream_create()));
        Ok(())
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        of(stream, "cuStreamDestroy_v2")?.1.stream_destroy(number(stream))
    }

    fn cuStreamSynchronize(stream: CUstream) {
        let (ordinal, gpu) = of(stream, "cuStreamSynchronize")?;
        let busy = |gpu: &Gpu| gpu.queues.is_busy(number(stream));
        unless_stalled(ordinal, gpu, busy).stream_synchronize(number(stream))
    }

    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) {
        let (ordinal, gpu) = of(event, "cuStreamWaitEvent")?;
        unless_stalled(ordinal, gpu, Gpu::is_full).stream_wait(number(stream), number(event))
    }

    fn cuStreamIsCapturing(stream: CUstream, capturing: *mut c_int as *mut sys::CUstreamCaptureStatus) {
        capturing.write(of(stream, "cuStreamIsCapturing")?.1.captures.status(number(stream)));
        Ok(())
    }

    fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_int as sys::CUstreamCaptureMode) {
        of(stream, "cuStreamBeginCapture_v2")?.1.capture_begin(number(stream), mode)
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        graph.write(ptr::null_mut());
        of(stream, "cuStreamEndCapture")?.1.captures.end(number(stream))
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int as *mut sys::CUstreamCaptureMode) {
        mode.write(capture::exchange(mode.read())?);
        Ok(())
    }

    fn cuEventCreate(event: *mut CUevent, flags: c_uint) {
        let (ordinal, mut gpu) = current("cuEventCreate")?;
        event.write(handle(ordinal, gpu.event_create(flags & 2 == 0)));
        Ok(())
    }

    fn cuEventDestroy_v2(event: CUevent) {
        of(event, "cuEventDestroy_v2")?.1.event_destroy(number(event))
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        let (ordinal, gpu) = of(event, "cuEventRecord")?;
        unless_stalled(ordinal, gpu, Gpu::is_full).event_record(number(event), number(stream))
    }

    fn cuEventQuery(event: CUevent) {
        of(event, "cuEventQuery")?.1.event_query(number(event))
    }

    fn cuEventSynchronize(event: CUevent) {
        let (ordinal, gpu) = of(event, "cuEventSynchronize")?;
        unless_stalled(ordinal, gpu, |gpu| gpu.is_pending(number(event))).event_synchronize(number(event))
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, from: CUevent, to: CUevent) {
        let (_, gpu) = of(from, "cuEventElapsedTime")?;
        milliseconds.write((gpu.event_seconds(number(from), number(to))? * 1e3) as f32);
        Ok(())
    }

    fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        ptx: *const c_void,
        count: c_uint,
        options: *mut c_int as *mut CUjit_option,
        values: *mut *mut c_void,
    ) {
        let (ordinal, mut gpu) = current("cuModuleLoadDataEx")?;
        let text = CStr::from_ptr(ptx.cast()).to_string_lossy();
        let option = |wanted: c_int| {
            let place = (0..count as usize).find(|index| options.add(*index).read() == wanted)?;
            Some(values.add(place).read())
        };
        match gpu.module_load(&text) {
            Ok(id) => module.write(handle(ordinal, id)),
            Err((code, words)) => {
                if let (Some(log), Some(room)) = (
                    option(CUjit_option::CU_JIT_ERROR_LOG_BUFFER as c_int),
                    option(CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as c_int),
                ) {
                    write_text(&words, log.cast(), room as usize as c_int);
                }
                return Err(code);
            }
        }
        Ok(())
    }

    fn cuModuleUnload(module: CUmodule) {
        of(module, "cuModuleUnload")?.1.module_unload(number(module))
    }

    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        let (ordinal, mut gpu) = of(module, "cuModuleGetFunction")?;
        let name = CStr::from_ptr(name).to_string_lossy();
        function.write(handle(ordinal, gpu.function(number(module), &name)?));
        Ok(())
    }

    fn cuLaunchKernel(
        function: CUfunction,
        blocks: c_uint,
        _blocks_y: c_uint,
        _blocks_z: c_uint,
        threads: c_uint,
        _threads_y: c_uint,
        _threads_z: c_uint,
        _shared: c_uint,
        stream: CUstream,
        arguments: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        let (ordinal, gpu) = of(function, "cuLaunchKernel")?;
        let mut gpu = unless_stalled(ordinal, gpu, Gpu::is_full);
        let kernel = gpu.kernel(number(function))?;
        let mut parameters = vec![0; kernel.parameter_bytes];
        for (index, (offset, bytes)) in kernel.parameters.iter().enumerate() {
            let value = arguments.add(index).read().cast::<u8>();
            std::ptr::copy_nonoverlapping(value, parameters.as_mut_ptr().add(*offset), *bytes);
        }
        gpu.launch(number(stream), kernel, blocks, threads, parameters)
    }
}

/// Number of races that the checker found on a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_races(ordinal: u32) -> u64 {
    gpu::lock(ordinal).races().len() as u64
}

/// Number of copies whose host side was not page-locked.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_pageable_copies(ordinal: u32) -> u64 {
    gpu::lock(ordinal).pageable_copies as u64
}

/// Number of kernels that were launched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_launches(ordinal: u32) -> u64 {
    gpu::lock(ordinal).calls.iter().filter(|call| **call == "cuLaunchKernel").count() as u64
}

/// Bytes of all copies to the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_uploaded(ordinal: u32) -> u64 {
    gpu::lock(ordinal).uploaded
}

/// Leaves a device this number of free bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_leave(ordinal: u32, bytes: u64) {
    let mut gpu = gpu::lock(ordinal);
    gpu.queues.limits.memory_bytes = gpu.memory_used() + bytes;
}

/// Instructions of all threads of all kernels that ran.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_instructions(ordinal: u32) -> u64 {
    gpu::lock(ordinal).queues.instructions
}
