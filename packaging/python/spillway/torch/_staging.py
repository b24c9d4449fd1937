"""Copies between a device and pageable memory through a bounded ring of page-locked blocks, where the system locks too little. The program
waits for none of them: the driver alone would have it wait for each.

A thread carries copies out in the order in which they were started. Out: the device writes to a block, which the thread then copies. Back:
the thread copies to a block, which the device then reads. Page-locked memory needs no block, but its copies keep their place in the order.
If no block can be locked, the driver stages the copies, and the thread waits for them.

Invariants:
- Copies are in the queue before they are among those that are waited for.
- A block is used again after the end of its last use.
- Host memory is read after the end of all earlier copies to the host.
- `begun` is set once the stream has all of the copies, and `event` is their end there. `over` is set once both ends have their values."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from .._early.worker import Flag, Worker
from ..errors import UnsupportedError
from ._layout import views
from ._tensors import holds_values

#: Number of blocks, and bytes of one: the most, and the least that is tried.
_BLOCKS, _MOST, _LEAST = 4, 8 << 20, 64 << 10
#: Pieces in a block begin at multiples of this, as elements of every dtype may.
_ALIGNMENT = 64


class Ring:
    """Page-locked blocks, which are smaller where the system locks less; none where it locks nothing.

    Args:
        lock: Page-locked memory of a number of bytes. Raises UnsupportedError if the system locks no more."""

    def __init__(self, lock: Callable[[int], torch.Tensor]):
        size = _MOST
        self.blocks: list[torch.Tensor] = []
        while len(self.blocks) < _BLOCKS and size >= _LEAST:
            # Those of before are given back first.
            self.blocks.clear()
            with suppress(UnsupportedError):
                while len(self.blocks) < _BLOCKS:
                    self.blocks.append(lock(size))
            size //= 2

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)


class _Piece(NamedTuple):
    """Elements of contiguous host memory, the tensor that they are copied to or from, and their first byte in a block."""

    host: torch.Tensor
    tensor: torch.Tensor
    at: int


class _Load:
    """What is copied at once: through a block, or directly.

    Attributes:
        block: The block.
        event: The end of the device's part; None: the stream did not take it."""

    def __init__(self, copies: _Copies, pieces: Sequence[_Piece], block: torch.Tensor | None):
        self.copies, self.block, self._pieces = copies, block, pieces
        self.event: Any = None

    def begin(self, stream: Any) -> None:
        """Gives the device its part."""
        ends = [piece.host if self.block is None else _part(self.block, piece) for piece in self._pieces]
        tensors = [piece.tensor for piece in self._pieces]
        try:
            if not self.copies.outward:
                self._move()
            with stream:
                to, sources = (ends, tensors) if self.copies.outward else (tensors, ends)
                torch._foreach_copy_(to, sources, non_blocking=True)
        finally:
            self.event = stream.record_event()

    def end(self) -> None:
        """Waits for the device, and does the rest."""
        if self.event is not None:
            self.event.synchronize()
        if self.copies.outward and self.copies.error is None:
            self._move()

    def _move(self) -> None:
        """Copies between host memory and the block."""
        if self.block is None:
            return
        block = self.block.data_ptr()
        for host, _, at in self._pieces:
            ends = (host.data_ptr(), block + at) if self.copies.outward else (block + at, host.data_ptr())
            ctypes.memmove(*ends, host.nbytes)


class _Copies:
    """Copies that were started in one call.

    Attributes:
        outward: From the device to the host.
        error: Why they failed.
        is_told: The program has got the error."""

    def __init__(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], outward: bool):
        # Versions are counted when copies are started, and the program may replace the memory of a tensor.
        pairs = zip([tensor.data for tensor in to], [tensor.data for tensor in sources])
        self._pairs = [(end, start) if outward else (start, end) for end, start in pairs if end.numel()]
        self.outward, self.process = outward, os.getpid()
        self.begun, self.over, self.event = Flag(), Flag(), None
        self.error: BaseException | None = None
        self.is_told = False

    def fail(self, error: BaseException) -> None:
        """Keeps the first error, without the frames of the thread, which hold tensors."""
        self.error = self.error or error.with_traceback(None)

    def forget(self) -> None:
        """Drops the tensors."""
        self._pairs = []

    def loads(self, size: int) -> Iterator[tuple[bool, list[_Piece]]]:
        """What is copied at once: whether through a block, of `size` bytes, and its pieces."""
        direct: list[_Piece] = []
        found: list[_Piece] = []
        used = 0
        for host, tensor in self._pairs:
            if not size or not _is_staged(host, tensor):
                direct.append(_Piece(host, tensor, 0))
                continue
            flat, start = host.view(-1), 0
            while start < flat.numel():
                if used + host.itemsize > size:
                    yield True, found
                    found, used = [], 0
                count = min((size - used) // host.itemsize, flat.numel() - start)
                for first, view in views(tensor, start, count):
                    at = used + (first - start) * host.itemsize
                    found.append(_Piece(flat[first : first + view.numel()].view(view.shape), view, at))
                start += count
                used = -(-(used + count * host.itemsize) // _ALIGNMENT) * _ALIGNMENT
        if found:
            yield True, found
        if direct:
            yield False, direct


def _is_staged(host: torch.Tensor, tensor: torch.Tensor) -> bool:
    """False for a copy that the device, or torch, does by itself."""
    return not host.is_pinned() and host.is_contiguous() and holds_values(host) and host.shape == tensor.shape


def _part(block: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """What a block has of a piece."""
    return block[piece.at : piece.at + piece.host.nbytes].view(piece.host.dtype).view(piece.host.shape)


class Fence:
    """What copies are awaited by.

    Args:
        copies: Copies of one stream, in their order."""

    def __init__(self, copies: Sequence[_Copies]):
        self._copies = copies

    def synchronize(self) -> None:
        """Waits until the copies are over; raises the error of the first that failed."""
        for copies in self._copies:
            self._wait(copies, copies.over)
        self._check()

    def query(self) -> bool:
        """True if the copies are over."""
        return all(copies.over.is_set for copies in self._copies)

    def join(self, stream: Any) -> None:
        """Makes later work of a stream wait for the copies. Waits until the stream of the copies has all of them, and raises as
        `synchronize()`."""
        for copies in self._copies:
            self._wait(copies, copies.begun)
        self._check()
        stream.wait_event(self._copies[-1].event)

    def _wait(self, copies: _Copies, flag: Flag) -> None:
        if not flag.is_set and copies.process != os.getpid():
            raise UnsupportedError(f"copies of process {copies.process} do not end in its forked child {os.getpid()}")
        flag.wait()

    def _check(self) -> None:
        failed = [copies for copies in self._copies if copies.error is not None]
        for copies in failed:
            copies.is_told = True
        if failed and (error := failed[0].error) is not None:
            raise error


class _Line:
    """What the thread does.

    Args:
        stream: The stream of the device's part.
        blocks: The blocks."""

    def __init__(self, stream: Any, blocks: Sequence[torch.Tensor]):
        self._stream, self._free, self._size = stream, [*blocks], blocks[0].nbytes if blocks else 0
        #: What the device has, in its order; copies after the last of their loads.
        self._begun: deque[_Load | _Copies] = deque()

    def serve(self, calls: SimpleQueue[_Copies | None]) -> None:
        """Carries out copies until None comes."""
        # Tensors of this mode are written to in it only, and others in any.
        with torch.inference_mode():
            while True:
                if self._begun and calls.empty():
                    self._end_one()
                    continue
                copies = calls.get()
                if copies is None:
                    break
                self._begin(copies)
                # A thread that waits for the next copies keeps nothing of these.
                del copies
            while self._begun:
                self._end_one()

    def _begin(self, copies: _Copies) -> None:
        while not copies.outward and any(isinstance(other, _Load) and other.copies.outward for other in self._begun):
            self._end_one()
        try:
            for is_staged, pieces in copies.loads(self._size):
                load = _Load(copies, pieces, self._take() if is_staged else None)
                # Before anything is done with the block: it is given back at the end.
                self._begun.append(load)
                load.begin(self._stream)
            copies.event = self._stream.record_event()
        except BaseException as error:
            copies.fail(error)
        copies.forget()
        self._begun.append(copies)
        copies.begun.set()

    def _take(self) -> torch.Tensor:
        while not self._free:
            self._end_one()
        return self._free.pop()

    def _end_one(self) -> None:
        first = self._begun.popleft()
        if isinstance(first, _Copies):
            first.over.set()
            return
        try:
            first.end()
        except BaseException as error:
            first.copies.fail(error)
        if first.block is not None:
            self._free.append(first.block)


class Staging:
    """The copies on one stream of a device.

    Args:
        stream: The stream.
        blocks: Page-locked memory, which no other stream uses."""

    def __init__(self, stream: Any, blocks: Sequence[torch.Tensor]):
        self._worker: Worker[_Copies] = Worker(_Line(stream, blocks).serve)
        #: Copies that may not be over, or whose error the program has not got.
        self._open: dict[_Copies, None] = {}

    @property
    def serves(self) -> bool:
        """False in a forked child, and at the end of the interpreter."""
        return self._worker.serves

    def start(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], outward: bool) -> None:
        """Starts copies, after what the stream was given before, and returns at once. Tensors are kept until then, not their values: no
        code may write to them meanwhile.

        Args:
            to: Where they go.
            sources: What is copied.
            outward: From the device to the host."""
        torch.autograd.graph.increment_version([*to])
        copies = _Copies(to, sources, outward)
        self._worker.calls.put(copies)
        self._open[copies] = None

    def fence(self) -> Fence | None:
        """The fence of the copies that were started before; None if they are over."""
        for copies in [*self._open]:
            if copies.is_told or (copies.over.is_set and copies.error is None):
                self._open.pop(copies, None)
        left = [*self._open]
        return Fence(left) if left else None

    def __del__(self) -> None:
        # Without a wait: the garbage collector may run anywhere.
        if (worker := getattr(self, "_worker", None)) is not None:
            worker.calls.put(None)
