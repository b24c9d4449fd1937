//! EXPERIMENTAL: GPUs through the CUDA driver. This header is not part of spillway.h, and its ABI is not frozen: functions
//! and structs may change with any release.
//!
//! Adam on the device, copies between device memory and pinned host memory, and speculation with buckets in device memory.
//!
//! The driver is loaded at run time. Without a GPU, a call with valid arguments is SPW_ERR_NO_DEVICE. Streams, events
//! and device memory are those of the framework: the library uses the device's primary context. A stream is passed as
//! `uint64_t` (`stream.cuda_stream` in torch, a `CUstream` or `cudaStream_t` in C); 0 is the legacy default stream.
//!
//!     spw_gpu_options options = SPW_GPU_OPTIONS_INIT;
//!     spw_gpu *gpu;
//!     spw_gpu_open(&options, &gpu);
//!
//!     spw_gpu_copy copy = SPW_GPU_COPY_INIT;
//!     copy.direction = SPW_GPU_DIRECTION_D2H;
//!     copy.device_dtype = copy.host_dtype = SPW_DTYPE_BF16;
//!     copy.n = n;
//!     copy.device = device_grad;
//!     copy.host = pinned_grad;
//!     copy.after = SPW_GPU_AFTER_STREAM;
//!     copy.handle = stream;
//!     uint64_t ticket;
//!     spw_gpu_copy_start(gpu, &copy, &ticket);
//!     spw_gpu_copy_wait(gpu, ticket, -1);
//!
//!     spw_gpu_close(gpu);

pub mod device;

pub mod copy;

pub mod speculate;

pub use {copy::*, device::*, speculate::*};
