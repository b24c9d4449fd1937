"""The parameters of all units in an arena that the processes of a pipeline share (SysX section 4).

Invariants:
- A unit has a region. Its generation is the number of steps that changed it.
- The process with a stage's backward passes steps its parameters. A write of the stage's regions lasts from the optimizer
  step to the verdict of all devices: a step that is rolled back never becomes a generation.
- A fetch waits for the generation of the step before, and copies one whole generation.
- The arena has no name (memfd): nothing is left when all processes have ended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..arena import Arena
from ..errors import InvalidArgumentError, SpillwayError, TornError

#: Parameters begin on whole cache lines.
_ALIGN = 64


class _Place(NamedTuple):
    """A parameter in the region of its unit."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    trained: bool


class Store:
    """The parameters of all units.

    Args:
        units: The modules, whose parameters are copied."""

    def __init__(self, units: Sequence[torch.nn.Module]):
        self._places: list[list[_Place]] = []
        owner: dict[int, int] = {}
        for number, unit in enumerate(units):
            places: list[_Place] = []
            for name, parameter in unit.named_parameters():
                if owner.setdefault(id(parameter), number) != number:
                    raise InvalidArgumentError(
                        f"Pipeline: parameter {name} of unit {number} belongs to unit {owner[id(parameter)]} too; a "
                        "parameter must belong to one unit"
                    )
                if parameter.device.type != "cpu" or type(parameter.data) is not torch.Tensor:
                    raise InvalidArgumentError(
                        f"Pipeline: parameter {name} of unit {number} is a {type(parameter.data).__name__} on "
                        f"{parameter.device}; pass plain tensors in CPU memory"
                    )
                start = -(-places[-1].end // _ALIGN) * _ALIGN if places else 0
                places.append(_Place(parameter.dtype, tuple(parameter.shape), start, start + parameter.nbytes, parameter.requires_grad))
            self._places.append(places)
        _refuse_overlaps(units)
        self._arena = Arena.create(
            None, {_region(number): places[-1].end if places and places[-1].end else 1 for number, places in enumerate(self._places)}
        )
        for number, unit in enumerate(units):
            for ours, theirs in zip(self.tensors(number), unit.parameters()):
                ours.copy_(theirs.detach())

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import reduction

        return _opened, (reduction.DupFd(self._arena.fileno()), self._places)

    def tensors(self, unit: int) -> list[torch.Tensor]:
        """Returns the parameters of a unit, in the order of its parameters(), as views of the arena."""
        return self._views(unit, self._arena.tensor(_region(unit), torch.uint8))

    def _views(self, unit: int, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[place.start : place.end].view(place.dtype).view(place.shape) for place in self._places[unit]]

    def is_trained(self, unit: int) -> bool:
        """Returns True if a parameter of a unit requires a gradient."""
        return any(place.trained for place in self._places[unit])

    def trained(self, unit: int) -> list[bool]:
        """Returns for each parameter of a unit whether it requires a gradient."""
        return [place.trained for place in self._places[unit]]

    def copy(self, unit: int, steps: int) -> list[torch.Tensor]:
        """Returns copies of the parameters of a unit, after `steps` steps."""
        generation = steps if self.is_trained(unit) else 0
        flat = torch.empty(self._places[unit][-1].end if self._places[unit] else 0, dtype=torch.uint8)
        if flat.numel():
            found = self._arena.read_into(_region(unit), flat, at_least=generation)
            if found != generation:
                raise SpillwayError(f"unit {unit} holds step {found}, but step {generation} is fetched; please report this")
        return self._views(unit, flat)

    def begin(self, units: Iterable[int], steps: int) -> None:
        """Begins a write of units, which makes them the result of `steps` steps."""
        for unit in filter(self.is_trained, units):
            self._arena.write_begin(_region(unit), steps)

    def end(self, units: Iterable[int], kept: bool) -> None:
        """Ends a write: the step is kept, or every byte is as it was before."""
        for unit in filter(self.is_trained, units):
            if kept:
                self._arena.write_end(_region(unit))
            else:
                self._arena.write_abort(_region(unit), restored=True)

    def check_whole(self, steps: int) -> None:
        """Raises TornError unless all units hold the result of the same number of steps: `steps`, or one more."""
        regions = [(unit, self._arena.region(_region(unit))) for unit in range(len(self._places)) if self.is_trained(unit)]
        torn = [unit for unit, region in regions if region.in_write]
        if torn or len({region.generation for _, region in regions}) > 1 or any(region.generation < steps for _, region in regions):
            words = ", ".join(map(str, torn)) or "none"
            raise TornError(
                f"the weights are those of half a step: its optimizers had begun (units in a write: {words}); load an earlier checkpoint"
            )

    def close(self) -> None:
        """Unmaps the arena."""
        self._arena.close()


#: For each kind of tensor the kinds that may not lie in its memory. A "parameter" is one that is not trained.
_CONFLICTS = {"trained": ("trained", "parameter", "buffer"), "parameter": ("trained", "parameter"), "buffer": ("trained",)}


def _refuse_overlaps(units: Sequence[torch.nn.Module]) -> None:
    """Refuses a parameter in whose memory another parameter or a buffer lies: the copies would be trained apart. The memory
    of a tensor reaches from its first element to its last one. Tensors that no step changes may share memory: buffers, and a
    buffer with a parameter that is not trained."""
    spans = []
    for number, unit in enumerate(units):
        for word, tensors in (("parameter", unit.named_parameters()), ("buffer", unit.named_buffers())):
            for name, tensor in tensors:
                kind = "trained" if word == "parameter" and tensor.requires_grad else word
                if tensor.numel() and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
                    start = tensor.data_ptr()
                    spans.append((start, start + (last + 1) * tensor.element_size(), kind, f"{word} {name} of unit {number}"))
    # Of the tensors before, by their start, the one of each kind that reaches farthest.
    farthest = dict.fromkeys(_CONFLICTS, (0, ""))
    for start, end, kind, name in sorted(spans, key=lambda span: (span[0], span[2] == "buffer")):
        for other in _CONFLICTS[kind]:
            if start < farthest[other][0]:
                raise InvalidArgumentError(
                    f"Pipeline: {name} shares memory with {farthest[other][1]}, and a pipeline would train them apart; "
                    "use one Parameter object within a unit, or clone"
                )
        farthest[kind] = max(farthest[kind], (end, name))


def _region(unit: int) -> str:
    return f"unit{unit}"


def _opened(fd: Any, places: list[list[_Place]]) -> Store:
    store = Store.__new__(Store)
    store._places, descriptor = places, fd.detach()
    try:
        store._arena = Arena.open_fd(descriptor, write=True)
    finally:
        os.close(descriptor)
    return store
