"""Replaces DeepSpeed's compiled CPU optimizers, its file I/O and its pinned memory by Spillway.

Set SPILLWAY_DEEPSPEED=1 in the environment: every process of the job is patched, without a change to its script. Or
call:

    import spillway.deepspeed
    spillway.deepspeed.install()       # before the engine is built; at module level if workers are spawned

active() reports which operations Spillway has served.

The `spillway` block of the DeepSpeed configuration enables further parts; describe_settings() lists its settings:

- CPU and GPU update ZeRO-3's sub-groups together: "interleave".
- SuperOffload's steps end in the next forward: "superoffload"; see settle().
- Optimizer states with "offload_optimizer": {"device": "nvme"} are stored on a tier: "paths", "host_memory" and others.
- A killed run resumes at its last commit: "resume"; see commit(), client_state() and resumed_step().

Example:
    A DeepSpeed configuration whose run resumes after a crash:

        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"}},
        "spillway": {"paths": ["/mnt/nvme", "/mnt/pfs"], "job": "run7", "resume": true}"""

from __future__ import annotations

from typing import Any

from .._import_hook import unheard
from . import _hook, _installed
from ._hook import OPS, install, uninstall

__all__ = ["OPS", "active", "client_state", "commit", "describe_settings", "install", "resumed_step", "settle", "uninstall"]


def active() -> dict[str, Any]:
    """Reports what Spillway has done in this process.

    Returns:
        A dict: counters per replaced op, the active kernel ("kernel"), the I/O backend ("io"; None before the first file operation),
        SuperOffload's speculative steps ("superoffload", where "deferred" are those completed after step()), ZenFlow's steps
        ("zenflow"), the tiers, and steps that were recorded and rolled back. "preload" has the counters of the preload library, if
        it is loaded.
        "left_to_deepspeed" names the parts that do not fit this version of DeepSpeed, with the reason. "not_installed" says why
        SPILLWAY_DEEPSPEED has no effect, where the package was found by PYTHONPATH alone and install() was not called."""
    reason = None if _installed.parts else unheard("SPILLWAY_DEEPSPEED")
    return {**_hook.report(), **({"not_installed": f"SPILLWAY_DEEPSPEED is set, but {reason}"} if reason else {})}


def commit(engine: Any) -> None:
    """Makes an engine's optimizer states, and the further state of the run, durable on the tier as the engine's global
    step. Collective: every rank must call it, and it returns after all ranks have committed.

    Args:
        engine: A DeepSpeedEngine whose optimizer states are on a tier.

    Raises:
        InvalidArgumentError: The states are not on a tier, or the engine is between two micro-batches of a step.
        TierError: Another rank failed."""
    from . import _engine_state

    _engine_state.commit(engine)


def client_state(engine: Any) -> dict[Any, Any]:
    """Returns a dict for the caller's own data, which every commit stores, such as the position in the data set.

    After a resume it has the content of the last commit. It may contain None, numbers, strings, bytes, lists, tuples,
    deques, dictionaries, tensors and numpy arrays.

    Raises:
        InvalidArgumentError: The engine's optimizer states are not on a tier."""
    from . import _engine_state

    return _engine_state.client_state(engine)


def resumed_step(engine: Any) -> int | None:
    """Returns the global step at which the run was resumed; None for a new run.

    Raises:
        InvalidArgumentError: The engine's optimizer states are not on a tier."""
    from . import _engine_state

    return _engine_state.resumed_step(engine)


def settle(engine: Any) -> None:
    """Completes the last step of SuperOffload with "verdict": "forward" in this rank; afterwards `ds_tensor` of each parameter has the new
    weights. Forwards, gathers, checkpoints and DeepSpeed's functions for states do so themselves.

    Args:
        engine: A DeepSpeedEngine. Without a step to complete nothing happens."""
    from . import _superoffload

    _superoffload.complete(engine.optimizer)


def describe_settings() -> str:
    """Returns all settings of the `spillway` block as Markdown tables: valid values, defaults and meaning."""
    from . import _settings

    return _settings.describe()
