"""Structs of plan.h: what a machine and a model need, and schedules of pipelines."""

from ctypes import POINTER, Structure, c_double, c_uint32, c_uint64

from .given import Given


class PlanShape(Given):
    c_name = "spw_plan_shape"
    _fields_ = [("struct_size", c_uint32), ("transfer_dtype", c_uint32), ("fetch_gradients", c_uint32), ("slots", c_uint32),
                ("count", c_uint64), ("sizes", POINTER(c_uint64)), ("size", c_uint64), ("chunk", c_uint64)]


class PlanOptions(Given):
    c_name = "spw_plan_options"
    _fields_ = [("struct_size", c_uint32), ("mode", c_uint32), ("parameter", c_uint64), ("residents", c_uint64),
                ("backward", c_double)]


class PlanResult(Structure):
    c_name = "spw_plan_result"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("exposed_seconds", c_double),
                ("home_seconds", c_double), ("serial_seconds", c_double), ("cpu_seconds", c_double),
                ("h2d_seconds", c_double), ("d2h_seconds", c_double), ("gpu_seconds", c_double), ("gpu", c_uint64),
                ("residents", c_uint64), ("gpu_bytes", c_uint64), ("host_bytes", c_uint64),
                ("to_device_bytes", c_uint64), ("to_host_bytes", c_uint64)]


class PipelineOptions(Given):
    c_name = "spw_pipeline_options"
    _fields_ = [("struct_size", c_uint32), ("schedule", c_uint32), ("devices", c_uint32), ("micro_batches", c_uint32),
                ("stages", c_uint32), ("split", c_uint32), ("slots", c_uint32), ("flags", c_uint32),
                ("latency", c_double), ("seconds_per_byte", c_double)]


class PipelineUnit(Given):
    c_name = "spw_pipeline_unit"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("forward", c_double), ("backward", c_double),
                ("recompute", c_double), ("fetch", c_double), ("offload", c_double), ("optimizer", c_double),
                ("param_bytes", c_uint64), ("grad_bytes", c_uint64), ("activation_bytes", c_uint64), ("input_bytes", c_uint64)]


class PipelineResult(Structure):
    c_name = "spw_pipeline_result"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("passes_seconds", c_double),
                ("iteration_seconds", c_double), ("exposed_seconds", c_double), ("passes_bubble_ratio", c_double),
                ("iteration_bubble_ratio", c_double), ("closed_bubble_ratio", c_double), ("operations", c_uint64),
                ("dependencies", c_uint64), ("changes", c_uint64), ("fetches", c_uint64), ("fetched_bytes", c_uint64),
                ("offloaded_bytes", c_uint64), ("activations", c_uint64), ("activation_bytes", c_uint64),
                ("gradients", c_uint64), ("gradient_bytes", c_uint64), ("checkpoints", c_uint64),
                ("checkpoint_bytes", c_uint64)]


class PipelineOperation(Structure):
    c_name = "spw_pipeline_operation"
    _fields_ = [("struct_size", c_uint32), ("kind", c_uint32), ("device", c_uint32), ("peer", c_uint32),
                ("micro_batch", c_uint32), ("first_unit", c_uint32), ("units", c_uint32), ("begins", c_uint32),
                ("ends", c_uint32), ("dependencies", c_uint32), ("first_dependency", c_uint64), ("bytes", c_uint64),
                ("start", c_double), ("end", c_double)]


class PipelineChange(Structure):
    c_name = "spw_pipeline_change"
    _fields_ = [("struct_size", c_uint32), ("operation", c_uint32), ("device", c_uint32), ("memory", c_uint32),
                ("freed", c_uint32), ("reserved", c_uint32), ("bytes", c_uint64), ("resident", c_uint64)]


class PipelineDevice(Structure):
    c_name = "spw_pipeline_device"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("busy", c_double), ("first", c_double),
                ("last", c_double), ("operations", c_uint64), ("peak_bytes", c_uint64), ("parameters", c_uint64),
                ("checkpoints", c_uint64), ("activations", c_uint64), ("gradients", c_uint64), ("messages", c_uint64)]
