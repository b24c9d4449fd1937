"""The residents of DeepSpeed's interleaved update: the last sub-groups, whose masters and moments stay on the GPU between steps.

Before code outside sees masters or states, the states of all residents return to host memory. The next step takes them to the GPU again,
unless code outside has seen states before each of the last two steps: then they stay until a step follows that nothing has preceded."""

from __future__ import annotations

import os
import warnings
from typing import Any

from .._written import facts
from ..errors import InvalidArgumentError
from ..interleave import PLACEMENTS

_CPU, _, _RESIDENT = PLACEMENTS
#: Bytes of a parameter on the GPU: master and moments. Its gradient comes in addition.
_STATE = 12
#: With "auto", residents leave one part in this number of the GPU's memory free, as those of spw_interleave_replan do.
_RESERVE = 10
#: With "auto", the steps that show how much memory the model needs.
_FIRST_STEPS = 2
#: The accesses in a row, each before another step, after which states stay in host memory.
_MOST_IN_A_ROW = 2


class Residents:
    """The residents of one optimizer.

    Args:
        asked: The number of sub-groups, or "auto".
        most: The largest number of them.
        gpu: The Gpu; None if threads take its part.

    Attributes:
        number: How many sub-groups may be resident.
        plan: The placements of a step with residents.
        plan_at_home: Those of a step that has all states in host memory."""

    def __init__(self, asked: int | str, most: int, gpu: Any):
        self.number = 0 if asked == "auto" else min(int(asked), most)
        self.plan, self.plan_at_home = list[str](), list[str]()
        self._most, self._gpu = most, gpu
        self._chosen = asked != "auto"
        # Gradients on the GPU, which are copied from host memory before a step.
        self._gradients: dict[int, Any] = {}
        self._stream: Any = None
        # The facts of the tensors whose states are on the GPU, or on their way; None if all states are in host memory.
        self._away: list[Any] | None = None
        self._seen, self._in_a_row = False, 0
        self._process = os.getpid()

    # How many they are.

    def choose(self, steps: int, masters: Any) -> None:
        """With "auto", chooses the number once so many steps were done; `masters` have gradients."""
        if not self._chosen and steps >= _FIRST_STEPS:
            self.number, self._chosen = min(self._most, self._fitting(masters)), True

    def _fitting(self, masters: Any) -> int:
        """The sub-groups, counted from the last one, that fit in the memory that no step has used, less the reserve."""
        if self._gpu is None:
            return self._most
        import torch

        from ..torch.inner import unused_bytes

        device = torch.device("cuda", self._gpu.ordinal)
        free, total = torch.cuda.mem_get_info(device)
        left = min(free, unused_bytes(device)) - total // _RESERVE
        for found, master in enumerate(reversed(masters)):
            left -= (_STATE + master.grad.element_size()) * master.numel()
            if left < 0:
                return found
        return len(masters)

    def open(self, masters: Any) -> None:
        """Makes room for the gradients of the last sub-groups. Those for which the GPU has none are no residents."""
        import torch

        device = None if self._gpu is None else torch.device("cuda", self._gpu.ordinal)
        self._gradients = {}
        for index in reversed(range(len(masters) - self.number, len(masters))):
            try:
                self._gradients[index] = torch.empty_like(masters[index].grad, device=device)
            except torch.OutOfMemoryError:
                found = f"the GPU has memory for {len(self._gradients)} of {self.number} residents"
                warnings.warn(f"spillway.interleave: {found}", RuntimeWarning, stacklevel=2)
                self.number = len(self._gradients)
                break
        if device is not None and self._gradients:
            self._stream = torch.cuda.Stream(device)

    def gradient(self, index: int, own: Any) -> Any:
        """Where the GPU has the gradient of a sub-group that may be resident; for others `own`."""
        return self._gradients.get(index, own)

    # Where their states are.

    def admit(self, update: Any, tensors: Any) -> None:
        """Before a step: has the states of residents on the GPU. `tensors(index)` are the master and the moments of a sub-group."""
        self._in_a_row, self._seen = self._in_a_row + 1 if self._seen else 0, False
        kind = "plan" if self._in_a_row < _MOST_IN_A_ROW else "plan_at_home"
        wanted = getattr(self, kind)
        if wanted == update.get_plan():
            return
        if _RESIDENT in wanted:
            self._away = self._facts(tensors)
        update.set_plan(wanted)
        # The GPU may have memory for fewer.
        setattr(self, kind, update.get_plan())

    def replanned(self, update: Any) -> None:
        """The update may have a better plan."""
        if _RESIDENT in (found := update.get_plan()):
            self.plan = found
        else:
            self.plan_at_home = found

    def give_back(self, update: Any) -> None:
        """Has all states in host memory. After an interrupt it is called again."""
        if self._away is not None:
            if update is None:
                raise InvalidArgumentError(
                    "spillway.interleave: the states of residents were lost with their GPU; make a new engine, and load a checkpoint"
                )
            update.set_plan([_CPU if placement == _RESIDENT else placement for placement in update.get_plan()])
            update.drain()
            self._away = None

    def written(self, tensors: Any) -> list[int]:
        """The sub-groups of which a tensor was written or replaced while the states of residents were on the GPU."""
        if self._away is None:
            return []
        return [index for index, was, now in zip(self._gradients, self._away, self._facts(tensors)) if was != now]

    def _facts(self, tensors: Any) -> list[Any]:
        return [[facts(tensor) for tensor in tensors(index)] for index in self._gradients]

    def seen(self) -> bool:
        """Code outside is about to see states. False in a forked process, whose states are its own.

        Raises:
            InvalidArgumentError: States are on the GPU of the parent process."""
        self._seen = True
        if not self.is_own and self._away is not None:
            raise InvalidArgumentError(
                "spillway.interleave: this process was forked, and states of its parent's sub-groups are on the GPU; read them in the "
                "parent, before the fork"
            )
        return self.is_own

    @property
    def is_own(self) -> bool:
        """True in the process that made them."""
        return self._process == os.getpid()

    # Their gradients.

    def upload(self, placements: Any, masters: Any, stream: Any) -> dict[int, Any]:
        """Copies the gradients of residents to the GPU, after what `stream` has so far. Returns the stream of each copy."""
        import torch

        streams = {}
        for index, gradient in self._gradients.items():
            if self._gpu is None:
                gradient.copy_(masters[index].grad)
            elif placements[index] == _RESIDENT:
                self._stream.wait_stream(stream)
                with torch.cuda.stream(self._stream):
                    gradient.copy_(masters[index].grad, non_blocking=True)
                streams[index] = self._stream
        return streams
