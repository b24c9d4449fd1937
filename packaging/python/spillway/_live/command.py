"""The commands `python -m spillway watch DIR|PID` and `python -m spillway metrics DIR|PID`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import _console
from ..errors import InvalidArgumentError, NotFoundError
from . import prometheus, reader, screen

_FOUND, _NOT_FOUND, _USAGE = 0, 1, 2
_STYLES = {"head": "bold", "plain": "", "bad": "bold red"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"spillway: {message}; {self.prog} --help lists the options", file=sys.stderr)
        sys.exit(_USAGE)


def _parser(command: str, description: str) -> _Parser:
    parser = _Parser(f"python -m spillway {command}", description=description, allow_abbrev=False)
    parser.add_argument("job", metavar="DIR|PID", help="the number of a process, or a directory with its tier")
    return parser


def _guarded(work: Callable[[], int]) -> int:
    try:
        return work()
    except (InvalidArgumentError, NotFoundError) as error:
        print(f"spillway: {error}", file=sys.stderr)
        return _USAGE if isinstance(error, InvalidArgumentError) else _NOT_FOUND
    except KeyboardInterrupt:
        return _FOUND


def metrics(given: Sequence[str]) -> int:
    """Prints the figures once, in Prometheus' text format."""
    asked = _parser("metrics", "Prints what a running job does, once, in Prometheus' text format.").parse_args(given)

    def work() -> int:
        found = reader.find(asked.job)
        living = [record for record in found if record.lives is not False]
        if not living:
            raise NotFoundError(f"process {found[0].pid} has ended; its last figures are {found[0].age:.0f} s old: watch shows them")
        _console.write(prometheus.text(living), end="")
        return _FOUND

    return _guarded(work)


def watch(given: Sequence[str]) -> int:
    """Shows the figures until the processes end."""
    parser = _parser("watch", "Shows live what a running job does, until it ends.")
    parser.add_argument("--count", type=int, metavar="N", help="show the figures N times; by default until the job ends")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="seconds between; default: 1")
    asked = parser.parse_args(given)
    if (asked.count is not None and asked.count < 1) or not 0.05 <= asked.interval <= 86400:
        parser.error("--count is a number from 1 on, and --interval one of seconds from 0.05 to 86400")
    return _guarded(lambda: _watch(asked.job, asked.count, asked.interval))


def _watch(job: str, count: int | None, interval: float) -> int:
    found, seen, number = reader.find(job), _Seen(), 0
    if all(record.lives is False for record in found):
        _show_plain(seen.lines(found))
        return _NOT_FOUND
    with _screen() as show:
        while True:
            number += 1
            show(seen.lines(found))
            if number == count or all(record.lives is False for record in found):
                return _FOUND
            time.sleep(interval)
            found = seen.followed(job)
            if not found:
                # A process that ends by itself removes its record.
                show([screen.Line(f"{', '.join(f'process {pid}' for pid, _ in seen.records)} has ended", "head")])
                return _FOUND


class _Seen:
    """What was shown of each process: rates are those between its last two records, of which one may be shown several times."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, int], tuple[reader.Published | None, reader.Published]] = {}

    def followed(self, job: str) -> list[reader.Published]:
        """The records of a later look at a job: those of the processes that were shown, and new ones with a tier in its directory. Earlier
        processes may have left records too."""
        by_number = reader.number_of(job) is not None
        try:
            found = reader.find(job)
        except NotFoundError:
            return []
        return [one for one in found if (one.pid, one.start) in self.records or not (by_number or one.lives is False)]

    def lines(self, found: Sequence[reader.Published]) -> list[screen.Line]:
        told: list[screen.Line] = []
        for record in found:
            key = record.pid, record.start
            before, last = self.records.get(key, (None, None))
            if last is None or last.time != record.time:
                before, self.records[key] = last, (last, record)
            told += screen.lines(record, before)
        return told


def _show_plain(lines: Sequence[screen.Line]) -> None:
    _console.write("\n".join(line.text for line in lines))


class _Plain:
    """Lines one below the other."""

    def __enter__(self) -> Callable[[Sequence[screen.Line]], None]:
        return _show_plain

    def __exit__(self, *_: object) -> None:
        pass


class _Rich:
    """Lines in the place of those before, on a terminal."""

    def __init__(self, live: Any, text: Any):
        self._live, self._text = live, text

    def __enter__(self) -> Callable[[Sequence[screen.Line]], None]:
        self._live.__enter__()
        return self._show

    def _show(self, lines: Sequence[screen.Line]) -> None:
        text = self._text()
        for line in lines:
            text.append(line.text + "\n", style=_STYLES[line.style])
        self._live.update(text, refresh=True)

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(*error)


def _screen() -> Any:
    if sys.stdout is None or not sys.stdout.isatty():
        return _Plain()
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        return _Plain()
    return _Rich(Live(auto_refresh=False), Text)
