"""The `interleave` object in the `spillway` block of a DeepSpeed configuration: CPU and GPU step ZeRO-3's sub-groups at
the same time; their states are in host memory, or of residents in the memory of the GPU.

    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}},
    "spillway": {"interleave": {"plan": "stride", "plan_argument": 2, "gradient_transfers": true}}

Results are bit-identical to DeepSpeedCPUAdam on Spillway's op. When a step returns, all states but those of residents are in host
memory. Code outside sees those of residents as after the step, see _interleave_residents.py."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import threading
import weakref
from typing import Any

from .. import _abi, _native, _pinned
from .. import gpu as _gpu
from .._held_signals import HeldSignals
from ..errors import InvalidArgumentError
from ..interleave import Interleave, Rates, Subgroup, plan
from . import _installed, _lifetime, _optimizer_ops, _stage3, _watched
from ._interleave_residents import Residents

_updates: weakref.WeakSet[InterleavedUpdate] = weakref.WeakSet()


def served():
    """Counters of steps and of sub-groups per processor, summed over all optimizers of this process."""
    total: dict[str, int] = {}
    for update in _updates:
        for name, value in update.counts.items():
            total[name] = total.get(name, 0) + value
    return total


_installed.counted(lambda: {"interleave": found} if (found := served()) else {})


class InterleavedUpdate:
    """The interleaved update of one stage-3 optimizer."""

    def __init__(self, stage3, settings):
        reason = _unfit(stage3)
        if reason:
            raise InvalidArgumentError(f"spillway.interleave: {reason}")
        self._stage3, self.settings = weakref.proxy(stage3), settings
        self.gpu: Any = _gpu.Gpu(_ordinal()) if settings.backend == "cuda" else None
        self._interleave: Any = None
        self._arrays: Any = None
        self.lock = threading.RLock()
        self._copies: collections.deque[_gpu.Copy] = collections.deque()
        self._closed = False
        # True while a step has begun and not ended.
        self._in_flight = False
        # The last step's factor, which the gradients in host memory do not have yet.
        self._factor = 1.0
        self._with_data = len(set().union(*(_stage3.with_data(stage3, group) for group in stage3.fp16_groups)))
        fetched = settings.plan_argument if settings.plan == "count" else 0
        self._residents = Residents(settings.residents, max(0, len(stage3.fp16_groups) - fetched), self.gpu)
        _watched.watch(stage3, self)
        _lifetime.opened(self)
        self.counts = {"steps": 0, "cpu": 0, "gpu": 0, "resident": 0}
        _updates.add(self)

    def step(self, factor):
        """Starts the step of all sub-groups; `factor` multiplies the gradients."""
        self._return(only_written=True)
        self._open()
        stream = self._stream()
        self.reading()
        for copy in self._copies:
            copy.stream_wait(stream)
        self._residents.admit(self._interleave, self._tensors)
        placements, masters = self._interleave.get_plan(), self._stage3.fp32_partitioned_groups_flat
        states = [self._stage3.optimizer.state[master] for master in masters]
        calls = [_checked(_stage3.call_of(self._stage3, index, state["step"] + 1, factor)) for index, state in enumerate(states)]
        streams = self._residents.upload(placements, masters, stream)
        # An interrupt between these calls would leave a step that can be neither ended nor begun again.
        signals = HeldSignals()
        signals.hold()
        try:
            for index in range(len(placements)):
                self._interleave.grad_ready(index, streams.get(index, stream))
            self._in_flight = True
            self._interleave.begin_ds(self._stage3.optimizer.opt_id, calls, stream)
            for state in states:
                state["step"] += 1
            self._factor = factor
        finally:
            signals.release()
        self.counts["steps"] += 1
        for placement, master in zip(placements, masters):
            self.counts[placement] += 1
            _optimizer_ops.count("cpu_adam", master.numel())

    def seen(self):
        """Has the states of residents in host memory, because code outside may read or change them."""
        if self._residents.seen():
            with _watched.inside(self._stage3):
                self._return()

    def _return(self, only_written=False):
        """Has the states of residents in host memory; with `only_written` only if that was written. Refuses what was written there."""
        if self._in_flight:
            # An interrupt has ended the last step's call, but not the step.
            self._drain()
        written = self._residents.written(self._tensors)
        if written or not only_written:
            self._residents.give_back(self._interleave)
        if written:
            raise InvalidArgumentError(
                f"spillway.interleave: a tensor of sub-group {written[0]} was written or replaced while its states were on the GPU; it may "
                "have the values from before the write. Fetch the masters, or optimizer.state, from the optimizer again before a write"
            )

    def reading(self):
        """Multiplies the gradients of parameters that had none since the last step by that step's factor, as every step of
        DeepSpeed does. Called before such a gradient is used, read or set."""
        stage3, factor, self._factor = self._stage3, self._factor, 1.0
        if factor == 1.0 or len(stage3.norm_for_param_grads) >= self._with_data:
            return
        with _watched.inside(stage3):
            for param in itertools.chain.from_iterable(stage3.fp16_groups):
                if stage3.get_param_id(param) not in stage3.norm_for_param_grads:
                    index, offset, count = stage3.grad_position[stage3.get_param_id(param)]
                    stage3.fp32_partitioned_groups_flat[index].grad.narrow(0, offset, count).mul_(factor)

    def publish(self, index):
        """Makes the current stream wait for a sub-group's new weights. After the last sub-group all states but those of residents are in
        host memory."""
        self._interleave.stream_wait_params(index, self._stream())
        if index == len(self._interleave) - 1:
            self._drain()
            if self.settings.replan:
                self._interleave.replan()
                self._residents.replanned(self._interleave)
        self._stage3._unflatten_partitioned_parameters(index)

    def _drain(self):
        self._interleave.drain()
        self._in_flight = False
        self._copies.clear()

    @contextlib.contextmanager
    def setting(self, params):
        """Open while stage 3 sets gradients of these parameters."""
        self.reading()
        yield

    def accumulating(self, params):
        """No-op: the gradients are in stage 3's buffer."""

    def gradient(self, param, grad):
        """Starts copying a gradient to host memory, with gradient_transfers."""
        if not self.settings.gradient_transfers:
            return False
        index, offset, _ = self._stage3.grad_position[self._stage3.get_param_id(param)]
        self._copy_out(grad, self._stage3.fp32_partitioned_groups_flat[index].grad.narrow(0, offset, grad.numel()))
        return True

    def _copy_out(self, grad, host):
        if grad.dtype != host.dtype and host.element_size() != 4:
            raise InvalidArgumentError(
                f"spillway.interleave: a gradient of {grad.dtype} cannot be copied to {host.dtype}; use float32 "
                "master gradients, or the gradient's dtype"
            )
        # Each copy keeps its gradient on the GPU alive until it ends. Copies end in the order of their start.
        while self._copies and self._copies[0].done():
            self._copies.popleft()
        self._copies.append(self.gpu.copy_out(grad.contiguous(), host, after=self._stream()))

    def skip(self):
        """Waits for the gradient copies of a step that is skipped."""
        while self._copies:
            self._copies.popleft().wait()

    def _stream(self):
        if self.gpu is None:
            return None
        import torch

        return torch.cuda.current_stream()

    def _open(self):
        """Opens the update at the first step, and reopens it if a checkpoint has replaced tensors, or if there are more residents."""
        if self._closed:
            raise InvalidArgumentError("spillway.interleave: the update was closed with its engine; make a new engine")
        residents, masters = self._residents, self._stage3.fp32_partitioned_groups_flat
        residents.choose(self.counts["steps"], masters)
        arrays = [self._subgroup(index) for index in range(len(masters))]
        addresses = [[(array.data_ptr(), array.numel(), array.dtype) for array in group if array is not None] for group in arrays]
        if (residents.number, addresses) == self._arrays:
            return
        self._end()
        residents.open(masters)
        arrays = [group._replace(grad=residents.gradient(index, group.grad)) for index, group in enumerate(arrays)]
        settings, sizes = self.settings, [group.param.numel() for group in arrays]
        self._interleave = Interleave(
            arrays, gpu=self.gpu, transfer_dtype="delivered", fetch_gradients=True, slots=settings.slots, chunk=settings.chunk
        )
        rates = Rates(**settings.rates.model_dump()) if settings.rates else Rates(1.0, 1.0, 1.0, 1.0)
        residents.plan, residents.plan_at_home = (self._plan(rates, sizes, number) for number in (residents.number, 0))
        self._interleave.set_plan(residents.plan_at_home)
        if settings.rates:
            self._interleave.calibrate(rates)
        self._arrays = residents.number, addresses

    def _plan(self, rates, sizes, residents):
        settings = self.settings
        found = plan(
            rates,
            sizes,
            mode=settings.plan,
            argument=settings.plan_argument,
            residents=residents,
            transfer_dtype="delivered",
            fetch_gradients=True,
            slots=settings.slots,
            chunk=settings.chunk,
        )
        return list(found.placements)

    def _subgroup(self, index):
        stage3 = self._stage3
        master, weights = stage3.fp32_partitioned_groups_flat[index], stage3.fp16_partitioned_groups_flat[index]
        state = _stage3.state_of(stage3, master)
        if self.gpu is None:
            return Subgroup(master.data, state["exp_avg"], state["exp_avg_sq"], master.grad.data, weights)
        master.data, master.grad = _locked(master.data), _locked(master.grad.data)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = _locked(state[name])
        return Subgroup(master.data, state["exp_avg"], state["exp_avg_sq"], None, weights, master.grad.data)

    def _tensors(self, index):
        master = self._stage3.fp32_partitioned_groups_flat[index]
        state = self._stage3.optimizer.state[master]
        return master, state["exp_avg"], state["exp_avg_sq"]

    def close(self):
        """Closes the update and the GPU; the states are in host memory."""
        with self.lock if self._residents.is_own else contextlib.nullcontext():
            self._closed = True
            self._end()
            if self.gpu is not None:
                self.gpu.close()

    def _end(self):
        if self._interleave is None:
            return
        # An interrupt between these calls would lose the states of residents.
        signals = HeldSignals()
        signals.hold()
        try:
            if self._residents.is_own:
                if self._in_flight:
                    self._drain()
                self._residents.give_back(self._interleave)
        finally:
            self._interleave.close()
            self._interleave = self._arrays = None
            signals.release()


def _unfit(stage3):
    """The reason why this optimizer's sub-groups cannot be interleaved; None if they can."""
    if reason := _stage3.optimizer_lacks(stage3) or _stage3.offload_lacks(stage3) or _stage3.scaler_lacks(stage3):
        return reason
    if stage3.swap_optimizer or any(flat is None for flat in stage3.fp16_partitioned_groups_flat):
        return "states or parameters are in files; put offload_optimizer on the device cpu and offload_param off nvme"
    if any(flat.element_size() != 2 for flat in stage3.fp16_partitioned_groups_flat):
        return "the model's weights have 32 bits; a 16-bit model is needed (bf16 or fp16)"
    return (
        "SuperOffload runs its own update; take super_offload or interleave out" if hasattr(stage3, "superoffload_cpu_optimizer") else None
    )


def _checked(call):
    """The call. Raises InvalidArgumentError for numbers that the library refuses, before a gradient is announced: a step that is refused
    later can be neither begun nor taken back."""
    options = _abi.sized(_abi.AdamOptions)
    options.step = call.step
    for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale"):
        setattr(options, name, ctypes.c_float(getattr(call, name)).value)
    # DeepSpeed's arithmetic has negative learning rates.
    options.lr = abs(options.lr)
    _native.call("spw_adam_check", ctypes.byref(options), None, 0)
    return call


def _ordinal():
    """The Gpu that torch uses; raises InvalidArgumentError if torch has no CUDA."""
    _gpu.gpu_count()
    import torch

    if not torch.cuda.is_available():
        raise InvalidArgumentError('spillway.interleave: this torch has no CUDA; with "backend": "host" threads take its part')
    return torch.cuda.current_device()


def _locked(tensor):
    """The tensor, or a copy in page-locked memory if it is not page-locked."""
    import torch

    if _pinned.contains(tensor.data_ptr(), tensor.numel() * tensor.element_size()) or tensor.is_pinned():
        return tensor
    locked = torch.from_numpy(_gpu.pinned(tensor.numel()))
    locked.copy_(tensor)
    return locked
