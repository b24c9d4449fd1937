"""Runs the program of a device: begins operations, waits for them, and keeps the buffers that passes exchange.

Invariants:
- The device follows its program. A begin hands the operation to a thread: one for passes, one each for fetches and
  offloads, one for each optimizer in flight. An end waits for it. What an operation reads is there when it begins,
  because the program has the ends of its dependencies before.
- A buffer is held from the begin of the operation that makes it, and is freed with the end of its last user. The bytes
  of its value must be the bytes that were reserved. The executor decides by itself who uses a buffer; it does not read
  the plan's changes of memory. A test compares the two.

Keys of buffers: ("x", unit, micro-batch) is the input of a unit, ("y", ...) the sent copy of an input that another device
reads, ("d", ...) the gradient of an input, ("a", ...) activations, ("p", unit, units) parameters, ("g", unit) accumulated
gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ..errors import SpillwayError
from ._channels import Channels
from ._plan import COMPUTE, MEMORY, Operation, Plan


class Event(NamedTuple):
    """A measured change of memory, with the fields of MemoryChange that can be measured."""

    operation: int
    memory: str
    freed: bool
    resident: int


class Memory:
    """The buffers of a device, with their bytes by kind of memory."""

    def __init__(self) -> None:
        self.resident = dict.fromkeys(MEMORY, 0)
        self._buffers: dict[tuple[Any, ...], list[Any]] = {}

    def reserve(self, memory: str, key: tuple[Any, ...], size: int, users: int = 1) -> None:
        """Counts a buffer whose value comes later."""
        assert key not in self._buffers, key
        self._buffers[key] = [memory, size, users, None]
        self.resident[memory] += size

    def fill(self, key: tuple[Any, ...], value: Any, size: int | None) -> None:
        """Sets the value of a buffer; `size` is its measured number of bytes, None if it cannot be measured."""
        buffer = self._buffers[key]
        if size is not None and size != buffer[1]:
            names = {
                "x": "the input",
                "y": "the input",
                "d": "the gradient of the input",
                "a": "the activations",
                "p": "the parameters",
                "g": "the gradients",
            }
            raise SpillwayError(
                f"{names[key[0]]} of unit {key[1]} has {size} bytes, but the plan has {buffer[1]}; all micro-batches need "
                "the shapes of the sample"
            )
        buffer[3] = value

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self._buffers

    def value(self, key: tuple[Any, ...]) -> Any:
        return self._buffers[key][3]

    def done(self, key: tuple[Any, ...]) -> None:
        """Ends a use; after the last one the buffer is freed."""
        assert key in self._buffers, key
        buffer = self._buffers[key]
        buffer[2] -= 1
        if buffer[2] == 0:
            del self._buffers[key]
            self.resident[buffer[0]] -= buffer[1]


class Executor:
    """Runs iterations of one device.

    Args:
        plan: The plan.
        device: The device.
        backend: Does the work: see LightBackend of the tests, and TorchBackend.
        channels: The messages from and to the other devices.
        progress: Called with the number of an operation before each of its commands, and as progress(number, True) when
            its pass begins; -1: the pass has ended.
        validate: Called with the device's verdict; returns a function that waits for the verdict of all devices."""

    def __init__(
        self,
        plan: Plan,
        device: int,
        backend: Any,
        channels: Channels,
        progress: Callable[..., None],
        validate: Callable[[bool], Callable[[], bool]],
    ):
        self.plan, self.device, self.backend, self.channels = plan, device, backend, channels
        self.progress, self.validate = progress, validate
        self.total = plan.stages * plan.split
        self._program = plan.program(device)
        self._sent = {(o.kind, o.first_unit, o.micro_batch) for o in plan.operations if o.device == device}
        self._frees = _last_uses(plan, self._program)
        self._passes, self._fetches, self._offloads = (ThreadPoolExecutor(1) for _ in range(3))
        optimizers = sum(1 for operation in plan.operations if operation.kind == "optimize" and operation.device == device)
        self._optimizers = ThreadPoolExecutor(max(1, min(optimizers, 4 if plan.async_optimizer else 1)))

    def run(self) -> tuple[list[Event], list[tuple[int, float, float]]]:
        """Runs an iteration. Returns the changes of memory, and for each pass its operation, start and end."""
        self.memory, self._spans = Memory(), list[tuple[int, float, float]]()
        events: list[Event] = []
        flights: dict[int, Any] = {}
        for number, end in self._program:
            operation = self.plan.operations[number]
            self.progress(number)
            before = dict(self.memory.resident)
            if end:
                flight = flights.pop(number)
                result = flight.result() if isinstance(flight, Future) else flight()
                getattr(self, f"_end_{operation.kind.split('_')[0]}")(operation, result, number)
            else:
                flights[number] = getattr(self, f"_begin_{operation.kind.split('_')[0]}")(operation, number)
            after = self.memory.resident
            events += [Event(number, memory, end, after[memory]) for memory in MEMORY if after[memory] != before[memory]]
        return events, self._spans

    def close(self) -> None:
        """Ends the threads after their present work."""
        for pool in (self._passes, self._fetches, self._offloads, self._optimizers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _computed(self, number: int, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        def timed() -> Any:
            self.progress(number, True)
            start = time.monotonic()
            try:
                return work(*arguments)
            finally:
                self._spans.append((number, start, time.monotonic()))
                self.progress(-1, True)

        return self._passes.submit(timed)

    def _sum(self, first: int, units: int, name: str) -> int:
        return sum(getattr(self.plan.units[unit], name) for unit in range(first, first + units))

    # Forward passes.

    def _begin_forward(self, operation: Operation, number: int) -> Future[Any]:
        first, after, micro_batch = operation.first_unit, operation.first_unit + operation.units, operation.micro_batch
        key = ("x", first, micro_batch)
        inputs = "checkpoints" if self.plan.recompute else "activations"
        if first == 0:
            self.memory.reserve(inputs, key, self.plan.units[0].input_bytes, 2)
            value = self.backend.input(micro_batch)
            self.memory.fill(key, value, self.backend.size(value))
        if after < self.total:
            size = self.plan.units[after].input_bytes
            if self._is_sent("send_activation", after, micro_batch):
                self.memory.reserve("messages", ("y", after, micro_batch), size)
            else:
                self.memory.reserve(inputs, ("x", after, micro_batch), size, 2)
        inner = range(first + 1, after) if self.plan.backward_split == 1 else range(0)
        for unit in inner:
            self.memory.reserve("checkpoints", ("x", unit, micro_batch), self.plan.units[unit].input_bytes)
        if not self.plan.recompute:
            self.memory.reserve("activations", ("a", first, micro_batch), self._sum(first, operation.units, "activation_bytes"))
        parameters = self.memory.value(("p", first, operation.units))
        return self._computed(number, self.backend.forward, first, operation.units, micro_batch, self.memory.value(key), parameters)

    def _end_forward(self, operation: Operation, result: Any, number: int) -> None:
        first, after, micro_batch = operation.first_unit, operation.first_unit + operation.units, operation.micro_batch
        output, inputs, activations = result
        for letter in ("x", "y"):
            if (
                after < self.total
                and (letter, after, micro_batch) in self.memory
                and self.memory.value((letter, after, micro_batch)) is None
            ):
                self.memory.fill((letter, after, micro_batch), output, self.backend.size(output))
        if self.plan.backward_split == 1:
            for unit in range(first + 1, after):
                self.memory.fill(("x", unit, micro_batch), inputs[unit], self.backend.size(inputs[unit]))
        if not self.plan.recompute:
            self.memory.fill(("a", first, micro_batch), activations, self.backend.activation_size(activations))
        self.memory.done(("x", first, micro_batch))
        self._free_parameters(number)

    def _is_sent(self, kind: str, unit: int, micro_batch: int | None) -> bool:
        return (kind, unit, micro_batch) in self._sent

    def _free_parameters(self, number: int) -> None:
        for key in self._frees.get(number, ()):
            self.backend.release(key[1], key[2])
            self.memory.done(key)

    # Backward passes.

    def _begin_recompute(self, operation: Operation, number: int) -> Future[Any]:
        first, units, micro_batch = operation.first_unit, operation.units, operation.micro_batch
        self.memory.reserve("activations", ("a", first, micro_batch), self._sum(first, units, "activation_bytes"))
        value, parameters = self.memory.value(("x", first, micro_batch)), self.memory.value(("p", first, units))
        return self._computed(number, self.backend.recompute, first, units, micro_batch, value, parameters)

    def _end_recompute(self, operation: Operation, result: Any, number: int) -> None:
        self.memory.fill(("a", operation.first_unit, operation.micro_batch), result, self.backend.activation_size(result))

    def _begin_backward(self, operation: Operation, number: int) -> Future[Any]:
        first, units, micro_batch = operation.first_unit, operation.units, operation.micro_batch
        after = first + units
        if ("g", first) not in self.memory:
            self.memory.reserve("gradients", ("g", first), self._sum(first, units, "grad_bytes"))
        if first > 0:
            self.memory.reserve("messages", ("d", first, micro_batch), self.plan.units[first].input_bytes)
        gradient = self.memory.value(("d", after, micro_batch)) if after < self.total else None
        activations, accumulated = self.memory.value(("a", first, micro_batch)), self.memory.value(("g", first))
        parameters = self.memory.value(("p", first, units))
        return self._computed(number, self.backend.backward, first, units, micro_batch, activations, gradient, accumulated, parameters)

    def _end_backward(self, operation: Operation, result: Any, number: int) -> None:
        first, after, micro_batch = operation.first_unit, operation.first_unit + operation.units, operation.micro_batch
        gradient, accumulated = result
        self.memory.fill(("g", first), accumulated, self.backend.gradient_size(accumulated))
        if first > 0:
            self.memory.fill(("d", first, micro_batch), gradient, self.backend.size(gradient))
        if after < self.total:
            self.memory.done(("d", after, micro_batch))
        self.memory.done(("a", first, micro_batch))
        self.memory.done(("x", first, micro_batch))
        self._free_parameters(number)

    # Parameters, gradients, optimizers.

    def _begin_fetch(self, operation: Operation, number: int) -> Future[Any]:
        first, units = operation.first_unit, operation.units
        self.memory.reserve("parameters", ("p", first, units), self._sum(first, units, "param_bytes"))
        return self._fetches.submit(self.backend.fetch, first, units)

    def _end_fetch(self, operation: Operation, result: Any, number: int) -> None:
        self.memory.fill(("p", operation.first_unit, operation.units), result, self.backend.size(result))

    def _begin_offload(self, operation: Operation, number: int) -> Future[Any]:
        first, units = operation.first_unit, operation.units
        return self._offloads.submit(self.backend.offload, first, units, self.memory.value(("g", first)))

    def _end_offload(self, operation: Operation, result: Any, number: int) -> None:
        self.memory.done(("g", operation.first_unit))

    def _begin_optimize(self, operation: Operation, number: int) -> Future[Any]:
        return self._optimizers.submit(self.backend.optimize, operation.first_unit, operation.units)

    def _end_optimize(self, operation: Operation, result: Any, number: int) -> None:
        pass

    def _begin_validate(self, operation: Operation, number: int) -> Callable[[], bool]:
        return self.validate(self.backend.verdict())

    def _end_validate(self, operation: Operation, result: bool, number: int) -> None:
        self.backend.validated(result)

    # Messages.

    def _begin_send(self, operation: Operation, number: int) -> Future[Any]:
        key, wire = self._keys(operation)
        value = self.memory.value(key)
        return self.channels.send(operation.peer or 0, wire, lambda: self.backend.encode(value))

    def _end_send(self, operation: Operation, result: Any, number: int) -> None:
        self.memory.done(self._keys(operation)[0])

    def _begin_receive(self, operation: Operation, number: int) -> Future[Any]:
        key, wire = self._keys(operation)
        memory, users = {
            "activation": ("checkpoints" if self.plan.recompute else "activations", 2),
            "gradient": ("messages", 1),
            "checkpoint": ("checkpoints", 1),
        }[wire[0]]
        self.memory.reserve(memory, key, self.plan.units[key[1]].input_bytes, users)
        return self.channels.receive(operation.peer or 0, wire)

    def _end_receive(self, operation: Operation, result: Any, number: int) -> None:
        value = self.backend.decode(*result)
        self.memory.fill(self._keys(operation)[0], value, self.backend.size(value))

    def _keys(self, operation: Operation) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The key of a message's buffer on this device, and of the message."""
        direction, what = operation.kind.split("_")
        unit, micro_batch = operation.first_unit, operation.micro_batch
        if what == "gradient":
            key = ("d", unit + operation.units, micro_batch)
        else:
            key = ("y" if (direction, what) == ("send", "activation") else "x", unit, micro_batch)
        return key, (what, unit, micro_batch)


def _last_uses(plan: Plan, program: list[Any]) -> dict[int, list[tuple[Any, ...]]]:
    """For each pass the parameters that no later pass reads before they are fetched again."""
    last: dict[tuple[Any, ...], int] = {}
    frees: dict[int, list[tuple[Any, ...]]] = {}

    def free(key: tuple[Any, ...]) -> None:
        if key in last:
            frees.setdefault(last.pop(key), []).append(key)

    for number, end in program:
        operation = plan.operations[number]
        key = ("p", operation.first_unit, operation.units)
        if operation.kind == "fetch" and not end:
            free(key)
        elif operation.kind in COMPUTE and end:
            last[key] = number
    for key in list(last):
        free(key)
    return frees
