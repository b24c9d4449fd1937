"""EXPERIMENTAL: stages, asynchronous optimizer jobs of a pipeline.

A Stage is the optimizer of one stage of a pipeline: the docs call it a stage optimizer. It steps its tensors as soon as
their gradients are complete, before the gradients of other stages and processes are validated. The verdict comes later: it
keeps every step, or rolls every step back to the bit. Stages share the processors of the thread pool.

    stages = [Stage([(param, grad, exp_avg, exp_avg_sq)], adam) for param, grad, exp_avg, exp_avg_sq in layers]
    for stage in stages:
        stage.submit(step=1)
    verdict = settle(stages)"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from . import _abi, _arguments, _kept, _native
from ._attributes import Fixed
from ._held_signals import HeldSignals
from ._native_handle import TIMEOUT, _NativeHandle
from .arena import Arena
from .errors import InvalidArgumentError, SpillwayError, TimedOutError
from .gpu import CudaEvent, CudaStream, Gpu
from .optim import Adam, StepStats, Tensors, tensor_table
from .speculate import EXACT, PUBLISH, STATES, _event

_WORD = _abi.SPEC_EVENT_KIND_WORD
# A settle() that raised so often was called with a value that no call accepts.
_MOST_INTERRUPTS = 100


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

    A rollback of a "staged" step writes the copies of the restored parameters. A region that held other bytes, as in generation
    0, does not get them back.

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

    #: A write to an item has an effect on the next job.
    tensors: Fixed[list[Any]] = Fixed("The tensors of the next job.")
    shadow: Fixed[list[Any] | None] = Fixed("The shadows of the next job; None without.")
    adam: Fixed[Adam] = Fixed("The Adam whose options the next step uses.")
    arena: Fixed[Arena | None] = Fixed("The Arena with the copies; None without.")
    region: Fixed[str | None] = Fixed("Name of the region with the copies; None without.")
    uint16_dtype: Fixed[str | None] = Fixed("The dtype that uint16 arrays hold.")

    def __init__(
        self,
        tensors: Tensors,
        adam: Adam,
        *,
        priority: int = 0,
        cores: int = 0,
        publish: str = "final",
        undo: str = "delta",
        shadow: Tensors | None = None,
        arena: Arena | None = None,
        region: str | None = None,
        uint16_dtype: str | None = None,
    ):
        known = {name: value for name, value in PUBLISH.items() if name != "speculative"}
        for name, value, values in (("publish", publish, known), ("undo", undo, EXACT)):
            _arguments.one_of(f"Stage: {name}", value, values)
        if not isinstance(adam, Adam):
            raise InvalidArgumentError(f"Stage: adam is a {type(adam).__name__}; pass a spillway.Adam")
        if (arena is None) != (region is None):
            raise InvalidArgumentError("Stage: arena and region belong together; pass both or none")
        if arena is not None:
            Arena._given("Stage: arena", arena)
        options = _abi.sized(_abi.StageOptions)
        options.priority, options.cores = _arguments.signed("Stage: priority", priority), _arguments.unsigned("Stage: cores", cores, 32)
        options.undo_mode, options.publish = EXACT[undo], known[publish]
        self.tensors, self.shadow = list(tensors), None if shadow is None else list(shadow)
        self._shape = {"publish": publish, "undo": undo, "priority": priority, "cores": cores}
        self.adam, self.arena, self.region, self.uint16_dtype = adam, arena, region, uint16_dtype
        self._verdict: StepStats | None = None
        self._held = _kept.Submitted()
        self._hold("spw_stage_open", ctypes.byref(options), keeps=(self._held,))

    def _facts(self) -> dict[str, Any]:
        return {"tensors": len(self.tensors), **self._shape, "arena": self.arena, "region": self.region, "verdict": self.verdict}

    @property
    def verdict(self) -> StepStats | None:
        """The result of the last wait(); None before it."""
        return self._verdict

    def submit(
        self,
        step: int,
        *,
        lr: float | None = None,
        grad_scale: float = 1.0,
        generation: int | None = None,
        event_fd: int | None = None,
        word: tuple[int, int] | None = None,
        after: CudaStream | CudaEvent | None = None,
        gpu: Gpu | None = None,
    ) -> None:
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
            BusyError: The last job is not over; call finish() first. Or another stage or writer has the region.
            TornError: The writer of the region ended in a write, and the copies cover only a part of the region."""
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
            index = self.arena._index(self.region)  # type: ignore[arg-type]

            def with_arena(arena: Any) -> None:
                target = _abi.sized(_abi.StageTarget)
                target.region, target.arena, target.generation = index, arena.value, step if generation is None else generation
                self._submit(held, own, table, event, ctypes.byref(target))

            self.arena._through(with_arena)

        submit() if gpu is None else Gpu._given("Stage.submit: gpu", gpu)._through(submit)

    def _submit(self, held: Any, options: Any, table: Any, event: Any, target: Any) -> None:
        arguments = ctypes.byref(options), ctypes.addressof(table), len(table), event, target
        self._held.submit((held, table), lambda outcome: self._recorded(outcome, "spw_stage_submit_adam", *arguments))
        self._verdict = None

    def wait(self, timeout: float | None = None) -> StepStats:
        """Waits until the tensors are stepped; returns the local result, the StepStats of the scaled gradients.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: The step has not run yet.
            SpillwayError: The job failed: roll every stage back."""
        stats = _abi.sized(_abi.StepStats)
        self._wait_by(timeout, "spw_stage_wait", after=(ctypes.byref(stats),))
        self._verdict = StepStats(bool(stats.nonfinite), stats.sum_squares)
        return self._verdict

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
            TimedOutError: The job is not over.
            SpillwayError: The job failed, before or during the wait. It is rolled back, and needs no verdict."""
        begun = self._held.begun()
        try:
            self._wait_by(timeout, "spw_stage_finish")
        except SpillwayError as error:
            if error.status != TIMEOUT:
                self._held.over(begun)
            raise
        self._held.over(begun)

    def exchange(self) -> None:
        """Exchanges the tensors' param and states with the shadows, after a step that was kept with undo "shadow"."""
        if self.shadow is None:
            raise InvalidArgumentError('Stage.exchange: this Stage has no shadow; open it with undo="shadow"')
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


def settle(
    stages: Iterable[Stage],
    *,
    arena: Arena | None = None,
    process: int = 0,
    round: int = 0,
    reduce: Callable[[StepStats], StepStats] | None = None,
    timeout: float | None = None,
) -> Settled:
    """Waits for all stages, exchanges the local results, then keeps every step or rolls every step back, and waits until
    that is done.

    All processes of the arena get one outcome. A process that leaves settle() by an exception before the round is decided,
    also by a timeout, Ctrl-C or a wrong argument, aborts the round: all processes roll back. After that it follows the
    verdict, and then raises the exception of a signal handler. Without a valid `arena`, `process` and `round` no round is
    aborted: the other processes wait for their timeout, or until this process ends. An interrupt before settle() has begun
    leaves the jobs open: Stage.close() rolls them back, and Arena.abort_round() aborts the round.

    Args:
        stages: The stages of this process, each once, each with a submitted job.
        arena: Arena over whose processes the verdict goes; None: this process alone. `Arena.join` comes first.
        process: Number of this process in the arena.
        round: Number of the round, from 1: the number of the step will do. settle() posts it: a round that this process
            posted before is an error.
        reduce: Reduces the StepStats over all nodes: any `nonfinite`, the sum of `sum_squares`. An exception inside it, or
            another answer than a StepStats, rolls this process back and no other: it must fail in all processes or in none.
            In the main thread, the first signal during reduce is handled after it. A second signal is handled at once: its
            exception rolls this process back and no other.
        timeout: Longest wait in seconds for each stage and for the verdict; None: no limit. Steps that are kept or rolled
            back are waited for without a limit.

    Raises:
        PeerEndedError: A process ended or left the round. Every step is rolled back.
        TimedOutError: A stage, or the verdict, did not come in time. Every step is rolled back.
        InvalidArgumentError: An argument is wrong, or this process posted the round before. Every step is rolled back, here
            also if the earlier post of the round was decided.
        SpillwayError: A stage failed. Every step is rolled back."""
    settlement: _Settlement | None = None
    raised: list[BaseException] = []
    while settlement is None or not settlement.over:
        try:
            if settlement is None:
                settlement = _Settlement(stages, arena, process, round, reduce, timeout, raised)
            settlement.advance()
        except BaseException as error:
            # No call: a second signal handler may run after every call.
            raised += [error]
    raised += settlement.failures
    if raised:
        try:
            raise raised[0]
        finally:
            # The errors refer by their tracebacks to this frame and to those of the settlement.
            raised.clear()
            settlement.failures.clear()
            settlement = None
    assert settlement.outcome is not None
    return settlement.outcome


class _Settlement:
    """One settle(). A signal handler may raise between any two bytecodes; advance() is then called again."""

    def __init__(
        self,
        stages: Iterable[Stage],
        arena: Arena | None,
        process: int,
        round: int,
        reduce: Callable[[StepStats], StepStats] | None,
        timeout: float | None,
        raised: list[BaseException],
    ):
        self.named, self.arena, self.process, self.round = stages, arena, process, round
        self.reduce, self.timeout = reduce, timeout
        self.listed: list[Stage] = []
        self.stages: list[Stage] = []
        self.given: list[list[int]] = []
        self.taken, self.over = False, False
        self.posted: list[int] = []
        self.local: tuple[bool, int, float] = (False, 0, 0.0)
        # What reduce gets, which its call removes: an empty list tells that reduce was called.
        self.asked: list[StepStats] = [StepStats(False, 0.0)]
        self.reduced: list[Any] = []
        self.outcome: Settled | None = None
        self.failures: list[SpillwayError] = []
        self.raised = raised
        self.signals = HeldSignals()

    def advance(self) -> None:
        """Does what is left to do. An exception before the outcome is known ends the agreement."""
        if len(self.raised) >= _MOST_INTERRUPTS:
            self.over = True
            return
        self.signals.release()
        if not self.taken:
            self._take()
        if self.outcome is None and not self.raised:
            self._check()
            self._agree()
        if self.outcome is None:
            self._leave()
        assert self.outcome is not None
        self._give(self.outcome.kept)
        self._finish()
        self.over = True

    def _take(self) -> None:
        """Lists the stages, each once; what is no stage gets no verdict."""
        if not self.listed:
            try:
                # One step. An iterator that raises leaves the stages before it in the list.
                self.listed.extend(self.named)
            except Exception:
                if not self.raised:
                    raise
        self.stages = list({id(stage): stage for stage in self.listed if isinstance(stage, Stage)}.values())
        self.given = [[] for _ in self.stages]
        self.taken = True

    def _check(self) -> None:
        if len(self.stages) != len(self.listed):
            other = [type(stage).__name__ for stage in self.listed if not isinstance(stage, Stage)]
            raise InvalidArgumentError(
                f"settle: stages has a {other[0]}; pass Stages" if other else "settle: stages names a stage twice; pass each stage once"
            )
        if self.arena is not None and not isinstance(self.arena, Arena):
            raise InvalidArgumentError(f"settle: arena is a {type(self.arena).__name__}; pass a spillway.arena.Arena")
        if self.reduce is not None and not callable(self.reduce):
            raise InvalidArgumentError(f"settle: reduce is a {type(self.reduce).__name__}; pass a function")

    def _agree(self) -> None:
        total, nonfinite = 0.0, False
        for number, stage in enumerate(self.stages):
            try:
                stats = stage.wait(self.timeout)
                total, nonfinite = total + stats.sum_squares, nonfinite or stats.nonfinite
            except SpillwayError as error:
                error.args = (f"settle: stages[{number}]: {error}",)
                self.failures.append(error)
        failed = bool(self.failures)
        if self.arena is None:
            return self._decide(nonfinite, int(failed), total)
        self.arena._post(self.posted, self.process, self.round, (nonfinite or failed, total), failed)
        try:
            found = self.arena.wait_verdict(self.round, timeout=self.timeout)
        except TimedOutError:
            decided = self.arena.abort_round(self.process, self.round)
            if decided is None:
                raise
            found = decided
        self._decide(*found)

    def _leave(self) -> None:
        """After an exception: follows the verdict if it is known or decided; otherwise aborts the round."""
        if self.reduced:
            return self._decide(*self.local)
        found = None
        if isinstance(self.arena, Arena) and self.asked:
            with contextlib.suppress(SpillwayError):
                found = self.arena.abort_round(self.process, self.round)
        if found is None or self.posted != [0]:
            self.outcome = Settled(False, False, 0, float("nan"))
        else:
            self._decide(*found)

    def _decide(self, nonfinite: bool, failed: int, sum_squares: float) -> None:
        answer = (bool(nonfinite or failed), sum_squares)
        if self.reduce is not None:
            if not self.reduced:
                self.local = (nonfinite, failed, sum_squares)
                self.signals.hold()
                self.asked = [StepStats(*answer)]
                # One step passes the value to reduce and stores the answer: handlers run before it, or inside reduce.
                self.reduced.extend(itertools.islice(map(self.reduce, iter(self.asked.pop, None)), 1))
            answer = self._reduced()
        kept = not answer[0] and not failed
        self.outcome = Settled(kept, answer[0], failed, answer[1] if not answer[0] else float("nan"))
        self.signals.release()

    def _reduced(self) -> tuple[bool, float]:
        """The answer of reduce. A wrong one rolls the steps back."""
        try:
            nonfinite, sum_squares = self.reduced[0]
            return bool(nonfinite), float(sum_squares)
        except Exception as error:
            self.failures.append(
                InvalidArgumentError(f"settle: reduce returned {self.reduced[0]!r}; return a StepStats (nonfinite, sum_squares): {error}")
            )
            return True, float("nan")

    def _give(self, kept: bool) -> None:
        """Gives every stage its verdict once, also if one of them is closed."""
        function = "spw_stage_commit" if kept else "spw_stage_rollback"
        for stage, given in zip(self.stages, self.given):
            if not given:
                try:
                    stage._recorded(given, function)
                except SpillwayError as error:
                    given.append(-1)
                    self.failures.append(error)

    def _finish(self) -> None:
        """Waits for every stage, also if one of them failed: the caller owns the tensors again."""
        for stage in self.stages:
            try:
                stage.finish()
            except SpillwayError as error:
                self.failures.append(error)


def cores() -> Cores:
    """Returns how the stages of this process use the processors."""
    found = _abi.sized(_abi.StageCores)
    _native.call("spw_stage_get_cores", ctypes.byref(found))
    return Cores(found.threads, found.in_use, found.waiting, found.peak_threads)


def _word_event(word: tuple[int, int]) -> Any:
    event = _abi.sized(_abi.SpecEvent)
    event.kind, event.word = _WORD, _arguments.unsigned("Stage.submit: the address of word", word[0])
    event.value = _arguments.unsigned("Stage.submit: the value of word", word[1], 32)
    return ctypes.byref(event)
