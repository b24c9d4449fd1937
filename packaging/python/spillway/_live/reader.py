"""Finds the records of processes, and checks the values of a record: a process of another version of this package may have written it."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import InvalidArgumentError, NotFoundError
from . import place

_PLACES = ("host", "device")


class Path(NamedTuple):
    """A path of a tier, since its open; as of spillway.PathReport."""

    name: str
    health: str
    read_bytes: int
    written_bytes: int
    reading_seconds: float
    writing_seconds: float


class Optimizer(NamedTuple):
    """The figures of an optimizer; None: it has no such figure."""

    kind: str
    where: str
    steps: int
    seconds: float
    last_seconds: float
    exposed_seconds: float | None
    commits: int | None
    committed_step: int | None
    memory: dict[tuple[str, str], int]
    paths: list[Path]


class Published(NamedTuple):
    """What a process has published.

    Attributes:
        lives: False: the process has ended. None: it is one of another namespace of processes.
        age: Seconds since it was published."""

    pid: int
    start: int
    command: str
    lives: bool | None
    age: float
    time: float
    optimizers: list[Optimizer]
    directories: list[str]


def number_of(job: str) -> int | None:
    """The number of a process that `job` is; None: it is none."""
    return int(job) if job.isascii() and job.isdigit() and len(job) <= 10 else None


def find(job: str) -> list[Published]:
    """The records of a process, by its number, or of all processes with a tier in a directory; those of living ones, if there are some.

    Raises:
        InvalidArgumentError: It is neither a number nor a directory.
        NotFoundError: There is no record."""
    if (number := number_of(job)) is not None:
        return _of_number(number)
    if os.path.isdir(job):
        found = [record for record in _all() if any(_is_within(job, place) for place in record.directories)]
        if not found:
            raise NotFoundError(
                f"no process of this user and machine has a tier in {job}, or has stepped on it yet; name the directory of a path, "
                "or the number of the process"
            )
    else:
        raise InvalidArgumentError(f"{job!r} is neither the number of a process nor a directory; pass one of them")
    return [record for record in found if record.lives is not False] or found


def _of_number(number: int) -> list[Published]:
    """The records of a process by its number. Earlier processes may have left records under this number: while a process here has it,
    theirs are not read; after its end, only the newest is."""
    found = [record for record in _all() if record.pid == number]
    if here := [record for record in found if record.lives]:
        return here
    elsewhere = [record for record in found if record.lives is None]
    if place.start_of(number) is not None:
        found = elsewhere
    if not found:
        raise NotFoundError(_why_none(number))
    newest = max(found, key=lambda record: record.time)
    return elsewhere if newest.lives is None else [newest]


def _why_none(number: int) -> str:
    what = f"process {number} has published no figures"
    try:
        owner = os.stat(f"/proc/{number}").st_uid
    except OSError:
        return f"{what}, and there is no such process; name one that runs"
    if owner != os.geteuid():
        return f"{what} that this user may read: it belongs to user {owner}; watch it as that user"
    if (unusable := _unusable()) is not None:
        return f"{what}: {unusable}"
    return (
        f"{what}: it has not ended a step of an optimizer of Spillway, or runs with SPILLWAY_WATCH=0, or with another /dev/shm, as in a "
        "container; wait for a step, or watch it from there"
    )


def _unusable() -> str | None:
    """Why no directory of records can be used; None: one can, or there is none."""
    failed: OSError | None = None
    for directory in place.directories():
        try:
            with place.opened(directory):
                return None
        except FileNotFoundError:
            pass
        except OSError as error:
            failed = error
    return None if failed is None else f"{failed.filename}: {failed.strerror}"


def _is_within(asked: str, job: str) -> bool:
    """True if `asked` is the path on which the directory of a job is, or that directory, or is below it."""
    here, own = os.path.realpath(asked), os.path.realpath(job)
    return here in (own, os.path.dirname(own)) or here.startswith(os.path.join(own, ""))


def _all() -> list[Published]:
    found: dict[place.Process, Published] = {}
    now, own = time.time(), place.namespace()
    for directory in place.directories():
        with suppress(OSError), place.opened(directory) as folder:
            for process in place.processes(folder):
                if (stored := place.read(folder, process.file)) is not None:
                    found[process] = _record(stored, process, process.lives(own), now)
    return [found[key] for key in sorted(found)]


def _record(stored: dict[str, Any], process: place.Process, lives: bool | None, now: float) -> Published:
    optimizers = [one for one in _list(stored.get("optimizers")) if isinstance(one, dict)]
    told = _number(stored.get("time"))
    places = [place for one in optimizers for place in _list(one.get("directories")) if isinstance(place, str) and "\0" not in place]
    return Published(
        process.number,
        process.start,
        _text(stored.get("command")),
        lives,
        max(0.0, now - told),
        told,
        [*map(_optimizer, optimizers)],
        places,
    )


def _optimizer(stored: dict[str, Any]) -> Optimizer:
    memory = stored.get("memory")
    by_place = {place: memory.get(place) for place in _PLACES} if isinstance(memory, dict) else {}
    kinds = {
        (place, _text(kind)): int(_number(size))
        for place, sizes in by_place.items()
        if isinstance(sizes, dict)
        for kind, size in sizes.items()
    }
    return Optimizer(
        _text(stored.get("kind")),
        _text(stored.get("where")),
        int(_number(stored.get("steps"))),
        _number(stored.get("seconds")),
        _number(stored.get("last_seconds")),
        None if stored.get("exposed_seconds") is None else _number(stored["exposed_seconds"]),
        None if stored.get("commits") is None else int(_number(stored["commits"])),
        None if stored.get("committed_step") is None else int(_number(stored["committed_step"])),
        kinds,
        [_path(path) for path in _list(stored.get("paths")) if isinstance(path, dict)],
    )


def _path(stored: dict[str, Any]) -> Path:
    numbers = [_number(stored.get(name)) for name in Path._fields[2:]]
    return Path(_text(stored.get("name")), _text(stored.get("health")), int(numbers[0]), int(numbers[1]), numbers[2], numbers[3])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    """A number that is at least 0; 0 in place of anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e300 or math.isnan(value):
        return 0.0
    return value


def _text(value: Any) -> str:
    """A text in one line that a terminal shows as it is."""
    return "".join(letter if letter.isprintable() else "?" for letter in value) if isinstance(value, str) else ""
