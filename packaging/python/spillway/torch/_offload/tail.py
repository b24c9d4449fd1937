"""The tail of offload(): the last buckets of backward, whose masters and states stay on the device of their parameters (SuperOffload 4.3).

Backward hides no step of its last buckets on the host. They are measured and stepped on their device, after the verdict, so that nothing
of them is rolled back. In host memory and on a CUDA device the library's own kernels step them, with the bits of a step on the host. On
other devices torch does, and serves neither narrow states nor rounding at random."""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ... import _abi, _tail_search
from ..._early.gpu_events import opened
from ..._held_signals import HeldSignals
from ...errors import NoDeviceError
from ...gpu import Gpu
from ...optim import Adam, grad_stats
from ...recording import StepStats
from .._norm import clip_factor
from .._table import narrow_table
from .._tensors import local, unused_bytes


class TorchKernels:
    """Adam by torch's operations. Its results differ from the library's by roundings."""

    def squares(self, grads: Sequence[torch.Tensor], scale: float) -> list[float]:
        """The sum of the squares of each gradient, scaled."""
        norms = [torch.linalg.vector_norm(grad.float() * scale, dtype=torch.float64) for grad in grads]
        return torch.stack(norms).square().tolist()

    def step(self, adam: Adam, rows: Sequence[Any], scale: float) -> None:
        """One step of these rows, which is counted by `adam`."""
        signals = HeldSignals()
        signals.hold()
        try:
            options = adam.options_of_next_step(scale)
            for row in rows:
                self._step(options, scale, *row)
            adam.step_count += 1
        finally:
            signals.release()

    @staticmethod
    def _step(options: Any, scale: float, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, copied: Any = None) -> None:
        grad = grad.float() * scale
        if options.weight_decay_mode == _abi.WEIGHT_DECAY_L2:
            grad.add_(param, alpha=options.weight_decay)
        else:
            param.mul_(1 - options.lr * options.weight_decay)
        # Moments of 16 bits are rounded once, after the parameter was computed from their float32 values.
        first, second = exp_avg.float(), exp_avg_sq.float()
        first.mul_(options.beta1).add_(grad, alpha=1 - options.beta1)
        second.mul_(options.beta2).addcmul_(grad, grad, value=1 - options.beta2)
        below = second.sqrt().mul_((1 - options.beta2**options.step) ** -0.5).add_(options.eps)
        param.addcdiv_(first, below, value=-options.lr / (1 - options.beta1**options.step))
        if first is not exp_avg:
            exp_avg.copy_(first)
            exp_avg_sq.copy_(second)
        if copied is not None:
            copied.copy_(param)


class HostKernels(TorchKernels):
    """The library's kernels for host memory."""

    def squares(self, grads: Sequence[torch.Tensor], scale: float) -> list[float]:
        """The sum of the squares of each gradient, scaled."""
        return [grad_stats(grad, scale=scale).sum_squares for grad in grads]

    def step(self, adam: Adam, rows: Sequence[Any], scale: float) -> None:
        """One step of these rows, which is counted by `adam`."""
        adam.step(rows, grad_scale=scale)

    def step_table(self, adam: Adam, table: Any, scale: float) -> None:
        """One step of the rows of a C table, which is counted by `adam`."""
        adam._run(ctypes.addressof(table), len(table), scale, False)


class CudaKernels(TorchKernels):
    """The library's kernels for a CUDA device, in the order of torch's current stream. torch measures."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu

    def step(self, adam: Adam, rows: Sequence[Any], scale: float) -> None:
        """One step of these rows, which is counted by `adam`."""
        self._gpu.step(adam, rows, grad_scale=scale)

    def step_table(self, adam: Adam, table: Any, scale: float) -> None:
        """One step of the rows of a C table, which is counted by `adam`."""
        self._gpu._step_table(adam, table, grad_scale=scale)


_kernels: dict[torch.device, TorchKernels] = {torch.device("cpu"): HostKernels()}


def kernels_of(device: torch.device) -> TorchKernels:
    """The kernels of a device."""
    if device not in _kernels:
        made = TorchKernels()
        # A build of torch for another vendor calls its devices so too.
        if device.type == "cuda" and torch.version.cuda is not None:
            try:
                # The second call raises the error of the first.
                made = CudaKernels(opened(device.index or 0) or Gpu(device.index or 0))
            except NoDeviceError:
                pass
        _kernels[device] = made
    return _kernels[device]


def serves_narrow(device: torch.device) -> bool:
    """True if the tail of a device may have narrow states, or round at random."""
    return isinstance(kernels_of(device), (HostKernels, CudaKernels))


def apart_in_bits(params: Iterable[torch.Tensor]) -> torch.device | None:
    """A device whose steps may differ from the host's by roundings, if several processes could have it for the same parameters."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    devices = dict.fromkeys(local(param).device for param in params)
    return next((device for device in devices if type(kernels_of(device)) is TorchKernels), None)


class _DeviceSlots:
    """The parameters of a bucket that are on one device, and the Adam of the round, which counts their step."""

    def __init__(self, slots: Sequence[Any], device: torch.device):
        self.slots, self.kernels, self.adam = slots, kernels_of(device), Adam()
        self._is_plain = all(slot.precision.is_plain for slot in slots)

    def squares(self, scale: float) -> list[float]:
        return self.kernels.squares([slot.grad for slot in self.slots], scale)

    def step(self, scale: float) -> None:
        rows = [slot.row() for slot in self.slots]
        if self._is_plain:
            self.kernels.step(self.adam, rows, scale)
            return
        table, held = narrow_table(rows, (slot.scales(0) for slot in self.slots), (slot.split(0) for slot in self.slots))
        shared = self.adam.options_of_next_step(scale)
        options = [type(shared).from_buffer_copy(shared) for _ in table]
        for entry, slot, own in zip(table, self.slots, options):
            if slot.precision.stochastic:
                slot.put_rounding(own)
            entry.options = ctypes.addressof(own)
        assert isinstance(self.kernels, (HostKernels, CudaKernels))
        self.kernels.step_table(self.adam, table, scale)
        # Until the call has read them.
        del held, options


class Tail:
    """The last buckets of a lane, which need no submission.

    Args:
        buckets: The parameters of each bucket, by its place."""

    def __init__(self, buckets: Mapping[int, Sequence[Any]]):
        self._factor, self._scale, self._limit, self._number = 1.0, 1.0, 0.0, 0
        self._buckets: dict[int, list[_DeviceSlots]] = {}
        for place, slots in buckets.items():
            devices = dict.fromkeys(local(slot.param).device for slot in slots)
            self._buckets[place] = [
                _DeviceSlots([slot for slot in slots if local(slot.param).device == device], device) for device in devices
            ]

    def begin(self, adam: Adam, max_norm: float, grad_scale: float) -> None:
        """Opens a round."""
        self._scale, self._limit = grad_scale, max_norm
        for part in chain.from_iterable(self._buckets.values()):
            part.adam = copy.copy(adam)
        self._number = adam.step_count + 1

    def results(self) -> list[StepStats]:
        """The statistics of each bucket."""
        sums = [_halved(list(chain.from_iterable(part.squares(self._scale) for part in parts))) for parts in self._buckets.values()]
        # Of Inf the engine makes NaN too.
        return [StepStats(False, total) if math.isfinite(total) else StepStats(True, math.nan) for total in sums]

    def resolve(self, skips: bool, total: float | None) -> None:
        """Gives the verdict that follows from the norm; `total` is the sum of all squares, None without a norm."""
        clips = self._limit and total is not None and not skips
        self._factor = self._scale * (clip_factor(math.sqrt(total or 0.0), self._limit) if clips else 1.0)

    def step(self, place: int) -> None:
        """Steps a bucket, at the first call after the verdict."""
        for part in self._buckets[place]:
            if part.adam.step_count < self._number:
                part.step(self._factor)


def _halved(sums: list[float]) -> float:
    """The sum of a bucket's tensors, added in the order of the library, which halves their list."""
    middle = len(sums) // 2
    return _halved(sums[:middle]) + _halved(sums[middle:]) if middle else sum(sums)


def tail_of(lanes: Sequence[Any], most: int) -> list[int]:
    """How many of its last buckets each lane keeps on the device, `most` in all: those that backward completes last."""
    counts = [0] * len(lanes)
    for _ in range(most):
        left = [number for number, lane in enumerate(lanes) if counts[number] < len(lane.buckets)]
        if not left:
            break
        counts[max(left, key=lambda number: lanes[number].buckets[-1 - counts[number]].completed())] += 1
    return counts


def room(plan: Any) -> int:
    """The number of buckets whose states fit in half of the memory of their devices that no backward has used."""
    sizes: dict[torch.device, int] = {}
    for slot in plan.slots:
        device = local(slot.param).device
        sizes[device] = sizes.get(device, 0) + slot.state_bytes()
    fits = len(plan.buckets)
    for device, size in sizes.items():
        if device.type != "cpu" and size:
            kept = sum(slot.state_bytes() for slot in plan.slots if slot.stays and local(slot.param).device == device)
            fits = min(fits, _tail_search.room(len(plan.buckets), size, kept, unused_bytes(device)))
    return fits
