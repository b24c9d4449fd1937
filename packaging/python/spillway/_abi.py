"""The C ABI as ctypes sees it: constants, structures and the prototype of every function of spillway.h.

tests/test_abi.py compares all of it with the header, by a C compiler."""

import ctypes
from ctypes import (CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32,
                    c_uint64, c_void_p)

ABI_VERSION = 1

DTYPE_NONE, DTYPE_F32, DTYPE_F16, DTYPE_BF16 = 0, 1, 2, 3
DTYPES = {"float32": DTYPE_F32, "float16": DTYPE_F16, "bfloat16": DTYPE_BF16,
          "f32": DTYPE_F32, "f16": DTYPE_F16, "bf16": DTYPE_BF16}
WEIGHT_DECAY_MODES = {"decoupled": 0, "l2": 1}
LOG_LEVELS = {"off": 0, "error": 1, "warn": 2, "info": 3, "debug": 4}

LOG_FN = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)


class ThreadOptions(Structure):
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
                ("param_copy", c_void_p), ("options", c_void_p)]


class StepStats(Structure):
    c_name = "spw_step_stats"
    _fields_ = [("struct_size", c_uint32), ("nonfinite", c_uint32), ("sum_squares", c_double)]


class AdamOptions(Structure):
    c_name = "spw_adam_options"
    _fields_ = [("struct_size", c_uint32), ("weight_decay_mode", c_uint32), ("step", c_uint64),
                ("lr", c_double), ("beta1", c_double), ("beta2", c_double), ("eps", c_double),
                ("weight_decay", c_double), ("grad_scale", c_double),
                ("no_bias_correction", c_uint32), ("reserved", c_uint32)]


class AdagradOptions(Structure):
    c_name = "spw_adagrad_options"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("step", c_uint64),
                ("lr", c_double), ("lr_decay", c_double), ("eps", c_double),
                ("weight_decay", c_double), ("grad_scale", c_double)]


class LionOptions(Structure):
    c_name = "spw_lion_options"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32),
                ("lr", c_double), ("beta1", c_double), ("beta2", c_double),
                ("weight_decay", c_double), ("grad_scale", c_double)]


class UndoOptions(Structure):
    c_name = "spw_undo_options"
    _fields_ = [("struct_size", c_uint32), ("mode", c_uint32), ("elements", c_uint64), ("tensors", c_uint64)]


class SpecOptions(Structure):
    c_name = "spw_spec_options"
    _fields_ = [("struct_size", c_uint32), ("buckets", c_uint32), ("undo_mode", c_uint32), ("publish", c_uint32)]


class SpecStats(Structure):
    c_name = "spw_spec_stats"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32),
                ("commits", c_uint64), ("redos", c_uint64), ("skips", c_uint64), ("aborts", c_uint64),
                ("buckets_speculated", c_uint64), ("buckets_committed", c_uint64), ("buckets_redone", c_uint64),
                ("buckets_rolled_back", c_uint64), ("buckets_spared", c_uint64), ("seconds_exposed", c_double)]


class SpecEvent(Structure):
    c_name = "spw_spec_event"
    _fields_ = [("struct_size", c_uint32), ("kind", c_uint32), ("fd", c_int32), ("value", c_uint32), ("word", c_void_p)]


class SpecOutcome(Structure):
    c_name = "spw_spec_outcome"
    _fields_ = [("struct_size", c_uint32), ("verdict", c_uint32), ("norm", c_double), ("grad_scale", c_double),
                ("withdrawn", c_uint32), ("reserved", c_uint32)]


class PoolOptions(Structure):
    c_name = "spw_pool_options"
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("block_bytes", c_uint64), ("block_count", c_uint64),
                ("node", c_uint32), ("reserved", c_uint32)]


class PoolStats(Structure):
    c_name = "spw_pool_stats"
    _fields_ = [("struct_size", c_uint32), ("page_kind", c_uint32), ("block_bytes", c_uint64),
                ("block_count", c_uint64), ("in_use", c_uint64), ("high_water", c_uint64), ("quarantined", c_uint64),
                ("bytes", c_uint64), ("locked_bytes", c_uint64), ("foreign_bytes", c_uint64)]


class PinnedStats(Structure):
    c_name = "spw_pinned_stats"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("allocations", c_uint64), ("bytes", c_uint64),
                ("high_water", c_uint64), ("mapped_bytes", c_uint64), ("locked_bytes", c_uint64)]


class IoOptions(Structure):
    c_name = "spw_io_options"
    _fields_ = [("struct_size", c_uint32), ("backend", c_uint32), ("flags", c_uint32), ("queue_depth", c_uint32),
                ("block_bytes", c_uint64), ("workers", c_uint32), ("file_mode", c_uint32), ("deadline_ms", c_uint64)]


class IoRequest(Structure):
    c_name = "spw_io_request"
    _fields_ = [("struct_size", c_uint32), ("fd", c_int32), ("path", c_char_p), ("offset", c_uint64),
                ("buffer", c_void_p), ("bytes", c_uint64), ("deadline_ms", c_uint64)]


class IoStats(Structure):
    c_name = "spw_io_stats"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("reads", c_uint64), ("writes", c_uint64),
                ("read_bytes", c_uint64), ("written_bytes", c_uint64), ("failed", c_uint64), ("requests", c_uint64),
                ("direct_bytes", c_uint64), ("buffered_bytes", c_uint64), ("bounced_bytes", c_uint64),
                ("resumed", c_uint64), ("retried", c_uint64), ("pending", c_uint64), ("stuck", c_uint64),
                ("queue_depth", c_uint64), ("block_bytes", c_uint64)]


class IoFailure(Structure):
    c_name = "spw_io_failure"
    _fields_ = [("struct_size", c_uint32), ("system_errno", c_int32), ("offset", c_uint64), ("bytes", c_uint64),
                ("path", c_char_p)]


STRUCTURES = (ThreadOptions, Stats, Tensor, StepStats, AdamOptions, AdagradOptions, LionOptions, UndoOptions,
              SpecOptions, SpecStats, SpecEvent, SpecOutcome,
              PoolOptions, PoolStats, PinnedStats, IoOptions, IoRequest, IoStats, IoFailure)

_STATUS = c_int32
_STEP = [c_void_p, c_size_t, POINTER(StepStats)]

# Tables of tensors travel as addresses, so that one prepared table serves every call.
PROTOTYPES = {
    "spw_abi_version": (c_uint32, []),
    "spw_version": (c_char_p, []),
    "spw_status_name": (c_char_p, [c_int32]),
    "spw_last_error": (c_char_p, []),
    "spw_set_log": (_STATUS, [LOG_FN, c_void_p, c_int32]),
    "spw_threads_configure": (_STATUS, [POINTER(ThreadOptions)]),
    "spw_threads_count": (_STATUS, [POINTER(c_uint32)]),
    "spw_kernel_name": (_STATUS, [POINTER(c_char_p)]),
    "spw_dtype_size": (c_uint64, [c_uint32]),
    "spw_stats_get": (_STATUS, [POINTER(Stats)]),
    "spw_adam_options_init": (_STATUS, [POINTER(AdamOptions), c_size_t]),
    "spw_adam_step": (_STATUS, [POINTER(AdamOptions), *_STEP]),
    "spw_adagrad_options_init": (_STATUS, [POINTER(AdagradOptions), c_size_t]),
    "spw_adagrad_step": (_STATUS, [POINTER(AdagradOptions), *_STEP]),
    "spw_lion_options_init": (_STATUS, [POINTER(LionOptions), c_size_t]),
    "spw_lion_step": (_STATUS, [POINTER(LionOptions), *_STEP]),
    "spw_grad_stats": (_STATUS, [c_void_p, c_uint32, c_uint64, c_double, POINTER(StepStats)]),
    "spw_undo_open": (_STATUS, [POINTER(UndoOptions), POINTER(c_void_p)]),
    "spw_undo_adam_step": (_STATUS, [c_void_p, POINTER(AdamOptions), POINTER(Tensor), c_size_t, POINTER(StepStats)]),
    "spw_undo_adagrad_step": (
        _STATUS, [c_void_p, POINTER(AdagradOptions), POINTER(Tensor), c_size_t, POINTER(StepStats)]),
    "spw_undo_lion_step": (_STATUS, [c_void_p, POINTER(LionOptions), POINTER(Tensor), c_size_t, POINTER(StepStats)]),
    "spw_undo_rollback": (_STATUS, [c_void_p]),
    "spw_undo_redo": (_STATUS, [c_void_p, c_double]),
    "spw_undo_commit": (_STATUS, [c_void_p, c_uint32]),
    "spw_undo_log_bytes": (_STATUS, [c_void_p, POINTER(c_uint64)]),
    "spw_undo_close": (_STATUS, [c_void_p]),
    "spw_spec_open": (_STATUS, [POINTER(SpecOptions), POINTER(c_void_p)]),
    "spw_spec_begin_adam": (_STATUS, [c_void_p, POINTER(AdamOptions), c_double]),
    "spw_spec_begin_adagrad": (_STATUS, [c_void_p, POINTER(AdagradOptions), c_double]),
    "spw_spec_begin_lion": (_STATUS, [c_void_p, POINTER(LionOptions), c_double]),
    "spw_spec_submit": (_STATUS, [c_void_p, c_uint32, c_void_p, c_size_t, POINTER(SpecEvent)]),
    "spw_spec_submit_ds_adam": (_STATUS, [c_void_p, c_uint32, c_int32, c_uint64, c_float, c_float, c_float, c_float,
                                          c_float, c_uint32, POINTER(Tensor), POINTER(SpecEvent)]),
    "spw_spec_ready": (_STATUS, [c_void_p, c_uint32, POINTER(c_uint32)]),
    "spw_spec_wait": (_STATUS, [c_void_p, c_uint32, c_int64]),
    "spw_spec_local_result": (_STATUS, [c_void_p, c_int64, POINTER(StepStats)]),
    "spw_spec_resolve": (_STATUS, [c_void_p, POINTER(StepStats), POINTER(SpecOutcome)]),
    "spw_spec_resolve_as": (_STATUS, [c_void_p, c_uint32, c_double, POINTER(SpecOutcome)]),
    "spw_spec_abort": (_STATUS, [c_void_p]),
    "spw_spec_finish": (_STATUS, [c_void_p, c_int64]),
    "spw_spec_withdrawn": (_STATUS, [c_void_p, POINTER(c_uint32), c_size_t, POINTER(c_size_t)]),
    "spw_spec_stats_get": (_STATUS, [c_void_p, POINTER(SpecStats)]),
    "spw_spec_close": (_STATUS, [c_void_p]),
    "spw_pool_open": (_STATUS, [POINTER(PoolOptions), POINTER(c_void_p)]),
    "spw_pool_close": (_STATUS, [c_void_p]),
    "spw_pool_alloc": (_STATUS, [c_void_p, POINTER(c_void_p)]),
    "spw_pool_free": (_STATUS, [c_void_p, c_void_p]),
    "spw_pool_contains": (_STATUS, [c_void_p, c_void_p, c_uint64, POINTER(c_uint32)]),
    "spw_pool_register": (_STATUS, [c_void_p, c_void_p, c_uint64]),
    "spw_pool_unregister": (_STATUS, [c_void_p, c_void_p]),
    "spw_pool_stats_get": (_STATUS, [c_void_p, POINTER(PoolStats)]),
    "spw_pinned_alloc": (_STATUS, [c_uint64, POINTER(c_void_p)]),
    "spw_pinned_free": (_STATUS, [c_void_p]),
    "spw_pinned_contains": (_STATUS, [c_void_p, c_uint64, POINTER(c_uint32)]),
    "spw_pinned_stats_get": (_STATUS, [POINTER(PinnedStats)]),
    "spw_io_open": (_STATUS, [POINTER(IoOptions), POINTER(c_void_p)]),
    "spw_io_close": (_STATUS, [c_void_p, c_int64]),
    "spw_io_read": (_STATUS, [c_void_p, POINTER(IoRequest), POINTER(c_uint64)]),
    "spw_io_write": (_STATUS, [c_void_p, POINTER(IoRequest), POINTER(c_uint64)]),
    "spw_io_sync": (_STATUS, [c_void_p, POINTER(IoRequest), POINTER(c_uint64)]),
    "spw_io_wait": (_STATUS, [c_void_p, c_uint64, c_int64, POINTER(c_uint64)]),
    "spw_io_wait_all": (_STATUS, [c_void_p, c_int64, POINTER(c_uint64)]),
    "spw_io_wait_many": (_STATUS, [c_void_p, POINTER(c_uint64), c_uint64, c_int64]),
    "spw_io_cancel": (_STATUS, [c_void_p, c_uint64]),
    "spw_io_holds_memory": (_STATUS, [c_void_p, c_uint64, POINTER(c_uint32)]),
    "spw_io_last_failure": (_STATUS, [POINTER(IoFailure)]),
    "spw_io_stats_get": (_STATUS, [c_void_p, POINTER(IoStats)]),
    "spw_io_describe": (_STATUS, [c_void_p, c_char_p, c_size_t]),
    "spw_adam_open": (_STATUS, [POINTER(AdamOptions), POINTER(c_void_p)]),
    "spw_adam_set_lr": (_STATUS, [c_void_p, c_double]),
    "spw_adam_advance": (_STATUS, [c_void_p, *_STEP]),
    "spw_adam_step_count": (_STATUS, [c_void_p, POINTER(c_uint64)]),
    "spw_adam_close": (_STATUS, [c_void_p]),
    "spw_ds_adam_create": (_STATUS, [c_int32, c_float, c_float, c_uint32]),
    "spw_ds_adam_update": (_STATUS, [c_int32, c_uint64, c_float, c_float, c_float, c_float, c_float, c_uint32,
                                     POINTER(Tensor)]),
    "spw_ds_adam_destroy": (_STATUS, [c_int32]),
    "spw_ds_adagrad_create": (_STATUS, [c_int32]),
    "spw_ds_adagrad_update": (_STATUS, [c_int32, c_uint64, c_float, c_float, c_float, POINTER(Tensor)]),
    "spw_ds_adagrad_destroy": (_STATUS, [c_int32]),
    "spw_ds_lion_create": (_STATUS, [c_int32]),
    "spw_ds_lion_update": (_STATUS, [c_int32, c_uint64, c_float, c_float, c_float, c_float, POINTER(Tensor)]),
    "spw_ds_lion_destroy": (_STATUS, [c_int32]),
}


def sized(structure_type):
    """A zeroed structure with its struct_size set."""
    return structure_type(struct_size=ctypes.sizeof(structure_type))
