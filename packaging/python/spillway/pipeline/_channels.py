"""Messages between the processes of a pipeline, over one pipe for each ordered pair of devices.

Invariants:
- A send never blocks the caller: a thread for each peer writes.
- A receipt is posted before it is read: a thread for each peer reads the next message only for a posted receipt.
  Memory for messages that nobody expects yet stays with the sender.
- Sends and receipts of a pair have the same order, because both follow the positions of the plan."""

from __future__ import annotations

import pickle
import queue
import threading
from concurrent.futures import Future
from typing import Any

from ..errors import SpillwayError


class PeerGoneError(SpillwayError):
    """The process at the other end of a pipe has ended."""


class Channels:
    """The pipes of one device.

    Args:
        outgoing: For each peer the writing end of a pipe.
        incoming: For each peer the reading end of a pipe."""

    def __init__(self, outgoing: dict[int, Any], incoming: dict[int, Any]):
        self._sends = {peer: _Worker(lambda job, end=end, peer=peer: _send(end, peer, *job)) for peer, end in outgoing.items()}
        self._receipts = {peer: _Worker(lambda job, end=end, peer=peer: _receive(end, peer, *job)) for peer, end in incoming.items()}

    def send(self, peer: int, key: tuple[Any, ...], meta: Any, data: Any) -> Future[Any]:
        """Sends `data`, an object with bytes, with a small object `meta`. The key names the message."""
        return self._sends[peer].submit((key, meta, data))

    def receive(self, peer: int, key: tuple[Any, ...]) -> Future[Any]:
        """Posts the receipt of the next message of a peer, whose key must be `key`. The result is (meta, bytes)."""
        return self._receipts[peer].submit((key,))


class _Worker:
    """A thread that does jobs in order."""

    def __init__(self, work: Any):
        self._work, self._jobs = work, queue.SimpleQueue[Any]()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, job: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def _run(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(self._work(job))
            except BaseException as error:
                future.set_exception(error)


def _send(end: Any, peer: int, key: tuple[Any, ...], meta: Any, data: Any) -> None:
    try:
        end.send_bytes(pickle.dumps((key, meta)))
        end.send_bytes(data)
    except OSError as error:
        raise PeerGoneError(f"sending to device {peer} failed: {error}") from error


def _receive(end: Any, peer: int, key: tuple[Any, ...]) -> tuple[Any, bytes]:
    try:
        found, meta = pickle.loads(end.recv_bytes())
        data = end.recv_bytes()
    except (OSError, EOFError) as error:
        raise PeerGoneError(f"receiving from device {peer} failed: {error or 'its process has ended'}") from error
    if found != key:
        raise SpillwayError(f"device {peer} sent {found}, but {key} is next; please report this")
    return meta, data
