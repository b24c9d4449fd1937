"""Adam and AdamW whose step is a job of a stage: conversion, check and step of the gradients are one pass over memory, on the processors
that all stages of the process share (SysX section 4).

Invariants:
- One job is open at most, from a step to keep(), rollback() or the next step. The stage holds all memory of an open job.
- A step that was neither kept nor rolled back is kept, also if the optimizer is freed: torch's optimizers do not take steps back.
- A step that raised has changed nothing: its job is rolled back before the exception leaves.
- A rollback closes the stage: that one call returns when every bit is restored, so no signal handler sees half of it."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from .. import _abi, _native
from .._groups import is_torchs
from ..errors import InvalidArgumentError, UnsupportedError
from ..optim import Adam as PlainAdam
from ..optim import StepStats
from ..stage import Stage
from ..torch import Adam, AdamW
from ..torch.inner import CODES, Memory, Recorded, SpillwayOptimizer, name_of


class _KeptStage(Stage):
    """A stage that keeps an open step when it is closed or freed."""

    @staticmethod
    def _before(handle: Any) -> object:
        return _native.library().spw_stage_commit(handle)

    @property
    def is_closed(self) -> bool:
        """True after close() or cancel()."""
        return not self._cell

    def close(self) -> None:
        """Keeps an open step, and closes the stage."""
        if self._end(before=self._before):
            self._held.clear()

    def cancel(self, status: list[int]) -> None:
        """Rolls an open step back, closes the stage, and appends the status of the call."""
        # Names a stage that is closed or belongs to another process.
        self.handle
        if self._end(status=status):
            self._held.clear()


class _StageStep(Recorded):
    """A step that is an open job of the stage."""

    def __init__(self, table: Any, stage: _KeptStage, verdicts: list[StepStats]):
        super().__init__(table)
        self._stage, self._verdicts = stage, verdicts

    def run(self, status: list[int]) -> None:
        """Submits the job and waits until its tensors are stepped; appends the status of the wait."""
        stage, stats = self._stage, _abi.sized(_abi.StepStats)
        # An interrupted call may have left a job.
        stage.rollback()
        stage.finish()
        held = [tensor.detach() for tensor in (*self.written, *self._grads)]
        try:
            stage._submit(held, next(iter(self.table.options.values())), self.table.entries, None, None)
            stage._recorded(status, "spw_stage_wait", -1, ctypes.byref(stats))
        finally:
            if status != [0]:
                stage.rollback()
                stage.finish()
        self._verdicts[:] = [StepStats(bool(stats.nonfinite), stats.sum_squares)]

    def keep(self) -> None:
        """Keeps the step. In a forked child the values are kept already: the job belongs to the parent."""
        if self._stage._process == os.getpid():
            _keep(self._stage)

    def rollback(self, status: list[int]) -> None:
        """Restores every bit of parameters and states; appends the status of the call."""
        try:
            self._check_unchanged()
        except InvalidArgumentError:
            self.keep()
            raise
        self._stage.cancel(status)


class _Jobs(Memory):
    """States in host memory, whose steps are jobs of a stage.

    Attributes:
        verdicts: The verdict of the last step."""

    rest_words = (
        "cannot be stepped by a stage, which has no amsgrad, capturable or differentiable, and needs contiguous CPU parameters and "
        "gradients of float32, bfloat16 or float16; leave these options out and cast the parameter, or pass another optimizer"
    )
    _stage: _KeptStage | None = None
    _last: _StageStep | None

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.verdicts = [StepStats(False, 0.0)]

    def keep(self) -> None:
        """Keeps the last step, if there is one."""
        self.note_result()
        if self._last is not None:
            self._last.keep()
            self._last = None

    def begin(self, groups: list[dict[str, Any]], undo: bool) -> None:
        """Begins a step: the one before is kept."""
        self.keep()
        _check_signs(self.name, groups)
        self.verdicts[:] = [StepStats(False, 0.0)]
        super().begin(groups, undo)

    def load(self, by_torch: Any) -> None:
        """Loads a state dict; keeps the last step first."""
        self.keep()
        super().load(by_torch)

    def _recorded(self, rows: Any) -> Recorded:
        if self._stage is None or self._stage.is_closed or self._stage._process != os.getpid():
            self._stage = _KeptStage([], PlainAdam(), publish="staged")
        return _StageStep(rows, self._stage, self.verdicts)


class StageOptimizer(SpillwayOptimizer):
    """Base of StageAdam and StageAdamW; not for direct use.

    Attributes:
        verdict: StepStats of the gradients of the last step, from the pass of the step itself. A step with Inf or NaN is done
            all the same: roll it back."""

    _memory = _Jobs
    _settable = ("max_norm", "process_group", "skip_nonfinite")

    def _begin(self, params: Any, beyond: Any, **arguments: Any) -> None:
        super()._begin(params, _options(type(self).__name__, beyond), **arguments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch does.

        Raises:
            UnsupportedError: A stage cannot step the group. The optimizer is as before."""
        super().add_param_group(param_group)
        try:
            _check_group(self, len(self.param_groups) - 1)
        except UnsupportedError:
            self.param_groups.pop()
            raise

    @property
    def verdict(self) -> StepStats:
        """StepStats of the gradients of the last step."""
        return self._jobs.verdicts[-1]

    @property
    def _jobs(self) -> _Jobs:
        assert isinstance(self._home, _Jobs)
        return self._home

    def keep(self) -> None:
        """Keeps the last step: it cannot be rolled back any more. Does nothing without such a step."""
        self._jobs.keep()


class StageAdam(StageOptimizer, Adam):
    """spillway.torch.Adam whose step is a job of a stage. Bits, options and states are those of spillway.torch.Adam with undo=True.

    Args:
        params: Parameters, or groups of parameters: contiguous, in CPU memory, of float32, bfloat16 or float16. `maximize` is the same in
            all groups.
        options: The arguments of spillway.torch.Adam, without undo, tier and host_memory; no amsgrad, capturable or differentiable;
            master is None or "f32".

    Raises:
        UnsupportedError: A stage cannot step such parameters, or not with these options.

    Example:
        optimizer = functools.partial(spillway.pipeline.StageAdam, lr=1e-3)"""


class StageAdamW(StageOptimizer, AdamW):
    """spillway.torch.AdamW whose step is a job of a stage. Bits, options and states are those of spillway.torch.AdamW with undo=True.

    Args:
        params: Parameters, or groups of parameters: contiguous, in CPU memory, of float32, bfloat16 or float16. `maximize` is the same in
            all groups.
        options: The arguments of spillway.torch.AdamW, without undo, tier and host_memory; no amsgrad, capturable or differentiable;
            master is None or "f32".

    Raises:
        UnsupportedError: A stage cannot step such parameters, or not with these options.

    Example:
        optimizer = functools.partial(spillway.pipeline.StageAdamW, lr=1e-3, weight_decay=0.1)"""


def _keep(stage: Stage) -> None:
    if stage.state() == "speculative":
        stage.commit()
    stage.finish()


def _options(name: str, options: Any) -> Any:
    """The keywords of an optimizer whose steps can always be rolled back."""
    if not options.get("undo", True):
        raise InvalidArgumentError(f"{name}: undo is False, but a step of this class can always be rolled back; leave out undo")
    if options.get("tier") is not None:
        raise UnsupportedError(f"{name}: the states of a stage are in host memory; leave out tier, or pass spillway.torch.{name[5:]}")
    if options.get("master") == "split":
        raise UnsupportedError(f'{name}: a step of split masters cannot be rolled back; pass master="f32"')
    return {**options, "undo": True}


def refuse_parameter(kind: str, name: str, parameter: torch.Tensor) -> None:
    """Raises UnsupportedError for a trained parameter that a stage cannot step."""
    if parameter.requires_grad and not (parameter.dtype in CODES and parameter.is_cpu and parameter.is_contiguous()):
        raise UnsupportedError(
            f"{kind}: {name} is {parameter.dtype} on {parameter.device} with strides {parameter.stride()}; a stage steps "
            "contiguous float32, bfloat16 and float16 parameters in CPU memory: cast or copy it, or pass another optimizer"
        )


def _check_group(optimizer: StageOptimizer, number: int) -> None:
    group, kind = optimizer.param_groups[number], type(optimizer).__name__
    if is_torchs(group):
        raise UnsupportedError(f"{kind}: a stage has no amsgrad, capturable or differentiable; leave them out, or pass torch's optimizer")
    _check_signs(kind, optimizer.param_groups)
    for index, parameter in enumerate(group["params"]):
        refuse_parameter(kind, name_of(group, number, index), parameter)


def _check_signs(kind: str, groups: list[dict[str, Any]]) -> None:
    if len({bool(group.get("maximize")) for group in groups}) > 1:
        raise UnsupportedError(
            f"{kind}: maximize differs between two groups, and the job of a stage has one sign for all; pass the same value for all groups"
        )
