"""Schedules: the C library plans, this module reads the plan once and keeps it as Python objects.

A Plan holds no memory of the library, and can be sent to other processes."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import _abi, _arguments, _native
from ..errors import InvalidArgumentError

SCHEDULES = {"afab": _abi.PIPELINE_SCHEDULE_AFAB, "1f1b": _abi.PIPELINE_SCHEDULE_1F1B, "decoupled": _abi.PIPELINE_SCHEDULE_DECOUPLED}
KINDS = (
    "forward",
    "backward",
    "recompute",
    "fetch",
    "offload",
    "optimize",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
    "send_checkpoint",
    "receive_checkpoint",
    "validate",
)
MEMORY = ("parameters", "checkpoints", "activations", "gradients", "messages")
COMPUTE = ("forward", "backward", "recompute")
_RECOMPUTE, _LATE, _ASYNC = (_abi.PIPELINE_FLAG_RECOMPUTE, _abi.PIPELINE_FLAG_LATE_CHECKPOINTS, _abi.PIPELINE_FLAG_ASYNC_OPTIMIZER)
_NONE = 2**32 - 1


class Unit(NamedTuple):
    """Costs of a unit; passes, activations and inputs are those of one micro-batch.

    Attributes:
        forward: Seconds of the forward pass.
        backward: Seconds of the backward pass.
        recompute: Seconds of the recomputation before it.
        fetch: Seconds of the transfer of the parameters to a device.
        offload: Seconds of the transfer of the gradients to host memory.
        optimizer: Seconds of the optimizer step on the CPU.
        param_bytes: Bytes of the parameters.
        grad_bytes: Bytes of the gradients.
        activation_bytes: Bytes of the activations that the backward pass reads.
        input_bytes: Bytes of the input, which is the output of the unit before."""

    forward: float = 1.0
    backward: float = 2.0
    recompute: float = 0.0
    fetch: float = 0.0
    offload: float = 0.0
    optimizer: float = 0.0
    param_bytes: int = 0
    grad_bytes: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0


class Operation(NamedTuple):
    """An operation of a device.

    Attributes:
        kind: "forward", "backward", "recompute", "fetch", "offload", "optimize", "validate", or "send_" or "receive_"
            with "activation", "gradient" or "checkpoint".
        device: The device.
        peer: The other device of a message, else None.
        micro_batch: The micro-batch; None for parameters, accumulated gradients, optimizers and validations.
        first_unit: First unit of the operation's stage. For a message, that of the stage that receives.
        units: Number of units of that stage; 1 for a checkpoint.
        begins: Position of the begin among the begins and ends of all operations. This order respects dependencies.
        ends: Position of the end.
        bytes: Bytes of a transfer or message.
        start: Seconds from the start of the iteration to the begin.
        end: Seconds from the start of the iteration to the end.
        dependencies: Numbers of the operations that end before this one begins. A receipt depends on its send, and
            begins and ends right behind it."""

    kind: str
    device: int
    peer: int | None
    micro_batch: int | None
    first_unit: int
    units: int
    begins: int
    ends: int
    bytes: int
    start: float
    end: float
    dependencies: tuple[int, ...]

    def describe(self) -> str:
        """Returns the operation in words."""
        stage = f"unit {self.first_unit}" if self.units == 1 else f"units {self.first_unit} to {self.first_unit + self.units - 1}"
        words = {
            "validate": "validation of the gradients",
            "optimize": f"optimizer step of {stage}",
            "fetch": f"fetch of the parameters of {stage}",
            "offload": f"offload of the gradients of {stage}",
        }
        text = words.get(self.kind, f"{self.kind.replace('_', ' of the ') if '_' in self.kind else self.kind} of {stage}")
        text += "" if self.micro_batch is None else f" on micro-batch {self.micro_batch}"
        return text if self.peer is None else f"{text} ({'to' if self.kind[0] == 's' else 'from'} device {self.peer})"


class MemoryChange(NamedTuple):
    """A change of the bytes of one kind of memory on one device.

    Attributes:
        operation: Number of the operation.
        device: Its device.
        memory: "parameters", "checkpoints", "activations", "gradients" or "messages".
        freed: True: freed at the end of the operation. False: allocated at its begin.
        bytes: The bytes that are allocated or freed.
        resident: The bytes of this kind on the device afterwards."""

    operation: int
    device: int
    memory: str
    freed: bool
    bytes: int
    resident: int


class Command(NamedTuple):
    """The begin or end of an operation, in the program of a device."""

    operation: int
    end: bool


@dataclasses.dataclass(frozen=True)
class Given:
    """The arguments of plan()."""

    schedule: str
    devices: int
    micro_batches: int
    stages: int
    split: int
    slots: int
    recompute: bool
    early_checkpoints: bool
    async_optimizer: bool
    latency: float
    seconds_per_byte: float
    units: tuple[Unit, ...]


@dataclasses.dataclass(frozen=True)
class Plan(Given):
    """A schedule, and what the model predicts for it.

    Attributes:
        schedule, devices, micro_batches, stages, split, slots, recompute, early_checkpoints, async_optimizer: As given.
        units: Costs of all units.
        operations: All operations, by device, and for each device in the order in which they begin.
        changes: All changes of memory, in their order.
        passes_seconds: Seconds from the first pass to the last.
        iteration_seconds: Seconds from the first fetch to the last operation.
        exposed_seconds: Seconds after the last pass: gradients and optimizer steps that nothing hides.
        passes_bubble_ratio: Idle time of the devices from the first pass to the last (SysX Equation 3).
        iteration_bubble_ratio: Idle time of the devices in the whole iteration (Figures 2 and 8).
        closed_bubble_ratio: passes_bubble_ratio by the closed form. None if none is known: it needs units of equal cost whose
            fetches, messages and recomputations take no time.
        peak_bytes: For each device the largest number of bytes at a time.
        peaks: For each device the largest number of bytes of each kind of memory.
        messages: Number and bytes of the fetches, and of sent activations, gradients and checkpoints."""

    operations: tuple[Operation, ...]
    changes: tuple[MemoryChange, ...]
    passes_seconds: float
    iteration_seconds: float
    exposed_seconds: float
    passes_bubble_ratio: float
    iteration_bubble_ratio: float
    closed_bubble_ratio: float | None
    peak_bytes: tuple[int, ...]
    peaks: tuple[dict[str, int], ...]
    messages: dict[str, tuple[int, int]]

    @property
    def backward_split(self) -> int:
        """Units of a backward stage."""
        return 1 if self.schedule == "decoupled" else self.split

    def program(self, device: int) -> list[Command]:
        """Returns the begins and ends of a device's operations, in order. Devices that follow their programs, and wait
        for their messages, cannot deadlock."""
        own = [(number, operation) for number, operation in enumerate(self.operations) if operation.device == device]
        commands = [(operation.begins, Command(number, False)) for number, operation in own]
        commands += [(operation.ends, Command(number, True)) for number, operation in own]
        return [command for _, command in sorted(commands)]

    def to_svg(self, width: int = 900) -> str:
        """Returns the timeline as an SVG picture of `width` pixels, from 200 to 20000.

        Raises:
            InvalidArgumentError: The width is another one, or more than 16384 operations take time."""
        pixels = _arguments.unsigned("Plan.to_svg: width", width, 32)
        handle = _open(self)
        try:
            return _native.text("spw_pipeline_get_svg", handle, pixels)
        finally:
            _native.call("spw_pipeline_close", handle)


class Rollback(NamedTuple):
    """Cost of rollbacks, as fractions of an iteration's time.

    Attributes:
        per_event: Cost of an iteration that is rolled back.
        mean: Mean cost over all iterations."""

    per_event: float
    mean: float


def rollback_cost(iteration: float, rollback: float, exposed: float = 0.0, every: float = 1.0) -> Rollback:
    """Computes the cost of rollbacks (SysX section 5.6).

    Args:
        iteration: Seconds of an iteration.
        rollback: Seconds of a rollback.
        exposed: Seconds of optimizer steps that no pass hides, and that would have been skipped.
        every: One of this many iterations is rolled back.

    Example:
        spillway.pipeline.rollback_cost(iteration=10, rollback=4, exposed=1.3, every=100).mean"""
    given = {"iteration": iteration, "rollback": rollback, "exposed": exposed, "every": every}
    values = {name: _arguments.real(f"rollback_cost: {name}", value) for name, value in given.items()}
    for name, least in (("rollback", 0.0), ("exposed", 0.0), ("every", 1.0)):
        if not least <= values[name] < math.inf:
            raise InvalidArgumentError(f"rollback_cost: {name} is {given[name]!r}; pass a finite number of at least {least:g}")
    if not 0 < values["iteration"] < math.inf:
        raise InvalidArgumentError(f"rollback_cost: iteration is {iteration!r}; pass a positive finite number of seconds")
    per_event = (values["rollback"] + values["exposed"]) / values["iteration"]
    if not math.isfinite(per_event):
        raise InvalidArgumentError(
            f"rollback_cost: iteration is {iteration!r}, too small beside the {rollback!r} and {exposed!r} seconds of rollback"
        )
    return Rollback(per_event, per_event / values["every"])


def plan(
    schedule: str,
    *,
    devices: int,
    micro_batches: int,
    stages: int,
    split: int = 1,
    units: Unit | Sequence[Unit] | None = None,
    slots: int = 2,
    recompute: bool | None = None,
    early_checkpoints: bool = True,
    async_optimizer: bool | None = None,
    latency: float = 0.0,
    seconds_per_byte: float = 0.0,
) -> Plan:
    """Plans a pipeline.

    Args:
        schedule: "afab" (GPipe; with more stages than devices Mobius), "1f1b" (DAPPLE; with more stages than devices
            Megatron's interleaved schedule) or "decoupled" (SysX).
        devices: Number of devices.
        micro_batches: Number of micro-batches.
        stages: Number of forward stages.
        split: Units per forward stage.
        units: The costs of each unit, or one Unit for all. None: a forward pass of a stage takes 1, a backward pass of
            all units of a stage takes 2, and nothing else takes time.
        slots: Number of parameter sets that a device has room for. A set is the parameters of a stage.
        recompute: Recompute the activations from checkpoints. None: True for "decoupled", which needs it.
        early_checkpoints: Send a checkpoint after its forward pass, and not right before the backward pass.
        async_optimizer: A stage's optimizer begins with its own gradients, and not when all gradients are in host
            memory. None: True for "decoupled".
        latency: Seconds of a message between devices.
        seconds_per_byte: Further seconds of a message per byte.

    Raises:
        InvalidArgumentError: The schedule is not possible with these numbers, has too many passes, or has times whose sum
            is not finite.

    Example:
        spillway.pipeline.plan("decoupled", devices=2, micro_batches=2, stages=2, split=2).passes_bubble_ratio"""
    decoupled = _arguments.one_of("plan: schedule", schedule, SCHEDULES) == "decoupled"
    devices, micro_batches, stages, split, slots = (
        _arguments.between(f"plan: {name}", value, 1, (1 << 32) - 1)
        for name, value in (("devices", devices), ("micro_batches", micro_batches), ("stages", stages), ("split", split), ("slots", slots))
    )
    if units is None:
        units = Unit(forward=1 / split, backward=2 / split)
    costs = (units,) if isinstance(units, Unit) else tuple(units)
    given: dict[str, Any] = dict(
        schedule=schedule,
        devices=devices,
        micro_batches=micro_batches,
        stages=stages,
        split=split,
        slots=slots,
        recompute=decoupled if recompute is None else bool(recompute),
        early_checkpoints=bool(early_checkpoints),
        async_optimizer=decoupled if async_optimizer is None else bool(async_optimizer),
        latency=latency,
        seconds_per_byte=seconds_per_byte,
    )
    handle = _open(Given(**given, units=costs))
    try:
        found = _read(handle, devices)
    finally:
        _native.call("spw_pipeline_close", handle)
    costs = costs * (stages * split) if len(costs) == 1 else costs
    return Plan(**given, units=costs, **found)


def _open(given: Given) -> ctypes.c_void_p:
    options = _abi.sized(_abi.PipelineOptions)
    options.schedule, options.devices, options.micro_batches = SCHEDULES[given.schedule], given.devices, given.micro_batches
    options.stages, options.split, options.slots = given.stages, given.split, given.slots
    options.flags = _RECOMPUTE * given.recompute + _LATE * (not given.early_checkpoints) + _ASYNC * given.async_optimizer
    options.latency, options.seconds_per_byte = given.latency, given.seconds_per_byte
    table = (_abi.PipelineUnit * len(given.units))()
    for slot, unit in zip(table, given.units):
        slot.struct_size = ctypes.sizeof(_abi.PipelineUnit)
        for name, value in unit._asdict().items():
            setattr(slot, name, value)
    handle = ctypes.c_void_p()
    _native.call("spw_plan_pipeline", ctypes.byref(options), table, len(table), ctypes.byref(handle))
    return handle


def _read(handle: ctypes.c_void_p, devices: int) -> dict[str, Any]:
    result = _abi.sized(_abi.PipelineResult)
    _native.call("spw_pipeline_get_result", handle, ctypes.byref(result))
    operations = _structs(_abi.PipelineOperation, result.operations)
    _native.call("spw_pipeline_get_operations", handle, 0, len(operations), operations)
    changes = _structs(_abi.PipelineChange, result.changes)
    _native.call("spw_pipeline_get_changes", handle, 0, len(changes), changes)
    numbers = (ctypes.c_uint32 * result.dependencies)()
    _native.call("spw_pipeline_get_dependencies", handle, 0, len(numbers), numbers)
    before, found = list(numbers), []
    for device in range(devices):
        one = _abi.sized(_abi.PipelineDevice)
        _native.call("spw_pipeline_get_device", handle, device, ctypes.byref(one))
        found.append(one)
    closed = result.closed_bubble_ratio
    return dict(
        operations=tuple(_operation(one, before) for one in operations),
        changes=tuple(
            MemoryChange(one.operation, one.device, MEMORY[one.memory], bool(one.freed), one.bytes, one.resident) for one in changes
        ),
        passes_seconds=result.passes_seconds,
        iteration_seconds=result.iteration_seconds,
        exposed_seconds=result.exposed_seconds,
        passes_bubble_ratio=result.passes_bubble_ratio,
        iteration_bubble_ratio=result.iteration_bubble_ratio,
        closed_bubble_ratio=closed if closed == closed else None,
        peak_bytes=tuple(one.peak_bytes for one in found),
        peaks=tuple({name: getattr(one, name) for name in MEMORY} for one in found),
        messages={
            "fetches": (result.fetches, result.fetched_bytes),
            "activations": (result.activations, result.activation_bytes),
            "gradients": (result.gradients, result.gradient_bytes),
            "checkpoints": (result.checkpoints, result.checkpoint_bytes),
        },
    )


def _structs(kind: Any, count: int) -> Any:
    """Room for `count` structs; the library reads the size of the first one."""
    table = (kind * count)()
    if count:
        table[0].struct_size = ctypes.sizeof(kind)
    return table


def _operation(one: Any, before: list[int]) -> Operation:
    peer = None if one.peer == _NONE else one.peer
    micro_batch = None if one.micro_batch == _NONE else one.micro_batch
    first = one.first_dependency
    return Operation(
        KINDS[one.kind],
        one.device,
        peer,
        micro_batch,
        one.first_unit,
        one.units,
        one.begins,
        one.ends,
        one.bytes,
        one.start,
        one.end,
        tuple(before[first : first + one.dependencies]),
    )
