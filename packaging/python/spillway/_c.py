"""The C interface for ctypes: constants, structs and prototypes.

Generated from src/capi: SPILLWAY_BLESS=1 cargo test -p spillway-header."""

from ctypes import (CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64,
                    c_void_p)

from ._integers import Given, address, i32, i64, u32, u64

ABI_VERSION = 2
IO_ALL = 18446744073709551615
TOPO_NONE = 4294967295
# spw_status
OK = 0
ERR_INVALID_ARGUMENT = 1
ERR_UNSUPPORTED = 2
ERR_UNKNOWN_ID = 3
ERR_LIMIT_REACHED = 4
ERR_BUSY = 5
ERR_INTERNAL = 9
ERR_SYSTEM = 11
ERR_IO = 20
ERR_NO_SPACE = 21
ERR_SHORT_FILE = 22
ERR_TIMEOUT = 23
ERR_CANCELLED = 24
ERR_NOT_FOUND = 25
ERR_DEADLINE = 26
ERR_PATH_FAILED = 27
ERR_CORRUPT = 30
ERR_FORMAT = 31
ERR_FOREIGN = 32
ERR_LOCKED = 33
ERR_PATH_MISSING = 34
ERR_LOST = 35
ERR_NO_STATE = 36
ERR_NO_STEP = 37
ERR_FENCED = 38
ERR_NO_ROUND = 40
ERR_ROUND_OPEN = 41
ERR_ROUND_RESOLVED = 42
ERR_BUCKET_MISSING = 43
ERR_BUCKET_SUBMITTED = 44
ERR_EVENT_BROKEN = 45
ERR_NO_DEVICE = 50
ERR_DRIVER_STUB = 51
ERR_DRIVER_TOO_OLD = 52
ERR_GPU_JIT = 53
ERR_GPU_OUT_OF_MEMORY = 54
ERR_GPU_LOST = 55
ERR_GPU_FORKED = 56
ERR_GPU = 57
ERR_ARENA_TORN = 60
ERR_ARENA_CHANGED = 61
ERR_ARENA_PEER_ENDED = 62
ERR_ARENA_FORMAT = 63
ERR_ARENA_FOREIGN = 64
ERR_ARENA_EXISTS = 65
ERR_ARENA_MISSING = 66

# spw_log_level
LOG_LEVEL_OFF = 0
LOG_LEVEL_ERROR = 1
LOG_LEVEL_WARN = 2
LOG_LEVEL_INFO = 3
LOG_LEVEL_DEBUG = 4

# spw_dtype
DTYPE_NONE = 0
DTYPE_F32 = 1
DTYPE_F16 = 2
DTYPE_BF16 = 3
DTYPE_CODES = 4

# spw_weight_decay
WEIGHT_DECAY_DECOUPLED = 0
WEIGHT_DECAY_L2 = 1

# spw_rounding
ROUNDING_NEAREST = 0
ROUNDING_STOCHASTIC = 1

# spw_moment
MOMENT_FIRST = 1
MOMENT_SECOND = 2

# spw_undo_mode
UNDO_MODE_DELTA = 0
UNDO_MODE_ARITHMETIC = 1
UNDO_MODE_SHADOW = 2
UNDO_MODE_NONE = 3

# spw_pinned_flag
PINNED_FLAG_NO_HUGE_PAGES = 1
PINNED_FLAG_NO_LOCK = 2
PINNED_FLAG_BIND_NODE = 4

# spw_io_backend
IO_BACKEND_AUTO = 0
IO_BACKEND_URING = 1
IO_BACKEND_THREADS = 2

# spw_io_flag
IO_FLAG_NO_DIRECT = 1
IO_FLAG_NO_PREALLOCATE = 2

# spw_tier_mode
TIER_MODE_AUTO = 0
TIER_MODE_CREATE = 1
TIER_MODE_RESUME = 2
TIER_MODE_READ = 3

# spw_tier_durability
TIER_DURABILITY_DATA = 0
TIER_DURABILITY_PROCESS = 1
TIER_DURABILITY_FULL = 2

# spw_tier_path_kind
TIER_PATH_KIND_DIRECTORY = 0
TIER_PATH_KIND_MEMORY = 1

# spw_tier_flag
TIER_FLAG_DEGRADED = 1
TIER_FLAG_NO_DIRECT = 2
TIER_FLAG_AT_STEP = 4
TIER_FLAG_KEEP_BEFORE = 8

# spw_tier_path_flag
TIER_PATH_FLAG_NODE = 1

# spw_tier_health
TIER_HEALTH_HEALTHY = 0
TIER_HEALTH_DRAINING = 1
TIER_HEALTH_FAILED = 2
TIER_HEALTH_MISSING = 3

# spw_tier_export_flag
TIER_EXPORT_FLAG_SAFETENSORS = 1
TIER_EXPORT_FLAG_FAST = 2

# spw_swap_flag
SWAP_FLAG_NO_HUGE_PAGES = 1
SWAP_FLAG_NO_LOCK = 2
SWAP_FLAG_SPLIT_MASTER = 4
SWAP_FLAG_BF16_MOMENTS = 8
SWAP_FLAG_CODED_MOMENTS = 32
SWAP_FLAG_BIND_NODE = 16
SWAP_FLAG_LOW_BITS = 64

# spw_swap_begin_flag
SWAP_BEGIN_FLAG_SPECULATIVE = 1
SWAP_BEGIN_FLAG_STATS = 2
SWAP_BEGIN_FLAG_NO_RESTORE = 4

# spw_gpu_direction
GPU_DIRECTION_D2H = 0
GPU_DIRECTION_H2D = 1

# spw_gpu_after
GPU_AFTER_NOTHING = 0
GPU_AFTER_EVENT = 1
GPU_AFTER_STREAM = 2

# spw_transfer_dtype
TRANSFER_DTYPE_NATIVE = 0
TRANSFER_DTYPE_F32 = 1
TRANSFER_DTYPE_DELIVERED = 2

# spw_spec_publish
SPEC_PUBLISH_FINAL = 0
SPEC_PUBLISH_STAGED = 1
SPEC_PUBLISH_SPECULATIVE = 2

# spw_spec_state
SPEC_STATE_MISSING = 0
SPEC_STATE_PENDING = 1
SPEC_STATE_SPECULATIVE = 2
SPEC_STATE_FINAL = 3

# spw_spec_event_kind
SPEC_EVENT_KIND_NONE = 0
SPEC_EVENT_KIND_FD = 1
SPEC_EVENT_KIND_WORD = 2
SPEC_EVENT_KIND_CUDA = 3
SPEC_EVENT_KIND_CUDA_STREAM = 4

# spw_spec_verdict
SPEC_VERDICT_COMMIT = 0
SPEC_VERDICT_SKIP = 1
SPEC_VERDICT_REDO = 2

# spw_placement
PLACEMENT_CPU = 0
PLACEMENT_GPU = 1
PLACEMENT_RESIDENT = 2

# spw_interleave_backend
INTERLEAVE_BACKEND_HOST = 0
INTERLEAVE_BACKEND_CUDA = 1

# spw_plan_mode
PLAN_MODE_MODEL = 0
PLAN_MODE_EQ1 = 1
PLAN_MODE_STRIDE = 2
PLAN_MODE_COUNT = 3

# spw_pipeline_schedule
PIPELINE_SCHEDULE_AFAB = 0
PIPELINE_SCHEDULE_1F1B = 1
PIPELINE_SCHEDULE_DECOUPLED = 2

# spw_pipeline_flag
PIPELINE_FLAG_RECOMPUTE = 1
PIPELINE_FLAG_LATE_CHECKPOINTS = 2
PIPELINE_FLAG_ASYNC_OPTIMIZER = 4

# spw_pipeline_kind
PIPELINE_KIND_FORWARD = 0
PIPELINE_KIND_BACKWARD = 1
PIPELINE_KIND_RECOMPUTE = 2
PIPELINE_KIND_FETCH = 3
PIPELINE_KIND_OFFLOAD = 4
PIPELINE_KIND_OPTIMIZE = 5
PIPELINE_KIND_SEND_ACTIVATION = 6
PIPELINE_KIND_RECEIVE_ACTIVATION = 7
PIPELINE_KIND_SEND_GRADIENT = 8
PIPELINE_KIND_RECEIVE_GRADIENT = 9
PIPELINE_KIND_SEND_CHECKPOINT = 10
PIPELINE_KIND_RECEIVE_CHECKPOINT = 11
PIPELINE_KIND_VALIDATE = 12

# spw_pipeline_memory
PIPELINE_MEMORY_PARAMETERS = 0
PIPELINE_MEMORY_CHECKPOINTS = 1
PIPELINE_MEMORY_ACTIVATIONS = 2
PIPELINE_MEMORY_GRADIENTS = 3
PIPELINE_MEMORY_MESSAGES = 4

# spw_arena_flag
ARENA_FLAG_HUGE = 1
ARENA_FLAG_BIND_NODE = 2
ARENA_FLAG_COLLECT = 4

# spw_arena_open_flag
ARENA_OPEN_FLAG_WRITE = 1
ARENA_OPEN_FLAG_ORPHAN = 2

# spw_topo_flag
TOPO_FLAG_LOAD_DRIVER = 1

# spw_topo_node_kind
TOPO_NODE_KIND_DRAM = 0
TOPO_NODE_KIND_HIGH_BANDWIDTH = 1
TOPO_NODE_KIND_CXL = 2
TOPO_NODE_KIND_PERSISTENT = 3
TOPO_NODE_KIND_GPU = 4
TOPO_NODE_KIND_SLOWER = 5
TOPO_NODE_KIND_OTHER = 6
TOPO_NODE_KIND_EMPTY = 7

# spw_topo_scope
TOPO_SCOPE_NODE = 0
TOPO_SCOPE_PACKAGE = 1

# spw_topo_cpus
TOPO_CPUS_ALL = 0
TOPO_CPUS_TRAINER = 1
TOPO_CPUS_WORKERS = 2

# spw_window_home
WINDOW_HOME_HOST = 0
WINDOW_HOME_TIER = 1

LOG_FN = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)
SWAP_STEPPED_FN = CFUNCTYPE(c_int32, c_void_p, c_uint64, c_void_p)


class Info(Structure):
    c_name = "spw_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_threads", c_uint32),
        ("kernel", c_char_p),
        ("adam_calls", c_uint64),
        ("adam_elements", c_uint64),
        ("adagrad_calls", c_uint64),
        ("adagrad_elements", c_uint64),
        ("lion_calls", c_uint64),
        ("lion_elements", c_uint64),
    ]


class ThreadOptions(Given):
    c_name = "spw_thread_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_threads", c_uint32),
    ]


class AdamOptions(Given):
    c_name = "spw_adam_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("weight_decay_mode", c_uint32),
        ("step", c_uint64),
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("grad_scale", c_double),
        ("no_bias_correction", c_uint32),
        ("reserved", c_uint32),
        ("rounding", c_uint32),
        ("reserved2", c_uint32),
        ("rounding_seed", c_uint64),
        ("rounding_first", c_uint64),
    ]


class Tensor(Structure):
    c_name = "spw_tensor"
    _fields_ = [
        ("struct_size", c_uint32),
        ("param_dtype", c_uint32),
        ("state_dtype", c_uint32),
        ("grad_dtype", c_uint32),
        ("copy_dtype", c_uint32),
        ("take_copy", c_uint32),
        ("n", c_uint64),
        ("param", c_void_p),
        ("grad", c_void_p),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("param_copy", c_void_p),
        ("options", c_void_p),
        ("shadow_param", c_void_p),
        ("shadow_exp_avg", c_void_p),
        ("shadow_exp_avg_sq", c_void_p),
        ("param_low", c_void_p),
        ("low_sums", POINTER(c_uint64)),
        ("exp_avg_scale", c_void_p),
        ("exp_avg_sq_scale", c_void_p),
    ]


class StepStats(Structure):
    c_name = "spw_step_stats"
    _fields_ = [
        ("struct_size", c_uint32),
        ("nonfinite", c_uint32),
        ("sum_squares", c_double),
    ]


class AdagradOptions(Given):
    c_name = "spw_adagrad_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("step", c_uint64),
        ("lr", c_double),
        ("lr_decay", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("grad_scale", c_double),
    ]


class LionOptions(Given):
    c_name = "spw_lion_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("weight_decay", c_double),
        ("grad_scale", c_double),
    ]


class SignumOptions(Given):
    c_name = "spw_signum_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("lr", c_double),
        ("momentum", c_double),
        ("weight_decay", c_double),
        ("grad_scale", c_double),
    ]


class GradTensor(Structure):
    c_name = "spw_grad_tensor"
    _fields_ = [
        ("struct_size", c_uint32),
        ("dst_dtype", c_uint32),
        ("src_dtype", c_uint32),
        ("reserved", c_uint32),
        ("n", c_uint64),
        ("dst", c_void_p),
        ("src", c_void_p),
    ]


class UndoOptions(Given):
    c_name = "spw_undo_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("mode", c_uint32),
        ("elements", c_uint64),
        ("tensors", c_uint64),
    ]


class PinnedOptions(Given):
    c_name = "spw_pinned_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("node", c_uint32),
        ("reserved", c_uint32),
    ]


class PinnedStats(Structure):
    c_name = "spw_pinned_stats"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("allocations", c_uint64),
        ("bytes", c_uint64),
        ("high_water", c_uint64),
        ("mapped_bytes", c_uint64),
        ("locked_bytes", c_uint64),
        ("unused_bytes", c_uint64),
    ]


class IoOptions(Given):
    c_name = "spw_io_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("flags", c_uint32),
        ("queue_depth", c_uint32),
        ("block_bytes", c_uint64),
        ("workers", c_uint32),
        ("turns", c_uint32),
        ("turn_timeout_ms", c_uint64),
    ]


class IoRequest(Given):
    c_name = "spw_io_request"
    _fields_ = [
        ("struct_size", c_uint32),
        ("fd", c_int32),
        ("path", c_char_p),
        ("offset", c_uint64),
        ("buffer", c_void_p),
        ("bytes", c_uint64),
        ("deadline_ms", c_uint64),
    ]


class IoStats(Structure):
    c_name = "spw_io_stats"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("reads", c_uint64),
        ("writes", c_uint64),
        ("read_bytes", c_uint64),
        ("written_bytes", c_uint64),
        ("failed", c_uint64),
        ("requests", c_uint64),
        ("direct_bytes", c_uint64),
        ("buffered_bytes", c_uint64),
        ("bounced_bytes", c_uint64),
        ("resumed", c_uint64),
        ("retried", c_uint64),
        ("pending", c_uint64),
        ("stuck", c_uint64),
        ("queue_depth", c_uint64),
        ("block_bytes", c_uint64),
    ]


class IoFailure(Structure):
    c_name = "spw_io_failure"
    _fields_ = [
        ("struct_size", c_uint32),
        ("system_errno", c_int32),
        ("offset", c_uint64),
        ("bytes", c_uint64),
    ]


class TierPath(Given):
    c_name = "spw_tier_path"
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_uint32),
        ("directory", c_char_p),
        ("limit_bytes", c_uint64),
        ("reserve_bytes", c_uint64),
        ("flags", c_uint32),
        ("node", c_uint32),
    ]


class TierOptions(Given):
    c_name = "spw_tier_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("mode", c_uint32),
        ("job", c_char_p),
        ("host", c_char_p),
        ("rank", c_uint32),
        ("world", c_uint32),
        ("paths", POINTER(TierPath)),
        ("path_count", c_uint64),
        ("durability", c_uint32),
        ("flags", c_uint32),
        ("block_bytes", c_uint64),
        ("io_timeout_ms", c_uint64),
        ("queue_depth", c_uint32),
        ("io_backend", c_uint32),
        ("at_step", c_uint64),
        ("turns", c_uint32),
        ("turn_timeout_ms", c_uint32),
        ("at_tag", c_uint64),
    ]


class TierStepsInfo(Structure):
    c_name = "spw_tier_steps_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("committed", c_uint32),
        ("last", c_uint64),
        ("before", c_uint64),
        ("has_before", c_uint32),
        ("first", c_uint32),
        ("exists", c_uint32),
        ("reserved", c_uint32),
        ("last_tag", c_uint64),
        ("before_tag", c_uint64),
    ]


class TierTarget(Given):
    c_name = "spw_tier_target"
    _fields_ = [
        ("struct_size", c_uint32),
        ("path", c_uint32),
        ("path_blocks", POINTER(c_uint32)),
        ("path_count", c_uint64),
    ]


class TierProgress(Structure):
    c_name = "spw_tier_progress"
    _fields_ = [
        ("struct_size", c_uint32),
        ("ended", c_uint32),
        ("step", c_uint64),
        ("written", c_uint64),
        ("bytes", c_uint64),
    ]


class TierOpenedInfo(Structure):
    c_name = "spw_tier_opened_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("resumed", c_uint32),
        ("step", c_uint64),
        ("payload_bytes", c_uint64),
        ("missing_paths", c_uint64),
        ("lost_extents", c_uint64),
    ]


class TierExtentInfo(Structure):
    c_name = "spw_tier_extent_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("extent", c_uint32),
        ("bytes", c_uint64),
        ("generation", c_uint64),
        ("streams", c_uint32),
        ("committed", c_uint32),
        ("lost", c_uint32),
        ("blocks", c_uint32),
    ]


class TierPathInfo(Structure):
    c_name = "spw_tier_path_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("health", c_uint32),
        ("kind", c_uint32),
        ("reserved", c_uint32),
        ("read_bytes", c_uint64),
        ("written_bytes", c_uint64),
        ("reading_ns", c_uint64),
        ("writing_ns", c_uint64),
        ("wear_bytes", c_uint64),
        ("file_bytes", c_uint64),
        ("free_bytes", c_uint64),
        ("blocks", c_uint64),
    ]


class TierVerifyInfo(Structure):
    c_name = "spw_tier_verify_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("extents", c_uint64),
        ("blocks", c_uint64),
        ("bytes", c_uint64),
        ("damaged", c_uint64),
    ]


class TierExportOptions(Given):
    c_name = "spw_tier_export_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("names", c_char_p),
        ("first", c_uint64),
        ("end", c_uint64),
        ("dtype", c_char_p),
        ("bytes_per_second", c_uint64),
    ]


class SwapOptions(Given):
    c_name = "spw_swap_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("host_memory", c_uint64),
        ("elements", POINTER(c_uint64)),
        ("subgroups", c_uint64),
        ("ratio", POINTER(c_double)),
        ("speeds", POINTER(c_double)),
        ("node", c_uint32),
        ("reserved", c_uint32),
    ]


class SwapBudget(Structure):
    c_name = "spw_swap_budget"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("host_bytes", c_uint64),
        ("buffer_bytes", c_uint64),
        ("buffers", c_uint64),
        ("cached", c_uint64),
        ("state_bytes", c_uint64),
        ("step_bytes", c_uint64),
        ("master_bytes", c_uint64),
        ("masters", c_uint64),
        ("working_bytes", c_uint64),
    ]


class SwapStats(Structure):
    c_name = "spw_swap_stats"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("rounds", c_uint64),
        ("hits", c_uint64),
        ("fetched", c_uint64),
        ("flushed", c_uint64),
        ("moved", c_uint64),
        ("exposed_seconds", c_double),
    ]


class GpuDriver(Structure):
    c_name = "spw_gpu_driver"
    _fields_ = [
        ("struct_size", c_uint32),
        ("devices", c_uint32),
        ("cuda_version", c_uint32),
        ("reserved", c_uint32),
    ]


class GpuOptions(Given):
    c_name = "spw_gpu_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("ordinal", c_uint32),
        ("chunk_bytes", c_uint64),
    ]


class GpuInfo(Structure):
    c_name = "spw_gpu_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("ordinal", c_uint32),
        ("capability", c_uint32),
        ("multiprocessors", c_uint32),
        ("copy_engines", c_uint32),
        ("reserved", c_uint32),
        ("memory_bytes", c_uint64),
        ("free_bytes", c_uint64),
        ("name", c_char_p),
        ("pci", c_char_p),
    ]


class DsAdamCall(Given):
    c_name = "spw_ds_adam_call"
    _fields_ = [
        ("struct_size", c_uint32),
        ("bias_correction", c_uint32),
        ("step", c_uint64),
        ("lr", c_float),
        ("beta1", c_float),
        ("beta2", c_float),
        ("eps", c_float),
        ("weight_decay", c_float),
        ("grad_scale", c_float),
    ]


class GpuCopy(Given):
    c_name = "spw_gpu_copy"
    _fields_ = [
        ("struct_size", c_uint32),
        ("direction", c_uint32),
        ("device_dtype", c_uint32),
        ("host_dtype", c_uint32),
        ("after", c_uint32),
        ("reserved", c_uint32),
        ("n", c_uint64),
        ("device", c_uint64),
        ("host", c_void_p),
        ("handle", c_uint64),
    ]


class GpuLink(Structure):
    c_name = "spw_gpu_link"
    _fields_ = [
        ("struct_size", c_uint32),
        ("transfer_dtype", c_uint32),
        ("d2h_f32", c_double),
        ("d2h_native", c_double),
        ("h2d_f32", c_double),
        ("h2d_native", c_double),
        ("step_f32", c_double),
        ("step_native", c_double),
    ]


class SpecEvent(Given):
    c_name = "spw_spec_event"
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_uint32),
        ("fd", c_int32),
        ("value", c_uint32),
        ("word", c_void_p),
        ("gpu", c_void_p),
        ("handle", c_uint64),
    ]


class SpecOptions(Given):
    c_name = "spw_spec_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("buckets", c_uint32),
        ("undo_mode", c_uint32),
        ("publish", c_uint32),
    ]


class SpecStats(Structure):
    c_name = "spw_spec_stats"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("commits", c_uint64),
        ("redos", c_uint64),
        ("skips", c_uint64),
        ("aborts", c_uint64),
        ("buckets_speculated", c_uint64),
        ("buckets_committed", c_uint64),
        ("buckets_redone", c_uint64),
        ("buckets_rolled_back", c_uint64),
        ("buckets_spared", c_uint64),
        ("seconds_exposed", c_double),
        ("seconds_since_begun", c_double),
    ]


class SpecOutcome(Structure):
    c_name = "spw_spec_outcome"
    _fields_ = [
        ("struct_size", c_uint32),
        ("verdict", c_uint32),
        ("norm", c_double),
        ("grad_scale", c_double),
        ("rolled_back", c_uint32),
        ("reserved", c_uint32),
    ]


class InterleaveOptions(Given):
    c_name = "spw_interleave_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("transfer_dtype", c_uint32),
        ("fetch_gradients", c_uint32),
        ("slots", c_uint32),
        ("grad_dtype", c_uint32),
        ("copy_dtype", c_uint32),
        ("reserved", c_uint32),
        ("chunk", c_uint64),
        ("gpu", c_void_p),
    ]


class InterleaveSubgroup(Given):
    c_name = "spw_interleave_subgroup"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("n", c_uint64),
        ("param", c_void_p),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("grad", c_void_p),
        ("param_copy", c_void_p),
        ("host_grad", c_void_p),
    ]


class InterleaveRates(Given):
    c_name = "spw_interleave_rates"
    _fields_ = [
        ("struct_size", c_uint32),
        ("half_duplex", c_uint32),
        ("cpu", c_double),
        ("downscale", c_double),
        ("gpu", c_double),
        ("h2d", c_double),
        ("d2h", c_double),
        ("cast", c_double),
        ("dram", c_double),
    ]


class DsAdamState(Structure):
    c_name = "spw_ds_adam_state"
    _fields_ = [
        ("struct_size", c_uint32),
        ("adamw_mode", c_uint32),
        ("step", c_uint64),
        ("beta1", c_float),
        ("beta2", c_float),
        ("beta1_power", c_float),
        ("beta2_power", c_float),
    ]


class PlanShape(Given):
    c_name = "spw_plan_shape"
    _fields_ = [
        ("struct_size", c_uint32),
        ("transfer_dtype", c_uint32),
        ("fetch_gradients", c_uint32),
        ("slots", c_uint32),
        ("count", c_uint64),
        ("sizes", POINTER(c_uint64)),
        ("size", c_uint64),
        ("chunk", c_uint64),
    ]


class PlanOptions(Given):
    c_name = "spw_plan_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("mode", c_uint32),
        ("parameter", c_uint64),
        ("residents", c_uint64),
        ("backward", c_double),
    ]


class PlanResult(Structure):
    c_name = "spw_plan_result"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("exposed_seconds", c_double),
        ("home_seconds", c_double),
        ("serial_seconds", c_double),
        ("cpu_seconds", c_double),
        ("h2d_seconds", c_double),
        ("d2h_seconds", c_double),
        ("gpu_seconds", c_double),
        ("gpu", c_uint64),
        ("residents", c_uint64),
        ("gpu_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("to_device_bytes", c_uint64),
        ("to_host_bytes", c_uint64),
    ]


class PipelineOptions(Given):
    c_name = "spw_pipeline_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("schedule", c_uint32),
        ("devices", c_uint32),
        ("micro_batches", c_uint32),
        ("stages", c_uint32),
        ("split", c_uint32),
        ("slots", c_uint32),
        ("flags", c_uint32),
        ("latency", c_double),
        ("seconds_per_byte", c_double),
    ]


class PipelineUnit(Given):
    c_name = "spw_pipeline_unit"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("forward", c_double),
        ("backward", c_double),
        ("recompute", c_double),
        ("fetch", c_double),
        ("offload", c_double),
        ("optimizer", c_double),
        ("param_bytes", c_uint64),
        ("grad_bytes", c_uint64),
        ("activation_bytes", c_uint64),
        ("input_bytes", c_uint64),
    ]


class PipelineResult(Structure):
    c_name = "spw_pipeline_result"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("passes_seconds", c_double),
        ("iteration_seconds", c_double),
        ("exposed_seconds", c_double),
        ("passes_bubble_ratio", c_double),
        ("iteration_bubble_ratio", c_double),
        ("closed_bubble_ratio", c_double),
        ("operations", c_uint64),
        ("dependencies", c_uint64),
        ("changes", c_uint64),
        ("fetches", c_uint64),
        ("fetched_bytes", c_uint64),
        ("offloaded_bytes", c_uint64),
        ("activations", c_uint64),
        ("activation_bytes", c_uint64),
        ("gradients", c_uint64),
        ("gradient_bytes", c_uint64),
        ("checkpoints", c_uint64),
        ("checkpoint_bytes", c_uint64),
    ]


class PipelineDevice(Structure):
    c_name = "spw_pipeline_device"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("busy", c_double),
        ("first", c_double),
        ("last", c_double),
        ("operations", c_uint64),
        ("peak_bytes", c_uint64),
        ("parameters", c_uint64),
        ("checkpoints", c_uint64),
        ("activations", c_uint64),
        ("gradients", c_uint64),
        ("messages", c_uint64),
    ]


class PipelineOperation(Structure):
    c_name = "spw_pipeline_operation"
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_uint32),
        ("device", c_uint32),
        ("peer", c_uint32),
        ("micro_batch", c_uint32),
        ("first_unit", c_uint32),
        ("units", c_uint32),
        ("begins", c_uint32),
        ("ends", c_uint32),
        ("dependencies", c_uint32),
        ("first_dependency", c_uint64),
        ("bytes", c_uint64),
        ("start", c_double),
        ("end", c_double),
    ]


class PipelineChange(Structure):
    c_name = "spw_pipeline_change"
    _fields_ = [
        ("struct_size", c_uint32),
        ("operation", c_uint32),
        ("device", c_uint32),
        ("memory", c_uint32),
        ("freed", c_uint32),
        ("reserved", c_uint32),
        ("bytes", c_uint64),
        ("resident", c_uint64),
    ]


class ArenaRegion(Given):
    c_name = "spw_arena_region"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("name", c_char_p),
        ("bytes", c_uint64),
    ]


class ArenaOptions(Given):
    c_name = "spw_arena_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("name", c_char_p),
        ("regions", POINTER(ArenaRegion)),
        ("region_count", c_uint64),
        ("node", c_uint32),
        ("processes", c_uint32),
    ]


class ArenaInfo(Structure):
    c_name = "spw_arena_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("fd", c_int32),
        ("base", c_void_p),
        ("bytes", c_uint64),
        ("id", c_uint64),
        ("region_count", c_uint64),
        ("processes", c_uint32),
        ("owner_pid", c_uint32),
        ("owner_lives", c_uint32),
        ("is_owner", c_uint32),
        ("writable", c_uint32),
        ("huge", c_uint32),
    ]


class ArenaRegionInfo(Structure):
    c_name = "spw_arena_region_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("in_write", c_uint32),
        ("address", c_void_p),
        ("offset", c_uint64),
        ("bytes", c_uint64),
        ("generation", c_uint64),
    ]


class ArenaSnapshot(Given):
    c_name = "spw_arena_snapshot"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("generation", c_uint64),
        ("sequence", c_uint64),
    ]


class ArenaVerdict(Structure):
    c_name = "spw_arena_verdict"
    _fields_ = [
        ("struct_size", c_uint32),
        ("nonfinite", c_uint32),
        ("failed", c_uint32),
        ("reserved", c_uint32),
        ("sum_squares", c_double),
    ]


class StageOptions(Given):
    c_name = "spw_stage_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("priority", c_int32),
        ("cores", c_uint32),
        ("undo_mode", c_uint32),
        ("publish", c_uint32),
        ("reserved", c_uint32),
    ]


class StageTarget(Given):
    c_name = "spw_stage_target"
    _fields_ = [
        ("struct_size", c_uint32),
        ("region", c_uint32),
        ("arena", c_void_p),
        ("generation", c_uint64),
    ]


class StageCores(Structure):
    c_name = "spw_stage_cores"
    _fields_ = [
        ("struct_size", c_uint32),
        ("threads", c_uint32),
        ("in_use", c_uint32),
        ("waiting", c_uint32),
        ("peak_threads", c_uint32),
        ("reserved", c_uint32),
    ]


class TopoOptions(Given):
    c_name = "spw_topo_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("root", c_char_p),
    ]


class TopoInfo(Structure):
    c_name = "spw_topo_info"
    _fields_ = [
        ("struct_size", c_uint32),
        ("processors", c_uint32),
        ("cores", c_uint32),
        ("packages", c_uint32),
        ("nodes", c_uint32),
        ("gpus", c_uint32),
        ("drives", c_uint32),
        ("bound", c_uint32),
        ("allowed", c_char_p),
    ]


class TopoNode(Structure):
    c_name = "spw_topo_node"
    _fields_ = [
        ("struct_size", c_uint32),
        ("node", c_uint32),
        ("kind", c_uint32),
        ("allowed", c_uint32),
        ("memory_bytes", c_uint64),
        ("memory_side_cache_bytes", c_uint64),
        ("read_bandwidth", c_uint64),
        ("read_latency_ns", c_uint64),
        ("cpus", c_char_p),
        ("near_cpus", c_char_p),
    ]


class TopoGpu(Structure):
    c_name = "spw_topo_gpu"
    _fields_ = [
        ("struct_size", c_uint32),
        ("node", c_uint32),
        ("memory_node", c_uint32),
        ("reserved", c_uint32),
        ("pci", c_char_p),
        ("cpus", c_char_p),
    ]


class TopoRankOptions(Given):
    c_name = "spw_topo_rank_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("ranks", c_uint32),
        ("rank", c_uint32),
        ("scope", c_uint32),
        ("share", c_double),
    ]


class TopoPages(Structure):
    c_name = "spw_topo_pages"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("sampled", c_uint64),
        ("on_node", c_uint64),
        ("elsewhere", c_uint64),
        ("absent", c_uint64),
    ]


class WindowOptions(Given):
    c_name = "spw_window_options"
    _fields_ = [
        ("struct_size", c_uint32),
        ("slots", c_uint32),
        ("gpu", c_void_p),
        ("tier", c_void_p),
    ]


class WindowUnit(Given):
    c_name = "spw_window_unit"
    _fields_ = [
        ("struct_size", c_uint32),
        ("home", c_uint32),
        ("keep", c_uint32),
        ("extent", c_uint32),
        ("stream", c_uint32),
        ("reserved", c_uint32),
        ("bytes", c_uint64),
        ("host", c_void_p),
    ]


class WindowStats(Structure):
    c_name = "spw_window_stats"
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("device_bytes", c_uint64),
        ("peak_bytes", c_uint64),
        ("fetched_bytes", c_uint64),
        ("fetches", c_uint64),
        ("uses", c_uint64),
        ("late", c_uint64),
    ]


STRUCTURES = (
    Info,
    ThreadOptions,
    AdamOptions,
    Tensor,
    StepStats,
    AdagradOptions,
    LionOptions,
    SignumOptions,
    GradTensor,
    UndoOptions,
    PinnedOptions,
    PinnedStats,
    IoOptions,
    IoRequest,
    IoStats,
    IoFailure,
    TierPath,
    TierOptions,
    TierStepsInfo,
    TierTarget,
    TierProgress,
    TierOpenedInfo,
    TierExtentInfo,
    TierPathInfo,
    TierVerifyInfo,
    TierExportOptions,
    SwapOptions,
    SwapBudget,
    SwapStats,
    GpuDriver,
    GpuOptions,
    GpuInfo,
    DsAdamCall,
    GpuCopy,
    GpuLink,
    SpecEvent,
    SpecOptions,
    SpecStats,
    SpecOutcome,
    InterleaveOptions,
    InterleaveSubgroup,
    InterleaveRates,
    DsAdamState,
    PlanShape,
    PlanOptions,
    PlanResult,
    PipelineOptions,
    PipelineUnit,
    PipelineResult,
    PipelineDevice,
    PipelineOperation,
    PipelineChange,
    ArenaRegion,
    ArenaOptions,
    ArenaInfo,
    ArenaRegionInfo,
    ArenaSnapshot,
    ArenaVerdict,
    StageOptions,
    StageTarget,
    StageCores,
    TopoOptions,
    TopoInfo,
    TopoNode,
    TopoGpu,
    TopoRankOptions,
    TopoPages,
    WindowOptions,
    WindowUnit,
    WindowStats,
)

# For each function its result and its arguments.
PROTOTYPES = {
    "spw_status_name": (c_char_p, [i32("status")]),
    "spw_last_error": (c_char_p, []),
    "spw_error_text": (c_int32, [i32("error"), c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_abi_version": (c_uint32, []),
    "spw_version": (c_char_p, []),
    "spw_struct_init": (c_int32, [c_char_p, address("struct_out"), u64("size")]),
    "spw_get_info": (c_int32, [POINTER(Info)]),
    "spw_set_threads": (c_int32, [POINTER(ThreadOptions)]),
    "spw_set_log": (c_int32, [LOG_FN, address("user"), i32("level")]),
    "spw_log_next": (c_int32, [POINTER(c_int32), c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_adam_step": (c_int32, [POINTER(AdamOptions), address("tensors"), u64("count"), POINTER(StepStats)]),
    "spw_adam_check": (c_int32, [POINTER(AdamOptions), address("tensors"), u64("count")]),
    "spw_adagrad_step": (c_int32, [POINTER(AdagradOptions), address("tensors"), u64("count"), POINTER(StepStats)]),
    "spw_adagrad_check": (c_int32, [POINTER(AdagradOptions), address("tensors"), u64("count")]),
    "spw_undo_adagrad_step": (c_int32, [c_void_p, POINTER(AdagradOptions), address("tensors"), u64("count"), POINTER(StepStats)]),
    "spw_spec_begin_adagrad": (c_int32, [c_void_p, POINTER(AdagradOptions), c_double]),
    "spw_lion_step": (c_int32, [POINTER(LionOptions), address("tensors"), u64("count"), POINTER(StepStats)]),
    "spw_lion_check": (c_int32, [POINTER(LionOptions), address("tensors"), u64("count")]),
    "spw_undo_lion_step": (c_int32, [c_void_p, POINTER(LionOptions), address("tensors"), u64("count"), POINTER(StepStats)]),
    "spw_spec_begin_lion": (c_int32, [c_void_p, POINTER(LionOptions), c_double]),
    "spw_signum_step": (c_int32, [POINTER(SignumOptions), address("tensors"), u64("count"), POINTER(StepStats)]),
    "spw_signum_check": (c_int32, [POINTER(SignumOptions), address("tensors"), u64("count")]),
    "spw_undo_signum_step": (c_int32, [c_void_p, POINTER(SignumOptions), address("tensors"), u64("count"), POINTER(StepStats)]),
    "spw_spec_begin_signum": (c_int32, [c_void_p, POINTER(SignumOptions), c_double]),
    "spw_grad_stats": (c_int32, [address("tensors"), u64("count"), c_double, POINTER(StepStats)]),
    "spw_grad_accumulate": (c_int32, [address("tensors"), u64("count"), c_double, POINTER(StepStats)]),
    "spw_checksums": (c_int32, [POINTER(c_void_p), address("bytes"), u64("count"), POINTER(c_uint64)]),
    "spw_copies": (c_int32, [POINTER(c_void_p), POINTER(c_void_p), address("bytes"), u64("count")]),
    "spw_low_bits_settle": (c_int32, [address("tensors"), u64("count")]),
    "spw_codes_read": (c_int32, [u32("moment"), c_void_p, address("scales"), u64("n"), address("values")]),
    "spw_codes_write": (c_int32, [u32("moment"), address("values"), u64("n"), c_void_p, address("scales")]),
    "spw_undo_open": (c_int32, [POINTER(UndoOptions), POINTER(c_void_p)]),
    "spw_undo_adam_step": (c_int32, [c_void_p, POINTER(AdamOptions), address("tensors"), u64("count"), POINTER(StepStats)]),
    "spw_undo_rollback": (c_int32, [c_void_p]),
    "spw_undo_redo": (c_int32, [c_void_p, c_double]),
    "spw_undo_commit": (c_int32, [c_void_p, u32("release_memory")]),
    "spw_undo_get_log_bytes": (c_int32, [c_void_p, POINTER(c_uint64)]),
    "spw_undo_close": (c_int32, [c_void_p]),
    "spw_pinned_alloc": (c_int32, [POINTER(PinnedOptions), u64("bytes"), POINTER(c_void_p)]),
    "spw_pinned_free": (c_int32, [address("start")]),
    "spw_pinned_contains": (c_int32, [address("start"), u64("bytes"), POINTER(c_uint32)]),
    "spw_pinned_get_stats": (c_int32, [POINTER(PinnedStats)]),
    "spw_io_open": (c_int32, [POINTER(IoOptions), POINTER(c_void_p)]),
    "spw_io_close": (c_int32, [c_void_p, i64("timeout_ms")]),
    "spw_io_read": (c_int32, [c_void_p, POINTER(IoRequest), POINTER(c_uint64)]),
    "spw_io_write": (c_int32, [c_void_p, POINTER(IoRequest), POINTER(c_uint64)]),
    "spw_io_sync": (c_int32, [c_void_p, POINTER(IoRequest), POINTER(c_uint64)]),
    "spw_io_get_stats": (c_int32, [c_void_p, POINTER(IoStats)]),
    "spw_io_describe": (c_int32, [c_void_p, c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_io_wait": (c_int32, [c_void_p, address("handles"), u64("count"), i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_get_io_failure": (c_int32, [i32("error"), POINTER(IoFailure), c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_tier_get_steps": (c_int32, [POINTER(TierOptions), POINTER(TierStepsInfo)]),
    "spw_tier_open": (c_int32, [POINTER(TierOptions), POINTER(c_void_p)]),
    "spw_tier_end_turns": (c_int32, [c_void_p]),
    "spw_tier_close": (c_int32, [c_void_p, i64("timeout_ms")]),
    "spw_tier_destroy": (c_int32, [c_void_p]),
    "spw_tier_collect": (c_int32, [c_char_p, c_char_p, c_char_p, u32("rank")]),
    "spw_tier_define": (c_int32, [c_void_p, c_char_p, address("stream_bytes"), u64("stream_count"), POINTER(c_uint32)]),
    "spw_tier_remove": (c_int32, [c_void_p, u32("extent")]),
    "spw_tier_put": (c_int32, [c_void_p, u32("extent"), POINTER(c_void_p), POINTER(TierTarget), POINTER(c_uint64)]),
    "spw_tier_get": (c_int32, [c_void_p, u32("extent"), POINTER(c_void_p), POINTER(c_uint64)]),
    "spw_tier_wait": (c_int32, [c_void_p, u64("ticket"), i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_tier_commit": (c_int32, [c_void_p, u64("step"), address("payload"), u64("payload_bytes")]),
    "spw_tier_rollback": (c_int32, [c_void_p]),
    "spw_tier_task_wait": (c_int32, [c_void_p, i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_tier_task_get_progress": (c_int32, [c_void_p, POINTER(TierProgress)]),
    "spw_tier_task_close": (c_int32, [c_void_p]),
    "spw_tier_commit_begin": (c_int32, [c_void_p, u64("step"), address("payload"), u64("payload_bytes"), POINTER(c_void_p)]),
    "spw_tier_get_opened": (c_int32, [c_void_p, POINTER(TierOpenedInfo), address("payload_out"), u64("payload_bytes")]),
    "spw_tier_get_extent": (c_int32, [c_void_p, u64("index"), POINTER(TierExtentInfo), c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_tier_get_path": (c_int32, [c_void_p, u32("number"), POINTER(TierPathInfo), c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_tier_set_path": (c_int32, [c_void_p, u32("number"), u32("health")]),
    "spw_tier_evacuate": (c_int32, [c_void_p, u32("number")]),
    "spw_tier_verify": (c_int32, [c_void_p, POINTER(TierVerifyInfo)]),
    "spw_tier_export": (c_int32, [c_void_p, c_char_p, POINTER(TierExportOptions), POINTER(c_void_p)]),
    "spw_tier_import": (c_int32, [c_void_p, c_char_p, c_char_p, POINTER(c_uint64)]),
    "spw_swap_plan_budget": (c_int32, [POINTER(SwapOptions), u64("paths"), POINTER(SwapBudget)]),
    "spw_swap_open": (c_int32, [c_void_p, POINTER(SwapOptions), POINTER(c_void_p)]),
    "spw_swap_fill": (c_int32, [c_void_p, POINTER(c_void_p)]),
    "spw_swap_adam_step": (c_int32, [c_void_p, POINTER(AdamOptions), address("tensors"), u64("count"), POINTER(StepStats)]),
    "spw_swap_adam_step_parts": (c_int32, [c_void_p, POINTER(AdamOptions), address("tensors"), address("subgroups"), address("firsts"), u64("count")]),
    "spw_swap_read": (c_int32, [c_void_p, u64("subgroup"), address("weights"), address("param_out"), address("exp_avg_out"), address("exp_avg_sq_out")]),
    "spw_swap_write": (c_int32, [c_void_p, u64("subgroup"), address("param"), address("exp_avg"), address("exp_avg_sq")]),
    "spw_swap_commit": (c_int32, [c_void_p, u64("step"), address("payload"), u64("payload_bytes")]),
    "spw_swap_commit_begin": (c_int32, [c_void_p, u64("step"), address("payload"), u64("payload_bytes"), POINTER(c_void_p)]),
    "spw_swap_rollback": (c_int32, [c_void_p]),
    "spw_swap_get_stats": (c_int32, [c_void_p, POINTER(SwapStats)]),
    "spw_swap_get_trace": (c_int32, [c_void_p, c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_swap_close": (c_int32, [c_void_p]),
    "spw_swap_begin": (c_int32, [c_void_p, POINTER(AdamOptions), u32("flags")]),
    "spw_swap_submit": (c_int32, [c_void_p, u64("subgroup"), address("tensors"), address("firsts"), u64("count")]),
    "spw_swap_verdict": (c_int32, [c_void_p, u32("verdict"), c_double]),
    "spw_swap_finish": (c_int32, [c_void_p, i64("timeout_ms"), POINTER(StepStats)]),
    "spw_swap_next_published": (c_int32, [c_void_p, i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_gpu_probe": (c_int32, [POINTER(GpuDriver)]),
    "spw_gpu_open": (c_int32, [POINTER(GpuOptions), POINTER(c_void_p)]),
    "spw_gpu_close": (c_int32, [c_void_p]),
    "spw_gpu_get_info": (c_int32, [c_void_p, POINTER(GpuInfo)]),
    "spw_gpu_adam_step": (c_int32, [c_void_p, POINTER(AdamOptions), address("tensors"), u64("count"), u64("stream"), POINTER(StepStats)]),
    "spw_gpu_ds_adam_update": (c_int32, [c_void_p, i32("id"), POINTER(DsAdamCall), POINTER(Tensor), u64("stream")]),
    "spw_gpu_copy_start": (c_int32, [c_void_p, POINTER(GpuCopy), POINTER(c_uint64)]),
    "spw_gpu_copy_wait": (c_int32, [c_void_p, u64("ticket"), i64("timeout_ms")]),
    "spw_gpu_copy_stream_wait": (c_int32, [c_void_p, u64("ticket"), u64("stream")]),
    "spw_gpu_measure_link": (c_int32, [c_void_p, u32("accumulates"), u32("again"), POINTER(GpuLink)]),
    "spw_spec_publish_to": (c_int32, [c_void_p, u32("bucket"), c_void_p, POINTER(GpuCopy), u64("count")]),
    "spw_spec_submit_gpu": (c_int32, [c_void_p, u32("bucket"), c_void_p, address("tensors"), u64("count"), u64("stream"), POINTER(SpecEvent)]),
    "spw_spec_stream_wait": (c_int32, [c_void_p, u32("bucket"), u64("stream"), i64("timeout_ms")]),
    "spw_spec_open": (c_int32, [POINTER(SpecOptions), POINTER(c_void_p)]),
    "spw_spec_begin_adam": (c_int32, [c_void_p, POINTER(AdamOptions), c_double]),
    "spw_spec_get_stats": (c_int32, [c_void_p, POINTER(SpecStats)]),
    "spw_spec_close": (c_int32, [c_void_p]),
    "spw_spec_submit": (c_int32, [c_void_p, u32("bucket"), address("tensors"), u64("count"), POINTER(SpecEvent)]),
    "spw_spec_get_bucket": (c_int32, [c_void_p, u32("bucket"), POINTER(c_uint32)]),
    "spw_spec_wait": (c_int32, [c_void_p, u32("bucket"), i64("timeout_ms")]),
    "spw_spec_local_result": (c_int32, [c_void_p, i64("timeout_ms"), POINTER(StepStats)]),
    "spw_spec_get_squares": (c_int32, [c_void_p, POINTER(c_double), u64("capacity"), POINTER(c_uint64)]),
    "spw_spec_resolve": (c_int32, [c_void_p, POINTER(StepStats), POINTER(SpecOutcome)]),
    "spw_spec_resolve_as": (c_int32, [c_void_p, u32("verdict"), c_double, POINTER(SpecOutcome)]),
    "spw_spec_abort": (c_int32, [c_void_p]),
    "spw_spec_finish": (c_int32, [c_void_p, i64("timeout_ms")]),
    "spw_spec_get_rolled_back": (c_int32, [c_void_p, POINTER(c_uint32), u64("capacity"), POINTER(c_uint64)]),
    "spw_interleave_open": (c_int32, [POINTER(InterleaveOptions), POINTER(InterleaveSubgroup), u64("count"), POINTER(c_void_p)]),
    "spw_interleave_set_plan": (c_int32, [c_void_p, address("placements"), u64("count")]),
    "spw_interleave_get_plan": (c_int32, [c_void_p, POINTER(c_uint32)]),
    "spw_interleave_grad_ready": (c_int32, [c_void_p, u64("subgroup"), u64("stream")]),
    "spw_interleave_release_params": (c_int32, [c_void_p, u64("subgroup"), u64("stream")]),
    "spw_interleave_begin": (c_int32, [c_void_p, POINTER(AdamOptions), u64("count"), u64("stream")]),
    "spw_interleave_stream_wait_params": (c_int32, [c_void_p, u64("subgroup"), u64("stream")]),
    "spw_interleave_get_ready": (c_int32, [c_void_p, u64("subgroup"), POINTER(c_uint32)]),
    "spw_interleave_finish": (c_int32, [c_void_p]),
    "spw_interleave_drain": (c_int32, [c_void_p]),
    "spw_interleave_get_in_flight": (c_int32, [c_void_p, POINTER(c_uint64), u64("capacity"), POINTER(c_uint64)]),
    "spw_interleave_calibrate": (c_int32, [c_void_p, POINTER(InterleaveRates)]),
    "spw_interleave_replan": (c_int32, [c_void_p, c_double, POINTER(c_uint32)]),
    "spw_interleave_get_trace": (c_int32, [c_void_p, c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_interleave_begin_ds_adam": (c_int32, [c_void_p, i32("id"), POINTER(DsAdamCall), u64("count"), u64("stream")]),
    "spw_interleave_close": (c_int32, [c_void_p]),
    "spw_ds_adam_get_state": (c_int32, [i32("id"), POINTER(DsAdamState)]),
    "spw_ds_adam_set_state": (c_int32, [i32("id"), POINTER(DsAdamState)]),
    "spw_ds_adam_create": (c_int32, [i32("id"), c_float, c_float, u32("adamw_mode")]),
    "spw_ds_adam_update": (c_int32, [c_void_p, i32("id"), POINTER(DsAdamCall), POINTER(Tensor)]),
    "spw_ds_adam_rollback": (c_int32, [c_void_p, i32("id"), POINTER(DsAdamCall), POINTER(Tensor), POINTER(c_uint32)]),
    "spw_ds_adam_destroy": (c_int32, [i32("id")]),
    "spw_swap_ds_adam_step": (c_int32, [c_void_p, i32("id"), POINTER(DsAdamCall), address("tensors"), u64("count"), SWAP_STEPPED_FN, address("user")]),
    "spw_swap_ds_adam_calls": (c_int32, [c_void_p, i32("id"), POINTER(DsAdamCall), u64("count")]),
    "spw_spec_submit_ds_adam": (c_int32, [c_void_p, u32("bucket"), i32("id"), POINTER(DsAdamCall), POINTER(Tensor), POINTER(SpecEvent)]),
    "spw_plan_interleave": (c_int32, [POINTER(InterleaveRates), POINTER(PlanShape), POINTER(PlanOptions), POINTER(c_uint32), POINTER(PlanResult)]),
    "spw_plan_pipeline": (c_int32, [POINTER(PipelineOptions), POINTER(PipelineUnit), u64("unit_count"), POINTER(c_void_p)]),
    "spw_pipeline_close": (c_int32, [c_void_p]),
    "spw_pipeline_get_result": (c_int32, [c_void_p, POINTER(PipelineResult)]),
    "spw_pipeline_get_device": (c_int32, [c_void_p, u32("device"), POINTER(PipelineDevice)]),
    "spw_pipeline_get_operations": (c_int32, [c_void_p, u64("first"), u64("count"), POINTER(PipelineOperation)]),
    "spw_pipeline_get_changes": (c_int32, [c_void_p, u64("first"), u64("count"), POINTER(PipelineChange)]),
    "spw_pipeline_get_dependencies": (c_int32, [c_void_p, u64("first"), u64("count"), POINTER(c_uint32)]),
    "spw_pipeline_get_svg": (c_int32, [c_void_p, u32("width"), c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_arena_create": (c_int32, [POINTER(ArenaOptions), POINTER(c_void_p)]),
    "spw_arena_open": (c_int32, [c_char_p, u32("flags"), i64("timeout_ms"), POINTER(c_void_p)]),
    "spw_arena_open_fd": (c_int32, [i32("fd"), u32("flags"), POINTER(c_void_p)]),
    "spw_arena_close": (c_int32, [c_void_p]),
    "spw_arena_collect": (c_int32, [c_char_p]),
    "spw_arena_get_info": (c_int32, [c_void_p, POINTER(ArenaInfo)]),
    "spw_arena_get_notes": (c_int32, [c_void_p, c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_arena_find": (c_int32, [c_void_p, c_char_p, POINTER(c_uint32)]),
    "spw_arena_get_region": (c_int32, [c_void_p, u32("region"), POINTER(ArenaRegionInfo), c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_arena_write_begin": (c_int32, [c_void_p, u32("region"), u64("generation"), POINTER(c_uint32)]),
    "spw_arena_write_end": (c_int32, [c_void_p, u32("region")]),
    "spw_arena_write_abort": (c_int32, [c_void_p, u32("region"), u32("restored")]),
    "spw_arena_read_begin": (c_int32, [c_void_p, u32("region"), u64("at_least"), i64("timeout_ms"), POINTER(ArenaSnapshot)]),
    "spw_arena_read_validate": (c_int32, [c_void_p, u32("region"), POINTER(ArenaSnapshot)]),
    "spw_arena_read": (c_int32, [c_void_p, u32("region"), u64("at_least"), u64("offset"), address("to_out"), u64("bytes"), i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_arena_join": (c_int32, [c_void_p, u32("process")]),
    "spw_arena_post": (c_int32, [c_void_p, u32("process"), u64("round"), POINTER(StepStats), u32("failed")]),
    "spw_arena_wait_verdict": (c_int32, [c_void_p, u64("round"), i64("timeout_ms"), POINTER(ArenaVerdict)]),
    "spw_arena_abort_round": (c_int32, [c_void_p, u32("process"), u64("round"), POINTER(c_uint32), POINTER(ArenaVerdict)]),
    "spw_stage_open": (c_int32, [POINTER(StageOptions), POINTER(c_void_p)]),
    "spw_stage_submit_adam": (c_int32, [c_void_p, POINTER(AdamOptions), address("tensors"), u64("count"), POINTER(SpecEvent), POINTER(StageTarget)]),
    "spw_stage_wait": (c_int32, [c_void_p, i64("timeout_ms"), POINTER(StepStats)]),
    "spw_stage_commit": (c_int32, [c_void_p]),
    "spw_stage_redo": (c_int32, [c_void_p, c_double]),
    "spw_stage_rollback": (c_int32, [c_void_p]),
    "spw_stage_finish": (c_int32, [c_void_p, i64("timeout_ms")]),
    "spw_stage_get_state": (c_int32, [c_void_p, POINTER(c_uint32)]),
    "spw_stage_get_cores": (c_int32, [POINTER(StageCores)]),
    "spw_stage_close": (c_int32, [c_void_p]),
    "spw_topo_open": (c_int32, [POINTER(TopoOptions), POINTER(c_void_p)]),
    "spw_topo_close": (c_int32, [c_void_p]),
    "spw_topo_get_info": (c_int32, [c_void_p, POINTER(TopoInfo)]),
    "spw_topo_get_node": (c_int32, [c_void_p, u32("index"), POINTER(TopoNode)]),
    "spw_topo_get_gpu": (c_int32, [c_void_p, u32("ordinal"), POINTER(TopoGpu)]),
    "spw_topo_get_path_node": (c_int32, [c_void_p, c_char_p, POINTER(c_uint32)]),
    "spw_topo_get_json": (c_int32, [c_void_p, c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_topo_prefetch": (c_int32, [address("addresses"), u64("count")]),
    "spw_topo_get_rank_cpus": (c_int32, [c_void_p, POINTER(TopoRankOptions), u32("cpus"), c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_topo_bind_workers": (c_int32, [c_void_p, c_char_p]),
    "spw_topo_unbind_workers": (c_int32, []),
    "spw_topo_get_workers": (c_int32, [c_char_p, u64("size"), POINTER(c_uint64)]),
    "spw_topo_get_pages": (c_int32, [address("address"), u64("bytes"), u32("node"), POINTER(TopoPages)]),
    "spw_window_open": (c_int32, [POINTER(WindowOptions), POINTER(WindowUnit), u64("count"), POINTER(c_void_p)]),
    "spw_window_begin": (c_int32, [c_void_p]),
    "spw_window_use": (c_int32, [c_void_p, u32("unit"), u64("stream"), i64("timeout_ms"), POINTER(c_uint64)]),
    "spw_window_release": (c_int32, [c_void_p, u32("unit"), u64("stream")]),
    "spw_window_changed": (c_int32, [c_void_p, u32("unit")]),
    "spw_window_get_stats": (c_int32, [c_void_p, POINTER(WindowStats)]),
    "spw_window_close": (c_int32, [c_void_p]),
}
