"""Publishes the figures of this process's optimizers, for `python -m spillway watch` and `metrics`.

The end of a step publishes, at most once a second: no thread does, so that there is nothing to stop at a fork or at the end of the program.
A step that does not publish pays for two reads of a clock and a comparison. Publishing takes about a ten-thousandth of that second; it is
therefore always on, and SPILLWAY_WATCH=0 turns it off. An optimizer is asked for its figures by the thread that steps it, and by no other.

No failure here is one of the step: what cannot be published is tried again after a minute. No error of a signal handler is lost. A forked
child begins with no figures."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .. import _kept
from ..errors import is_raised_within
from . import place

#: Seconds between two records, and after a failure.
INTERVAL, AFTER_FAILURE = 1.0, 60.0
#: Seconds until a record is removed that is not replaced: of a process that has ended, and of one that another namespace may still have.
KEEPS_DEAD, KEEPS_FOREIGN = 3600.0, 7 * 86400.0
#: The code whose errors are no errors of the step. Those of other code are of a signal handler.
_CODE = ("spillway", "torch", "contextlib", "json", "os", "posixpath", "genericpath", "weakref")
_OFF = ("0", "no", "off", "false")
#: Most letters of the command in a record.
_MOST_COMMAND = 200


class Figures:
    """The figures of one optimizer. It lives as long as the optimizer holds it.

    Args:
        kind: What it is.
        owner: The optimizer, which is not kept alive.
        describe: Returns its further figures, as of `Publisher.record`."""

    def __init__(self, kind: str, owner: Any, describe: Callable[[Any], dict[str, Any]]):
        self.kind, self._owner, self._describe = kind, weakref.ref(owner), describe
        self.steps, self.seconds, self.last_seconds = 0, 0.0, 0.0
        #: Of `seconds`, those in which steps waited; None: steps never do.
        self.exposed_seconds: float | None = None
        self._publisher: Publisher | None = None
        #: What the owner has told, and until when it is not asked again.
        self._described: dict[str, Any] = {}
        self._due = 0.0

    def stepped(self, begun: float, waited: float | None = None) -> None:
        """Counts a step that has ended. `begun`: its time.perf_counter() at the begin. `waited`: seconds in which the program waited."""
        now = time.perf_counter()
        self.last_seconds = 0.0
        self._add(now - begun, waited)
        self.steps += 1
        publisher = _publisher
        if self._publisher is not publisher:
            self._publisher = publisher
            publisher.sources.add(self)
        if now >= self._due:
            self._ask(now)
        if now >= publisher.due:
            publisher.publish(now)

    def completed(self, begun: float, waited: float) -> None:
        """The rest of the last step, which it had left to a later call, has ended; as `stepped`."""
        self._add(time.perf_counter() - begun, waited)

    def _add(self, seconds: float, waited: float | None) -> None:
        self.last_seconds += seconds
        self.seconds += seconds
        if waited is not None:
            self.exposed_seconds = (self.exposed_seconds or 0.0) + min(max(waited, 0.0), seconds)

    def _ask(self, now: float) -> None:
        self._due = now + INTERVAL
        owner = self._owner()
        try:
            self._described = {} if owner is None else self._describe(owner)
        except Exception as error:
            # A hook may have closed a tier.
            if not is_raised_within(error, _CODE):
                raise

    def told(self) -> dict[str, Any]:
        """All figures."""
        own = {"kind": self.kind, "steps": self.steps, "seconds": self.seconds, "last_seconds": self.last_seconds}
        exposed = {} if self.exposed_seconds is None else {"exposed_seconds": self.exposed_seconds}
        return {**own, **exposed, **self._described}


class Publisher:
    """The record of this process.

    Attributes:
        due: From when on, by time.perf_counter(), the next one is published.
        sources: The figures of all optimizers."""

    def __init__(self) -> None:
        self.due, self.sources = 0.0, _kept.Living()
        self._process: place.Process | None = None
        self._directory: str | None = None

    def publish(self, now: float) -> None:
        """Publishes a record. It raises nothing but the exceptions of signal handlers."""
        self.due = now + INTERVAL
        try:
            if os.environ.get("SPILLWAY_WATCH", "").strip().lower() in _OFF:
                return
            self._write(json.dumps(self.record()).encode())
        except Exception as error:
            if not is_raised_within(error, _CODE):
                raise
            self.due = now + AFTER_FAILURE

    def record(self) -> dict[str, Any]:
        """What is published: the process, and the figures of each optimizer. These are `steps`, `seconds` of all of them and of the last
        one, and where there are such: `exposed_seconds`, `where` its states are, `memory` in bytes by kind on the "host" and on the
        "device", `commits` and the `committed_step`, `paths` with health, bytes and busy seconds, and the `tier`."""
        if self._process is None:
            self._process = place.this_process()
        return {
            "format": place.FORMAT,
            "time": time.time(),
            "command": " ".join(sys.argv)[:_MOST_COMMAND] or sys.executable,
            "optimizers": [found.told() for found in self.sources.list()],
        }

    def _write(self, content: bytes) -> None:
        assert self._process is not None
        if self._directory is None:
            self._directory = _usable()
            self._collect(self._directory)
        with place.opened(self._directory, make=True) as folder:
            place.write(folder, self._process, content)

    def _collect(self, directory: str) -> None:
        """Removes what processes have left that were killed."""
        assert self._process is not None
        with place.opened(directory) as folder:
            kept = {None: KEEPS_FOREIGN, False: KEEPS_DEAD}
            lives = {own.file: own.lives(self._process.namespace) for own in place.processes(folder)}
            left = {name: kept[living] for name, living in lives.items() if living is not True}
            left.update((name, KEEPS_DEAD) for name in os.listdir(folder) if name.endswith(".part"))
            for name, seconds in left.items():
                # Others may do the same.
                with suppress(FileNotFoundError):
                    if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > seconds:
                        os.unlink(name, dir_fd=folder)

    def end(self) -> None:
        """Removes the record at the end of the program."""
        if self._directory is None or self._process is None or self._process.number != os.getpid():
            return
        with suppress(Exception), place.opened(self._directory) as folder:
            os.unlink(self._process.file, dir_fd=folder)


def _usable() -> str:
    """The first directory that this user alone may use."""
    failed: OSError | None = None
    for directory in place.directories():
        try:
            with place.opened(directory, make=True):
                return directory
        except OSError as error:
            failed = error
    assert failed is not None
    raise failed


_publisher = Publisher()


def _begin_anew() -> None:
    """In a forked child: the record of the parent is not its own."""
    global _publisher
    _publisher = Publisher()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _publisher.end())
