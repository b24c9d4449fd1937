"""Optimizer steps that start before the global gradient norm is known, with results bit-identical to waiting for it.

    with spillway.Speculation(buckets=3) as speculation:
        for batch in batches:
            speculation.begin(adam, max_norm=1.0)
            for bucket, tensors in gradients_as_they_come:
                speculation.submit(bucket, tensors)
            mine = speculation.local_result()              # sum mine.sum_squares over all ranks
            outcome = speculation.resolve(mine)
            speculation.finish()

`tensors` are tuples as for the optimizer's step(). The caller must not touch their memory until the bucket is final."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, ne
from typing import Any, NamedTuple

from . import _abi, _arguments, _arrays, _kept
from ._attributes import Fixed
from ._native_handle import _NativeHandle
from .errors import InvalidArgumentError, OwnSuppressed
from .gpu import CudaEvent, CudaStream, Gpu, device_table, stream_number
from .optim import StepStats, Tensors, _Optimizer, counter, tensor_table

PUBLISH = {"final": _abi.SPEC_PUBLISH_FINAL, "staged": _abi.SPEC_PUBLISH_STAGED, "speculative": _abi.SPEC_PUBLISH_SPECULATIVE}
VERDICTS = ("commit", "skip", "redo")
STATES = ("missing", "pending", "speculative", "final")
#: The ways to roll back a step.
EXACT = {"delta": _abi.UNDO_MODE_DELTA, "shadow": _abi.UNDO_MODE_SHADOW}
_UNDO = {**EXACT, "none": _abi.UNDO_MODE_NONE}
_DESCRIPTOR = _abi.SPEC_EVENT_KIND_FD
_CUDA_EVENT, _CUDA_STREAM = _abi.SPEC_EVENT_KIND_CUDA, _abi.SPEC_EVENT_KIND_CUDA_STREAM


class Outcome(NamedTuple):
    """The result of a verdict.

    Attributes:
        verdict: "commit" keeps the steps, "skip" rolls all back, "redo" repeats them with `grad_scale`.
        norm: Norm of the scaled gradients of all ranks; NaN if they are not finite or the caller gave the verdict.
        grad_scale: Gradient factor of every kept step; 0 if none is kept.
        rolled_back: Number of buckets that are rolled back."""

    verdict: str
    norm: float
    grad_scale: float
    rolled_back: int


class SpeculationStats(NamedTuple):
    """Counters of a Speculation since its open.

    Attributes:
        commits: Rounds with the verdict "commit".
        redos: Rounds with the verdict "redo".
        skips: Rounds with the verdict "skip".
        aborts: Rounds that were aborted.
        buckets_speculated: Buckets that stepped before the verdict.
        buckets_committed: Buckets whose early step was kept.
        buckets_redone: Buckets whose early step was redone.
        buckets_rolled_back: Buckets whose early step was rolled back.
        buckets_spared: Buckets not stepped before the verdict: it was already certain, early steps of the last two rounds were in vain,
            they are in GPU memory, or `undo` is "none".
        exposed_seconds: Seconds that callers waited, summed over callers.
        seconds_since_begun: Seconds since the first bucket of the open or the last round began; -1 if none has begun."""

    commits: int
    redos: int
    skips: int
    aborts: int
    buckets_speculated: int
    buckets_committed: int
    buckets_redone: int
    buckets_rolled_back: int
    buckets_spared: int
    exposed_seconds: float
    seconds_since_begun: float


class Speculation(_NativeHandle):
    """An engine that steps buckets before the global gradient norm is known. Thread-safe.

    | publish | when a bucket's 16-bit copies are written |
    |---|---|
    | "final" | once the bucket is final |
    | "staged" | by the step itself; no code may read them before the bucket is final |
    | "speculative" | by the step itself; they may be read at once and may be rolled back |

    | undo | how a step is rolled back |
    |---|---|
    | "delta" | by a log |
    | "shadow" | steps write to the shadows given with the tensors, so the old values remain |
    | "none" | no bucket steps before the verdict: it is measured, and steps afterwards; this takes no memory |

    With undo "shadow" the shadows hold the state after a verdict of "commit" or "redo": exchange tensors and shadows in
    the next round.

    Args:
        buckets: Number of buckets of a round.
        publish: "final", "staged" or "speculative".
        undo: "delta", "shadow" or "none".

    Raises:
        InvalidArgumentError: An argument has a wrong value.

    Example:
        with spillway.Speculation(buckets=1) as speculation:
            speculation.begin(adam, max_norm=1.0)
            speculation.submit(0, [(param, grad, exp_avg, exp_avg_sq)])
            outcome = speculation.resolve(speculation.local_result())
            speculation.finish()"""

    closer = "spw_spec_close"

    buckets: Fixed[int] = Fixed("Number of buckets of a round.")

    def __init__(self, buckets: int, *, publish: str = "final", undo: str = "delta"):
        for name, value, known in (("publish", publish, PUBLISH), ("undo", undo, _UNDO)):
            _arguments.one_of(f"Speculation: {name}", value, known)
        buckets = _arguments.between("Speculation: buckets", buckets, 1, (1 << 32) - 1)
        options = _abi.sized(_abi.SpecOptions)
        options.buckets, options.undo_mode, options.publish = buckets, _UNDO[undo], PUBLISH[publish]
        self.buckets, self._publish, self._undo = buckets, publish, undo
        self._optimizer: _Optimizer | None = None
        self._held = _kept.Submitted()
        self._destinations: dict[int, list[Any]] = {}
        self._hold("spw_spec_open", ctypes.byref(options), keeps=(self._held, self._destinations))

    def _facts(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "publish": self._publish, "undo": self._undo, "optimizer": self._optimizer}

    def begin(self, optimizer: _Optimizer, *, max_norm: float = 0.0, grad_scale: float = 1.0) -> None:
        """Opens a round. resolve() increments the optimizer's step count unless the verdict is "skip".

        Args:
            optimizer: The Adam, Adagrad or other optimizer of spillway whose options the steps use.
            max_norm: Largest norm of all scaled gradients, above which they are clipped; 0: no limit.
            grad_scale: Factor of the gradients: 1 / loss scale.

        Raises:
            OutOfOrderError: The last round is not finished."""
        if not isinstance(optimizer, _Optimizer):
            raise InvalidArgumentError(
                f"Speculation.begin: optimizer is a {type(optimizer).__name__}; pass an optimizer of spillway, such as spillway.Adam"
            )
        options = optimizer.options_of_next_step(grad_scale)
        self._call(f"spw_spec_begin_{optimizer.c_name}", ctypes.byref(options), max_norm)
        self._optimizer = optimizer

    def submit(
        self,
        bucket: int,
        tensors: Tensors,
        *,
        shadow: Tensors | None = None,
        event_fd: int | None = None,
        after: CudaStream | CudaEvent | None = None,
        gpu: Gpu | None = None,
        uint16_dtype: str | None = None,
    ) -> None:
        """Submits a bucket, whose step starts at once or after an event.

        Args:
            bucket: Number of the bucket.
            tensors: As for the optimizer's step(). The caller must not touch their memory until the bucket is final.
            shadow: With undo "shadow", for each tensor a tuple of param and the states; see the optimizer's prepare().
            event_fd: The step starts when this descriptor is readable.
            after: The step starts when this stream or event of `gpu` reaches its present position.
            gpu: The Gpu of `after`.
            uint16_dtype: The dtype that uint16 arrays hold: "bf16" or "f16".

        Raises:
            InvalidArgumentError: No round was begun, or an array does not fit.
            OutOfOrderError: The bucket was submitted before in this round."""
        if self._optimizer is None:
            raise InvalidArgumentError(f"Speculation.submit: bucket {bucket} was submitted before a round; call begin() first")
        table, held = tensor_table(self._optimizer, tensors, uint16_dtype, shadow)
        if gpu is not None:
            Gpu._given("Speculation.submit: gpu", gpu)
        table_of = (ctypes.addressof(table), len(table))
        self.submit_table("spw_spec_submit", bucket, held, *table_of, event_fd=event_fd, after=after, gpu=gpu)

    def submit_gpu(
        self,
        bucket: int,
        gpu: Gpu,
        tensors: Iterable[Sequence[Any]],
        *,
        stream: CudaStream | None = None,
        after: CudaStream | CudaEvent | None = None,
    ) -> None:
        """Submits a bucket in GPU memory, in a round of Adam. The GPU steps it once, after the verdict.

        Args:
            bucket: Number of the bucket.
            gpu: The Gpu that holds the tensors.
            tensors: As for Gpu.step().
            stream: Stream in whose order the GPU steps; None: torch's current stream.
            after: Stream or event after which the GPU computes the norm."""
        rows = [tuple(row) for row in tensors]
        table = device_table(rows, ordinal=Gpu._given("Speculation.submit_gpu: gpu", gpu).ordinal)
        gpu._through(
            lambda device: self.submit_table(
                "spw_spec_submit_gpu",
                bucket,
                (_arrays.all_held(rows), stream),
                device,
                ctypes.addressof(table),
                len(table),
                stream_number(stream, gpu.ordinal),
                after=after,
                gpu=gpu,
            )
        )

    def publish_to(self, bucket: int, gpu: Gpu, copies: Sequence[Sequence[Any]]) -> None:
        """Uploads a bucket's 16-bit copies to the GPU as soon as they are valid, from now on. Call it between rounds.

        Args:
            bucket: Number of the bucket.
            gpu: The Gpu.
            copies: Tuples of host memory, device memory, and optionally the stream or event that still reads the old
                values."""
        rows = [tuple(row) for row in copies]
        Gpu._given("Speculation.publish_to: gpu", gpu)
        records = [gpu.copy_record(1, device, host, *after or (None,)) for host, device, *after in rows]
        table = (_abi.GpuCopy * len(records))(*records)
        destinations = self._destinations.setdefault(bucket, [])
        outcome: list[int] = []
        destinations.append(_arrays.all_held(rows))

        try:
            gpu._through(lambda device: self._recorded(outcome, "spw_spec_publish_to", bucket, device, table, len(table)))
        finally:
            # The new copies if C accepted them, else the old ones: always at least the memory that C uses.
            self._destinations[bucket] = destinations[-1:] if outcome == [0] else destinations[:-1]

    def stream_wait_params(self, bucket: int, stream: CudaStream | None = None, timeout: float | None = None) -> None:
        """Waits like wait(), then makes later work on `stream` wait, on the device, for the bucket's new parameters.

        Args:
            bucket: Number of the bucket.
            stream: The stream; None: torch's current stream.
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: The bucket has no new parameters yet."""
        self._wait_by(timeout, "spw_spec_stream_wait", bucket, stream_number(stream))

    def submit_table(
        self,
        function: str,
        bucket: int,
        held: Any,
        *arguments: Any,
        event_fd: int | None = None,
        after: CudaStream | CudaEvent | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        """Submits a bucket by the C function of that name, whose last argument is the event; `held` is kept alive until the round ends."""

        def submit(device: Any = None) -> None:
            event = _event(event_fd, after, device)
            self._held.submit(held, lambda outcome: self._recorded(outcome, function, bucket, *arguments, event))

        submit() if gpu is None else gpu._through(submit)

    def local_result(self, timeout: float | None = None) -> StepStats:
        """Waits until the gradients of every bucket are measured; returns this rank's StepStats.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: A bucket was not measured in this time.
            OutOfOrderError: A bucket was not submitted."""
        stats = _abi.sized(_abi.StepStats)
        self._wait_by(timeout, "spw_spec_local_result", after=(ctypes.byref(stats),))
        return StepStats(bool(stats.nonfinite), stats.sum_squares)

    def bucket_squares(self) -> list[float]:
        """Returns the sum of the squares of each bucket's scaled gradients; NaN for a bucket with a gradient that is not finite. Call it
        after local_result()."""
        squares, count = (ctypes.c_double * self.buckets)(), ctypes.c_uint64()
        self._call("spw_spec_get_squares", squares, self.buckets, ctypes.byref(count))
        return list(squares)

    def resolve(self, total: StepStats | tuple[bool, float]) -> Outcome:
        """Gives the verdict that follows from the measured norm; returns its Outcome at once.

        Args:
            total: The StepStats of all ranks: any `nonfinite`, the sum of `sum_squares`."""
        return self._resolve([], total)

    def _resolve(self, status: list[int], total: StepStats | tuple[bool, float]) -> Outcome:
        """As resolve(), and appends the status of the call to `status`, also if a signal handler raises after the call."""
        stats = _abi.sized(_abi.StepStats)
        stats.nonfinite, stats.sum_squares = int(total[0]), total[1]
        return self._resolved(status, "spw_spec_resolve", ctypes.byref(stats))

    def resolve_as(self, verdict: str, grad_scale: float = 1.0) -> Outcome:
        """Gives the caller's own verdict; returns its Outcome at once.

        Args:
            verdict: "commit", "skip" or "redo".
            grad_scale: Gradient factor of "redo"."""
        return self._resolve_as([], verdict, grad_scale)

    def _resolve_as(self, status: list[int], verdict: str, grad_scale: float) -> Outcome:
        """As resolve_as(), and appends the status of the call to `status`, also if a signal handler raises after the call."""
        number = VERDICTS.index(_arguments.one_of("Speculation.resolve_as: verdict", verdict, VERDICTS))
        return self._resolved(status, "spw_spec_resolve_as", number, grad_scale)

    def abort(self) -> None:
        """Rolls an open round back, whatever was submitted, and waits until that is done. A bucket that had failed is no error: its step
        has not happened, as that of the others."""
        self._call("spw_spec_abort")
        begun = self._held.begun()
        with OwnSuppressed():
            # It ends with the error of a failed bucket, once the round is over.
            self._wait_by(None, "spw_spec_finish")
        self._held.over(begun)

    def bucket_state(self, bucket: int) -> str:
        """Returns the state of a bucket: "missing", "pending", "speculative" or "final"."""
        state = ctypes.c_uint32()
        self._call("spw_spec_get_bucket", bucket, ctypes.byref(state))
        return STATES[state.value]

    def wait(self, bucket: int, timeout: float | None = None) -> None:
        """Waits until a bucket's 16-bit copies are valid: final, or with publish "speculative" stepped.

        Args:
            bucket: Number of the bucket.
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: The copies are not valid yet."""
        self._wait_by(timeout, "spw_spec_wait", bucket)

    def finish(self, timeout: float | None = None) -> None:
        """Waits until every bucket of the resolved round is final; their memory belongs to the caller again. While the round has no
        verdict, the call waits for that of another thread.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimedOutError: A bucket is not final yet."""
        begun = self._held.begun()
        self._wait_by(timeout, "spw_spec_finish")
        self._held.over(begun)

    def rolled_back_buckets(self) -> list[int]:
        """Returns the numbers of the buckets that were already stepped when the last verdict rolled them back."""
        buckets, count = (ctypes.c_uint32 * self.buckets)(), ctypes.c_uint64()
        self._call("spw_spec_get_rolled_back", buckets, self.buckets, ctypes.byref(count))
        return list(buckets[: count.value])

    def stats(self) -> SpeculationStats:
        """Returns the counters since the open."""
        counters = _abi.sized(_abi.SpecStats)
        self._call("spw_spec_get_stats", ctypes.byref(counters))
        return SpeculationStats(
            *(getattr(counters, {"exposed_seconds": "seconds_exposed"}.get(name, name)) for name in SpeculationStats._fields)
        )

    def _began(self) -> float | None:
        """When the first bucket of the open or the last round began, by time.perf_counter(); None if none has begun."""
        age = self.stats().seconds_since_begun
        return None if age < 0 else time.perf_counter() - age

    def close(self) -> None:
        """Closes the engine; an open round is rolled back first."""
        if self._end():
            self._held.clear()
            self._destinations.clear()

    def _resolved(self, status: list[int], function: str, *arguments: Any) -> Outcome:
        found = _abi.sized(_abi.SpecOutcome)
        # Functions of C only: a signal handler would run at the begin of one of Python.
        stepped = map(ne, map(attrgetter("verdict"), repeat(found)), repeat(_abi.SPEC_VERDICT_SKIP))
        count = counter([] if self._optimizer is None else [self._optimizer], stepped)
        self._counted(count, function, *arguments, ctypes.byref(found), outcome=status)
        return Outcome(VERDICTS[found.verdict], found.norm, found.grad_scale, found.rolled_back)


def _event(fd: int | None, after: Any = None, gpu: Any = None) -> Any:
    event = _abi.sized(_abi.SpecEvent)
    if after is not None and gpu is not None:
        event.gpu = gpu
        if hasattr(after, "cuda_stream"):
            event.kind, event.handle = _CUDA_STREAM, stream_number(after)
        else:
            event.kind, event.handle = _CUDA_EVENT, after.cuda_event
    elif after is not None:
        raise InvalidArgumentError("Speculation.submit: after is given without gpu; pass the Gpu to which the stream or event belongs")
    elif fd is not None:
        event.kind, event.fd = _DESCRIPTOR, _arguments.signed("event_fd", fd)
    else:
        return None
    return ctypes.byref(event)
