"""Structs of gpu.h and interleave.h: the GPU, and updates divided between CPU and GPU."""

from ctypes import Structure, c_char_p, c_double, c_uint32, c_uint64, c_void_p

from .given import Given


class GpuDriver(Structure):
    c_name = "spw_gpu_driver"
    _fields_ = [("struct_size", c_uint32), ("devices", c_uint32), ("cuda_version", c_uint32), ("reserved", c_uint32)]


class GpuOptions(Given):
    c_name = "spw_gpu_options"
    _fields_ = [("struct_size", c_uint32), ("ordinal", c_uint32), ("chunk_bytes", c_uint64)]


class GpuInfo(Structure):
    c_name = "spw_gpu_info"
    _fields_ = [("struct_size", c_uint32), ("ordinal", c_uint32), ("capability", c_uint32),
                ("multiprocessors", c_uint32), ("copy_engines", c_uint32), ("reserved", c_uint32),
                ("memory_bytes", c_uint64), ("free_bytes", c_uint64), ("name", c_char_p), ("pci", c_char_p)]


class GpuCopy(Given):
    c_name = "spw_gpu_copy"
    _fields_ = [("struct_size", c_uint32), ("direction", c_uint32), ("device_dtype", c_uint32),
                ("host_dtype", c_uint32), ("after", c_uint32), ("reserved", c_uint32), ("n", c_uint64),
                ("device", c_uint64), ("host", c_void_p), ("handle", c_uint64)]


class GpuLink(Structure):
    c_name = "spw_gpu_link"
    _fields_ = [("struct_size", c_uint32), ("transfer_dtype", c_uint32), ("d2h_f32", c_double), ("d2h_native", c_double),
                ("h2d_f32", c_double), ("h2d_native", c_double), ("step_f32", c_double), ("step_native", c_double)]


class InterleaveRates(Given):
    c_name = "spw_interleave_rates"
    _fields_ = [("struct_size", c_uint32), ("half_duplex", c_uint32), ("cpu", c_double), ("downscale", c_double),
                ("gpu", c_double), ("h2d", c_double), ("d2h", c_double), ("cast", c_double), ("dram", c_double)]


class InterleaveOptions(Given):
    c_name = "spw_interleave_options"
    _fields_ = [("struct_size", c_uint32), ("backend", c_uint32), ("transfer_dtype", c_uint32), ("fetch_gradients", c_uint32),
                ("slots", c_uint32), ("grad_dtype", c_uint32), ("copy_dtype", c_uint32), ("reserved", c_uint32),
                ("chunk", c_uint64), ("gpu", c_void_p)]


class InterleaveSubgroup(Given):
    c_name = "spw_interleave_subgroup"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("n", c_uint64), ("param", c_void_p),
                ("exp_avg", c_void_p), ("exp_avg_sq", c_void_p), ("grad", c_void_p), ("param_copy", c_void_p),
                ("host_grad", c_void_p)]
