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
                ("param_copy", c_void_p), ("options", c_void_p),
                ("shadow_param", c_void_p), ("shadow_exp_avg", c_void_p), ("shadow_exp_avg_sq", c_void_p)]


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


class TierPath(Structure):
    c_name = "spw_tier_path"
    _fields_ = [("struct_size", c_uint32), ("kind", c_uint32), ("directory", c_char_p),
                ("limit_bytes", c_uint64), ("reserve_bytes", c_uint64)]


class TierOptions(Structure):
    c_name = "spw_tier_options"
    _fields_ = [("struct_size", c_uint32), ("mode", c_uint32), ("job", c_char_p), ("host", c_char_p),
                ("rank", c_uint32), ("world", c_uint32), ("paths", POINTER(TierPath)), ("path_count", c_uint64),
                ("durability", c_uint32), ("flags", c_uint32), ("block_bytes", c_uint64), ("stall_ms", c_uint64),
                ("queue_depth", c_uint32), ("io_backend", c_uint32)]


class TierOpenedInfo(Structure):
    c_name = "spw_tier_opened_info"
    _fields_ = [("struct_size", c_uint32), ("resumed", c_uint32), ("step", c_uint64), ("payload_bytes", c_uint64),
                ("missing_paths", c_uint64), ("lost_extents", c_uint64)]


class TierExtentInfo(Structure):
    c_name = "spw_tier_extent_info"
    _fields_ = [("struct_size", c_uint32), ("extent", c_uint32), ("bytes", c_uint64), ("generation", c_uint64),
                ("streams", c_uint32), ("committed", c_uint32), ("lost", c_uint32), ("blocks", c_uint32)]


class TierPathInfo(Structure):
    c_name = "spw_tier_path_info"
    _fields_ = [("struct_size", c_uint32), ("health", c_uint32), ("kind", c_uint32), ("reserved", c_uint32),
                ("read_bytes", c_uint64), ("written_bytes", c_uint64), ("reading_ns", c_uint64),
                ("writing_ns", c_uint64), ("wear_bytes", c_uint64), ("file_bytes", c_uint64),
                ("free_bytes", c_uint64), ("blocks", c_uint64)]


class TierChecked(Structure):
    c_name = "spw_tier_checked"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("extents", c_uint64), ("blocks", c_uint64),
                ("bytes", c_uint64), ("damaged", c_uint64)]


class IoFailure(Structure):
    c_name = "spw_io_failure"
    _fields_ = [("struct_size", c_uint32), ("system_errno", c_int32), ("offset", c_uint64), ("bytes", c_uint64),
                ("path", c_char_p)]


class GpuDriver(Structure):
    c_name = "spw_gpu_driver"
    _fields_ = [("struct_size", c_uint32), ("devices", c_uint32), ("cuda_version", c_uint32), ("reserved", c_uint32)]


class GpuOptions(Structure):
    c_name = "spw_gpu_options"
    _fields_ = [("struct_size", c_uint32), ("ordinal", c_uint32), ("chunk_bytes", c_uint64)]


class GpuInfo(Structure):
    c_name = "spw_gpu_info"
    _fields_ = [("struct_size", c_uint32), ("ordinal", c_uint32), ("capability", c_uint32),
                ("multiprocessors", c_uint32), ("copy_engines", c_uint32), ("reserved", c_uint32),
                ("memory_bytes", c_uint64), ("free_bytes", c_uint64), ("name", c_char_p), ("pci", c_char_p)]


class GpuCopy(Structure):
    c_name = "spw_gpu_copy"
    _fields_ = [("struct_size", c_uint32), ("direction", c_uint32), ("device_dtype", c_uint32),
                ("host_dtype", c_uint32), ("after", c_uint32), ("reserved", c_uint32), ("n", c_uint64),
                ("device", c_uint64), ("host", c_void_p), ("handle", c_uint64)]


class GpuLink(Structure):
    c_name = "spw_gpu_link"
    _fields_ = [("struct_size", c_uint32), ("wire", c_uint32), ("out_f32", c_double), ("out_native", c_double),
                ("in_f32", c_double), ("in_native", c_double), ("step_f32", c_double), ("step_native", c_double)]


class PlanRates(Structure):
    c_name = "spw_plan_rates"
    _fields_ = [("struct_size", c_uint32), ("half_duplex", c_uint32), ("cpu", c_double), ("downscale", c_double),
                ("gpu", c_double), ("h2d", c_double), ("d2h", c_double), ("cast", c_double), ("dram", c_double)]


class PlanShape(Structure):
    c_name = "spw_plan_shape"
    _fields_ = [("struct_size", c_uint32), ("wire", c_uint32), ("fetch_gradients", c_uint32), ("slots", c_uint32),
                ("count", c_uint64), ("sizes", POINTER(c_uint64)), ("size", c_uint64), ("chunk", c_uint64)]


class PlanOptions(Structure):
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


class PlanBucket(Structure):
    c_name = "spw_plan_bucket"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("grad", c_double), ("step_cpu", c_double),
                ("param", c_double), ("step_gpu", c_double), ("backward", c_double)]


class PlanLoad(Structure):
    c_name = "spw_plan_load"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("peak", c_double), ("link", c_double),
                ("tokens", c_double), ("parameters", c_double), ("free_bytes", c_double)]


class PlanProbe(Structure):
    c_name = "spw_plan_probe"
    _fields_ = [("struct_size", c_uint32), ("accumulates", c_uint32), ("f32_wire", c_double),
                ("native_wire", c_double), ("f32_step", c_double), ("native_step", c_double)]


class InterleaveOptions(Structure):
    c_name = "spw_interleave_options"
    _fields_ = [("struct_size", c_uint32), ("backend", c_uint32), ("wire", c_uint32), ("fetch_gradients", c_uint32),
                ("slots", c_uint32), ("grad_dtype", c_uint32), ("copy_dtype", c_uint32), ("reserved", c_uint32),
                ("chunk", c_uint64)]


class InterleaveSubgroup(Structure):
    c_name = "spw_interleave_subgroup"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("n", c_uint64), ("param", c_void_p),
                ("exp_avg", c_void_p), ("exp_avg_sq", c_void_p), ("grad", c_void_p), ("param_copy", c_void_p)]


class SwapOptions(Structure):
    c_name = "spw_swap_options"
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("host_bytes", c_uint64), ("elements", POINTER(c_uint64)),
                ("subgroups", c_uint64), ("ratio", POINTER(c_double)), ("speeds", POINTER(c_double)),
                ("patience_seconds", c_double)]


class SwapBudget(Structure):
    c_name = "spw_swap_budget"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("host_bytes", c_uint64), ("buffer_bytes", c_uint64),
                ("buffers", c_uint64), ("cached", c_uint64), ("state_bytes", c_uint64), ("step_bytes", c_uint64)]


class SwapStats(Structure):
    c_name = "spw_swap_stats"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("rounds", c_uint64), ("hits", c_uint64),
                ("fetched", c_uint64), ("flushed", c_uint64), ("moved", c_uint64), ("exposed_seconds", c_double)]


STRUCTURES = (ThreadOptions, Stats, Tensor, StepStats, AdamOptions, AdagradOptions, LionOptions, UndoOptions,
              SpecOptions, SpecStats, SpecEvent, SpecOutcome,
              PlanRates, PlanShape, PlanOptions, PlanResult, PlanBucket, PlanLoad, PlanProbe, InterleaveOptions,
              InterleaveSubgroup, PoolOptions, PoolStats, PinnedStats, IoOptions, IoRequest, IoStats, IoFailure,
              TierPath, TierOptions, TierOpenedInfo, TierExtentInfo, TierPathInfo, TierChecked,
              SwapOptions, SwapBudget, SwapStats,
              GpuDriver, GpuOptions, GpuInfo, GpuCopy, GpuLink)

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
    "spw_undo_adam_step": (_STATUS, [c_void_p, POINTER(AdamOptions), *_STEP]),
    "spw_undo_adagrad_step": (_STATUS, [c_void_p, POINTER(AdagradOptions), *_STEP]),
    "spw_undo_lion_step": (_STATUS, [c_void_p, POINTER(LionOptions), *_STEP]),
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
    "spw_plan_interleave": (_STATUS, [POINTER(PlanRates), POINTER(PlanShape), POINTER(PlanOptions),
                                      POINTER(c_uint32), POINTER(PlanResult)]),
    "spw_plan_predict": (_STATUS, [POINTER(PlanRates), POINTER(PlanShape), POINTER(c_uint32), c_double,
                                   POINTER(PlanResult)]),
    "spw_plan_trace": (_STATUS, [POINTER(PlanRates), POINTER(PlanShape), POINTER(c_uint32), c_double, c_char_p,
                                 c_size_t, POINTER(c_uint64)]),
    "spw_plan_share": (_STATUS, [POINTER(PlanRates), c_double, c_uint32, POINTER(c_double), POINTER(c_double)]),
    "spw_plan_tail": (_STATUS, [POINTER(PlanBucket), c_uint64, c_uint64, POINTER(c_uint64), POINTER(c_uint64)]),
    "spw_plan_tail_next": (_STATUS, [POINTER(c_uint64), POINTER(c_double), c_size_t, c_uint64, c_uint64,
                                     POINTER(c_uint64), POINTER(c_uint64)]),
    "spw_plan_weights": (_STATUS, [POINTER(PlanLoad), POINTER(c_double), POINTER(c_double)]),
    "spw_plan_cast": (_STATUS, [POINTER(PlanProbe), POINTER(c_uint32)]),
    "spw_interleave_open": (_STATUS, [POINTER(InterleaveOptions), POINTER(InterleaveSubgroup), c_size_t,
                                      POINTER(c_void_p)]),
    "spw_interleave_set_plan": (_STATUS, [c_void_p, POINTER(c_uint32), c_size_t]),
    "spw_interleave_get_plan": (_STATUS, [c_void_p, POINTER(c_uint32)]),
    "spw_interleave_gradient": (_STATUS, [c_void_p, c_uint64, c_uint64]),
    "spw_interleave_params_free": (_STATUS, [c_void_p, c_uint64, c_uint64]),
    "spw_interleave_begin": (_STATUS, [c_void_p, POINTER(AdamOptions), c_size_t, c_uint64]),
    "spw_interleave_publish": (_STATUS, [c_void_p, c_uint64, c_uint64]),
    "spw_interleave_is_ready": (_STATUS, [c_void_p, c_uint64, POINTER(c_uint32)]),
    "spw_interleave_finish": (_STATUS, [c_void_p]),
    "spw_interleave_drain": (_STATUS, [c_void_p]),
    "spw_interleave_away": (_STATUS, [c_void_p, POINTER(c_uint64), c_size_t, POINTER(c_uint64)]),
    "spw_interleave_calibrate": (_STATUS, [c_void_p, POINTER(PlanRates)]),
    "spw_interleave_replan": (_STATUS, [c_void_p, c_double, POINTER(c_uint32)]),
    "spw_interleave_trace": (_STATUS, [c_void_p, c_char_p, c_size_t, POINTER(c_uint64)]),
    "spw_interleave_close": (_STATUS, [c_void_p]),
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
    "spw_swap_plan": (_STATUS, [POINTER(SwapOptions), c_uint64, POINTER(SwapBudget)]),
    "spw_swap_open": (_STATUS, [c_void_p, POINTER(SwapOptions), POINTER(c_void_p)]),
    "spw_swap_budget_of": (_STATUS, [c_void_p, POINTER(SwapBudget)]),
    "spw_swap_fill": (_STATUS, [c_void_p, POINTER(c_void_p)]),
    "spw_swap_adam_step": (_STATUS, [c_void_p, POINTER(AdamOptions), c_void_p, c_size_t, POINTER(StepStats)]),
    "spw_swap_read": (_STATUS, [c_void_p, c_uint64, c_void_p, c_void_p, c_void_p]),
    "spw_swap_commit": (_STATUS, [c_void_p, c_uint64, c_void_p, c_uint64]),
    "spw_swap_roll_back": (_STATUS, [c_void_p]),
    "spw_swap_get_stats": (_STATUS, [c_void_p, POINTER(SwapStats)]),
    "spw_swap_close": (_STATUS, [c_void_p]),
    "spw_gpu_probe": (_STATUS, [POINTER(GpuDriver)]),
    "spw_gpu_open": (_STATUS, [POINTER(GpuOptions), POINTER(c_void_p)]),
    "spw_gpu_close": (_STATUS, [c_void_p]),
    "spw_gpu_info_get": (_STATUS, [c_void_p, POINTER(GpuInfo)]),
    "spw_gpu_copy_start": (_STATUS, [c_void_p, POINTER(GpuCopy), POINTER(c_uint64)]),
    "spw_gpu_copy_wait": (_STATUS, [c_void_p, c_uint64, c_int64]),
    "spw_gpu_stream_wait": (_STATUS, [c_void_p, c_uint64, c_uint64]),
    "spw_gpu_link_get": (_STATUS, [c_void_p, c_uint32, c_uint32, POINTER(GpuLink)]),
    "spw_gpu_adam_step": (_STATUS, [c_void_p, POINTER(AdamOptions), POINTER(Tensor), c_size_t, c_uint64,
                                    POINTER(StepStats)]),
    "spw_adam_open": (_STATUS, [POINTER(AdamOptions), POINTER(c_void_p)]),
    "spw_adam_set_lr": (_STATUS, [c_void_p, c_double]),
    "spw_adam_advance": (_STATUS, [c_void_p, *_STEP]),
    "spw_adam_step_count": (_STATUS, [c_void_p, POINTER(c_uint64)]),
    "spw_adam_close": (_STATUS, [c_void_p]),
    "spw_ds_adam_create": (_STATUS, [c_int32, c_float, c_float, c_uint32]),
    "spw_ds_adam_update": (_STATUS, [c_int32, c_uint64, c_float, c_float, c_float, c_float, c_float, c_uint32,
                                     POINTER(Tensor)]),
    "spw_ds_adam_update_recorded": (_STATUS, [c_void_p, c_int32, c_uint64, c_float, c_float, c_float, c_float, c_float,
                                              c_uint32, POINTER(Tensor)]),
    "spw_ds_adam_rollback": (_STATUS, [c_void_p, c_int32, c_uint64, c_float, c_float, c_float, c_float, c_float,
                                       c_uint32, POINTER(Tensor), POINTER(c_uint32)]),
    "spw_ds_adam_destroy": (_STATUS, [c_int32]),
    "spw_ds_adagrad_create": (_STATUS, [c_int32]),
    "spw_ds_adagrad_update": (_STATUS, [c_int32, c_uint64, c_float, c_float, c_float, POINTER(Tensor)]),
    "spw_ds_adagrad_destroy": (_STATUS, [c_int32]),
    "spw_ds_lion_create": (_STATUS, [c_int32]),
    "spw_ds_lion_update": (_STATUS, [c_int32, c_uint64, c_float, c_float, c_float, c_float, POINTER(Tensor)]),
    "spw_ds_lion_destroy": (_STATUS, [c_int32]),
    "spw_tier_open": (_STATUS, [POINTER(TierOptions), POINTER(c_void_p)]),
    "spw_tier_close": (_STATUS, [c_void_p, c_int64]),
    "spw_tier_destroy": (_STATUS, [c_void_p]),
    "spw_tier_collect": (_STATUS, [c_char_p, c_char_p, c_char_p, c_uint32]),
    "spw_tier_define": (_STATUS, [c_void_p, c_char_p, POINTER(c_uint64), c_uint64, POINTER(c_uint32)]),
    "spw_tier_remove": (_STATUS, [c_void_p, c_uint32]),
    "spw_tier_put": (_STATUS, [c_void_p, c_uint32, POINTER(c_void_p), c_int32, POINTER(c_uint64)]),
    "spw_tier_put_striped": (_STATUS, [c_void_p, c_uint32, POINTER(c_void_p), POINTER(c_uint32), c_uint64,
                                       POINTER(c_uint64)]),
    "spw_tier_get": (_STATUS, [c_void_p, c_uint32, POINTER(c_void_p), POINTER(c_uint64)]),
    "spw_tier_wait": (_STATUS, [c_void_p, c_uint64, c_int64, POINTER(c_uint64)]),
    "spw_tier_commit": (_STATUS, [c_void_p, c_uint64, c_void_p, c_uint64]),
    "spw_tier_rollback": (_STATUS, [c_void_p]),
    "spw_tier_opened": (_STATUS, [c_void_p, POINTER(TierOpenedInfo), c_void_p, c_uint64]),
    "spw_tier_extent_get": (_STATUS, [c_void_p, c_uint64, POINTER(TierExtentInfo), c_char_p, c_size_t]),
    "spw_tier_path_get": (_STATUS, [c_void_p, c_uint32, POINTER(TierPathInfo), c_char_p, c_size_t]),
    "spw_tier_path_set": (_STATUS, [c_void_p, c_uint32, c_uint32]),
    "spw_tier_evacuate": (_STATUS, [c_void_p, c_uint32]),
    "spw_tier_verify": (_STATUS, [c_void_p, POINTER(TierChecked)]),
    "spw_tier_export": (_STATUS, [c_void_p, c_char_p, POINTER(c_uint64)]),
    "spw_tier_import": (_STATUS, [c_void_p, c_char_p, POINTER(c_uint64)]),
}


def sized(structure_type):
    """A zeroed structure with its struct_size set."""
    return structure_type(struct_size=ctypes.sizeof(structure_type))
