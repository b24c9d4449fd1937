"""Checkpoints of torch.distributed.checkpoint (DCP) whose values move between a tier and the files one by one.

    from spillway.torch import dcp

    state = {"model": get_model_state_dict(model), "optim": dcp.states(model, optimizer)}
    dcp.save(state, "step-1000")

    state = {"model": get_model_state_dict(model), "optim": dcp.states(model, optimizer)}
    dcp.load(state, "step-1000")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])

The files are DCP's: torch's own save() and load() write and read them too, also for optimizers without a tier and in another number of
processes. Host memory holds the values of one parameter and of one subgroup, and one saved tensor."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import InvalidArgumentError, UnsupportedError
from ._dcp_codes import Conversion, conversions
from ._offload.optimizer import Offloaded
from ._optimizer import SpillwayOptimizer
from ._states import LOW, MASTER
from ._tensors import like, local
from ._tier import TierHome, Value, value_of

__all__ = ["load", "save", "states"]

#: Called with the bytes that were moved in this process, and those that will be.
Progress = Callable[[int, int], object]


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None = None) -> dict[str, Any]:
    """As get_optimizer_state_dict of torch, but values on a tier are placeholders: tensors with a shape and without memory.

    save() reads them. After load(), set_optimizer_state_dict() or load_state_dict() writes the values of the checkpoint to the tier. An
    optimizer without a tier has its states themselves. Before the first step torch makes states by a step with a learning rate of zero,
    which it counts. Those of AdamW, Adam, Adagrad, Lion, Signum and offload() do not count it here.

    Args:
        model: The model of all parameters of the optimizer.
        optimizer: The optimizer. Pass the result to save() before the next step.
        options: As torch takes it, without full_state_dict and cpu_offload.

    Raises:
        UnsupportedError: torch would copy the values, as for these options and for the first version of FSDP."""
    if not isinstance(optimizer, SpillwayOptimizer) or not isinstance(optimizer._home, TierHome):
        if isinstance(optimizer, (SpillwayOptimizer, Offloaded)) and not optimizer.state:
            _make_states(model, optimizer)
        return get_optimizer_state_dict(model, optimizer, options=options)
    if options is not None and (options.full_state_dict or options.cpu_offload):
        raise UnsupportedError("dcp.states: options has full_state_dict or cpu_offload, which copy all values; leave them out")
    home = optimizer._home

    def made() -> dict[str, Any]:
        with home.with_placeholders() as placeholders:
            found = get_optimizer_state_dict(model, optimizer, options=options)
        left = {id(value) for tensor in flatten_state_dict(found)[0].values() if (value := value_of(tensor)) is not None}
        if left != {id(value) for value in placeholders}:
            raise UnsupportedError(
                "dcp.states: get_optimizer_state_dict has copied values, or left some out; use it without dcp.states, and check that the "
                "model has all parameters of the optimizer"
            )
        return found

    return home.alone(made)


def _make_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Has torch make the states of an optimizer that has none, by a step with a learning rate of zero. This step does not count."""
    get_optimizer_state_dict(model, optimizer)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"])


def save(
    state_dict: dict[str, Any], directory: str | os.PathLike[str], *, process_group: Any = None, progress: Progress | None = None
) -> None:
    """Writes a checkpoint as torch's save() does. Every process calls it.

    Args:
        state_dict: A state dict, in which results of states() are.
        directory: The directory.
        process_group: The processes; None: all.
        progress: Called after each tensor with the bytes that this process has written, and those that it will write.

    Raises:
        CheckpointException: A process failed. In a run of one process as well, torch raises it with the cause; an OutOfOrderError, if the
            optimizer was stepped since states(), is such a cause.

    Example:
        dcp.save({"optim": dcp.states(model, optimizer)}, "step-1000", progress=lambda done, total: print(done / total))"""
    checkpoint.save(
        state_dict, storage_writer=_Writer(directory, progress or _unnoticed), planner=_SavePlanner(), process_group=process_group
    )


def load(
    state_dict: dict[str, Any], directory: str | os.PathLike[str], *, process_group: Any = None, progress: Progress | None = None
) -> None:
    """Reads a checkpoint into a state dict, as torch's load() does. Every process calls it.

    Placeholders of states() are read later, when set_optimizer_state_dict() or load_state_dict() writes them to the tier: the files must
    stay until then. Call commit() afterwards.

    Moments that the checkpoint has in 8 bits are decoded for an optimizer with float moments, and the reverse, without DTensors.

    A checkpoint without masters, such as one of torch's own optimizers, leaves them to the values of the parameters: load these first. A
    master in host memory is then a new tensor of NaN, which stands for these values; set_optimizer_state_dict() takes it.

    Args:
        state_dict: A state dict, in which results of states() are.
        directory: The directory of a checkpoint by save(), or by torch's.
        process_group: The processes; None: all.
        progress: Called for each value of a placeholder that was read, with the bytes that this process has read, and those that it will
            read.

    Raises:
        CheckpointException: The checkpoint lacks a value, or has another shape; nothing was loaded."""
    flat, paths = flatten_state_dict(state_dict)
    reader = FileSystemReader(directory)
    saved = _names_in(reader)
    waiting = {name: tensor for name, tensor in flat.items() if value_of(tensor) is not None}
    rest = {name: value for name, value in flat.items() if name not in waiting}
    # Moments that the checkpoint has in the other form: in memory they are read at once.
    converted, later = conversions(rest, saved), {one.wanted[0]: one for one in conversions(waiting, saved, "meta")}
    for one in converted:
        rest = {**{name: value for name, value in rest.items() if name not in one.wanted}, **one.asked}
    asked = {name: tensor for name, tensor in waiting.items() if name not in later}
    for one in later.values():
        asked |= one.asked
    planner = _LoadPlanner(asked)
    checkpoint.load(rest, storage_reader=reader, planner=planner, process_group=process_group)
    for one in converted:
        for name, made in one.values().items():
            _set(state_dict, paths[name], made)
    for name, value in rest.items():
        if name in paths:
            _set(state_dict, paths[name], value if name not in planner.lacking else _no_master(value))
    total = sum(local(tensor).nbytes for name, tensor in waiting.items() if name in planner.items or name in later)
    told = _Counted(progress or _unnoticed, total)
    for name, tensor in waiting.items():
        value, of_codes = value_of(tensor), later.get(name)
        assert isinstance(value, Value)
        value.absent = of_codes is None and name not in planner.items
        end = partial(told, local(tensor).nbytes)
        if of_codes is None:
            value.fill = partial(_fill, reader, planner.items.get(name, []), end)
        else:
            value.fill = partial(_fill_decoded, reader, planner.items, of_codes, end)


def _names_in(reader: FileSystemReader) -> Collection[str]:
    """The names of the values of a checkpoint; none if it cannot be read, which the load says."""
    try:
        return reader.read_metadata().state_dict_metadata.keys()
    except (OSError, CheckpointException):
        return ()


def _fill_decoded(
    reader: FileSystemReader, items: Mapping[str, list[Any]], one: Conversion, told: Callable[[], object], into: torch.Tensor
) -> None:
    read = {name: torch.empty_like(tensor, device="cpu") for name, tensor in one.asked.items()}
    for name, tensor in read.items():
        _fill(reader, items[name], _nothing_told, tensor)
    into.copy_(one._replace(asked=read).values()[one.wanted[0]])
    told()


def _nothing_told() -> None:
    """The caller tells the progress."""


def _no_master(own: torch.Tensor) -> torch.Tensor:
    """A master in the place of this one that has the values of the parameter: NaN, or low bits of 0."""
    part = local(own)
    return like(own, torch.full_like(part, math.nan) if part.is_floating_point() else torch.zeros_like(part))


def _set(state_dict: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        state_dict = state_dict[key]
    state_dict[path[-1]] = value


def _fill(reader: FileSystemReader, items: list[Any], told: Callable[[], object], into: torch.Tensor) -> None:
    try:
        reader.read_data(LoadPlan(items), _Into(into)).wait()
    # torch raises errors of many types for a file that was truncated.
    except Exception as error:
        names = ", ".join(sorted({item.storage_index.fqn for item in items}))
        raise InvalidArgumentError(
            f"{names} cannot be read from a file of the checkpoint {reader.checkpoint_id} any more: {type(error).__name__}: {error}; keep "
            "the files until the states are loaded"
        ) from error
    told()


def _unnoticed(done: int, total: int) -> None:
    """No progress was asked for."""


class _Counted:
    """Adds up what was moved."""

    def __init__(self, progress: Progress, total: int):
        self._progress, self._done, self._total = progress, 0, total

    def __call__(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)


class _SavePlanner(DefaultSavePlanner):
    """Reads a placeholder when its value is to be written."""

    def resolve_data(self, write_item: Any) -> Any:
        value = value_of(self.state_dict[write_item.index.fqn])
        return super().resolve_data(write_item) if value is None else value.read()


class _Writer(FileSystemWriter):
    """Writes a file for each process, as torch's writer. That one holds all tensors of a file until its end."""

    def __init__(self, directory: Any, progress: Progress):
        super().__init__(directory)
        self._progress = progress

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        told = _Counted(self._progress, sum(_bytes_of(item) for item in plan.items))
        name = f"{plan.storage_data.prefix}0.distcp"
        if plan.items:
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                for item in plan.items:
                    offset, data = stream.tell(), planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        stream.write(data.getbuffer())
                    else:
                        torch.save(_alone(data), stream)
                    length = stream.tell() - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
                    told(_bytes_of(item))
                stream.flush()
                os.fsync(stream.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory of its own size: torch.save writes the whole storage."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().size() == tensor.nbytes else tensor.clone()


def _bytes_of(item: Any) -> int:
    return 0 if item.tensor_data is None else item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


class _LoadPlanner(DefaultLoadPlanner):
    """Leaves out the values of placeholders.

    Args:
        waiting: The placeholders, by their names in the checkpoint.

    Attributes:
        items: What is to be read for each of them, except for masters that the checkpoint lacks.
        lacking: The masters in host memory that the checkpoint lacks."""

    state_dict: dict[str, Any]

    def __init__(self, waiting: dict[str, torch.Tensor]):
        super().__init__()
        self._waiting = waiting
        self.items: dict[str, list[Any]] = {}
        self.lacking: set[str] = set()

    def create_local_plan(self) -> LoadPlan:
        saved = () if self.metadata is None else self.metadata.state_dict_metadata
        wanted = {name: tensor for name, tensor in self._waiting.items() if not _is_lacking(name, saved)}
        self.lacking = {name for name in self.state_dict if _is_lacking(name, saved)}
        self.state_dict = {**{name: value for name, value in self.state_dict.items() if name not in self.lacking}, **wanted}
        plan = super().create_local_plan()
        self.items = {name: [] for name in wanted}
        for item in plan.items:
            self.items.get(item.dest_index.fqn, []).append(item)
        return dataclasses.replace(plan, items=[item for item in plan.items if item.dest_index.fqn not in wanted])


def _is_lacking(name: str, saved: Any) -> bool:
    """True for a master whose parameter has none in a checkpoint with these names."""
    parameter, _, state = name.rpartition(".")
    other = {MASTER: LOW, LOW: MASTER}.get(state)
    if other is None or name in saved:
        return False
    if f"{parameter}.{other}" in saved:
        own = "split" if other == LOW else "f32"
        raise InvalidArgumentError(
            f"the checkpoint has {parameter}.{other}, and this optimizer {name}: the masters are of the other kind; load it with an "
            f"optimizer of {own!r} masters"
        )
    return True


class _Into(DefaultLoadPlanner):
    """Reads one tensor."""

    def __init__(self, into: torch.Tensor):
        super().__init__()
        self._into = into

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return self._into
