"""Whether a program has written to tensors since some moment. All parts of the package ask it here.

Two signs answer:
- `facts`: object, version, address and kind of a tensor. A write that autograd sees, `data = ...` and an exchange of tensors change them.
- `sums`: sums of the tensors' memory. A write by `.data`, by numpy or in inference mode leaves no other trace.

A sum reads the memory once. In host memory it is a checksum, which the library computes by all threads. On a device it is that of
_device_sums.py. It stays there: a `Comparison` of sums is begun without a wait, and read later, for many tensors in one go."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Iterable, Sequence
from operator import add, attrgetter, gt, ne
from typing import Any

from . import _native

_version, _dtype, _nbytes, _is_cpu = attrgetter("_version"), attrgetter("dtype"), attrgetter("nbytes"), attrgetter("is_cpu")
#: Lists of one length: of each tensor one fact.
Facts = tuple[list[Any], ...]


def facts(tensor: Any) -> tuple[Any, ...]:
    """What a write that torch sees changes. That of a DTensor is asked of the part that this process holds."""
    return id(tensor), version(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def facts_of(tensors: Sequence[Any]) -> Facts:
    """The facts of many tensors: a list for each fact. An object for each tensor would cost more in Python's garbage collector."""
    import torch

    of = torch.Tensor
    return (
        [*map(id, tensors)],
        _versions(tensors),
        [*map(of.data_ptr, tensors)],
        [*map(_dtype, tensors)],
        [*map(of.numel, tensors)],
        _orders(tensors),
    )


def _orders(tensors: Sequence[Any]) -> list[Any]:
    """The order of each tensor's elements in its memory: True if it is contiguous, else its strides."""
    import torch

    found: list[Any] = [*map(torch.Tensor.is_contiguous, tensors)]
    if not all(found):
        found = [is_plain or tensor.stride() for is_plain, tensor in zip(found, tensors)]
    return found


def with_versions(known: Facts, tensors: Sequence[Any]) -> Facts:
    """These facts with the present versions of the tensors: those after writes that change nothing else."""
    return known[0], _versions(tensors), *known[2:]


def with_memory(known: Facts, tensors: Sequence[Any]) -> Facts:
    """These facts with the present versions and addresses of the same tensors, whose kinds did not change."""
    import torch

    return known[0], _versions(tensors), [*map(torch.Tensor.data_ptr, tensors)], *known[3:]


def _versions(tensors: Sequence[Any]) -> list[int]:
    try:
        return [*map(_version, tensors)]
    except RuntimeError:
        return [*map(version, tensors)]


def differing(now: Facts, before: Facts) -> list[int]:
    """The places of the tensors whose facts differ."""
    if now == before:
        return []
    places = range(len(now[0]))
    return sorted({place for one, other in zip(now, before) for place in itertools.compress(places, map(ne, one, other))})


def version(tensor: Any) -> int:
    """The version of a tensor; -1 for one of inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def sums(tensors: Iterable[Any]) -> list[Any]:
    """A sum for each strided tensor: a number if it is in host memory, else a tensor of its device."""
    return Sums(tensors).take()


class Sums:
    """The sums of tensors that stay where they are: one call of the library takes those of all dense tensors in host memory. Keeps their
    memory.

    Args:
        tensors: Strided tensors on any device."""

    def __init__(self, tensors: Iterable[Any]):
        import torch

        self._own = [*tensors]
        count = len(self._own)
        #: The places of tensors that the library cannot read where they are.
        self._others: list[int] = [] if _are_read(self._own) else [place for place, own in enumerate(self._own) if not _are_read([own])]
        of, places = torch.UntypedStorage, sorted({*range(count)}.difference(self._others)) if self._others else range(count)
        read = [self._own[place] for place in places]
        # They keep the memory, also if a parameter gets another one by `data = ...`.
        self._storages = [*map(torch.Tensor.untyped_storage, read)]
        addresses, sizes = array("Q", map(torch.Tensor.data_ptr, read)), array("Q", map(_nbytes, read))
        ends = map(add, map(of.data_ptr, self._storages), map(of.nbytes, self._storages))
        # Memory that was freed is a change, not an error: the step that follows names the tensor.
        for place in itertools.compress(itertools.count(), map(gt, map(add, addresses, sizes), ends)):
            addresses[place] = sizes[place] = 0
        if self._others:
            addresses, sizes = (_spread(found, places, count) for found in (addresses, sizes))
        self._data, self._bytes = (ctypes.c_void_p * count).from_buffer(addresses), (ctypes.c_uint64 * count).from_buffer(sizes)

    def take(self) -> list[Any]:
        """The sums now."""
        found = array("Q", bytes(8 * len(self._own)))
        _native.call("spw_checksums", self._data, self._bytes, len(found), (ctypes.c_uint64 * len(found)).from_buffer(found))
        taken: list[Any] = found.tolist()
        if self._others:
            self._take_others(taken)
        return taken

    def _take_others(self, taken: list[Any]) -> None:
        import torch

        # This module imports torch.
        from ._device_sums import device_sums

        # A program may have a mode of its own, such as a default device.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            apart = list[int]()
            for place in self._others:
                own = self._own[place]
                if not _is_flat(own):
                    own = own.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
                if own.is_cpu:
                    taken[place] = Sums([own]).take()[0]
                else:
                    taken[place] = _bytes(own)
                    apart.append(place)
            for place, total in zip(apart, device_sums([taken[place] for place in apart])):
                taken[place] = total


def _spread(found: array[int], places: Iterable[int], count: int) -> array[int]:
    """An array of `count` numbers: those of `found` at these places, else 0."""
    spread = array("Q", bytes(8 * count))
    for place, one in zip(places, found):
        spread[place] = one
    return spread


class Comparison:
    """Sums of now with those of before, place by place. To begin it waits for no device.

    Args:
        now, before: What `sums` has returned."""

    def __init__(self, now: Sequence[Any], before: Sequence[Any]):
        import torch

        self._differ: set[int] = set()
        self._apart: list[tuple[list[int], Any]] = []
        if {*map(type, now)} <= {int} and [*now] == [*before]:
            return
        devices: dict[Any, list[int]] = {}
        for place, (one, other) in enumerate(zip(now, before)):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.device == other.device:
                devices.setdefault(one.device, []).append(place)
            elif isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or one != other:
                self._differ.add(place)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for places in devices.values():
                differ = torch.stack([now[place] for place in places]) != torch.stack([before[place] for place in places])
                self._apart.append((places, differ))

    def places(self) -> set[int]:
        """The places at which they differ. The first call waits for each device once."""
        while self._apart:
            places, differ = self._apart[-1]
            self._differ.update(itertools.compress(places, differ.tolist()))
            del self._apart[-1]
        return self._differ

    def __bool__(self) -> bool:
        return bool(self.places())


def compared(lists: Iterable[tuple[Sequence[Any], Sequence[Any]]]) -> Comparison:
    """One comparison of several lists of sums, each with that of before."""
    now, before = list[Any](), list[Any]()
    for own, other in lists:
        now += own
        before += other
    return Comparison(now, before)


def changed(pairs: Iterable[tuple[Any, Any]]) -> Comparison:
    """Compares tensors with their sums of before."""
    tensors, before = [*zip(*pairs)] or [(), ()]
    return Comparison(sums(tensors), before)


def _are_read(tensors: Sequence[Any]) -> bool:
    """True if the library can read all these tensors where they are. For many that is one pass for each property."""
    import torch

    of = torch.Tensor
    if not all(map(_is_cpu, tensors)) or any(map(of.is_neg, tensors)) or any(map(of.is_conj, tensors)):
        return False
    return not any(map(of._is_zerotensor, tensors)) and (all(map(of.is_contiguous, tensors)) or all(map(is_dense, tensors)))


def _is_flat(own: Any) -> bool:
    """True if the tensor's values are its memory, without gaps."""
    return is_dense(own) and not (own.is_neg() or own.is_conj() or own._is_zerotensor())


def is_dense(own: Any) -> bool:
    """True if the elements of a strided tensor fill their memory, in any order, as those of channels_last do."""
    import torch

    # Only such strides are preserved.
    return own.is_contiguous() or torch.empty_like(own, device="meta").stride() == own.stride()


def _bytes(own: Any) -> Any:
    """The memory of a flat tensor."""
    import torch

    if not own.is_contiguous():
        own = own.as_strided((own.numel(),), (1,))
    return own.view(-1).view(torch.uint8)
