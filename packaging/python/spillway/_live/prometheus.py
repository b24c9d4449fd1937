"""The figures of processes in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..tier import HEALTH
from .reader import Published

_Labels = dict[str, str]


class _Metric(NamedTuple):
    kind: str
    help: str


METRICS = {
    "spillway_record_age_seconds": _Metric("gauge", "Seconds since the process has published its figures, at the end of a step."),
    "spillway_steps_total": _Metric("counter", "Steps that have ended."),
    "spillway_step_seconds_total": _Metric("counter", "Seconds in steps."),
    "spillway_last_step_seconds": _Metric("gauge", "Seconds of the last step."),
    "spillway_exposed_seconds_total": _Metric(
        "counter", "Of the seconds in steps, those in which the program waited for data or for the step."
    ),
    "spillway_commits_total": _Metric("counter", "Commits of the tier since its open."),
    "spillway_committed_step": _Metric("gauge", "The step of the last commit."),
    "spillway_memory_bytes": _Metric("gauge", "Bytes of memory, by kind, on the host and on devices."),
    "spillway_path_read_bytes_total": _Metric("counter", "Bytes read from a path since its open."),
    "spillway_path_written_bytes_total": _Metric("counter", "Bytes written to a path since its open."),
    "spillway_path_reading_seconds_total": _Metric("counter", "Seconds with a read of the path in flight."),
    "spillway_path_writing_seconds_total": _Metric("counter", "Seconds with a write of the path in flight."),
    "spillway_path_health": _Metric("gauge", "1 for the state that the path has."),
}


def text(records: Iterable[Published]) -> str:
    """The figures of these processes."""
    samples: dict[str, list[str]] = {name: [] for name in METRICS}
    for record in records:
        for name, labels, value in _samples(record):
            samples[name].append(f"{name}{_labelled(labels)} {_number(value)}")
    parts: list[str] = []
    for name, lines in samples.items():
        if lines:
            parts += [f"# HELP {name} {METRICS[name].help}", f"# TYPE {name} {METRICS[name].kind}", *lines]
    return "\n".join([*parts, ""])


def _samples(record: Published) -> Iterator[tuple[str, _Labels, float]]:
    process = {"pid": str(record.pid)}
    yield "spillway_record_age_seconds", process, record.age
    for number, one in enumerate(record.optimizers):
        own = {**process, "optimizer": str(number), "kind": one.kind}
        yield "spillway_steps_total", own, one.steps
        yield "spillway_step_seconds_total", own, one.seconds
        yield "spillway_last_step_seconds", own, one.last_seconds
        for name, value in (
            ("spillway_exposed_seconds_total", one.exposed_seconds),
            ("spillway_commits_total", one.commits),
            ("spillway_committed_step", one.committed_step),
        ):
            if value is not None:
                yield name, own, value
        for (where, kind), size in one.memory.items():
            yield "spillway_memory_bytes", {**own, "where": where, "of": kind}, size
        for place, path in enumerate(one.paths):
            # Two paths may have one name: several in memory have none.
            labels = {**own, "path": path.name, "number": str(place)}
            yield "spillway_path_read_bytes_total", labels, path.read_bytes
            yield "spillway_path_written_bytes_total", labels, path.written_bytes
            yield "spillway_path_reading_seconds_total", labels, path.reading_seconds
            yield "spillway_path_writing_seconds_total", labels, path.writing_seconds
            for state in HEALTH:
                yield "spillway_path_health", {**labels, "state": state}, float(path.health == state)


def _labelled(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
