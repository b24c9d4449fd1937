//! The CUDA driver API as a table of functions. All functions are looked up before the first call.
//!
//! Result codes are plain integers, since a newer driver may return codes that this file does not list.
#![allow(non_snake_case, reason = "the driver's own names")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Result code of a driver call.
pub type Code = c_int;
/// Address of an object inside the driver: a context, stream, event, module or function.
pub type Handle = *mut c_void;
/// Address in device memory.
pub type DevicePtr = u64;

macro_rules! table {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions that Spillway calls. All exist in every driver since 525.
        #[derive(Debug, Clone, Copy)]
        pub struct Table {
            $(
                #[doc = concat!("`", stringify!($name), "` of the driver API.")]
                pub $name: unsafe extern "C" fn($($argument),*) -> Code,
            )*
        }

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
                        // SAFETY: not null, so it is the driver's function of this name, which has this signature.
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
    cuGetErrorName(Code, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut c_int, c_int);
    cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    cuDeviceGetName(*mut c_char, c_int, c_int);
    cuDeviceGetPCIBusId(*mut c_char, c_int, c_int);
    cuDevicePrimaryCtxRetain(*mut Handle, c_int);
    cuDevicePrimaryCtxRelease_v2(c_int);
    cuCtxPushCurrent_v2(Handle);
    cuCtxPopCurrent_v2(*mut Handle);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut DevicePtr, usize);
    cuMemFree_v2(DevicePtr);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuPointerGetAttributes(c_uint, *const c_int, *const *mut c_void, DevicePtr);
    cuMemcpyHtoDAsync_v2(DevicePtr, *const c_void, usize, Handle);
    cuMemcpyDtoHAsync_v2(*mut c_void, DevicePtr, usize, Handle);
    cuStreamCreateWithPriority(*mut Handle, c_uint, c_int);
    cuStreamDestroy_v2(Handle);
    cuStreamSynchronize(Handle);
    cuStreamWaitEvent(Handle, Handle, c_uint);
    cuStreamIsCapturing(Handle, *mut c_int);
    cuThreadExchangeStreamCaptureMode(*mut c_int);
    cuEventCreate(*mut Handle, c_uint);
    cuEventDestroy_v2(Handle);
    cuEventRecord(Handle, Handle);
    cuEventQuery(Handle);
    cuEventSynchronize(Handle);
    cuEventElapsedTime(*mut f32, Handle, Handle);
    cuModuleLoadDataEx(*mut Handle, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
    cuModuleUnload(Handle);
    cuModuleGetFunction(*mut Handle, Handle, *const c_char);
    cuLaunchKernel(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
}

fn name(with_nul: &'static str) -> &'static CStr {
    CStr::from_bytes_until_nul(with_nul.as_bytes()).unwrap_or_default()
}

/// Result codes that Spillway distinguishes.
pub mod code {
    use super::Code;

    pub const SUCCESS: Code = 0;
    pub const OUT_OF_MEMORY: Code = 2;
    pub const NOT_INITIALIZED: Code = 3;
    pub const STUB_LIBRARY: Code = 34;
    pub const INSUFFICIENT_DRIVER: Code = 35;
    pub const NO_DEVICE: Code = 100;
    pub const NO_BINARY_FOR_GPU: Code = 209;
    pub const ECC_UNCORRECTABLE: Code = 214;
    pub const INVALID_PTX: Code = 218;
    pub const NVLINK_UNCORRECTABLE: Code = 220;
    pub const JIT_COMPILER_NOT_FOUND: Code = 221;
    pub const UNSUPPORTED_PTX_VERSION: Code = 222;
    pub const JIT_COMPILATION_DISABLED: Code = 223;
    pub const CONTAINED: Code = 226;
    pub const NOT_READY: Code = 600;
    pub const ILLEGAL_ADDRESS: Code = 700;
    pub const LAUNCH_TIMEOUT: Code = 702;
    pub const CONTEXT_IS_DESTROYED: Code = 709;
    pub const ASSERT: Code = 710;
    pub const HOST_MEMORY_ALREADY_REGISTERED: Code = 712;
    pub const HARDWARE_STACK_ERROR: Code = 714;
    pub const LAUNCH_FAILED: Code = 719;
    pub const TENSOR_MEMORY_LEAK: Code = 721;
    pub const SYSTEM_NOT_READY: Code = 802;
    pub const SYSTEM_DRIVER_MISMATCH: Code = 803;
    pub const COMPAT_NOT_SUPPORTED: Code = 804;
    pub const UNKNOWN: Code = 999;
}
