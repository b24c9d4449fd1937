"""Structs of base.h, optim.h, undo.h, speculate.h and deepspeed.h: optimizers, their records and rounds."""

from ctypes import Structure, c_double, c_float, c_int32, c_uint32, c_uint64, c_void_p

from .given import Given


class ThreadOptions(Given):
    c_name = "spw_thread_options"
    _fields_ = [("struct_size", c_uint32), ("num_threads", c_uint32)]


class Stats(Structure):
    c_name = "spw_stats"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32),
                ("adam_calls", c_uint64), ("adam_elements", c_uint64),
                ("adagrad_calls", c_uint64), ("adagrad_elements", c_uint64),
                ("lion_calls", c_uint64), ("lion_elements", c_uint64)]


class Tensor(Structure):
    c_name = "spw_tensor"
    _fields_ = [("struct_size", c_uint32),
                ("param_dtype", c_uint32), ("state_dtype", c_uint32), ("grad_dtype", c_uint32),
                ("copy_dtype", c_uint32), ("reserved", c_uint32),
                ("n", c_uint64),
                ("param", c_void_p), ("grad", c_void_p), ("exp_avg", c_void_p), ("exp_avg_sq", c_void_p),
                ("param_copy", c_void_p), ("options", c_void_p),
                ("shadow_param", c_void_p), ("shadow_exp_avg", c_void_p), ("shadow_exp_avg_sq", c_void_p),
                ("param_low", c_void_p)]


class GradTensor(Structure):
    c_name = "spw_grad_tensor"
    _fields_ = [("struct_size", c_uint32), ("dst_dtype", c_uint32), ("src_dtype", c_uint32), ("reserved", c_uint32),
                ("n", c_uint64), ("dst", c_void_p), ("src", c_void_p)]


class StepStats(Structure):
    c_name = "spw_step_stats"
    _fields_ = [("struct_size", c_uint32), ("nonfinite", c_uint32), ("sum_squares", c_double)]


class AdamOptions(Given):
    c_name = "spw_adam_options"
    _fields_ = [("struct_size", c_uint32), ("weight_decay_mode", c_uint32), ("step", c_uint64),
                ("lr", c_double), ("beta1", c_double), ("beta2", c_double), ("eps", c_double),
                ("weight_decay", c_double), ("grad_scale", c_double),
                ("no_bias_correction", c_uint32), ("reserved", c_uint32),
                ("rounding", c_uint32), ("reserved2", c_uint32), ("rounding_seed", c_uint64)]


class AdagradOptions(Given):
    c_name = "spw_adagrad_options"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("step", c_uint64),
                ("lr", c_double), ("lr_decay", c_double), ("eps", c_double),
                ("weight_decay", c_double), ("grad_scale", c_double)]


class LionOptions(Given):
    c_name = "spw_lion_options"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32),
                ("lr", c_double), ("beta1", c_double), ("beta2", c_double),
                ("weight_decay", c_double), ("grad_scale", c_double)]


class UndoOptions(Given):
    c_name = "spw_undo_options"
    _fields_ = [("struct_size", c_uint32), ("mode", c_uint32), ("elements", c_uint64), ("tensors", c_uint64)]


class SpecOptions(Given):
    c_name = "spw_spec_options"
    _fields_ = [("struct_size", c_uint32), ("buckets", c_uint32), ("undo_mode", c_uint32), ("publish", c_uint32)]


class SpecStats(Structure):
    c_name = "spw_spec_stats"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32),
                ("commits", c_uint64), ("redos", c_uint64), ("skips", c_uint64), ("aborts", c_uint64),
                ("buckets_speculated", c_uint64), ("buckets_committed", c_uint64), ("buckets_redone", c_uint64),
                ("buckets_rolled_back", c_uint64), ("buckets_spared", c_uint64), ("seconds_exposed", c_double)]


class SpecEvent(Given):
    c_name = "spw_spec_event"
    _fields_ = [("struct_size", c_uint32), ("kind", c_uint32), ("fd", c_int32), ("value", c_uint32), ("word", c_void_p),
                ("gpu", c_void_p), ("handle", c_uint64)]


class SpecOutcome(Structure):
    c_name = "spw_spec_outcome"
    _fields_ = [("struct_size", c_uint32), ("verdict", c_uint32), ("norm", c_double), ("grad_scale", c_double),
                ("rolled_back", c_uint32), ("reserved", c_uint32)]


class DsAdamCall(Given):
    c_name = "spw_ds_adam_call"
    _fields_ = [("struct_size", c_uint32), ("bias_correction", c_uint32), ("step", c_uint64), ("lr", c_float),
                ("beta1", c_float), ("beta2", c_float), ("eps", c_float), ("weight_decay", c_float),
                ("grad_scale", c_float)]


class DsAdamState(Structure):
    c_name = "spw_ds_adam_state"
    _fields_ = [("struct_size", c_uint32), ("adamw_mode", c_uint32), ("step", c_uint64), ("beta1", c_float),
                ("beta2", c_float), ("beta1_power", c_float), ("beta2_power", c_float)]
