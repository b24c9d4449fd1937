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

import ctypes
from typing import NamedTuple

from . import _abi, _native
from ._held import Held, record
from .errors import InvalidArgument
from .gpu import device_table, stream_number
from .optim import StepStats, _Optimizer, tensor_table

PUBLISH = {"final": 0, "staged": 1, "speculative": 2}
VERDICTS = ("commit", "skip", "redo")
STATES = ("missing", "pending", "speculative", "final")
UNDO = {"delta": 1, "shadow": 2}
_DESCRIPTOR, _CUDA_EVENT, _CUDA_STREAM = 1, 3, 4


class Outcome(NamedTuple):
    """The result of a verdict: "commit", "skip" or "redo"; the norm of the scaled gradients of all ranks (NaN if they
    are not finite or the caller gave the verdict); the gradient factor of every kept step (0 if none is kept); and the
    number of buckets that are rolled back."""

    verdict: str
    norm: float
    grad_scale: float
    withdrawn: int


class Speculation(Held):
    """An engine for speculation rounds of `buckets` buckets.

    | publish | when a bucket's 16-bit copies are written |
    |---|---|
    | "final" | once the bucket is final |
    | "staged" | by the step itself; no code may read them before the bucket is final |
    | "speculative" | by the step itself; they may be read at once and may be rolled back |

    | undo | how a step is rolled back |
    |---|---|
    | "delta" | by a log |
    | "shadow" | steps write to the shadows given with the tensors, so the old values remain |

    With undo "shadow" the shadows hold the state after a verdict of "commit" or "redo": exchange tensors and shadows in
    the next round."""

    what, closer = "engine", "spw_spec_close"

    def __init__(self, buckets, *, publish="final", undo="delta"):
        for name, value, known in (("publish", publish, PUBLISH), ("undo", undo, UNDO)):
            if value not in known:
                raise InvalidArgument(f"{name} is {value!r}; one of {', '.join(known)} expected")
        if not isinstance(buckets, int) or not 0 < buckets < 1 << 32:
            raise InvalidArgument(f"buckets is {buckets!r}; a number of buckets is needed")
        options = _abi.sized(_abi.SpecOptions)
        options.buckets, options.undo_mode, options.publish = buckets, UNDO[undo], PUBLISH[publish]
        self.buckets = buckets
        self._optimizer = None
        self._held, self._destinations = {}, {}
        self._hold("spw_spec_open", ctypes.byref(options))

    def begin(self, optimizer, *, max_norm=0.0, grad_scale=1.0):
        """Opens a round of steps of a spillway.Adam, Adagrad or Lion. resolve() increments the optimizer's step count
        unless the verdict is "skip". max_norm 0 sets no limit; grad_scale is 1 / loss scale."""
        if not isinstance(optimizer, _Optimizer):
            raise InvalidArgument(f"optimizer is a {type(optimizer).__name__}; a spillway optimizer is needed")
        options = optimizer.options_of_next_step(grad_scale)
        self._call(f"spw_spec_begin_{optimizer.c_name}", ctypes.byref(options), max_norm)
        self._optimizer = optimizer

    def submit(self, bucket, tensors, *, shadow=None, event_fd=None, after=None, gpu=None, uint16_as=None):
        """Submits a bucket. Its step starts at once, or when the descriptor `event_fd` is readable, or when the stream
        or event `after` of the Gpu `gpu` reaches its current position. For `shadow` see the optimizer's prepare()."""
        if self._optimizer is None:
            raise InvalidArgument("no round was begun")
        table, held = tensor_table(self._optimizer, tensors, uint16_as, shadow)
        def submit(device=None):
            self.submit_table("spw_spec_submit", bucket, held, ctypes.addressof(table), len(table),
                              _event(event_fd, after, device))

        submit() if gpu is None else gpu._through(submit)

    def submit_gpu(self, bucket, gpu, tensors, *, stream=None, after=None):
        """Submits a bucket in GPU memory, in a round of Adam. The GPU computes its norm once `after` is reached, and
        steps it once, after the verdict, in the order of `stream`. The tensors are as for Gpu.step()."""
        table = device_table(tensors, ordinal=gpu.ordinal)
        gpu._through(lambda device: self.submit_table(
            "spw_spec_submit_gpu", bucket, (list(tensors), stream), device, ctypes.addressof(table), len(table),
            stream_number(stream, gpu.ordinal), _event(None, after, device)))

    def publish_to(self, bucket, gpu, copies):
        """Uploads a bucket's 16-bit copies to the GPU as soon as they are valid, from now on. `copies` has tuples (host
        memory, device memory[, stream or event that still reads the old values]). Call it between rounds."""
        records = [gpu.copy_record(1, device, host, *after or (None,)) for host, device, *after in copies]
        table = (_abi.GpuCopy * len(records))(*records)
        destinations, outcome = self._destinations.setdefault(bucket, []), []
        destinations.append(copies)

        def publish_to(device):
            self._through(lambda handle: record(outcome, _native.library().spw_spec_publish_to, handle, bucket, device, table,
                                                len(table)))
            _native.check(outcome[0])

        try:
            gpu._through(publish_to)
        finally:
            # The new copies if C accepted them, else the old ones: always at least the memory that C uses.
            self._destinations[bucket] = destinations[-1:] if outcome == [0] else destinations[:-1]

    def publish(self, bucket, stream=None, timeout=None):
        """Waits like wait(), then makes later work on `stream` wait, on the device, for the bucket's new parameters."""
        self._call("spw_spec_stream_wait", bucket, stream_number(stream), _milliseconds(timeout))

    def submit_table(self, function, bucket, held, *arguments):
        """Submits a bucket by the C function of that name; `held` is kept alive until the round ends."""
        token, outcome = object(), []
        # Keep the memory alive before the call, so that an interrupt cannot free it while C uses it.
        self._held[token] = held

        def submit(handle):
            record(outcome, getattr(_native.library(), function), handle, bucket, *arguments)
            _native.check(outcome[0])

        try:
            self._through(submit)
        finally:
            if outcome != [0]:
                self._held.pop(token, None)

    def local_result(self, timeout=None):
        """Waits until the gradients of every bucket are measured; returns this rank's StepStats."""
        stats = _abi.sized(_abi.StepStats)
        self._call("spw_spec_local_result", _milliseconds(timeout), ctypes.byref(stats))
        return StepStats(bool(stats.nonfinite), stats.sum_squares)

    def resolve(self, total):
        """Gives the verdict that follows from `total`, the StepStats summed over all ranks; returns its Outcome at
        once."""
        stats = _abi.sized(_abi.StepStats)
        stats.nonfinite, stats.sum_squares = int(total[0]), total[1]
        return self._resolved("spw_spec_resolve", ctypes.byref(stats))

    def resolve_as(self, verdict, grad_scale=1.0):
        """Gives the caller's own verdict: "commit", "skip", or "redo" with the gradient factor `grad_scale`."""
        if verdict not in VERDICTS:
            raise InvalidArgument(f"verdict is {verdict!r}; one of {', '.join(VERDICTS)} expected")
        return self._resolved("spw_spec_resolve_as", VERDICTS.index(verdict), grad_scale)

    def abort(self):
        """Rolls an open round back, whatever was submitted, and waits until that is done."""
        self._call("spw_spec_abort")
        self.finish()

    def ready(self, bucket):
        """State of a bucket: "missing", "pending", "speculative" or "final"."""
        state = ctypes.c_uint32()
        self._call("spw_spec_ready", bucket, ctypes.byref(state))
        return STATES[state.value]

    def wait(self, bucket, timeout=None):
        """Waits until a bucket's 16-bit copies are valid: final, or with publish "speculative" stepped."""
        self._call("spw_spec_wait", bucket, _milliseconds(timeout))

    def finish(self, timeout=None):
        """Waits until every bucket of the resolved round is final; their memory belongs to the caller again."""
        self._call("spw_spec_finish", _milliseconds(timeout))
        self._held.clear()

    def withdrawn(self):
        """Numbers of the buckets that were already stepped when the last verdict rolled them back."""
        buckets, count = (ctypes.c_uint32 * self.buckets)(), ctypes.c_size_t()
        self._call("spw_spec_withdrawn", buckets, self.buckets, ctypes.byref(count))
        return list(buckets[:count.value])

    def stats(self):
        """Counters as a dict: rounds by verdict, buckets by outcome, and the time that callers waited."""
        counters = _abi.sized(_abi.SpecStats)
        self._call("spw_spec_stats_get", ctypes.byref(counters))
        return {name: getattr(counters, name) for name, _ in _abi.SpecStats._fields_[2:]}

    def close(self):
        """Closes the engine; an open round is rolled back first."""
        if self._end():
            self._held.clear()
            self._destinations.clear()

    def _resolved(self, function, *arguments):
        found = _abi.sized(_abi.SpecOutcome)
        self._call(function, *arguments, ctypes.byref(found))
        outcome = Outcome(VERDICTS[found.verdict], found.norm, found.grad_scale, found.withdrawn)
        if outcome.verdict != "skip" and self._optimizer is not None:
            self._optimizer.step_count += 1
        return outcome


def _milliseconds(timeout):
    return -1 if timeout is None else max(0, round(timeout * 1000))


def _event(fd, after=None, gpu=None):
    event = _abi.sized(_abi.SpecEvent)
    if after is not None and gpu is not None:
        event.gpu = gpu
        if hasattr(after, "cuda_stream"):
            event.kind, event.handle = _CUDA_STREAM, stream_number(after)
        else:
            event.kind, event.handle = _CUDA_EVENT, after.cuda_event
    elif after is not None:
        raise InvalidArgument("after is given, but no gpu")
    elif fd is not None:
        event.kind, event.fd = _DESCRIPTOR, fd
    else:
        return None
    return ctypes.byref(event)
