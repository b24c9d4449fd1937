"""Links over one pipe for each ordered pair of devices: the default on one machine. Nothing but the processes of the pipeline can open
them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from typing import Any

from ._channels import Endpoint, Link, PeerGoneError


class PipeEndpoint(Endpoint):
    """The ends of the pipes of one device."""

    def __init__(self) -> None:
        self.incoming: dict[int, Any] = {}
        self.outgoing: dict[int, Any] = {}

    def open(self) -> dict[int, Link]:
        """Returns the links; see Endpoint."""
        return {peer: _PipeLink(peer, self.incoming.get(peer), self.outgoing.get(peer)) for peer in {*self.incoming, *self.outgoing}}

    def close(self) -> None:
        """Closes the ends that this process holds."""
        for end in (*self.incoming.values(), *self.outgoing.values()):
            end.close()


def connect(devices: int, pairs: Iterable[tuple[int, int]]) -> list[Endpoint]:
    """Opens a pipe for each pair (from, to) of devices. Returns the endpoints by device."""
    endpoints = [PipeEndpoint() for _ in range(devices)]
    try:
        for sender, receiver in sorted(set(pairs)):
            endpoints[receiver].incoming[sender], endpoints[sender].outgoing[receiver] = multiprocessing.Pipe(duplex=False)
    except BaseException:
        for endpoint in endpoints:
            endpoint.close()
        raise
    return list(endpoints)


class _PipeLink(Link):
    def __init__(self, peer: int, incoming: Any, outgoing: Any):
        self._peer, self._incoming, self._outgoing = peer, incoming, outgoing

    def write(self, head: bytes, data: Any) -> None:
        try:
            self._outgoing.send_bytes(head)
            self._outgoing.send_bytes(data)
        except OSError as error:
            raise PeerGoneError(f"sending to device {self._peer} failed: {error}") from error

    def read(self) -> tuple[bytes, bytes]:
        try:
            return self._incoming.recv_bytes(), self._incoming.recv_bytes()
        except (OSError, EOFError) as error:
            raise PeerGoneError(f"receiving from device {self._peer} failed: {error or 'its process has ended'}") from error
