"""Structs of arena.h, stage.h and topo.h: shared memory, stages, and the topology."""

from ctypes import Structure, c_char_p, c_double, c_int32, c_uint32, c_uint64, c_void_p

from .given import Given


class ArenaRegion(Given):
    c_name = "spw_arena_region"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("name", c_char_p), ("bytes", c_uint64)]


class ArenaOptions(Given):
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


class ArenaSnapshot(Given):
    c_name = "spw_arena_snapshot"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("generation", c_uint64), ("sequence", c_uint64)]


class ArenaVerdict(Structure):
    c_name = "spw_arena_verdict"
    _fields_ = [("struct_size", c_uint32), ("nonfinite", c_uint32), ("failed", c_uint32), ("reserved", c_uint32),
                ("sum_squares", c_double)]


class StageOptions(Given):
    c_name = "spw_stage_options"
    _fields_ = [("struct_size", c_uint32), ("priority", c_int32), ("cores", c_uint32), ("undo_mode", c_uint32),
                ("publish", c_uint32), ("reserved", c_uint32)]


class StageTarget(Given):
    c_name = "spw_stage_target"
    _fields_ = [("struct_size", c_uint32), ("region", c_uint32), ("arena", c_void_p), ("generation", c_uint64)]


class StageCores(Structure):
    c_name = "spw_stage_cores"
    _fields_ = [("struct_size", c_uint32), ("threads", c_uint32), ("in_use", c_uint32), ("waiting", c_uint32),
                ("peak_threads", c_uint32), ("reserved", c_uint32)]


class TopoOptions(Given):
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


class TopoRankOptions(Given):
    c_name = "spw_topo_rank_options"
    _fields_ = [("struct_size", c_uint32), ("ranks", c_uint32), ("rank", c_uint32), ("scope", c_uint32), ("share", c_double)]


class TopoPages(Structure):
    c_name = "spw_topo_pages"
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("sampled", c_uint64), ("on_node", c_uint64),
                ("elsewhere", c_uint64), ("absent", c_uint64)]
