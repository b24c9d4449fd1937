"""Replaces DeepSpeed's compiled CPU optimizers, its file I/O and its pinned memory by Spillway.

Set SPILLWAY_DEEPSPEED=1 in the environment: every process of the job is patched, without a change to its script. Or
call:

    import spillway.deepspeed
    spillway.deepspeed.install()       # before the engine is built; at module level if workers are spawned

active() reports which operations Spillway has served.

The `spillway` block of the DeepSpeed configuration enables further parts; describe_settings() lists its settings:

- CPU and GPU update ZeRO-3's sub-groups together: "interleave".
- Optimizer states with "offload_optimizer": {"device": "nvme"} are stored on a tier: "paths", "cache_bytes" and others.
- A killed run resumes at its last commit: "resume"; see commit(), client_state() and resumed_step().

Example:
    A DeepSpeed configuration whose run resumes after a crash:

        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"}},
        "spillway": {"paths": ["/mnt/nvme", "/mnt/pfs"], "job": "run7", "resume": true}"""

from __future__ import annotations

import sys
from typing import Any

from . import _hook
from ._hook import OPS, install, uninstall

__all__ = ["OPS", "active", "client_state", "commit", "describe_settings", "install", "resumed_step", "uninstall"]


def active() -> dict[str, Any]:
    """Reports what Spillway has done in this process.

    Returns:
        A dict: counters per replaced op, the active kernel ("kernel"), the I/O backend ("io"; None before the first
        file operation), SuperOffload's speculative steps, ZenFlow's steps ("zenflow"), the tiers, and steps that were
        recorded and rolled back. "preload" has the counters of the preload library, if it is loaded.
        "left_to_deepspeed" names the parts that do not fit this version of DeepSpeed, with the reason."""
    import spillway

    from . import _engine, _ops, _preload, _undo, _zenflow

    report = {op: _ops.served(op) for op in OPS if op in _hook.installed()}
    if report:
        report["kernel"] = spillway.kernel_name()
        report.update({"undo": recorded} if (recorded := _undo.report()) else {})
        report.update({"zenflow": steps} if (steps := _zenflow.served()) else {})
    if "async_io" in report:
        report["io"] = _engine.describe()
    superoffload = sys.modules.get(f"{__name__}._superoffload")
    if superoffload and "superoffload" in _hook.installed() and superoffload.served():
        report["superoffload"] = superoffload.served()
    tiers = sys.modules.get(f"{__name__}._tier")
    if tiers and tiers.served():
        report["tier"] = tiers.served()
    parameters = sys.modules.get(f"{__name__}._parameters")
    if parameters and parameters.served():
        report["parameter_tier"] = parameters.served()
    updates = sys.modules.get(f"{__name__}._interleave")
    if updates and updates.served():
        report["interleave"] = updates.served()
    if (preload := _preload.served()) is not None:
        report["preload"] = preload
    versions = sys.modules.get(f"{__name__}._versions")
    if versions and _hook.installed() and versions.left():
        report["left_to_deepspeed"] = versions.left()
    return report


def commit(engine: Any) -> None:
    """Makes an engine's optimizer states, and the further state of the run, durable on the tier as the engine's global
    step. Collective: every rank must call it, and it returns after all ranks have committed.

    Args:
        engine: A DeepSpeedEngine whose optimizer states are on a tier.

    Raises:
        InvalidArgumentError: The states are not on a tier, or the engine is between two micro-batches of a step.
        TierError: Another rank failed."""
    from . import _resume

    _resume.commit(engine)


def client_state(engine: Any) -> dict[Any, Any]:
    """Returns a dict for the caller's own data, which every commit stores, such as the position in the data set.

    After a resume it has the content of the last commit. It may contain None, numbers, strings, bytes, lists, tuples,
    deques, dictionaries, tensors and numpy arrays.

    Raises:
        InvalidArgumentError: The engine's optimizer states are not on a tier."""
    from . import _resume

    return _resume.client_state(engine)


def resumed_step(engine: Any) -> int | None:
    """Returns the global step at which the run was resumed; None for a new run.

    Raises:
        InvalidArgumentError: The engine's optimizer states are not on a tier."""
    from . import _resume

    return _resume.resumed_step(engine)


def describe_settings() -> str:
    """Returns all settings of the `spillway` block as Markdown tables: valid values, defaults and meaning."""
    from . import _block

    return _block.describe()
