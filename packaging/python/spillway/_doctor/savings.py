"""What a job saves: the planner's figures of the job as it is, and of what Spillway has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgumentError
from ..planner import plan_model
from .findings import Findings


def check(options: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError if the planner takes these options for no model."""
    plan_model(parameters="1M", **options)


def planned(found: Findings, options: Mapping[str, Any]) -> tuple[list[str], dict[str, Any] | None]:
    """Lines about the savings, and the plan; None if the planner knows too little about the paths of the job.

    Args:
        found: The job.
        options: The model or the number of its parameters, and the machine, as `plan_model` takes them.

    Raises:
        InvalidArgumentError: The planner refuses the model or an option."""
    try:
        plan = plan_model(**{"paths": found.directories, **options, **found.plan})
    except InvalidArgumentError as error:
        # Without what the job says, it refuses what the user has passed.
        plan_model(**options)
        return [f"not planned: {str(error).removeprefix('plan_model: ')}"], None
    strategies = {row["strategy"]: row for row in plan["strategies"]}
    # With one path the planner has no row of its own for it.
    now = strategies.get(found.strategy) or (strategies.get("tier") if found.strategy == "tier-one-path" else None)
    offered = [row for name, row in strategies.items() if name in found.choices and row["fits"] and row["seconds"]]
    lines = [] if now is None else [_row("now", now)]
    if now is None and found.strategy.startswith("tier"):
        lines.append("now: states on a tier, whose directories are known only when it runs; add --path DIR:READ:WRITE:CAPACITY")
    for name, rows in _best(offered):
        lines.append(_row(name, rows))
    if not offered:
        lacks = next((row["reasons"][0] for row in plan["strategies"] if row["strategy"] in found.choices and row["reasons"]), "no path")
        lines.append(f"nothing fits this machine: {lacks}; name another machine by --gpu-memory and --host-memory")
    elif now is not None:
        lines.append(_difference(now, _fastest(offered)))
    assumed = sorted(name for name, source in plan["sources"].items() if source == "assumed")
    if assumed:
        lines.append(f"assumed of the machine: {', '.join(assumed)}; spillway plan says more")
    return lines, plan


def calls(found: Findings, plan: Mapping[str, Any]) -> list[str]:
    """The calls by which a program of torch has the best strategies."""
    offered = [row for row in plan["strategies"] if row["strategy"] in found.choices and row["fits"] and row["seconds"]]
    return [f"{plan['calls'][row['strategy']]}   ({name})" for name, row in _best(offered)]


def _best(offered: list[Any]) -> list[tuple[str, Any]]:
    """The best strategies that fit, with what they are best in; one that is best in several things stands once."""
    if not offered:
        return []
    found: dict[str, tuple[list[str], Any]] = {}
    for name, row in (
        ("fastest", _fastest(offered)),
        ("least GPU", min(offered, key=lambda row: (row["gpu_bytes"], row["seconds"]["exposed"]))),
        ("least host", min(offered, key=lambda row: (row["host_bytes"], row["seconds"]["exposed"]))),
    ):
        found.setdefault(row["strategy"], ([], row))[0].append(name)
    return [(", ".join(names), row) for names, row in found.values()]


def _fastest(offered: list[Any]) -> Any:
    return min(offered, key=lambda row: row["seconds"]["exposed"])


def _row(name: str, row: Mapping[str, Any]) -> str:
    seconds = f"exposed {row['seconds']['exposed']:.2f} s a step" if row["seconds"] else "no room"
    stored = sum(path["bytes"] for path in row["paths"])
    paths = f", paths {_gb(stored)}" if stored else ""
    fits = "" if row["fits"] else ", does not fit"
    return f"{name:<21} {row['strategy']:<17} GPU {_gb(row['gpu_bytes'])}, host {_gb(row['host_bytes'])}{paths}, {seconds}{fits}"


def _difference(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    if now is then:
        return "the job has the fastest one already"
    parts = [
        f"{(then[field] - now[field]) / 1e9:+.1f} GB of {name} memory" for name, field in (("GPU", "gpu_bytes"), ("host", "host_bytes"))
    ]
    if now["seconds"] and then["seconds"]:
        parts.append(f"{then['seconds']['exposed'] - now['seconds']['exposed']:+.2f} s a step")
    return f"the fastest in place of now: {', '.join(parts)}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
