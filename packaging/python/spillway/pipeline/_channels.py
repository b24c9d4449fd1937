"""Messages between the processes of a pipeline. _pipes.py and _gloo.py have the links that carry them.

Invariants, for every kind of link:
- A send never blocks the caller: a thread for each peer writes.
- A receipt is posted before it is read: a thread for each peer reads the next message only for a posted receipt.
  Memory for messages that nobody expects yet stays with the sender.
- Sends and receipts of a pair have the same order, because both follow the positions of the plan.
- A link to a process that has ended raises PeerGoneError."""

from __future__ import annotations

import abc
import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..errors import SpillwayError


class PeerGoneError(SpillwayError):
    """The process at the other end of a link has ended."""


class Link(abc.ABC):
    """The connection of a device to a peer. One thread writes, another one reads."""

    @abc.abstractmethod
    def write(self, head: bytes, data: Any) -> None:
        """Sends a message of two parts: `head`, and `data`, an object with bytes. Returns when the memory of `data` is free again.

        Raises:
            PeerGoneError: The peer has ended."""

    @abc.abstractmethod
    def read(self) -> tuple[bytes, bytes]:
        """Returns the parts of the peer's next message.

        Raises:
            PeerGoneError: The peer has ended."""


class Endpoint(abc.ABC):
    """What a process needs for its links. The parent makes one for each device, and sends it to the process."""

    @abc.abstractmethod
    def open(self) -> dict[int, Link]:
        """Returns the links by peer, in the process of the device. All processes call this at the same time."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the parent's copies of the descriptors, after the processes have started."""


class Channels:
    """The messages of one device.

    Args:
        links: The link to each peer."""

    def __init__(self, links: dict[int, Link]):
        self._sends = {peer: _Worker(lambda job, link=link: _send(link, *job)) for peer, link in links.items()}
        self._receipts = {peer: _Worker(lambda job, link=link, peer=peer: _receive(link, peer, *job)) for peer, link in links.items()}

    def send(self, peer: int, key: tuple[Any, ...], make: Callable[[], tuple[Any, Any]]) -> Future[Any]:
        """Sends what `make` returns in the thread of the peer: a small object, and an object with bytes. The key names the message."""
        return self._sends[peer].submit((key, make))

    def receive(self, peer: int, key: tuple[Any, ...]) -> Future[Any]:
        """Posts the receipt of the next message of a peer, whose key must be `key`. The result is (small object, bytes)."""
        return self._receipts[peer].submit((key,))


class _Worker:
    """A thread that does jobs in order. It starts with the first job."""

    def __init__(self, work: Any):
        self._work, self._jobs = work, queue.SimpleQueue[Any]()
        self._started = False

    def submit(self, job: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(self._work(job))
            except BaseException as error:
                future.set_exception(error)


def _send(link: Link, key: tuple[Any, ...], make: Callable[[], tuple[Any, Any]]) -> None:
    meta, data = make()
    link.write(pickle.dumps((key, meta)), data)


def _receive(link: Link, peer: int, key: tuple[Any, ...]) -> tuple[Any, bytes]:
    head, data = link.read()
    found, meta = pickle.loads(head)
    if found != key:
        raise SpillwayError(f"device {peer} sent {found}, but {key} is next; please report this")
    return meta, data
