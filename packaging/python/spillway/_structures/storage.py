"""Structs of memory.h, io.h, tier.h and swap.h: pools, files, tiers, and updates over a tier."""

from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_uint32, c_uint64, c_void_p

from .given import Given


class PoolOptions(Given):
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


class IoOptions(Given):
    c_name = "spw_io_options"
    _fields_ = [("struct_size", c_uint32), ("backend", c_uint32), ("flags", c_uint32), ("queue_depth", c_uint32),
                ("block_bytes", c_uint64), ("workers", c_uint32), ("file_mode", c_uint32), ("deadline_ms", c_uint64)]


class IoRequest(Given):
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


class TierPath(Given):
    c_name = "spw_tier_path"
    _fields_ = [("struct_size", c_uint32), ("kind", c_uint32), ("directory", c_char_p),
                ("limit_bytes", c_uint64), ("reserve_bytes", c_uint64)]


class TierOptions(Given):
    c_name = "spw_tier_options"
    _fields_ = [("struct_size", c_uint32), ("mode", c_uint32), ("job", c_char_p), ("host", c_char_p),
                ("rank", c_uint32), ("world", c_uint32), ("paths", POINTER(TierPath)), ("path_count", c_uint64),
                ("durability", c_uint32), ("flags", c_uint32), ("block_bytes", c_uint64), ("io_timeout_ms", c_uint64),
                ("queue_depth", c_uint32), ("io_backend", c_uint32), ("at_step", c_uint64)]


class TierTarget(Given):
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


class SwapOptions(Given):
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
