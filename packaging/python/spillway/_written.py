"""Whether a program has written to tensors since some moment. All parts of the package ask it here.

Two signs answer:
- `facts`: object, version, address and kind of a tensor. A write that autograd sees, `data = ...` and an exchange of tensors change them.
- `sums`: sums over the words of the tensors' memory, weighted by place. A write by `.data`, by numpy or in inference mode leaves no other
  trace.

A sum reads the memory once. It stays on the device of its tensor: a `Comparison` of sums is begun without a wait, and read later, for many
tensors in one go. A sum does not see an exchange of words: on the CPU, one within 512 bytes of a tensor of more than 32 KiB; on a device,
any."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

#: Words of a row that is summed up without weights, most words of a tensor that has no such rows, and most words of a batch.
_ROW, _FEW, _BATCH = 64, 4096, 1 << 16


def facts(tensor: Any) -> tuple[Any, ...]:
    """What a write that torch sees changes. That of a DTensor is asked of the part that this process holds."""
    return id(tensor), version(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape


def version(tensor: Any) -> int:
    """The version of a tensor; -1 for one of inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def sums(tensors: Iterable[Any]) -> list[Any]:
    """A sum for each strided tensor: a number if it is in host memory, else a tensor of its device."""
    return Sums(tensors).take()


class Sums:
    """The sums of tensors that stay where they are. Keeps their memory.

    Args:
        tensors: Strided tensors on any device."""

    def __init__(self, tensors: Iterable[Any]):
        self._alone: list[tuple[int, Any]] = []
        self._batches: list[_Batch] = []
        self._count, words = 0, 0
        small: list[tuple[int, Any]] = []
        for tensor in tensors:
            own, place, self._count = tensor.detach(), self._count, self._count + 1
            if not own.is_cpu or own.nbytes > 8 * _FEW or not _is_flat(own):
                self._alone.append((place, own))
                continue
            small.append((place, own))
            words += -(-own.nbytes // 8)
            if words >= _BATCH:
                self._batches.append(_Batch(small))
                small, words = [], 0
        if len(small) > 1:
            self._batches.append(_Batch(small))
        else:
            self._alone += small

    def take(self) -> list[Any]:
        """The sums now."""
        import torch

        found: list[Any] = [0] * self._count
        # A program may have a mode of its own, such as a default device.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for batch in self._batches:
                for place, value in batch.take():
                    found[place] = value
            for place, own in self._alone:
                found[place] = _sum(own)
        return found


class _Batch:
    """Small tensors of host memory, which are copied one after another. Then each operation is one for all of them."""

    def __init__(self, tensors: Sequence[tuple[int, Any]]):
        import torch

        self._places = [place for place, _ in tensors]
        self._pieces: list[Any] = []
        lengths = []
        with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
            for _, own in tensors:
                memory = _bytes(own)
                self._pieces.append(memory)
                if memory.numel() % 8:
                    self._pieces.append(_padding()[memory.numel() % 8 :])
                lengths.append(-(-memory.numel() // 8))
            self._ends = torch.tensor([*itertools.accumulate(lengths, initial=0)], dtype=torch.int64, device="cpu")
            self._weights = torch.cat([_weights()[:length] for length in lengths])

    def take(self) -> Iterable[tuple[int, int]]:
        """The places of the tensors with their sums."""
        import torch

        words = torch.cat(self._pieces).view(torch.int64).mul_(self._weights)
        upto = torch.zeros(words.numel() + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(words, 0, out=upto[1:])
        return zip(self._places, upto[self._ends].diff().tolist())


class Comparison:
    """Sums of now with those of before, place by place. To begin it waits for no device.

    Args:
        now, before: What `sums` has returned."""

    def __init__(self, now: Sequence[Any], before: Sequence[Any]):
        self._count = len(now)
        self._differ = {place for place, (one, other) in enumerate(zip(now, before)) if isinstance(one, int) and one != other}
        self._apart: dict[Any, tuple[list[int], list[Any]]] = {}
        for place, (one, other) in enumerate(zip(now, before)):
            if not isinstance(one, int):
                places, found = self._apart.setdefault(one.device, ([], []))
                places.append(place)
                found.append(one != other)

    def places(self) -> set[int]:
        """The places at which they differ. The first call waits for each device once."""
        import torch

        while self._apart:
            _, (places, found) = self._apart.popitem()
            self._differ.update(itertools.compress(places, torch.stack(found).tolist()))
        return self._differ

    def __bool__(self) -> bool:
        return bool(self.places())


def _sum(own: Any) -> Any:
    """The sum of one tensor."""
    import torch

    memory = _bytes(own if _is_flat(own) else own.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))
    if not own.is_cpu:
        # One operation. The widest words that fit.
        width = next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if _fits(memory, dtype.itemsize))
        return memory.view(width).sum(dtype=torch.int64)
    if memory.storage_offset() % 8:
        memory = memory.clone()
    whole, rest = memory.numel() // 8 * 8, memory.numel() % 8
    words = memory[:whole].view(torch.int64)
    tail = [torch.cat([memory[whole:], _padding()[rest:]]).view(torch.int64)] if rest else []
    while words.numel() > _FEW:
        rows = words.numel() // _ROW
        if words.numel() % _ROW:
            tail.append(words[rows * _ROW :])
        words = words[: rows * _ROW].view(rows, _ROW).sum(1)
    if tail:
        words = torch.cat([words, *tail])
    return int((words * _weights()[: words.numel()]).sum())


def _fits(memory: Any, size: int) -> bool:
    return memory.numel() % size == 0 and memory.storage_offset() % size == 0


def _is_flat(own: Any) -> bool:
    """True if the tensor's values are its memory, without gaps."""
    return _is_dense(own) and not (own.is_neg() or own.is_conj() or own._is_zerotensor())


def _is_dense(own: Any) -> bool:
    """True if the elements fill their memory, in any order."""
    import torch

    # Only such strides are preserved.
    return own.is_contiguous() or torch.empty_like(own, device="meta").stride() == own.stride()


def _bytes(own: Any) -> Any:
    """The memory of a flat tensor."""
    import torch

    if not own.is_contiguous():
        own = own.as_strided((own.numel(),), (1,))
    return own.view(-1).view(torch.uint8)


@functools.cache
def _weights() -> Any:
    """Odd numbers."""
    import torch

    with torch._C.DisableTorchFunction(), torch.inference_mode(False):
        generator = torch.Generator("cpu").manual_seed(0x5B17)
        return torch.randint(-(2**62), 2**62, (2 * _FEW,), generator=generator, device="cpu").mul_(2).add_(1)


@functools.cache
def _padding() -> Any:
    """The bytes that fill a word."""
    import torch

    with torch._C.DisableTorchFunction(), torch.inference_mode(False):
        return torch.zeros(8, dtype=torch.uint8, device="cpu")
