"""What `python -m spillway watch` shows of a process: lines of text, with the rates since the figures that were shown before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .reader import Optimizer, Path, Published


class Line(NamedTuple):
    """A line and its style: "head", "plain", or "bad" for what needs a look."""

    text: str
    style: str = "plain"


def lines(record: Published, before: Published | None) -> Iterator[Line]:
    """The lines about a process. `before`: what it had published before; None: rates are averages since the open."""
    if before is not None and (before.time >= record.time or before.start != record.start):
        before = None
    head = f"process {record.pid}  {record.command}"
    if record.lives is False:
        yield Line(f"{head}  has ended; these are its last figures, published {_time(record.age)} ago", "bad")
    else:
        yield Line(f"{head}  published {_time(record.age)} ago{'' if record.lives else ', in another container'}", "head")
    for number, one in enumerate(record.optimizers):
        last = None if before is None or number >= len(before.optimizers) else before.optimizers[number]
        yield from _optimizer(one, last if last is not None and last.kind == one.kind and last.steps <= one.steps else None)


def _optimizer(one: Optimizer, before: Optimizer | None) -> Iterator[Line]:
    steps = one.steps - before.steps if before is not None else one.steps
    parts = [f"step {one.steps}", f"last {_time(one.last_seconds)}"]
    if steps:
        parts.append(f"mean {_time((one.seconds - (before.seconds if before is not None else 0.0)) / steps)}")
    if one.exposed_seconds is not None:
        exposed = one.exposed_seconds - ((before.exposed_seconds or 0.0) if before is not None else 0.0)
        parts.append(f"exposed {_time(max(0.0, exposed) / steps)} a step" if steps else f"exposed {_time(one.exposed_seconds)}")
    if one.commits is not None:
        committed = "" if one.committed_step is None else f", the last of step {one.committed_step}"
        parts.append(f"{one.commits} commits{committed}")
    yield Line(f"  {one.kind}{f', {one.where}' if one.where else ''}: {', '.join(parts)}")
    if one.memory:
        yield Line("    memory: " + ", ".join(f"{where} {kind} {size / 1e9:.3f} GB" for (where, kind), size in one.memory.items() if size))
    for number, path in enumerate(one.paths):
        last = before.paths[number] if before is not None and number < len(before.paths) else None
        yield _path(path, last)


def _path(path: Path, before: Path | None) -> Line:
    read, reading = path.read_bytes - (before.read_bytes if before else 0), path.reading_seconds - (before.reading_seconds if before else 0)
    written, writing = (
        path.written_bytes - (before.written_bytes if before else 0),
        path.writing_seconds - (before.writing_seconds if before else 0),
    )
    rates = f"read {_rate(read, reading)}, write {_rate(written, writing)}"
    return Line(f"    {path.name or 'memory'}: {path.health}, {rates}", "plain" if path.health == "healthy" else "bad")


def _rate(size: int, seconds: float) -> str:
    """Bytes per second of a path that transfers."""
    return f"{size / seconds / 1e9:.2f} GB/s" if size > 0 and seconds > 0 else "idle"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
