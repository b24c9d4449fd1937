"""Where chunks are between steps: here, in host memory.

The flow asks a home for the memory of a chunk, and gives it back: unchanged, or with new states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...errors import OutOfOrderError
from .chunk import Chunk
from .lane import host_memory

_Result = TypeVar("_Result")


class Home:
    """Chunks in host memory, which is page-locked for parameters on a device."""

    #: True while whole() runs, and after one that did not end.
    _mixed = False
    #: The directory of the values of state dicts; None: they are in memory.
    directory: Any = None
    #: The error that the class has raised in its step.
    of_class: BaseException | None = None

    def begin(self, chunk: Chunk) -> None:
        """Starts to bring a chunk to host memory."""

    def memory(self, chunk: Chunk) -> torch.Tensor:
        """Host memory with the states of a chunk."""
        found: torch.Tensor = chunk.kept
        return found

    def blank(self, chunk: Chunk) -> torch.Tensor:
        """Host memory for the states of a new chunk."""
        return host_memory(chunk.size, next(iter(chunk.entries)))

    def keep(self, chunk: Chunk, memory: torch.Tensor) -> None:
        """The memory has the states of a chunk now."""
        chunk.kept = memory

    def release(self, memory: torch.Tensor) -> None:
        """The states in the memory of a chunk are unchanged, and nobody reads it any more."""

    def drop(self, chunk: Chunk) -> None:
        """Nobody needs the states of a chunk any more."""
        chunk.kept = None

    def clear(self, chunks: list[Chunk]) -> None:
        """Nobody needs any states, also where a transfer has failed."""
        for chunk in chunks:
            chunk.kept = None

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), a step. If processes share a commit, all of them raise where it fails in one."""
        self.check()
        return work()

    def check(self) -> None:
        """Raises OutOfOrderError if the states are not those of one step."""
        if self._mixed:
            raise OutOfOrderError("Staged: a load was interrupted, so some states are missing; load the state dict again")

    def watched(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), which reads or writes states."""
        return work()

    def whole(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), which replaces all states. If it does not end, other calls are refused until another one has."""
        self._mixed = True
        found = work()
        self._mixed = False
        return found

    def host_bytes(self, chunks: list[Chunk]) -> int:
        """Bytes of host memory for chunks."""
        return sum(chunk.size for chunk in chunks)

    def facts(self) -> dict[str, Any]:
        """Keywords that only this home knows, for a repr."""
        return {}

    def close(self) -> None:
        """Gives back what the home holds."""
