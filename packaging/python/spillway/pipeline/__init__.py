"""EXPERIMENTAL: pipeline parallelism with offloaded parameters (SysX section 3): schedules, and a runner with one process per device.

    plan = spillway.pipeline.plan("decoupled", devices=4, micro_batches=4, stages=8, split=2)
    print(plan.passes_bubble_ratio)
    open("timeline.svg", "w").write(plan.to_svg())

A model is a list of units. A forward stage has `split` units. In a decoupled schedule a backward stage has one unit, and
may be on another device than the forward stage; else it has the units of its forward stage.

`Pipeline`, `StageAdam` and `StageAdamW` need torch. The rest does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._plan import MemoryChange, Operation, Plan, Rollback, Unit, plan, rollback_cost
from .errors import PipelineError

if TYPE_CHECKING:
    from ._runner import Pipeline, StepReport, seed_of
    from ._stage_optimizer import StageAdam, StageAdamW

__all__ = [
    "MemoryChange",
    "Operation",
    "Pipeline",
    "PipelineError",
    "Plan",
    "Rollback",
    "StageAdam",
    "StageAdamW",
    "StepReport",
    "Unit",
    "plan",
    "rollback_cost",
    "seed_of",
]


def __getattr__(name: str) -> Any:
    if name in ("Pipeline", "StepReport", "seed_of"):
        from . import _runner

        return getattr(_runner, name)
    if name in ("StageAdam", "StageAdamW"):
        from . import _stage_optimizer

        return getattr(_stage_optimizer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
