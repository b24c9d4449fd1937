"""Detects writes to the values of state dicts of an optimizer whose states are on a tier, or are staged.

torch's own optimizers share their states with a state dict: a checkpoint that is loaded into its tensors is loaded into the optimizer. The
values of a tier are copies, and such a load would be lost. Instead the next use of the states raises an error.

A probe is a tensor without memory that has the version of a value: torch counts a write there, also after the program has dropped the value
and its memory is free. A write by `.data` or numpy is not counted."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ..errors import InvalidArgumentError
from ._tensors import local


class Given:
    """The values in state dicts, until the states are replaced.

    Args:
        place: Where the states are, for messages.
        back: Another cure than to load the dict, for messages."""

    def __init__(self, place: str = " on the tier", back: str = ", or call rollback() to return to the last commit") -> None:
        self._place, self._back = place, back
        self._probes: list[tuple[str, torch.Tensor, int, weakref.ref[torch.Tensor]]] = []

    def note(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Remembers values with their names in messages."""
        for name, value in values:
            own = local(value)
            probe = own.detach()
            probe.data = own.new_empty(0)
            self._probes.append((name, probe, probe._version, weakref.ref(own)))

    def check(self) -> None:
        """Raises an error if a value was written to."""
        for name, probe, version, _ in self._probes:
            if probe._version != version:
                raise InvalidArgumentError(
                    f"{name} was written to in a state dict, which has copies of the states{self._place}, so that the optimizer would lose "
                    f"the write; pass the dict to load_state_dict() or set_optimizer_state_dict(), as after dcp.load(){self._back}; clone "
                    "a value that is not to be loaded before you write to it"
                )
        # Values that were freed can no longer be written to.
        self._probes = [probe for probe in self._probes if probe[3]() is not None]

    def forget(self) -> None:
        """Forgets all values: the states were replaced, and writes to earlier values no longer matter."""
        self._probes = []
