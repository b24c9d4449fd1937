"""Links over torch.distributed's Gloo: TCP connections of the loopback interface.

A message is up to three transfers of one tag: a first part of fixed length with the lengths of head and data and the begin of the
head; the rest of the head, if any; the data, if any. Gloo transfers the bytes of a send when the peer has posted its receipt.

Invariants:
- The processes find each other by a FileStore in a file of memory without a name (memfd), which they get from their parent:
  no other pipeline uses it, and nothing is left.
- Sockets are bound to 127.0.0.1 only, at ports that the system chooses.
- A transfer ends with its peer: Gloo closes all connections of a process that ends. It has no timeout of its own that a step
  could reach; Pipeline.step(timeout=) is the limit."""

from __future__ import annotations

import datetime
import os
import struct
import threading
from collections.abc import Iterable
from typing import Any

from ..errors import UnsupportedError
from ._channels import Endpoint, Link, PeerGoneError

#: Gloo counts milliseconds in 32 bits at some places.
_LONGEST = datetime.timedelta(days=24)
_ADDRESS = "127.0.0.1"
#: Bytes of the first transfer of a message; its begin, the lengths of head and data.
_FIRST, _LENGTHS = 512, "<QQ"
_START = struct.calcsize(_LENGTHS)


class GlooEndpoint(Endpoint):
    """The store by which the processes find each other, and the peers of one device. `devices` is 0 if no device has a peer."""

    def __init__(self, store: int, device: int, devices: int, peers: set[int]):
        self._store, self._device, self._devices, self._peers = store, device, devices, peers

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import reduction

        return _opened, (reduction.DupFd(self._store), self._device, self._devices, self._peers)

    def open(self) -> dict[int, Link]:
        """Returns the links; see Endpoint."""
        from torch import distributed

        if not self._devices:
            return {}
        store = distributed.FileStore(f"/proc/self/fd/{self._store}", self._devices)
        options = distributed.ProcessGroupGloo._Options()
        options._devices, options._timeout = [distributed.ProcessGroupGloo.create_device(hostname=_ADDRESS)], _LONGEST
        group = distributed.ProcessGroupGloo(store, self._device, self._devices, options)
        begin = threading.Lock()
        return {peer: _GlooLink(group, begin, peer) for peer in self._peers}

    def close(self) -> None:
        """Closes the store, once for all devices."""
        if self._device == 0:
            os.close(self._store)


def connect(devices: int, pairs: Iterable[tuple[int, int]]) -> list[Endpoint]:
    """Returns the endpoints by device.

    Raises:
        UnsupportedError: torch has no Gloo."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        raise UnsupportedError('Pipeline: this build of torch has no Gloo; pass transport="pipes"')
    peers: list[set[int]] = [set() for _ in range(devices)]
    for sender, receiver in pairs:
        peers[sender].add(receiver)
        peers[receiver].add(sender)
    store = os.memfd_create("spillway-pipeline-store")
    return [GlooEndpoint(store, device, devices if any(peers) else 0, peers[device]) for device in range(devices)]


def _opened(store: Any, *arguments: Any) -> GlooEndpoint:
    return GlooEndpoint(store.detach(), *arguments)


class _GlooLink(Link):
    def __init__(self, group: Any, begin: threading.Lock, peer: int):
        self._group, self._begin, self._peer = group, begin, peer

    def write(self, head: bytes, data: Any) -> None:
        view = memoryview(data)
        first = bytearray(_FIRST)
        struct.pack_into(_LENGTHS, first, 0, len(head), view.nbytes)
        first[_START:] = head[: _FIRST - _START].ljust(_FIRST - _START)
        for part in (first, bytearray(head[_FIRST - _START :]), bytearray(view) if view.readonly else view):
            self._transfer("sending to", self._group.send, part)

    def read(self) -> tuple[bytes, bytes]:
        first = bytearray(_FIRST)
        self._transfer("receiving from", self._group.recv, first)
        head_bytes, data_bytes = struct.unpack_from(_LENGTHS, first)
        rest, data = bytearray(max(0, head_bytes - (_FIRST - _START))), bytearray(data_bytes)
        for part in (rest, data):
            self._transfer("receiving from", self._group.recv, part)
        return bytes(first[_START : _START + head_bytes] + rest), bytes(data)

    def _transfer(self, words: str, begin: Any, part: Any) -> None:
        import torch

        if not len(part):
            return
        try:
            # Gloo counts the operations of a group without a lock.
            with self._begin:
                work = begin([torch.frombuffer(part, dtype=torch.uint8)], self._peer, 0)
            work.wait()
        except RuntimeError as error:
            raise PeerGoneError(f"{words} device {self._peer} failed: {error}") from error
