"""The parameters of all units in memory that the processes of a pipeline share (SysX section 4).

The process with a stage's backward passes steps its parameters. Every process fetches from here, between two steps of the
optimizers: a step begins after all devices have ended the one before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InvalidArgumentError
from ._worker import SharedMemory

#: Parameters begin on whole cache lines.
_ALIGN = 64


class Store:
    """Copies of the parameters of all units.

    Args:
        units: The modules."""

    def __init__(self, units: Sequence[torch.nn.Module]):
        self._places: list[list[tuple[torch.dtype, tuple[int, ...], int, bool]]] = []
        owner: dict[int, int] = {}
        end = 0
        for number, unit in enumerate(units):
            places = []
            for name, parameter in unit.named_parameters():
                if owner.setdefault(id(parameter), number) != number:
                    raise InvalidArgumentError(f"Pipeline: parameter {name} of unit {number} belongs to unit {owner[id(parameter)]} too; a "
                                               "parameter must belong to one unit")
                if parameter.device.type != "cpu" or type(parameter.data) is not torch.Tensor:
                    raise InvalidArgumentError(f"Pipeline: parameter {name} of unit {number} is a {type(parameter.data).__name__} on "
                                               f"{parameter.device}; pass plain tensors in CPU memory")
                places.append((parameter.dtype, tuple(parameter.shape), end, parameter.requires_grad))
                end += -(-parameter.nbytes // _ALIGN) * _ALIGN
            self._places.append(places)
        self.memory = SharedMemory(end)
        for number, unit in enumerate(units):
            for ours, theirs in zip(self.tensors(number), unit.parameters()):
                ours.copy_(theirs.detach())

    def tensors(self, unit: int) -> list[torch.Tensor]:
        """Returns the parameters of a unit, in the order of its parameters(), as views of the shared memory."""
        found = []
        for dtype, shape, start, _ in self._places[unit]:
            count = torch.Size(shape).numel()
            flat = torch.frombuffer(self.memory.map, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
            found.append(flat.view(shape))
        return found

    def trained(self, unit: int) -> list[bool]:
        """Returns for each parameter of a unit whether it requires a gradient."""
        return [requires for _, _, _, requires in self._places[unit]]

    def close(self) -> None:
        """Closes the descriptor of the shared memory."""
        self.memory.close()
