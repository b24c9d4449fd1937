"""The structs of the C headers as ctypes structures, with the same field names."""

from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_uint32, c_uint64, c_void_p

_RANGES = {c_uint32: (0, 2**32 - 1), c_uint64: (0, 2**64 - 1), c_int32: (-2**31, 2**31 - 1)}


class _Given(Structure):
    """Base of structs with user input: an integer that does not fit its field is an error, where ctypes truncates
    it."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._ranges = {name: _RANGES[kind] for name, kind, *_ in cls._fields_ if kind in _RANGES}

    def __setattr__(self, name, value):
        least, most = self._ranges.get(name, (None, None))
        if least is not None and isinstance(value, int) and not least <= value <= most:
            # Here, so that a program may read the layouts from this file alone.
            from .errors import InvalidArgumentError
            raise InvalidArgumentError(f"{name} is {value}; pass a number from {least} to {most}")
        super().__setattr__(name, value)


class ThreadOptions(_Given):
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


class AdamOptions(_Given):
    c_name = "spw_adam_options"
    _fields_ = [("struct_size", c_uint32), ("weight_decay_mode", c_uint32), ("step", c_uint64),
                ("lr", c_double), ("beta1", c_double), ("beta2", c_double), ("eps", c_double),
                ("weight_decay", c_double), ("grad_scale", c_double),
                ("no_bias_correction", c_uint32), ("reserved", c_uint32),
                ("rounding", c_uint32), ("reserved2", c_uint32), ("rounding_seed", c_uint64)]


class AdagradOptions(_Given):
    c_name = "spw_adagrad_options"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("step", c_uint64),
                ("lr", c_double), ("lr_decay", c_double), ("eps", c_double),
                ("weight_decay", c_double), ("grad_scale", c_double)]


class LionOptions(_Given):
    c_name = "spw_lion_options"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32),
                ("lr", c_double), ("beta1", c_double), ("beta2", c_double),
                ("weight_decay", c_double), ("grad_scale", c_double)]


class UndoOptions(_Given):
    c_name = "spw_undo_options"
    _fields_ = [("struct_size", c_uint32), ("mode", c_uint32), ("elements", c_uint64), ("tensors", c_uint64)]


class SpecOptions(_Given):
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
    _fields_ = [("struct_size", c_uint32), ("kind", c_uint32), ("fd", c_int32), ("value", c_uint32), ("word", c_void_p),
                ("gpu", c_void_p), ("handle", c_uint64)]


class SpecOutcome(Structure):
    c_name = "spw_spec_outcome"
    _fields_ = [("struct_size", c_uint32), ("verdict", c_uint32), ("norm", c_double), ("grad_scale", c_double),
                ("rolled_back", c_uint32), ("reserved", c_uint32)]


class PoolOptions(_Given):
    c_name = "spw_pool_options"
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("block_bytes", c_uint64), ("block_count", c_uint64),
                ("node", c_uint32), ("reserved", c_uint32)]


class PoolStats(Structure):
    c_name = "spw_pool_stats"
    _fields_ = [("struct_size", c_uint32), ("page_kind", c_uint32), ("block_bytes", c_uint64),
                ("block_count", c_uint64), ("in_use", c_uint64), ("high_water", c_uint64), ("quarantined", c_uint64),
                ("bytes", c_uint64), ("locked_bytes", c_uint64)]


class PinnedStats(Structure):
    c_name = "spw_pinned_stats"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("allocations", c_uint64), ("bytes", c_uint64),
                ("high_water", c_uint64), ("mapped_bytes", c_uint64), ("locked_bytes", c_uint64)]


class IoOptions(_Given):
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


class TierPath(_Given):
    c_name = "spw_tier_path"
    _fields_ = [("struct_size", c_uint32), ("kind", c_uint32), ("directory", c_char_p),
                ("limit_bytes", c_uint64), ("reserve_bytes", c_uint64)]


class TierOptions(_Given):
    c_name = "spw_tier_options"
    _fields_ = [("struct_size", c_uint32), ("mode", c_uint32), ("job", c_char_p), ("host", c_char_p),
                ("rank", c_uint32), ("world", c_uint32), ("paths", POINTER(TierPath)), ("path_count", c_uint64),
                ("durability", c_uint32), ("flags", c_uint32), ("block_bytes", c_uint64), ("io_timeout_ms", c_uint64),
                ("queue_depth", c_uint32), ("io_backend", c_uint32), ("at_step", c_uint64)]


class TierTarget(_Given):
    c_name = "spw_tier_target"
    _fields_ = [("struct_size", c_uint32), ("path", c_uint32), ("path_blocks", POINTER(c_uint32)),
                ("path_count", c_uint64)]


class TierStepsInfo(Structure):
    c_name = "spw_tier_steps_info"
    _fields_ = [("struct_size", c_uint32), ("committed", c_uint32), ("last", c_uint64), ("before", c_uint64),
                ("has_before", c_uint32), ("first", c_uint32), ("exists", c_uint32), ("reserved", c_uint32)]


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


class TierVerifyInfo(Structure):
    c_name = "spw_tier_verify_info"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("extents", c_uint64), ("blocks", c_uint64),
                ("bytes", c_uint64), ("damaged", c_uint64)]


class IoFailure(Structure):
    c_name = "spw_io_failure"
    _fields_ = [("struct_size", c_uint32), ("system_errno", c_int32), ("offset", c_uint64), ("bytes", c_uint64),
                ("path", c_char_p)]


class GpuDriver(Structure):
    c_name = "spw_gpu_driver"
    _fields_ = [("struct_size", c_uint32), ("devices", c_uint32), ("cuda_version", c_uint32), ("reserved", c_uint32)]


class GpuOptions(_Given):
    c_name = "spw_gpu_options"
    _fields_ = [("struct_size", c_uint32), ("ordinal", c_uint32), ("chunk_bytes", c_uint64)]


class GpuInfo(Structure):
    c_name = "spw_gpu_info"
    _fields_ = [("struct_size", c_uint32), ("ordinal", c_uint32), ("capability", c_uint32),
                ("multiprocessors", c_uint32), ("copy_engines", c_uint32), ("reserved", c_uint32),
                ("memory_bytes", c_uint64), ("free_bytes", c_uint64), ("name", c_char_p), ("pci", c_char_p)]


class GpuCopy(_Given):
    c_name = "spw_gpu_copy"
    _fields_ = [("struct_size", c_uint32), ("direction", c_uint32), ("device_dtype", c_uint32),
                ("host_dtype", c_uint32), ("after", c_uint32), ("reserved", c_uint32), ("n", c_uint64),
                ("device", c_uint64), ("host", c_void_p), ("handle", c_uint64)]


class GpuLink(Structure):
    c_name = "spw_gpu_link"
    _fields_ = [("struct_size", c_uint32), ("transfer_dtype", c_uint32), ("d2h_f32", c_double), ("d2h_native", c_double),
                ("h2d_f32", c_double), ("h2d_native", c_double), ("step_f32", c_double), ("step_native", c_double)]


class InterleaveRates(_Given):
    c_name = "spw_interleave_rates"
    _fields_ = [("struct_size", c_uint32), ("half_duplex", c_uint32), ("cpu", c_double), ("downscale", c_double),
                ("gpu", c_double), ("h2d", c_double), ("d2h", c_double), ("cast", c_double), ("dram", c_double)]


class PlanShape(_Given):
    c_name = "spw_plan_shape"
    _fields_ = [("struct_size", c_uint32), ("transfer_dtype", c_uint32), ("fetch_gradients", c_uint32), ("slots", c_uint32),
                ("count", c_uint64), ("sizes", POINTER(c_uint64)), ("size", c_uint64), ("chunk", c_uint64)]


class PlanOptions(_Given):
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


class PlanBucket(_Given):
    c_name = "spw_plan_bucket"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("grad", c_double), ("step_cpu", c_double),
                ("param", c_double), ("step_gpu", c_double), ("backward", c_double)]


class PlanLoad(_Given):
    c_name = "spw_plan_load"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("peak", c_double), ("link", c_double),
                ("tokens", c_double), ("parameters", c_double), ("free_bytes", c_double)]


class PlanProbe(_Given):
    c_name = "spw_plan_probe"
    _fields_ = [("struct_size", c_uint32), ("accumulates", c_uint32), ("f32_transfer", c_double),
                ("native_transfer", c_double), ("f32_step", c_double), ("native_step", c_double)]


class PipelineOptions(_Given):
    c_name = "spw_pipeline_options"
    _fields_ = [("struct_size", c_uint32), ("schedule", c_uint32), ("devices", c_uint32), ("micro_batches", c_uint32),
                ("stages", c_uint32), ("split", c_uint32), ("slots", c_uint32), ("flags", c_uint32),
                ("latency", c_double), ("seconds_per_byte", c_double)]


class PipelineUnit(_Given):
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


class InterleaveOptions(_Given):
    c_name = "spw_interleave_options"
    _fields_ = [("struct_size", c_uint32), ("backend", c_uint32), ("transfer_dtype", c_uint32), ("fetch_gradients", c_uint32),
                ("slots", c_uint32), ("grad_dtype", c_uint32), ("copy_dtype", c_uint32), ("reserved", c_uint32),
                ("chunk", c_uint64), ("gpu", c_void_p)]


class InterleaveSubgroup(_Given):
    c_name = "spw_interleave_subgroup"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("n", c_uint64), ("param", c_void_p),
                ("exp_avg", c_void_p), ("exp_avg_sq", c_void_p), ("grad", c_void_p), ("param_copy", c_void_p),
                ("host_grad", c_void_p)]


class SwapOptions(_Given):
    c_name = "spw_swap_options"
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("memory_budget", c_uint64),
                ("elements", POINTER(c_uint64)),
                ("subgroups", c_uint64), ("ratio", POINTER(c_double)), ("speeds", POINTER(c_double)),
                ("turn_timeout_ms", c_uint64)]


class SwapBudget(Structure):
    c_name = "spw_swap_budget"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("host_bytes", c_uint64), ("buffer_bytes", c_uint64),
                ("buffers", c_uint64), ("cached", c_uint64), ("state_bytes", c_uint64), ("step_bytes", c_uint64),
                ("master_bytes", c_uint64), ("masters", c_uint64), ("working_bytes", c_uint64)]


class SwapStats(Structure):
    c_name = "spw_swap_stats"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("rounds", c_uint64), ("hits", c_uint64),
                ("fetched", c_uint64), ("flushed", c_uint64), ("moved", c_uint64), ("exposed_seconds", c_double)]


class DsAdamCall(_Given):
    c_name = "spw_ds_adam_call"
    _fields_ = [("struct_size", c_uint32), ("bias_correction", c_uint32), ("step", c_uint64), ("lr", c_float),
                ("beta1", c_float), ("beta2", c_float), ("eps", c_float), ("weight_decay", c_float),
                ("grad_scale", c_float)]


class DsAdamState(Structure):
    c_name = "spw_ds_adam_state"
    _fields_ = [("struct_size", c_uint32), ("adamw_mode", c_uint32), ("step", c_uint64), ("beta1", c_float),
                ("beta2", c_float), ("beta1_power", c_float), ("beta2_power", c_float)]


class ArenaRegion(_Given):
    c_name = "spw_arena_region"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("name", c_char_p), ("bytes", c_uint64)]


class ArenaOptions(_Given):
    c_name = "spw_arena_options"
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("name", c_char_p), ("regions", c_void_p),
                ("region_count", c_uint64), ("node", c_uint32), ("processes", c_uint32)]


class ArenaInfo(Structure):
    c_name = "spw_arena_info"
    _fields_ = [("struct_size", c_uint32), ("fd", c_int32), ("base", c_void_p), ("bytes", c_uint64), ("id", c_uint64),
                ("region_count", c_uint64), ("processes", c_uint32), ("owner_pid", c_uint32), ("owner_lives", c_uint32),
                ("is_owner", c_uint32), ("writable", c_uint32), ("huge", c_uint32)]


class ArenaRegionInfo(Structure):
    c_name = "spw_arena_region_info"
    _fields_ = [("struct_size", c_uint32), ("in_write", c_uint32), ("address", c_void_p), ("offset", c_uint64),
                ("bytes", c_uint64), ("generation", c_uint64)]


class ArenaSnapshot(_Given):
    c_name = "spw_arena_snapshot"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("generation", c_uint64), ("sequence", c_uint64)]


class ArenaVerdict(Structure):
    c_name = "spw_arena_verdict"
    _fields_ = [("struct_size", c_uint32), ("nonfinite", c_uint32), ("failed", c_uint32), ("reserved", c_uint32),
                ("sum_squares", c_double)]


class StageOptions(_Given):
    c_name = "spw_stage_options"
    _fields_ = [("struct_size", c_uint32), ("priority", c_int32), ("cores", c_uint32), ("undo_mode", c_uint32),
                ("publish", c_uint32), ("reserved", c_uint32)]


class StageTarget(_Given):
    c_name = "spw_stage_target"
    _fields_ = [("struct_size", c_uint32), ("region", c_uint32), ("arena", c_void_p), ("generation", c_uint64)]


class StageCores(Structure):
    c_name = "spw_stage_cores"
    _fields_ = [("struct_size", c_uint32), ("threads", c_uint32), ("in_use", c_uint32), ("waiting", c_uint32),
                ("peak_threads", c_uint32), ("reserved", c_uint32)]


class TopoOptions(_Given):
    c_name = "spw_topo_options"
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("root", c_char_p)]


class TopoInfo(Structure):
    c_name = "spw_topo_info"
    _fields_ = [("struct_size", c_uint32), ("processors", c_uint32), ("cores", c_uint32), ("packages", c_uint32),
                ("nodes", c_uint32), ("gpus", c_uint32), ("drives", c_uint32), ("bound", c_uint32), ("allowed", c_char_p)]


class TopoNode(Structure):
    c_name = "spw_topo_node"
    _fields_ = [("struct_size", c_uint32), ("node", c_uint32), ("kind", c_uint32), ("allowed", c_uint32),
                ("memory_bytes", c_uint64), ("memory_side_cache_bytes", c_uint64), ("read_bandwidth", c_uint64),
                ("read_latency_ns", c_uint64), ("cpus", c_char_p), ("near_cpus", c_char_p)]


class TopoGpu(Structure):
    c_name = "spw_topo_gpu"
    _fields_ = [("struct_size", c_uint32), ("node", c_uint32), ("memory_node", c_uint32), ("reserved", c_uint32),
                ("pci", c_char_p), ("cpus", c_char_p)]


class TopoRankOptions(_Given):
    c_name = "spw_topo_rank_options"
    _fields_ = [("struct_size", c_uint32), ("ranks", c_uint32), ("rank", c_uint32), ("scope", c_uint32), ("share", c_double)]


class TopoPages(Structure):
    c_name = "spw_topo_pages"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("sampled", c_uint64), ("on_node", c_uint64),
                ("elsewhere", c_uint64), ("absent", c_uint64)]


STRUCTURES = (ThreadOptions, Stats, Tensor, GradTensor, StepStats, AdamOptions, AdagradOptions, LionOptions, UndoOptions,
              SpecOptions, SpecStats, SpecEvent, SpecOutcome,
              InterleaveRates, PlanShape, PlanOptions, PlanResult, PlanBucket, PlanLoad, PlanProbe, PipelineOptions, PipelineUnit,
              PipelineResult, PipelineOperation, PipelineChange, PipelineDevice, InterleaveOptions,
              InterleaveSubgroup, PoolOptions, PoolStats, PinnedStats, IoOptions, IoRequest, IoStats, IoFailure,
              TierPath, TierOptions, TierTarget, TierStepsInfo, TierOpenedInfo, TierExtentInfo, TierPathInfo, TierVerifyInfo,
              SwapOptions, SwapBudget, SwapStats, DsAdamCall, DsAdamState,
              GpuDriver, GpuOptions, GpuInfo, GpuCopy, GpuLink,
              ArenaRegion, ArenaOptions, ArenaInfo, ArenaRegionInfo, ArenaSnapshot, ArenaVerdict,
              StageOptions, StageTarget, StageCores,
              TopoOptions, TopoInfo, TopoNode, TopoGpu, TopoRankOptions, TopoPages)
