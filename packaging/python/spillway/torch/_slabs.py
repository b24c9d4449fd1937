"""Host memory for copies and states, cut to size from slabs.

torch's page-locked memory rounds each tensor up to a power of two, and torch and the C library keep memory after its last use.

Invariants:
- A slab is kept by its tensors only, and goes with the last of them. In a forked child it stays.
- A page-locked slab is registered with the driver once, when it is made. It is given back after the copies that the device was asked for
  have ended."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from .. import _pinned, topo
from ..errors import UnsupportedError
from ._staging import Ring

#: Tensors begin at multiples of this: a cache line.
_ALIGNMENT = 64
#: Least and most bytes of a slab for small tensors.
_LEAST, _MOST = 1 << 20, 64 << 20
#: A tensor of these bytes has a slab of its own: whole pages are at most a hundredth more.
_LARGE = 512 << 10
#: A slab for small tensors has this part of the bytes that are in use: no more than that is unused.
_PART = 256
#: Number of slabs whose last bytes later tensors may have.
_OPEN = 8
#: What the one warning of pageable memory has told; several links may have such memory.
_told: list[str] = []


class Driver(Protocol):
    """What registers host memory with a device."""

    def register(self, address: int, size: int) -> None:
        """Locks the pages of memory, so that copies run beside the program. Raises UnsupportedError if they cannot be locked."""

    def unregister(self, address: int) -> None:
        """Waits for copies and ends the registration."""

    @property
    def node(self) -> int | None:
        """The NUMA node whose memory the device reaches best; None: any."""


class CudaDriver:
    """CUDA's runtime, as torch has it.

    Args:
        device: The device that copies."""

    #: The registration holds in the contexts of all devices.
    _PORTABLE = 1

    def __init__(self, device: torch.device):
        self._device = device

    def register(self, address: int, size: int) -> None:
        """Locks the pages of memory, so that copies run beside the program."""
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, self._PORTABLE))
        if code:
            raise UnsupportedError(f"cudaHostRegister returned {code}")

    def unregister(self, address: int) -> None:
        """Waits for copies and ends the registration."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(address)

    @cached_property
    def node(self) -> int | None:
        """The NUMA node of the GPU; None if it is not known, or the only one."""
        if torch.version.cuda is None:
            return None
        ordinal = self._device.index
        return topo._node_of_gpu(torch.cuda.current_device() if ordinal is None else ordinal)


class Pages:
    """Memory of the process from the library: in huge pages where the system has them, all of them taken by the library's threads. It is
    private: a forked child has a copy.

    Args:
        node: The NUMA node that it comes from; None: any."""

    def __init__(self, node: int | None = None):
        self._node = node

    def take(self, size: int, freed: Callable[[], object]) -> Any:
        """An object with a buffer of this size. Its end calls `freed`, and then the memory is gone."""
        return _pinned.allocate(size, lambda _: freed(), lock=False, node=self._node)


class LockedPages:
    """Page-locked memory.

    Args:
        driver: What registers it."""

    def __init__(self, driver: Driver):
        self._driver = driver

    def take(self, size: int, freed: Callable[[], object]) -> Any:
        """An object with a buffer of this size. Its end calls `freed`, and then the memory is gone.

        Raises:
            UnsupportedError: The driver locks no pages."""
        address, is_locked = 0, False

        def unlock() -> None:
            if is_locked:
                self._driver.unregister(address)
            freed()

        slab = Pages(self._driver.node).take(size, unlock)
        address = ctypes.addressof(slab)
        self._driver.register(address, size)
        is_locked = True
        return slab


class Slabs:
    """The slabs for one device. Thread-safe: small tensors of two threads are in different slabs.

    Args:
        pages: What they are made of."""

    def __init__(self, pages: Pages | LockedPages):
        self._pages = pages
        # The sizes of all slabs, by their number.
        self._sizes: dict[int, int] = {}
        self._numbers = itertools.count()
        # For each thread the slabs that have bytes left, and the first one of these; the newest slab is the last.
        self._mine = threading.local()
        #: Why the driver locks no more memory of the library, and the bytes that torch has locked in its place.
        self._refusal: str | None = None
        self._of_torch = 0
        # Memory in place of that which torch cannot lock; None: it could so far.
        self._pageable: Slabs | None = None
        #: The blocks through which pageable memory is copied; None: no memory is pageable.
        self.ring: Ring | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all slabs."""
        return sum([*self._sizes.values()]) + (0 if self._pageable is None else self._pageable.bytes)

    def memory(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with undefined values. If the driver locks no pages, it is torch's page-locked memory, and pageable memory if torch
        locks none either."""
        elements = math.prod(shape)
        size = elements * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._refusal is None:
            try:
                slab, start = self._place(size)
            except UnsupportedError as error:
                self._refusal = str(error)
            else:
                return torch.frombuffer(slab, dtype=dtype, count=elements, offset=start).view(shape)
        if self._pageable is None:
            try:
                return self._from_torch(shape, dtype)
            except RuntimeError as error:
                self._use_pageable(error)
        assert self._pageable is not None
        return self._pageable.memory(shape, dtype)

    def _from_torch(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """torch's page-locked memory."""
        found = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        if not self._of_torch:
            warnings.warn(
                f"spillway: the driver locks no memory of the library ({self._refusal}), so page-locked memory comes from torch, which "
                "rounds each tensor up to a power of two",
                stacklevel=3,
            )
        self._of_torch += found.nbytes
        return found

    def _use_pageable(self, error: RuntimeError) -> None:
        """Memory is pageable from now on: torch locks no more of it."""
        locked = self.bytes + self._of_torch
        self.ring, self._pageable = Ring(self._block), Slabs(Pages())
        if _told:
            return
        if self.ring.blocks:
            way = f"offload() and optimizers on a tier copy them through {self.ring.nbytes} page-locked bytes, and others by the driver"
        else:
            way = "the driver copies them through its own buffers, one after the other"
        _told.append(way)
        warnings.warn(
            f"spillway: the system locks no more memory (the driver: {self._refusal}; torch: {error}). {locked} bytes are page-locked, and "
            f"further gradients, weights and states are pageable: {way}, which takes longer. Let the system lock more memory, or keep "
            "fewer bytes, as docs/states.md shows",
            stacklevel=3,
        )

    def _block(self, size: int) -> torch.Tensor:
        """Page-locked memory of `size` bytes. Raises UnsupportedError if neither the driver nor torch locks it."""
        with suppress(UnsupportedError):
            return torch.frombuffer(self._make(size), dtype=torch.uint8)
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise UnsupportedError(str(error)) from error

    def _place(self, size: int) -> tuple[Any, int]:
        left: list[tuple[Callable[[], Any], int]] = getattr(self._mine, "left", [])
        for number, (of, used) in enumerate(left):
            slab, start = of(), _up(used, _ALIGNMENT)
            if slab is not None and start + size <= len(slab):
                left[number] = of, start + size
                return slab, start
        if size >= _LARGE:
            return self._make(_up(size, mmap.PAGESIZE)), 0
        # Room for a whole number of such tensors: models have many of one size.
        each = _up(size, _ALIGNMENT)
        count = min(_MOST, max(_LEAST, self.bytes // _PART)) // each
        slab = self._make(_up(count * each, mmap.PAGESIZE))
        self._mine.left = [*left[1 - _OPEN :], (weakref.ref(slab), size)]
        return slab, 0

    def _make(self, size: int) -> Any:
        number = next(self._numbers)
        slab = self._pages.take(size, partial(self._sizes.pop, number, None))
        self._sizes[number] = size
        return slab


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
