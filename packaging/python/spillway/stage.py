"""EXPERIMENTAL: stages, asynchronous optimizer jobs of a pipeline.

A stage steps its tensors as soon as their gradients are complete, before the gradients of other stages and processes are
validated. The verdict comes later: it keeps every step, or rolls every step back to the bit. Stages share the processors of
the thread pool.

    stages = [Stage([(param, grad, exp_avg, exp_avg_sq)], adam) for param, grad, exp_avg, exp_avg_sq in layers]
    for stage in stages:
        stage.submit(step=1)
    verdict = settle(stages)"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import _abi, _arguments, _native
from ._native_handle import _NativeHandle, record
from .arena import Arena
from .errors import InvalidArgumentError, SpillwayError
from .gpu import CudaEvent, CudaStream, Gpu
from .optim import Adam, StepStats, Tensors, tensor_table
from .speculate import PUBLISH, STATES, UNDO, _event

_WORD = 2


class Cores(NamedTuple):
    """The processors that the stages of this process share.

    Attributes:
        threads: Threads of the pool.
        in_use: Threads that stages have now.
        waiting: Stages that could run and wait for a thread.
        peak_threads: Threads that worked on stages at one time: the most so far."""

    threads: int
    in_use: int
    waiting: int
    peak_threads: int


class Settled(NamedTuple):
    """The outcome of `settle`.

    Attributes:
        kept: True if every step was kept, False if every step was rolled back.
        nonfinite: True if a gradient of any process is Inf or NaN.
        failed: Number of processes with a stage that failed.
        sum_squares: Sum of squares of all scaled gradients; NaN if `nonfinite`."""

    kept: bool
    nonfinite: bool
    failed: int
    sum_squares: float


class Stage(_NativeHandle):
    """An optimizer job that runs beside the caller. Thread-safe.

    | publish | when the 16-bit copies are written |
    |---|---|
    | "final" | after the verdict; until then readers of the region use the earlier ones |
    | "staged" | by the step itself, in one pass; readers of the region wait from the step to the verdict |

    Args:
        tensors: Tuples (param, grad, exp_avg, exp_avg_sq[, param_copy]) as for Adam.step(). No other code may touch their
            memory from submit() until finish() has returned.
        adam: The Adam whose options the steps use. Its step count does not change.
        priority: A stage with a higher number gets free processors first.
        cores: Most threads of a step; 0: all of the pool.
        publish: "final" or "staged".
        undo: "delta", or "shadow" with `shadow`.
        shadow: With undo "shadow", for each tensor a tuple of param and the states. They hold the state after a step that
            was kept; exchange() exchanges them with the tensors.
        arena: Arena, mapped for writing, that holds the param_copy of every tensor.
        region: Name of the region of the arena.
        uint16_dtype: The dtype that uint16 arrays hold: "bf16" or "f16".

    Example:
        with Stage([(param, grad, exp_avg, exp_avg_sq)], adam) as stage:
            stage.submit(step=1)
            settle([stage])"""

    closer = "spw_stage_close"

    def __init__(self, tensors: Tensors, adam: Adam, *, priority: int = 0, cores: int = 0, publish: str = "final",
                 undo: str = "delta", shadow: Tensors | None = None, arena: Arena | None = None, region: str | None = None,
                 uint16_dtype: str | None = None):
        known = {name: value for name, value in PUBLISH.items() if name != "speculative"}
        for name, value, values in (("publish", publish, known), ("undo", undo, UNDO)):
            if value not in values:
                raise InvalidArgumentError(f"Stage: {name} is {value!r}; pass one of {', '.join(values)}")
        if not isinstance(adam, Adam):
            raise InvalidArgumentError(f"Stage: adam is a {type(adam).__name__}; pass a spillway.Adam")
        if (arena is None) != (region is None):
            raise InvalidArgumentError("Stage: arena and region belong together; pass both or none")
        options = _abi.sized(_abi.StageOptions)
        options.priority, options.cores = _arguments.signed("Stage: priority", priority), _arguments.unsigned("Stage: cores", cores, 32)
        options.undo_mode, options.publish = UNDO[undo], known[publish]
        self.tensors, self.shadow = list(tensors), None if shadow is None else list(shadow)
        self.adam, self.arena, self.region, self.uint16_dtype = adam, arena, region, uint16_dtype
        self.verdict: StepStats | None = None
        self._held: list[Any] = []
        self._hold("spw_stage_open", ctypes.byref(options))

    def submit(self, step: int, *, lr: float | None = None, grad_scale: float = 1.0, generation: int | None = None,
               event_fd: int | None = None, word: tuple[int, int] | None = None, after: CudaStream | CudaEvent | None = None,
               gpu: Gpu | None = None) -> None:
        """Starts a step and returns at once. The step runs at once, or after an event.

        Args:
            step: Number of the step, from 1.
            lr: Learning rate of this step; None: that of the Adam.
            grad_scale: Factor of the gradients: 1 / loss scale.
            generation: Generation that the region gets if the step is kept; None: `step`.
            event_fd: The step starts when this descriptor is readable.
            word: Address of a 32-bit word and a value: the step starts when the word counts up to the value.
            after: The step starts when this stream or event of `gpu` reaches its present position.
            gpu: The Gpu of `after`.

        Raises:
            OutOfOrderError: The last job has no verdict.
            BusyError: The last job is not over; call finish() first."""
        _arguments.unsigned("Stage.submit: step", step)
        _arguments.unsigned("Stage.submit: generation", step if generation is None else generation)
        table, held = tensor_table(self.adam, self.tensors, self.uint16_dtype, self.shadow)
        own = _abi.AdamOptions()
        ctypes.pointer(own)[0] = self.adam.options_of_next_step(grad_scale, step)
        if lr is not None:
            own.lr = lr

        def submit(device: Any = None) -> None:
            event = _word_event(word) if word is not None else _event(event_fd, after, device)
            if self.arena is None:
                return self._submit(held, own, table, event, None)
            index = self.arena._index(self.region)

            def with_arena(arena: Any) -> None:
                target = _abi.sized(_abi.StageTarget)
                target.region, target.arena, target.generation = index, arena.value, step if generation is None else generation
                self._submit(held, own, table, event, ctypes.byref(target))

            self.arena._through(with_arena)

        submit() if gpu is None else gpu._through(submit)

    def _submit(self, held: Any, options: Any, table: Any, event: Any, target: Any) -> None:
        outcome: list[int] = []
        # Keep the memory alive before the call, so that an interrupt cannot free it while C uses it.
        entry = (held, table)
        self._held.append(entry)

        def submit(handle: Any) -> None:
            record(outcome, _native.library().spw_stage_submit_adam, handle, ctypes.byref(options), ctypes.addressof(table),
                   len(table), event, target)
            _native.check(outcome[0])

        try:
            self._through(submit)
            self.verdict = None
        finally:
            if outcome != [0]:
                self._held.remove(entry)

    def wait(self, timeout: float | None = None) -> StepStats:
        """Waits until the tensors are stepped; returns the local verdict, the StepStats of the scaled gradients.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: The step has not run yet.
            SpillwayError: The job failed: roll every stage back."""
        stats = _abi.sized(_abi.StepStats)
        self._call("spw_stage_wait", _arguments.milliseconds(timeout), ctypes.byref(stats))
        self.verdict = StepStats(bool(stats.nonfinite), stats.sum_squares)
        return self.verdict

    def commit(self) -> None:
        """Keeps the step; returns at once. finish() waits for the 16-bit copies."""
        self._call("spw_stage_commit")

    def redo(self, grad_scale: float) -> None:
        """Rolls the step back and repeats it with another gradient factor, as after clipping; returns at once."""
        self._call("spw_stage_redo", grad_scale)

    def rollback(self) -> None:
        """Rolls the job back, whatever its state; returns at once. finish() waits. Without an open job it does nothing."""
        self._call("spw_stage_rollback")

    def finish(self, timeout: float | None = None) -> None:
        """Waits until the job is over; the memory of its tensors belongs to the caller again.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: The job is not over."""
        try:
            self._call("spw_stage_finish", _arguments.milliseconds(timeout))
        except SpillwayError as error:
            if error.status != 23:
                self._held.clear()
            raise
        self._held.clear()

    def exchange(self) -> None:
        """Exchanges the tensors' param and states with the shadows, after a step that was kept with undo "shadow"."""
        if self.shadow is None:
            raise InvalidArgumentError("Stage.exchange: this Stage has no shadow; open it with undo=\"shadow\"")
        for index, (tensor, shadow) in enumerate(zip(self.tensors, self.shadow)):
            param, grad, exp_avg, exp_avg_sq, *rest = tensor
            self.tensors[index] = (shadow[0], grad, shadow[1], shadow[2], *rest)
            self.shadow[index] = (param, exp_avg, exp_avg_sq)

    def state(self) -> str:
        """Returns the state of the job: "missing", "pending", "speculative" (stepped, no verdict) or "final"."""
        state = ctypes.c_uint32()
        self._call("spw_stage_get_state", ctypes.byref(state))
        return STATES[state.value]

    def close(self) -> None:
        """Closes the stage; a job without a verdict is rolled back first."""
        if self._end():
            self._held.clear()


def settle(stages: Sequence[Stage], *, arena: Arena | None = None, process: int = 0, round: int = 0,
           reduce: Callable[[StepStats], StepStats] | None = None, timeout: float | None = None) -> Settled:
    """Waits for all stages, exchanges the local verdicts, then keeps every step or rolls every step back, and waits until
    that is done.

    Args:
        stages: The stages of this process, each with a submitted job.
        arena: Arena over whose processes the verdict goes; None: this process alone. `Arena.join` comes first.
        process: Number of this process in the arena.
        round: Number of the round, from 1: the number of the step will do.
        reduce: Reduces the StepStats over all nodes: any `nonfinite`, the sum of `sum_squares`.
        timeout: Longest wait in seconds of each wait; None: no limit.

    Raises:
        SpillwayError: A stage failed, a process ended, or a wait timed out. Every step of this process is rolled back."""
    total, failures, nonfinite = 0.0, [], False
    try:
        for stage in stages:
            try:
                stats = stage.wait(timeout)
                total, nonfinite = total + stats.sum_squares, nonfinite or stats.nonfinite
            except SpillwayError as error:
                failures.append(error)
        found = (nonfinite, int(bool(failures)), total)
        if arena is not None:
            arena.post(process, round, (nonfinite or bool(failures), total), failed=bool(failures))
            found = arena.wait_verdict(round, timeout=timeout)
        local = StepStats(bool(found[0] or found[1]), found[2])
        reduced = local if reduce is None else reduce(local)
        kept = not reduced[0] and not found[1]
        for stage in stages:
            stage.commit() if kept else stage.rollback()
    except BaseException:
        for stage in stages:
            stage.rollback()
        _finish_all(stages, timeout)
        raise
    if failures:
        with contextlib.suppress(SpillwayError):
            _finish_all(stages, timeout)
        raise failures[0]
    _finish_all(stages, timeout)
    return Settled(kept, bool(reduced[0]), found[1], reduced[1] if not reduced[0] else float("nan"))


def _finish_all(stages: Sequence[Stage], timeout: float | None) -> None:
    """Waits for every stage, also if one of them failed; then raises the first error."""
    failures = []
    for stage in stages:
        try:
            stage.finish(timeout)
        except SpillwayError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def cores() -> Cores:
    """Returns how the stages of this process use the processors."""
    found = _abi.sized(_abi.StageCores)
    _native.check(_native.library().spw_stage_get_cores(ctypes.byref(found)))
    return Cores(found.threads, found.in_use, found.waiting, found.peak_threads)


def _word_event(word: tuple[int, int]) -> Any:
    event = _abi.sized(_abi.SpecEvent)
    event.kind, event.word = _WORD, _arguments.unsigned("Stage.submit: the address of word", word[0])
    event.value = _arguments.unsigned("Stage.submit: the value of word", word[1], 32)
    return ctypes.byref(event)
