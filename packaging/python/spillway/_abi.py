"""The C ABI for ctypes: constants and the prototype of every function of the headers; _structures has the structs.

tests/test_abi.py compares both modules with the header, using a C compiler."""

import ctypes
from ctypes import (CFUNCTYPE, POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64,
                    c_void_p)
from functools import partial
from typing import Any, NamedTuple

from ._structures import *
from ._structures import STRUCTURES
from ._structures.integers import RANGES

ABI_VERSION = 2
TOPO_NONE = 2**32 - 1

DTYPE_NONE, DTYPE_F32, DTYPE_F16, DTYPE_BF16 = 0, 1, 2, 3
DTYPES = {"float32": DTYPE_F32, "float16": DTYPE_F16, "bfloat16": DTYPE_BF16,
          "f32": DTYPE_F32, "f16": DTYPE_F16, "bf16": DTYPE_BF16}
WEIGHT_DECAY_MODES = {"decoupled": 0, "l2": 1}
ROUNDINGS = {"nearest": 0, "stochastic": 1}
LOG_LEVELS = {"off": 0, "error": 1, "warn": 2, "info": 3, "debug": 4}

LOG_FN = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)
STEPPED_FN = CFUNCTYPE(c_int32, c_void_p, c_uint64, c_void_p)



class Integer(NamedTuple):
    """An integer argument of a C function: its C type, and its name in the header."""

    kind: Any
    name: str


class Checked(NamedTuple):
    """What an integer argument must be; see `_native.fitting`."""

    position: int
    name: str
    least: int
    most: int
    is_address: bool


_u32, _i32, _u64, _i64, _size = (partial(Integer, kind) for kind in (c_uint32, c_int32, c_uint64, c_int64, c_size_t))
# An address: an integer, or an object of ctypes.
_address = partial(Integer, c_void_p)

_STATUS = c_int32
_STEP = [_address("tensors"), _u64("count"), POINTER(StepStats)]

# Tables of tensors are passed as addresses, so that one prepared table serves every call.
PROTOTYPES = {
    "spw_abi_version": (c_uint32, []),
    "spw_version": (c_char_p, []),
    "spw_status_name": (c_char_p, [_i32("status")]),
    "spw_last_error": (c_char_p, []),
    "spw_set_log": (_STATUS, [LOG_FN, _address("user"), _i32("level")]),
    "spw_set_threads": (_STATUS, [POINTER(ThreadOptions)]),
    "spw_get_threads": (_STATUS, [POINTER(c_uint32)]),
    "spw_get_kernel": (_STATUS, [POINTER(c_char_p)]),
    "spw_dtype_size": (c_uint64, [_u32("dtype")]),
    "spw_get_stats": (_STATUS, [POINTER(Stats)]),
    "spw_topo_open": (_STATUS, [POINTER(TopoOptions), POINTER(c_void_p)]),
    "spw_topo_close": (_STATUS, [c_void_p]),
    "spw_topo_get_info": (_STATUS, [c_void_p, POINTER(TopoInfo)]),
    "spw_topo_get_node": (_STATUS, [c_void_p, _u32("index"), POINTER(TopoNode)]),
    "spw_topo_get_gpu": (_STATUS, [c_void_p, _u32("ordinal"), POINTER(TopoGpu)]),
    "spw_topo_get_path_node": (_STATUS, [c_void_p, c_char_p, POINTER(c_uint32)]),
    "spw_topo_get_json": (_STATUS, [c_void_p, c_char_p, _size("size"), POINTER(c_uint64)]),
    "spw_topo_get_rank_cpus": (_STATUS, [c_void_p, POINTER(TopoRankOptions), _u32("cpus"), c_char_p, _size("size"), POINTER(c_uint64)]),
    "spw_topo_bind_workers": (_STATUS, [c_void_p, c_char_p]),
    "spw_topo_unbind_workers": (_STATUS, []),
    "spw_topo_get_workers": (_STATUS, [c_char_p, _size("size"), POINTER(c_uint64)]),
    "spw_topo_get_pages": (_STATUS, [_address("address"), _u64("bytes"), _u32("node"), POINTER(TopoPages)]),
    "spw_adam_step": (_STATUS, [POINTER(AdamOptions), *_STEP]),
    "spw_adagrad_step": (_STATUS, [POINTER(AdagradOptions), *_STEP]),
    "spw_lion_step": (_STATUS, [POINTER(LionOptions), *_STEP]),
    "spw_adam_check": (_STATUS, [POINTER(AdamOptions), *_STEP[:2]]),
    "spw_adagrad_check": (_STATUS, [POINTER(AdagradOptions), *_STEP[:2]]),
    "spw_lion_check": (_STATUS, [POINTER(LionOptions), *_STEP[:2]]),
    "spw_grad_stats_all": (_STATUS, [*_STEP[:2], c_double, _STEP[2]]),
    "spw_grad_stats": (_STATUS, [_address("grad"), _u32("dtype"), _u64("n"), c_double, POINTER(StepStats)]),
    "spw_grad_accumulate": (_STATUS, [*_STEP[:2], c_double, _STEP[2]]),
    "spw_undo_open": (_STATUS, [POINTER(UndoOptions), POINTER(c_void_p)]),
    "spw_undo_adam_step": (_STATUS, [c_void_p, POINTER(AdamOptions), *_STEP]),
    "spw_undo_adagrad_step": (_STATUS, [c_void_p, POINTER(AdagradOptions), *_STEP]),
    "spw_undo_lion_step": (_STATUS, [c_void_p, POINTER(LionOptions), *_STEP]),
    "spw_undo_rollback": (_STATUS, [c_void_p]),
    "spw_undo_redo": (_STATUS, [c_void_p, c_double]),
    "spw_undo_commit": (_STATUS, [c_void_p, _u32("release_memory")]),
    "spw_undo_get_log_bytes": (_STATUS, [c_void_p, POINTER(c_uint64)]),
    "spw_undo_close": (_STATUS, [c_void_p]),
    "spw_spec_open": (_STATUS, [POINTER(SpecOptions), POINTER(c_void_p)]),
    "spw_spec_begin_adam": (_STATUS, [c_void_p, POINTER(AdamOptions), c_double]),
    "spw_spec_begin_adagrad": (_STATUS, [c_void_p, POINTER(AdagradOptions), c_double]),
    "spw_spec_begin_lion": (_STATUS, [c_void_p, POINTER(LionOptions), c_double]),
    "spw_spec_submit": (_STATUS, [c_void_p, _u32("bucket"), _address("tensors"), _u64("count"), POINTER(SpecEvent)]),
    "spw_spec_submit_ds_adam": (_STATUS, [c_void_p, _u32("bucket"), _i32("id"), POINTER(DsAdamCall), POINTER(Tensor),
                                          POINTER(SpecEvent)]),
    "spw_spec_get_bucket": (_STATUS, [c_void_p, _u32("bucket"), POINTER(c_uint32)]),
    "spw_spec_wait": (_STATUS, [c_void_p, _u32("bucket"), _i64("timeout_ms")]),
    "spw_spec_publish_to": (_STATUS, [c_void_p, _u32("bucket"), c_void_p, POINTER(GpuCopy), _u64("count")]),
    "spw_spec_submit_gpu": (_STATUS, [c_void_p, _u32("bucket"), c_void_p, _address("tensors"), _u64("count"), _u64("stream"), POINTER(SpecEvent)]),
    "spw_spec_stream_wait": (_STATUS, [c_void_p, _u32("bucket"), _u64("stream"), _i64("timeout_ms")]),
    "spw_spec_local_result": (_STATUS, [c_void_p, _i64("timeout_ms"), POINTER(StepStats)]),
    "spw_spec_resolve": (_STATUS, [c_void_p, POINTER(StepStats), POINTER(SpecOutcome)]),
    "spw_spec_resolve_as": (_STATUS, [c_void_p, _u32("verdict"), c_double, POINTER(SpecOutcome)]),
    "spw_spec_abort": (_STATUS, [c_void_p]),
    "spw_spec_finish": (_STATUS, [c_void_p, _i64("timeout_ms")]),
    "spw_spec_get_rolled_back": (_STATUS, [c_void_p, POINTER(c_uint32), _u64("capacity"), POINTER(c_uint64)]),
    "spw_spec_get_stats": (_STATUS, [c_void_p, POINTER(SpecStats)]),
    "spw_spec_close": (_STATUS, [c_void_p]),
    "spw_plan_interleave": (_STATUS, [POINTER(InterleaveRates), POINTER(PlanShape), POINTER(PlanOptions),
                                      POINTER(c_uint32), POINTER(PlanResult)]),
    "spw_plan_pipeline": (_STATUS, [POINTER(PipelineOptions), POINTER(PipelineUnit), _u64("unit_count"), POINTER(c_void_p)]),
    "spw_plan_rollback": (_STATUS, [c_double, c_double, c_double, c_double, POINTER(c_double), POINTER(c_double)]),
    "spw_pipeline_close": (_STATUS, [c_void_p]),
    "spw_pipeline_get_result": (_STATUS, [c_void_p, POINTER(PipelineResult)]),
    "spw_pipeline_get_device": (_STATUS, [c_void_p, _u32("device"), POINTER(PipelineDevice)]),
    "spw_pipeline_get_operations": (_STATUS, [c_void_p, _u64("first"), _u64("count"), POINTER(PipelineOperation)]),
    "spw_pipeline_get_changes": (_STATUS, [c_void_p, _u64("first"), _u64("count"), POINTER(PipelineChange)]),
    "spw_pipeline_get_dependencies": (_STATUS, [c_void_p, _u64("first"), _u64("count"), POINTER(c_uint32)]),
    "spw_pipeline_get_svg": (_STATUS, [c_void_p, _u32("width"), c_char_p, _size("size"), POINTER(c_uint64)]),
    "spw_interleave_open": (_STATUS, [POINTER(InterleaveOptions), POINTER(InterleaveSubgroup), _u64("count"),
                                      POINTER(c_void_p)]),
    "spw_interleave_set_plan": (_STATUS, [c_void_p, POINTER(c_uint32), _u64("count")]),
    "spw_interleave_get_plan": (_STATUS, [c_void_p, POINTER(c_uint32)]),
    "spw_interleave_grad_ready": (_STATUS, [c_void_p, _u64("subgroup"), _u64("stream")]),
    "spw_interleave_release_params": (_STATUS, [c_void_p, _u64("subgroup"), _u64("stream")]),
    "spw_interleave_begin": (_STATUS, [c_void_p, POINTER(AdamOptions), _u64("count"), _u64("stream")]),
    "spw_interleave_begin_ds_adam": (_STATUS, [c_void_p, _i32("id"), POINTER(DsAdamCall), _u64("count"), _u64("stream")]),
    "spw_interleave_stream_wait_params": (_STATUS, [c_void_p, _u64("subgroup"), _u64("stream")]),
    "spw_interleave_get_ready": (_STATUS, [c_void_p, _u64("subgroup"), POINTER(c_uint32)]),
    "spw_interleave_finish": (_STATUS, [c_void_p]),
    "spw_interleave_drain": (_STATUS, [c_void_p]),
    "spw_interleave_get_in_flight": (_STATUS, [c_void_p, POINTER(c_uint64), _u64("capacity"), POINTER(c_uint64)]),
    "spw_interleave_calibrate": (_STATUS, [c_void_p, POINTER(InterleaveRates)]),
    "spw_interleave_replan": (_STATUS, [c_void_p, c_double, POINTER(c_uint32)]),
    "spw_interleave_get_trace": (_STATUS, [c_void_p, c_char_p, _size("size"), POINTER(c_uint64)]),
    "spw_interleave_close": (_STATUS, [c_void_p]),
    "spw_pool_open": (_STATUS, [POINTER(PoolOptions), POINTER(c_void_p)]),
    "spw_pool_close": (_STATUS, [c_void_p]),
    "spw_pool_alloc": (_STATUS, [c_void_p, POINTER(c_void_p)]),
    "spw_pool_free": (_STATUS, [c_void_p, _address("block")]),
    "spw_pool_get_stats": (_STATUS, [c_void_p, POINTER(PoolStats)]),
    "spw_pinned_alloc": (_STATUS, [_u64("bytes"), POINTER(c_void_p)]),
    "spw_pinned_free": (_STATUS, [_address("start")]),
    "spw_pinned_contains": (_STATUS, [_address("start"), _u64("bytes"), POINTER(c_uint32)]),
    "spw_pinned_get_stats": (_STATUS, [POINTER(PinnedStats)]),
    "spw_io_open": (_STATUS, [POINTER(IoOptions), POINTER(c_void_p)]),
    "spw_io_close": (_STATUS, [c_void_p, _i64("timeout_ms")]),
    "spw_io_read": (_STATUS, [c_void_p, POINTER(IoRequest), POINTER(c_uint64)]),
    "spw_io_write": (_STATUS, [c_void_p, POINTER(IoRequest), POINTER(c_uint64)]),
    "spw_io_sync": (_STATUS, [c_void_p, POINTER(IoRequest), POINTER(c_uint64)]),
    "spw_io_wait": (_STATUS, [c_void_p, POINTER(c_uint64), _u64("count"), _i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_io_wait_all": (_STATUS, [c_void_p, _i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_io_cancel": (_STATUS, [c_void_p, _u64("handle")]),
    "spw_io_holds_memory": (_STATUS, [c_void_p, _u64("handle"), POINTER(c_uint32)]),
    "spw_get_io_failure": (_STATUS, [POINTER(IoFailure)]),
    "spw_io_get_stats": (_STATUS, [c_void_p, POINTER(IoStats)]),
    "spw_io_describe": (_STATUS, [c_void_p, c_char_p, _size("size"), POINTER(c_uint64)]),
    "spw_swap_plan_budget": (_STATUS, [POINTER(SwapOptions), _u64("paths"), POINTER(SwapBudget)]),
    "spw_swap_open": (_STATUS, [c_void_p, POINTER(SwapOptions), POINTER(c_void_p)]),
    "spw_swap_get_budget": (_STATUS, [c_void_p, POINTER(SwapBudget)]),
    "spw_swap_fill": (_STATUS, [c_void_p, POINTER(c_void_p)]),
    "spw_swap_adam_step": (_STATUS, [c_void_p, POINTER(AdamOptions), _address("tensors"), _u64("count"), POINTER(StepStats)]),
    "spw_swap_adam_step_parts": (_STATUS, [c_void_p, POINTER(AdamOptions), _address("tensors"), _address("subgroups"), _address("firsts"), _u64("count")]),
    "spw_swap_read": (_STATUS, [c_void_p, _u64("subgroup"), _address("weights"), _address("param_out"), _address("exp_avg_out"), _address("exp_avg_sq_out")]),
    "spw_swap_write": (_STATUS, [c_void_p, _u64("subgroup"), _address("param"), _address("exp_avg"), _address("exp_avg_sq")]),
    "spw_swap_commit": (_STATUS, [c_void_p, _u64("step"), _address("payload"), _u64("payload_bytes")]),
    "spw_swap_rollback": (_STATUS, [c_void_p]),
    "spw_swap_get_stats": (_STATUS, [c_void_p, POINTER(SwapStats)]),
    "spw_swap_close": (_STATUS, [c_void_p]),
    "spw_gpu_probe": (_STATUS, [POINTER(GpuDriver)]),
    "spw_gpu_open": (_STATUS, [POINTER(GpuOptions), POINTER(c_void_p)]),
    "spw_gpu_close": (_STATUS, [c_void_p]),
    "spw_gpu_get_info": (_STATUS, [c_void_p, POINTER(GpuInfo)]),
    "spw_gpu_copy_start": (_STATUS, [c_void_p, POINTER(GpuCopy), POINTER(c_uint64)]),
    "spw_gpu_copy_wait": (_STATUS, [c_void_p, _u64("ticket"), _i64("timeout_ms")]),
    "spw_gpu_copy_stream_wait": (_STATUS, [c_void_p, _u64("ticket"), _u64("stream")]),
    "spw_gpu_measure_link": (_STATUS, [c_void_p, _u32("accumulates"), _u32("again"), POINTER(GpuLink)]),
    "spw_gpu_adam_step": (_STATUS, [c_void_p, POINTER(AdamOptions), POINTER(Tensor), _u64("count"), _u64("stream"),
                                    POINTER(StepStats)]),
    "spw_ds_adam_create": (_STATUS, [_i32("id"), c_float, c_float, _u32("adamw_mode")]),
    "spw_ds_adam_update": (_STATUS, [c_void_p, _i32("id"), POINTER(DsAdamCall), POINTER(Tensor)]),
    "spw_ds_adam_rollback": (_STATUS, [c_void_p, _i32("id"), POINTER(DsAdamCall), POINTER(Tensor), POINTER(c_uint32)]),
    "spw_ds_adam_destroy": (_STATUS, [_i32("id")]),
    "spw_swap_ds_adam_step": (_STATUS, [c_void_p, _i32("id"), POINTER(DsAdamCall), _address("tensors"), _u64("count"), STEPPED_FN,
                                        _address("user")]),
    "spw_ds_adam_get_state": (_STATUS, [_i32("id"), POINTER(DsAdamState)]),
    "spw_ds_adam_set_state": (_STATUS, [_i32("id"), POINTER(DsAdamState)]),
    "spw_ds_adagrad_create": (_STATUS, [_i32("id")]),
    "spw_ds_adagrad_update": (_STATUS, [_i32("id"), _u64("step"), c_float, c_float, c_float, POINTER(Tensor)]),
    "spw_ds_adagrad_destroy": (_STATUS, [_i32("id")]),
    "spw_ds_lion_create": (_STATUS, [_i32("id")]),
    "spw_ds_lion_update": (_STATUS, [_i32("id"), _u64("step"), c_float, c_float, c_float, c_float, POINTER(Tensor)]),
    "spw_ds_lion_destroy": (_STATUS, [_i32("id")]),
    "spw_tier_get_steps": (_STATUS, [POINTER(TierOptions), POINTER(TierStepsInfo)]),
    "spw_tier_open": (_STATUS, [POINTER(TierOptions), POINTER(c_void_p)]),
    "spw_tier_close": (_STATUS, [c_void_p, _i64("timeout_ms")]),
    "spw_tier_destroy": (_STATUS, [c_void_p]),
    "spw_tier_collect": (_STATUS, [c_char_p, c_char_p, c_char_p, _u32("rank")]),
    "spw_tier_define": (_STATUS, [c_void_p, c_char_p, POINTER(c_uint64), _u64("stream_count"), POINTER(c_uint32)]),
    "spw_tier_remove": (_STATUS, [c_void_p, _u32("extent")]),
    "spw_tier_put": (_STATUS, [c_void_p, _u32("extent"), POINTER(c_void_p), POINTER(TierTarget), POINTER(c_uint64)]),
    "spw_tier_get": (_STATUS, [c_void_p, _u32("extent"), POINTER(c_void_p), POINTER(c_uint64)]),
    "spw_tier_wait": (_STATUS, [c_void_p, _u64("ticket"), _i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_tier_commit": (_STATUS, [c_void_p, _u64("step"), _address("payload"), _u64("payload_bytes")]),
    "spw_tier_rollback": (_STATUS, [c_void_p]),
    "spw_tier_get_opened": (_STATUS, [c_void_p, POINTER(TierOpenedInfo), _address("payload_out"), _u64("payload_bytes")]),
    "spw_tier_get_extent": (_STATUS, [c_void_p, _u64("index"), POINTER(TierExtentInfo), c_char_p, _size("size"),
                                       POINTER(c_uint64)]),
    "spw_tier_get_path": (_STATUS, [c_void_p, _u32("number"), POINTER(TierPathInfo), c_char_p, _size("size"), POINTER(c_uint64)]),
    "spw_tier_set_path": (_STATUS, [c_void_p, _u32("number"), _u32("health")]),
    "spw_tier_evacuate": (_STATUS, [c_void_p, _u32("number")]),
    "spw_tier_verify": (_STATUS, [c_void_p, POINTER(TierVerifyInfo)]),
    "spw_tier_export": (_STATUS, [c_void_p, c_char_p, POINTER(c_uint64)]),
    "spw_tier_import": (_STATUS, [c_void_p, c_char_p, POINTER(c_uint64)]),
    "spw_arena_create": (_STATUS, [POINTER(ArenaOptions), POINTER(c_void_p)]),
    "spw_arena_open": (_STATUS, [c_char_p, _u32("flags"), _i64("timeout_ms"), POINTER(c_void_p)]),
    "spw_arena_open_fd": (_STATUS, [_i32("fd"), _u32("flags"), POINTER(c_void_p)]),
    "spw_arena_close": (_STATUS, [c_void_p]),
    "spw_arena_collect": (_STATUS, [c_char_p]),
    "spw_arena_get_info": (_STATUS, [c_void_p, POINTER(ArenaInfo)]),
    "spw_arena_get_notes": (_STATUS, [c_void_p, c_char_p, _size("size"), POINTER(c_uint64)]),
    "spw_arena_find": (_STATUS, [c_void_p, c_char_p, POINTER(c_uint32)]),
    "spw_arena_get_region": (_STATUS, [c_void_p, _u32("region"), POINTER(ArenaRegionInfo), c_char_p, _size("size"), POINTER(c_uint64)]),
    "spw_arena_write_begin": (_STATUS, [c_void_p, _u32("region"), _u64("generation"), POINTER(c_uint32)]),
    "spw_arena_write_end": (_STATUS, [c_void_p, _u32("region")]),
    "spw_arena_write_abort": (_STATUS, [c_void_p, _u32("region"), _u32("restored")]),
    "spw_arena_read_begin": (_STATUS, [c_void_p, _u32("region"), _u64("at_least"), _i64("timeout_ms"), POINTER(ArenaSnapshot)]),
    "spw_arena_read_validate": (_STATUS, [c_void_p, _u32("region"), POINTER(ArenaSnapshot)]),
    "spw_arena_read": (_STATUS, [c_void_p, _u32("region"), _u64("at_least"), _u64("offset"), _address("to_out"), _u64("bytes"), _i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_arena_join": (_STATUS, [c_void_p, _u32("process")]),
    "spw_arena_post": (_STATUS, [c_void_p, _u32("process"), _u64("round"), POINTER(StepStats), _u32("failed")]),
    "spw_arena_wait_verdict": (_STATUS, [c_void_p, _u64("round"), _i64("timeout_ms"), POINTER(ArenaVerdict)]),
    "spw_arena_abort_round": (_STATUS, [c_void_p, _u32("process"), _u64("round"), POINTER(c_uint32), POINTER(ArenaVerdict)]),
    "spw_stage_open": (_STATUS, [POINTER(StageOptions), POINTER(c_void_p)]),
    "spw_stage_submit_adam": (_STATUS, [c_void_p, POINTER(AdamOptions), _address("tensors"), _u64("count"), POINTER(SpecEvent),
                                        POINTER(StageTarget)]),
    "spw_stage_wait": (_STATUS, [c_void_p, _i64("timeout_ms"), POINTER(StepStats)]),
    "spw_stage_commit": (_STATUS, [c_void_p]),
    "spw_stage_redo": (_STATUS, [c_void_p, c_double]),
    "spw_stage_rollback": (_STATUS, [c_void_p]),
    "spw_stage_finish": (_STATUS, [c_void_p, _i64("timeout_ms")]),
    "spw_stage_get_state": (_STATUS, [c_void_p, POINTER(c_uint32)]),
    "spw_stage_get_cores": (_STATUS, [POINTER(StageCores)]),
    "spw_stage_close": (_STATUS, [c_void_p]),
}

# For each function its integer arguments, which ctypes would shorten without notice.
INTEGERS = {name: tuple(Checked(position, argument.name, *RANGES[argument.kind], argument.kind is c_void_p)
                        for position, argument in enumerate(arguments) if isinstance(argument, Integer))
            for name, (_, arguments) in PROTOTYPES.items()}


def sized(structure_type):
    """A zeroed structure with its struct_size set."""
    return structure_type(struct_size=ctypes.sizeof(structure_type))
