"""EXPERIMENTAL: the topology of the machine, the processors of a rank, and workers that are bound to processors.

Processors and nodes are the system's numbers. Only threads of the library are ever bound: the affinity of the program's own
threads stays as it is.

Example:
    Leave a fifth of this rank's cores to the trainer, and bind the optimizer's workers to the others:

        from spillway import topo

        cores = topo.split(0.8)
        topo.bind(cores.workers)"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _abi, _arguments, _arrays, _files, _native
from .errors import InvalidArgumentError, SpillwayError

_ALL, _TRAINER, _WORKERS = range(3)
_MOST_32, _MOST_64 = 2**32 - 1, 2**64 - 1
_SCOPES = {"node": _abi.TOPO_SCOPE_NODE, "package": _abi.TOPO_SCOPE_PACKAGE}


@dataclass(frozen=True)
class Package:
    """A package (socket) and its online processors."""

    id: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """A NUMA node. `kind` is "dram", "high_bandwidth", "cxl", "persistent", "gpu", "slower", "other" or "empty"; `near_cpus`
    are the processors that reach the memory best. Bandwidth is in MB/s and latency in nanoseconds, if the firmware states
    them."""

    id: int
    kind: str
    cpus: tuple[int, ...]
    near_cpus: tuple[int, ...]
    memory_bytes: int
    memory_side_cache_bytes: int
    read_bandwidth: int | None
    read_latency: int | None
    tier: int | None
    distances: dict[int, int]
    allowed: bool


@dataclass(frozen=True)
class Device:
    """A GPU ("nvidia", "amd") or a drive ("nvme") on PCI. `memory_node` is the node that a GPU's own memory forms."""

    kind: str
    pci: str
    model: int
    name: str
    uuid: str
    node: int | None
    memory_node: int | None


@dataclass(frozen=True)
class Topology:
    """The machine as one process sees it.

    `online` are all processors, `cpuset` those of the process's cgroup, `allowed` those that the calling thread may use.
    `bound` is True if a launcher has bound this process. `gpus` has the GPU behind each CUDA ordinal, None where it is not
    known."""

    online: tuple[int, ...]
    cpuset: tuple[int, ...]
    allowed: tuple[int, ...]
    bound: bool
    packages: tuple[Package, ...]
    cores: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    devices: tuple[Device, ...]
    gpus: tuple[Device | None, ...]

    def node(self, number: int) -> Node:
        """Returns the node with this number.

        Raises:
            InvalidArgumentError: There is no such node."""
        for node in self.nodes:
            if node.id == number:
                return node
        raise InvalidArgumentError(f"node: there is no NUMA node {number}")


@dataclass(frozen=True)
class Cores:
    """Processors of a rank: all of them, those of the trainer, and those of the optimizer's workers."""

    cpus: tuple[int, ...]
    trainer: tuple[int, ...]
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Pages:
    """Pages of a range: looked at, on the node, on other nodes, and not in memory."""

    sampled: int
    on_node: int
    elsewhere: int
    absent: int


class _Handle:
    """An open topology of the library."""

    def __init__(self, root: Any = None, load_driver: bool = False) -> None:
        options = _abi.sized(_abi.TopoOptions)
        options.flags = int(load_driver)
        options.root = None if root is None else _arguments.path("root", root)
        self.value = ctypes.c_void_p()
        _native.call("spw_topo_open", ctypes.byref(options), ctypes.byref(self.value))

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *_: object) -> None:
        _native.library().spw_topo_close(self.value)

    def text(self, function: str, *arguments: Any) -> str:
        return _native.text(function, self.value, *arguments)


def read(root: str | os.PathLike[str] | None = None, *, load_driver: bool = False) -> Topology:
    """Reads the topology.

    Args:
        root: Directory of a recorded tree with `sys` and `proc`; None: this machine.
        load_driver: Load the CUDA driver to learn the order of the GPUs. Processes that are forked later cannot use CUDA."""
    with _Handle(root, load_driver) as handle:
        found = _files.parse_json(handle.text("spw_topo_get_json").encode())
    devices = tuple(Device(**device) for device in found["devices"])
    by_address = {device.pci: device for device in devices}
    return Topology(
        online=_numbers(found["online"]),
        cpuset=_numbers(found["cpuset"]),
        allowed=_numbers(found["allowed"]),
        bound=found["bound"],
        packages=tuple(Package(**_sets(package)) for package in found["packages"]),
        cores=tuple(_numbers(core) for core in found["cores"]),
        nodes=tuple(Node(**_sets(node, distances={int(to): far for to, far in node["distances"].items()})) for node in found["nodes"]),
        devices=devices,
        gpus=tuple(by_address.get(pci) for pci in found["visible"]["gpus"]),
    )


def _node_of_gpu(ordinal: int, root: str | os.PathLike[str] | None = None) -> int | None:
    """The node to which memory for transfers of a visible GPU is bound; None if it is not known, or the only one. Loads the CUDA driver."""
    try:
        found = read(root, load_driver=True)
    except SpillwayError:
        return None
    gpu = found.gpus[ordinal] if ordinal < len(found.gpus) else None
    return gpu.node if gpu is not None and len(found.nodes) > 1 else None


def place(
    rank: int, ranks: int, share: float = 0.8, scope: str = "node", *, load_driver: bool = False, root: str | os.PathLike[str] | None = None
) -> Cores:
    """Returns the processors of a rank of this machine: those of the node of its GPU, shared by the ranks on that node.

    Args:
        rank: Number of the rank on this machine (LOCAL_RANK); it uses the GPU with this ordinal.
        ranks: Number of ranks on this machine (LOCAL_WORLD_SIZE).
        share: Share of the rank's cores for the workers, as DeepSpeed's cpuadam_cores_perc.
        scope: "node", or "package" for all nodes of that node's package.
        load_driver: As in `read`.
        root: As in `read`.

    Raises:
        InvalidArgumentError: An argument is out of range."""
    ranks = _arguments.between("ranks", ranks, 1, _MOST_32)
    return _cores(root, load_driver, ranks, _arguments.between("rank", rank, 0, ranks - 1), share, scope)


def split(share: float = 0.8) -> Cores:
    """Returns the processors of this process, divided between trainer and workers.

    Under a launcher that has not bound its ranks, LOCAL_RANK and LOCAL_WORLD_SIZE first say which processors are this
    rank's, as in `place`. Otherwise all processors that the calling thread may use are.

    Raises:
        InvalidArgumentError: `share` is not above 0 and at most 1."""
    rank, ranks = _ranks_here()
    if ranks > 1 and not read().bound:
        return place(rank, ranks, share)
    return _cores(None, False, 0, 0, share, "node")


def _ranks_here() -> tuple[int, int]:
    """LOCAL_RANK and LOCAL_WORLD_SIZE, which a launcher sets; 0 and 1 without one."""
    rank, ranks = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    launched = rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)
    return (int(rank), int(ranks)) if launched else (0, 1)


def bind(cpus: Iterable[int] | str) -> None:
    """Binds the library's worker threads to processors, given as numbers or as a list such as "8-71".

    Without a number from `set_num_threads` or SPILLWAY_NUM_THREADS there is a worker for each core.

    Raises:
        InvalidArgumentError: No processor is given, or one that is offline or not in the process's cpuset."""
    text = cpus if isinstance(cpus, str) else ",".join(str(_arguments.between("cpus", cpu, 0, _MOST_32)) for cpu in cpus)
    with _Handle() as handle:
        _native.call("spw_topo_bind_workers", handle.value, text.encode())


def unbind() -> None:
    """Undoes `bind`."""
    _native.call("spw_topo_unbind_workers")


def workers() -> tuple[int, ...]:
    """Returns the processors to which the workers are bound; none if they are not bound."""
    return _numbers(_native.text("spw_topo_get_workers"))


def node_of_path(path: str | os.PathLike[str]) -> int | None:
    """Returns the node of the drive that holds a file or directory; None if it is not known."""
    node = ctypes.c_uint32()
    with _Handle() as handle:
        _native.call("spw_topo_get_path_node", handle.value, _arguments.path("path", path), ctypes.byref(node))
    return None if node.value == _abi.TOPO_NONE else node.value


def pages(array: Any, node: int) -> Pages:
    """Counts the pages of a numpy array or torch tensor that are on a node."""
    return pages_at(*_arrays.memory(array, "array", write=False), node)


def pages_at(address: int, size: int, node: int) -> Pages:
    """Counts the pages of `size` bytes from an address that are on a node. The memory is not touched."""
    address, size = _arguments.between("address", address, 0, _MOST_64), _arguments.between("size", size, 0, _MOST_64)
    node = _arguments.between("node", node, 0, _MOST_32)
    found = _abi.sized(_abi.TopoPages)
    _native.call("spw_topo_get_pages", address, size, node, ctypes.byref(found))
    return Pages(found.sampled, found.on_node, found.elsewhere, found.absent)


def _cores(root: Any, load_driver: bool, ranks: int, rank: int, share: float, scope: str) -> Cores:
    _arguments.one_of("scope", scope, _SCOPES)
    if isinstance(share, (str, bytes)) or not 0 < share <= 1:
        raise InvalidArgumentError(f"share is {share!r}; pass a number above 0 and at most 1")
    options = _abi.sized(_abi.TopoRankOptions)
    options.ranks, options.rank, options.scope, options.share = ranks, rank, _SCOPES[scope], share
    with _Handle(root, load_driver) as handle:
        return Cores(
            *(_numbers(handle.text("spw_topo_get_rank_cpus", ctypes.byref(options), which)) for which in (_ALL, _TRAINER, _WORKERS))
        )


def _numbers(text: str) -> tuple[int, ...]:
    ranges = (part.split("-") for part in text.split(",") if part)
    return tuple(number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1))


def _sets(fields: dict[str, Any], **others: Any) -> dict[str, Any]:
    lists: dict[str, Any] = {name: _numbers(fields[name]) for name in ("cpus", "near_cpus") if name in fields}
    return {**fields, **lists, **others}
