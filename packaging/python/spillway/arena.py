"""EXPERIMENTAL: arenas, parameters that several processes of one machine share.

One process creates an arena with named regions, and is its owner; the others map it by its name, or by the descriptor
of a memfd. Each region has a generation, the number of the step whose values it holds. A reader gets the values of one
whole step, waits, or gets an error.

    with Arena.create("job-17", {"layers": 4096}) as arena:             # the owner
        with arena.write("layers", generation=1):
            arena.view("layers", "f32")[:] = 0.5

    with Arena.open("job-17", timeout=10) as arena:                     # another process
        generation, values = arena.read("layers", "f32", at_least=1, timeout=10)"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import _abi, _arguments, _kept, _native
from ._native_handle import _NativeHandle
from .errors import BusyError, InvalidArgumentError, SpillwayError
from .optim import StepStats

_HUGE, _BIND_NODE, _COLLECT = _abi.ARENA_FLAG_HUGE, _abi.ARENA_FLAG_BIND_NODE, _abi.ARENA_FLAG_COLLECT
_WRITE, _ORPHAN = _abi.ARENA_OPEN_FLAG_WRITE, _abi.ARENA_OPEN_FLAG_ORPHAN


class ArenaInfo(NamedTuple):
    """An arena as this process sees it.

    Attributes:
        fd: A descriptor of the memory, valid until close; it may be sent to other processes.
        base: Address in this process.
        bytes: Length of the mapping.
        id: Random number of the arena.
        regions: Number of regions.
        processes: Number of processes that post verdicts.
        owner_pid: Process id of the owner.
        owner_lives: True if the owner has the arena open.
        is_owner: True if this object created the arena.
        writable: True if it is mapped for writing.
        huge: True if reserved huge pages back it.
        notes: Requested properties that the arena lacks, with the reasons; empty if it has all of them."""

    fd: int
    base: int
    bytes: int
    id: int
    regions: int
    processes: int
    owner_pid: int
    owner_lives: bool
    is_owner: bool
    writable: bool
    huge: bool
    notes: str


class Region(NamedTuple):
    """A region of an arena.

    Attributes:
        name: Its name.
        index: Its number.
        address: Address in this process.
        offset: Offset in the arena, the same in every process.
        bytes: Length.
        generation: The step whose values it holds; 0 before the first write.
        in_write: True if a write has begun and has not ended."""

    name: str
    index: int  # type: ignore[assignment]
    address: int
    offset: int
    bytes: int
    generation: int
    in_write: bool


class RegionVersion(NamedTuple):
    """A region at the begin of a read in place.

    Attributes:
        generation: The step whose values it holds.
        sequence: For `Arena.validate`."""

    generation: int
    sequence: int


class Verdict(NamedTuple):
    """The results of all processes together.

    Attributes:
        nonfinite: True if a gradient of any process is Inf or NaN.
        failed: Number of processes that failed.
        sum_squares: Sum of squares over all processes; NaN if `nonfinite`."""

    nonfinite: bool
    failed: int
    sum_squares: float


class Arena(_NativeHandle):
    """Shared memory with named regions. Thread-safe. Make one by `Arena.create`, `Arena.open` or `Arena.open_fd`.

    Views and tensors are memory of the arena itself. The arena stays mapped while one of them is alive: close() raises
    BusyError then, and a `with` block that ends leaves the close to the last of them.

    Example:
        with Arena.create("job-17", {"layers": 4096}) as arena:
            with arena.write("layers", generation=1):
                arena.view("layers", "f32")[:] = 0.5"""

    closer = "spw_arena_close"

    def __init__(self, opener: str, *arguments: Any):
        self._views = _kept.Living()
        self._regions: dict[str, int] = {}
        #: What was asked for: its name, and how it is mapped.
        self._asked: dict[str, Any] = {}
        self._hold(opener, *arguments)

    @classmethod
    def create(
        cls,
        name: str | None,
        regions: Mapping[str, int],
        *,
        processes: int = 0,
        huge: bool = False,
        node: int | None = None,
        collect: bool = False,
    ) -> Arena:
        """Creates an arena, whose regions hold zeros in generation 0. This object is its owner: its close removes the name.

        Args:
            name: Letters, digits, dots, dashes and underscores; None: a memfd, which others open by a descriptor.
            regions: For each name of a region its length in bytes.
            processes: Number of processes that post verdicts.
            huge: Try huge pages; `info().notes` says why there are none.
            node: NUMA node to which the pages are bound.
            collect: Remove an arena of this name whose owner has ended.

        Raises:
            ArenaExistsError: An arena of this name exists.
            ArenaFormatError: The file of this name is no arena; it stays.
            ArenaForeignError: The name belongs to another user, or is a link.
            SystemCallError: There is too little shared memory."""
        table = (_abi.ArenaRegion * len(regions))()
        for row, (region, size) in zip(table, regions.items()):
            row.struct_size = ctypes.sizeof(_abi.ArenaRegion)
            row.name, row.bytes = (
                _arguments.text("Arena: a region's name", region),
                _arguments.unsigned(f"Arena: bytes of region {region}", size),
            )
        options = _abi.sized(_abi.ArenaOptions)
        options.name = None if name is None else _arguments.text("Arena: name", name)
        options.flags = _HUGE * huge + _BIND_NODE * (node is not None) + _COLLECT * collect
        options.regions = table
        options.region_count, options.node = len(table), _arguments.unsigned("Arena: node", node or 0, 32)
        options.processes = _arguments.unsigned("Arena: processes", processes, 32)
        return cls("spw_arena_create", ctypes.byref(options))._named(name=name, regions=dict(regions), owner=True)

    @classmethod
    def open(cls, name: str, *, write: bool = False, orphan: bool = False, timeout: float | None = 0.0) -> Arena:
        """Opens an arena by its name.

        Args:
            name: The name.
            write: Map it for writing too.
            orphan: Open it also if its owner has ended.
            timeout: Seconds to wait for an arena that does not exist yet, or whose owner has ended; None: no limit.

        Raises:
            ArenaMissingError: There is none.
            PeerEndedError: Its owner has ended.
            ArenaFormatError: It is truncated, damaged, not an arena, or of another version.
            ArenaForeignError: It belongs to another user."""
        return cls(
            "spw_arena_open", _arguments.text("Arena: name", name), _WRITE * write + _ORPHAN * orphan, _arguments.milliseconds(timeout)
        )._named(name=name, write=write)

    @classmethod
    def open_fd(cls, fd: int, *, write: bool = False, orphan: bool = False) -> Arena:
        """Opens an arena without a name by a descriptor of its memory, which stays the caller's. Arguments and errors as
        of `open`."""
        return cls("spw_arena_open_fd", _arguments.signed("Arena: fd", fd), _WRITE * write + _ORPHAN * orphan)._named(write=write)

    def _named(self, **asked: Any) -> Arena:
        self._asked = asked
        return self

    def _facts(self) -> dict[str, Any]:
        return self._asked

    def info(self) -> ArenaInfo:
        """Returns the properties of the arena and of its mapping in this process."""
        found = _abi.sized(_abi.ArenaInfo)
        self._call("spw_arena_get_info", ctypes.byref(found))
        notes = self._through(lambda handle: _native.text("spw_arena_get_notes", handle))
        return ArenaInfo(
            found.fd,
            found.base,
            found.bytes,
            found.id,
            found.region_count,
            found.processes,
            found.owner_pid,
            bool(found.owner_lives),
            bool(found.is_owner),
            bool(found.writable),
            bool(found.huge),
            notes,
        )

    def fileno(self) -> int:
        """Returns a descriptor of the memory, valid until close. It may be sent to other processes."""
        return self.info().fd

    def regions(self) -> list[Region]:
        """Returns all regions."""
        return [self._region(index) for index in range(self.info().regions)]

    def region(self, name: str) -> Region:
        """Returns the region of that name."""
        return self._region(self._index(name))

    def view(self, name: str, dtype: Any = "f32", shape: Any = None) -> Any:
        """Returns the memory of a region as a numpy array, read-only if the arena is.

        Other processes may write to it at any time: see `snapshot` and `validate`, or `read` for a copy.

        Args:
            name: The region.
            dtype: "f32", "f16", "bf16" (as uint16), or a numpy dtype of plain numbers.
            shape: Shape of the array, which begins at the region's first byte; None: flat, the whole region. One length may
                be -1: the array has the whole region then, which must have a whole number of such rows.

        Raises:
            InvalidArgumentError: The dtype has Python objects, or the shape does not fit the region."""
        import numpy

        kind = _arguments.numpy_dtype("Arena.view: dtype", dtype)
        memory = self._memory(name)
        flat = numpy.frombuffer(memory, kind, len(memory) // kind.itemsize)
        if shape is None:
            found = flat
        else:
            lengths = _arguments.shape("Arena.view: shape", shape, len(flat))
            found = flat[: math.prod(lengths)].reshape(lengths)
        if not self.info().writable:
            found.flags.writeable = False
        return found

    def tensor(self, name: str, dtype: Any = None, shape: Any = None) -> Any:
        """Returns the memory of a region as a torch tensor. A write to a tensor of a read-only arena ends the process with
        SIGSEGV. Arguments as of `view`, with torch dtypes; None: torch.float32."""
        import torch

        known = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, None: torch.float32}
        kind = dtype if isinstance(dtype, torch.dtype) else known.get(dtype)
        if kind is None:
            raise InvalidArgumentError(f'Arena.tensor: dtype is {dtype!r}; pass a torch dtype, "f32", "f16" or "bf16"')
        memory = self._memory(name)
        flat = torch.frombuffer(memory, dtype=kind, count=len(memory) // kind.itemsize)
        if shape is None:
            return flat
        lengths = _arguments.shape("Arena.tensor: shape", shape, len(flat))
        return flat[: math.prod(lengths)].reshape(lengths)

    def read(self, name: str, dtype: Any = "f32", *, at_least: int = 0, timeout: float | None = None) -> tuple[int, Any]:
        """Returns the generation of a region and a copy of its values, all of that one step.

        Args:
            name: The region.
            dtype: As of `view`.
            at_least: Wait for this generation.
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TornError: The writer ended in the middle of a write.
            TimedOutError: The message names the writer, or the generation."""
        import numpy

        kind = _arguments.numpy_dtype("Arena.read: dtype", dtype)
        copy = numpy.empty(self.region(name).bytes // kind.itemsize, kind)
        return self.read_into(name, copy, at_least=at_least, timeout=timeout), copy

    def read_into(self, name: str, to: Any, *, offset: int = 0, at_least: int = 0, timeout: float | None = None) -> int:
        """Copies values of one whole step to a numpy array, torch tensor or bytearray; returns the generation.

        Args:
            name: The region.
            to: Receives the bytes; its length counts.
            offset: First byte in the region.
            at_least: Wait for this generation.
            timeout: Longest wait in seconds; None: no limit."""
        from . import _arrays

        address, size = _arrays.memory(to, "to", True)
        generation = ctypes.c_uint64()
        self._wait_by(
            timeout,
            "spw_arena_read",
            self._index(name),
            _arguments.unsigned("Arena: at_least", at_least),
            _arguments.unsigned("Arena: offset", offset),
            address,
            size,
            after=(ctypes.byref(generation),),
        )
        return generation.value

    def snapshot(self, name: str, *, at_least: int = 0, timeout: float | None = None) -> RegionVersion:
        """Begins a read in place: waits until no writer is at work. Data that is read is valid only after `validate`.

        Args:
            name: The region.
            at_least: Wait for this generation.
            timeout: Longest wait in seconds; None: no limit."""
        found = _abi.sized(_abi.ArenaSnapshot)
        self._wait_by(
            timeout,
            "spw_arena_read_begin",
            self._index(name),
            _arguments.unsigned("Arena: at_least", at_least),
            after=(ctypes.byref(found),),
        )
        return RegionVersion(found.generation, found.sequence)

    def validate(self, name: str, snapshot: RegionVersion) -> None:
        """Raises ChangedError if the region was written since the snapshot."""
        seen = _abi.sized(_abi.ArenaSnapshot)
        seen.generation, seen.sequence = snapshot
        self._call("spw_arena_read_validate", self._index(name), ctypes.byref(seen))

    @contextlib.contextmanager
    def write(self, name: str, generation: int) -> Iterator[bool]:
        """A `with` block that writes a region as `generation`, which is above the present one. Readers wait meanwhile.

        The value of the block is True if an earlier writer ended in the middle of a write: then every byte must be
        written. An exception in the block leaves the region torn.

        Raises:
            BusyError: Another process or thread writes the region, or a stage has it."""
        # A signal handler may raise between any two bytecodes: the outcome says whether a write has begun.
        index, torn = self._index(name), ctypes.c_uint32()
        outcome: list[int] = []
        _arguments.unsigned("Arena: generation", generation)
        try:
            self._recorded(outcome, "spw_arena_write_begin", index, generation, ctypes.byref(torn))
            yield bool(torn.value)
            self._call("spw_arena_write_end", index)
        except BaseException:
            if outcome == [0]:
                # An error means that the write has ended already.
                with contextlib.suppress(SpillwayError):
                    self._call("spw_arena_write_abort", index, 0)
            raise

    def write_begin(self, name: str, generation: int) -> bool:
        """Begins a write; returns True if every byte must be written, because an earlier writer ended in a write."""
        torn = ctypes.c_uint32()
        self._call("spw_arena_write_begin", self._index(name), _arguments.unsigned("Arena: generation", generation), ctypes.byref(torn))
        return bool(torn.value)

    def write_end(self, name: str) -> None:
        """Ends a write: the region holds the whole of its new generation. InvalidArgumentError if a stage has the region."""
        self._call("spw_arena_write_end", self._index(name))

    def write_abort(self, name: str, *, restored: bool = False) -> None:
        """Ends a write without a new generation. The region is torn, unless `restored`: every byte is as before. Errors as of
        `write_end`."""
        self._call("spw_arena_write_abort", self._index(name), int(restored))

    def join(self, process: int) -> None:
        """Takes the number `process` for this object, before the first round, so that others notice its death. An open round
        that an earlier process posted with this number is aborted."""
        self._call("spw_arena_join", _arguments.unsigned("Arena.join: process", process, 32))

    def post(self, process: int, round: int, stats: StepStats | tuple[bool, float], *, failed: bool = False) -> None:
        """Posts the local result of a round, each round once, after the round before got its outcome. A round is decided
        once all processes have posted it.

        Args:
            process: The number that this object joined as.
            round: Number of the round, from 1 to 2**32 - 1.
            stats: The StepStats of this process.
            failed: True if a stage of this process failed."""
        outcome: list[int] = []
        self._post(outcome, process, round, stats, failed)

    def _post(self, outcome: list[int], process: int, round: int, stats: StepStats | tuple[bool, float], failed: bool) -> None:
        """post(), which appends its status to `outcome` in one step with the call."""
        given = _abi.sized(_abi.StepStats)
        given.nonfinite, given.sum_squares = int(stats[0]), stats[1]
        number = _arguments.unsigned("Arena.post: process", process, 32)
        which = _arguments.unsigned("Arena.post: round", round)
        self._recorded(outcome, "spw_arena_post", number, which, ctypes.byref(given), int(failed))

    def wait_verdict(self, round: int, *, timeout: float | None = None) -> Verdict:
        """Waits until `round` is decided; all processes get the same outcome, and the same Verdict.

        Args:
            round: Number of the round.
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            PeerEndedError: The round is aborted for all processes: a process left it, or ended before it posted. Roll back.
                An object that has not joined aborts no round: it waits on for a process that ended.
            TimedOutError: The round is open. Wait again, or abort it; do not roll back before."""
        found = _abi.sized(_abi.ArenaVerdict)
        self._wait_by(
            timeout, "spw_arena_wait_verdict", _arguments.unsigned("Arena.wait_verdict: round", round), after=(ctypes.byref(found),)
        )
        return Verdict(bool(found.nonfinite), found.failed, found.sum_squares)

    def abort_round(self, process: int, round: int) -> Verdict | None:
        """Leaves a round, posted or not: aborts it for all processes, unless it is decided. Returns the Verdict of a decided
        round, which this process follows as all others do; None if the round is aborted. Open rounds before it are aborted
        too.

        Args:
            process: The number that this object joined as.
            round: Number of the round."""
        found, decided = _abi.sized(_abi.ArenaVerdict), ctypes.c_uint32()
        self._call(
            "spw_arena_abort_round",
            _arguments.unsigned("Arena.abort_round: process", process, 32),
            _arguments.unsigned("Arena.abort_round: round", round),
            ctypes.byref(decided),
            ctypes.byref(found),
        )
        return Verdict(bool(found.nonfinite), found.failed, found.sum_squares) if decided.value else None

    def close(self) -> None:
        """Unmaps the arena; the owner removes its name. BusyError while a view or tensor of it is alive."""
        self._check_views()
        # Once more when no call is in flight: another thread may have made a view meanwhile.
        self._end(before=lambda _: self._check_views())

    def _check_views(self) -> None:
        alive = len(self._views.list())
        if alive and self._cell:
            raise BusyError(f"cannot close this Arena: {alive} views or tensors of it are alive; delete them first")

    def __exit__(self, *_: object) -> None:
        if not self._views.list():
            self.close()

    def _index(self, name: str) -> int:
        if name not in self._regions:
            index = ctypes.c_uint32()
            self._call("spw_arena_find", _arguments.text("Arena: region", name), ctypes.byref(index))
            self._regions[name] = index.value
        return self._regions[name]

    def _region(self, index: int) -> Region:
        found, name = _abi.sized(_abi.ArenaRegionInfo), ctypes.create_string_buffer(65)
        self._call("spw_arena_get_region", index, ctypes.byref(found), name, len(name), None)
        return Region(name.value.decode(), index, found.address, found.offset, found.bytes, found.generation, bool(found.in_write))

    def _memory(self, name: str) -> Any:
        """The bytes of a region. They keep this arena alive, and mapped."""

        def mapped(_: Any) -> Any:
            found = self.region(name)
            # A class of its own: plain ctypes arrays take no attribute and no weak reference.
            kind: Any = type("_Memory", (ctypes.c_char * found.bytes,), {})
            memory = kind.from_address(found.address)
            memory.arena = self
            self._views.add(memory)
            return memory

        # A close in another thread waits until the bytes are among the views.
        return self._through(mapped)


def collect(name: str) -> None:
    """Removes the name of an arena whose owner has ended. Processes that have it open keep their memory.

    Raises:
        ArenaExistsError: Its owner lives.
        ArenaMissingError: There is none.
        ArenaFormatError: The file of this name is no arena; it stays. An empty file, or one of zeros, counts as an arena
            whose creation was interrupted: it is removed."""
    _native.call("spw_arena_collect", _arguments.text("Arena: name", name))
