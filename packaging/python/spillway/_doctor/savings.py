"""What a job saves: the planner's figures of the job as it is, and of what Spillway has for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgumentError
from ..planner import plan_model
from .findings import Findings

_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMBGT]?)", re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
#: The heads of a model have this width, and its vocabulary these words, where only the number of its parameters is known.
_WIDTH_OF_A_LAYER, _WORDS = 128, 32_000
_LEAST, _MOST = 10**6, 10**14


def parameters_of(text: str) -> int:
    """The number of parameters that a text such as "7B" names.

    Raises:
        InvalidArgumentError: It is none, or out of range."""
    found = _NUMBER.fullmatch(text.strip())
    number = 0 if found is None else int(float(found[1]) * _FACTORS[found[2].upper()])
    if not _LEAST <= number <= _MOST:
        raise InvalidArgumentError(f"--parameters is {text!r}; pass a number from 1M to 100T, such as 7B or 350M")
    return number


def described(parameters: int) -> dict[str, int]:
    """A description of a decoder with about this number of parameters, as the planner reads it: layers of 12 squares of the width, which
    is 128 for each layer, as in models of 7 to 70 billion."""
    layers = max(1, round((parameters / (12 * _WIDTH_OF_A_LAYER**2)) ** (1 / 3)))
    hidden = _WIDTH_OF_A_LAYER * layers
    return {
        "parameters": parameters,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": min(_WORDS, max(2, parameters // (4 * hidden))),
    }


def check(options: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError if the planner takes these options for no model."""
    plan_model(described(_LEAST), **options)


def planned(found: Findings, model: str | Mapping[str, Any], options: Mapping[str, Any]) -> tuple[list[str], dict[str, Any] | None]:
    """Lines about the savings, and the plan; None if the planner knows too little about the paths of the job.

    Raises:
        InvalidArgumentError: The planner refuses the model or an option."""
    # The number of subgroups is limited.
    passed = {"sub_group_size": max(10**8, model["parameters"] // 1000), **options} if isinstance(model, Mapping) else options
    try:
        plan = plan_model(model, **{"paths": found.directories, **passed, **found.plan})
    except InvalidArgumentError as error:
        # Without what the job says, it refuses what the user has passed.
        plan_model(model, **passed)
        return [f"not planned: {str(error).removeprefix('plan_model: ')}"], None
    strategies = {row["strategy"]: row for row in plan["strategies"]}
    # With one path the planner has no row of its own for it.
    now = strategies.get(found.strategy) or (strategies.get("tier") if found.strategy == "tier-one-path" else None)
    offered = [row for name, row in strategies.items() if name in found.choices and row["fits"] and row["seconds"]]
    lines = [] if now is None else [_row("now", now)]
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
