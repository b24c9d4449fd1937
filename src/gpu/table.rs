//! The CUDA driver API as a table of functions. All functions are looked up before the first call.
//!
//! Argument types are cudarc's bindings of the driver's header. The compiler compares every signature and version
//! suffix with these bindings. None of cudarc's functions is called: see `gpu`.
//!
//! Result codes and values that the driver writes are plain integers: a newer driver may return values that cudarc's
//! enums do not have, and such a value in an enum is undefined behaviour.
#![allow(non_snake_case, reason = "the driver's own names")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUjit_option, CUmodule,
    CUpointer_attribute, CUresult, CUstream,
};

/// Result code of a driver call.
pub type Code = c_int;

// A `Code` takes the place of every enum of the bindings in a signature.
const _: () = assert!(
    size_of::<Code>() == size_of::<CUresult>()
        && size_of::<Code>() == size_of::<sys::CUstreamCaptureStatus>()
        && size_of::<Code>() == size_of::<sys::CUstreamCaptureMode>()
);

/// The type of an argument in cudarc's binding: the second type, if there are two.
macro_rules! bound {
    ($argument:ty) => {
        $argument
    };
    ($argument:ty, $bound:ty) => {
        $bound
    };
}

macro_rules! table {
    ($($name:ident($($argument:ty $(as $bound:ty)?),*);)*) => {
        /// The functions that Spillway calls. All exist in every driver since 525.
        #[derive(Debug, Clone, Copy)]
        pub struct Table {
            $(
                #[doc = concat!("`", stringify!($name), "` of the driver API.")]
                pub $name: unsafe extern "C" fn($($argument),*) -> Code,
            )*
        }

        // Does not compile if a signature differs from cudarc's binding.
        $(const _: unsafe fn($(bound!($argument $(, $bound)?)),*) -> CUresult = sys::$name;)*

        impl Table {
            /// Looks every function up. The error is the name of the first missing function.
            ///
            /// # Safety
            /// For every name, `find` returns null or the driver's function of that name.
            pub unsafe fn resolve(find: impl Fn(&CStr) -> *mut c_void) -> Result<Table, &'static str> {
                Ok(Table {
                    $($name: {
                        let address = find(name(concat!(stringify!($name), "\0")));
                        if address.is_null() {
                            return Err(stringify!($name));
                        }
                        // SAFETY: not null, so it is the driver's function of this name. The signature is that of the
                        // binding, with integers of the same size for enums.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> Code>(address) }
                    },)*
                })
            }
        }
    };
}

table! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuGetErrorName(Code as CUresult, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuPointerGetAttributes(c_uint, *mut CUpointer_attribute, *mut *mut c_void, CUdeviceptr);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    cuStreamDestroy_v2(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamIsCapturing(CUstream, *mut c_int as *mut sys::CUstreamCaptureStatus);
    cuThreadExchangeStreamCaptureMode(*mut c_int as *mut sys::CUstreamCaptureMode);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventSynchronize(CUevent);
    cuEventElapsedTime(*mut f32, CUevent, CUevent);
    cuModuleLoadDataEx(*mut CUmodule, *const c_void, c_uint, *mut CUjit_option, *mut *mut c_void);
    cuModuleUnload(CUmodule);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuLaunchKernel(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
        *mut *mut c_void
    );
}

fn name(with_nul: &'static str) -> &'static CStr {
    CStr::from_bytes_until_nul(with_nul.as_bytes()).unwrap_or_default()
}

/// Result codes that Spillway distinguishes.
pub mod code {
    use cudarc::driver::sys::CUresult;

    use super::Code;

    pub const SUCCESS: Code = CUresult::CUDA_SUCCESS as Code;
    pub const OUT_OF_MEMORY: Code = CUresult::CUDA_ERROR_OUT_OF_MEMORY as Code;
    pub const NOT_INITIALIZED: Code = CUresult::CUDA_ERROR_NOT_INITIALIZED as Code;
    pub const STUB_LIBRARY: Code = CUresult::CUDA_ERROR_STUB_LIBRARY as Code;
    /// CUDA_ERROR_INSUFFICIENT_DRIVER of the runtime API.
    pub const INSUFFICIENT_DRIVER: Code = 35;
    pub const NO_DEVICE: Code = CUresult::CUDA_ERROR_NO_DEVICE as Code;
    pub const NO_BINARY_FOR_GPU: Code = CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as Code;
    pub const ECC_UNCORRECTABLE: Code = CUresult::CUDA_ERROR_ECC_UNCORRECTABLE as Code;
    pub const INVALID_PTX: Code = CUresult::CUDA_ERROR_INVALID_PTX as Code;
    pub const NVLINK_UNCORRECTABLE: Code = CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE as Code;
    pub const JIT_COMPILER_NOT_FOUND: Code = CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND as Code;
    pub const UNSUPPORTED_PTX_VERSION: Code = CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as Code;
    pub const JIT_COMPILATION_DISABLED: Code = CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED as Code;
    /// CUDA_ERROR_CONTAINED of later versions of CUDA.
    pub const CONTAINED: Code = 226;
    pub const NOT_READY: Code = CUresult::CUDA_ERROR_NOT_READY as Code;
    pub const ILLEGAL_ADDRESS: Code = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as Code;
    pub const LAUNCH_TIMEOUT: Code = CUresult::CUDA_ERROR_LAUNCH_TIMEOUT as Code;
    pub const CONTEXT_IS_DESTROYED: Code = CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED as Code;
    pub const ASSERT: Code = CUresult::CUDA_ERROR_ASSERT as Code;
    pub const HOST_MEMORY_ALREADY_REGISTERED: Code =
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as Code;
    pub const HARDWARE_STACK_ERROR: Code = CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR as Code;
    pub const LAUNCH_FAILED: Code = CUresult::CUDA_ERROR_LAUNCH_FAILED as Code;
    /// CUDA_ERROR_TENSOR_MEMORY_LEAK of later versions of CUDA.
    pub const TENSOR_MEMORY_LEAK: Code = 721;
    pub const SYSTEM_NOT_READY: Code = CUresult::CUDA_ERROR_SYSTEM_NOT_READY as Code;
    pub const SYSTEM_DRIVER_MISMATCH: Code = CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH as Code;
    pub const COMPAT_NOT_SUPPORTED: Code = CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE as Code;
    pub const UNKNOWN: Code = CUresult::CUDA_ERROR_UNKNOWN as Code;
}
