"""The tail of DeepSpeed's SuperOffload: the sub-groups that backward completes last, whose masters, moments and gradients are on the device
(SuperOffload 4.3). Backward hides no step of theirs on the host. The device steps them after the verdict, so that nothing of them is rolled
back, with the bits of a step on the host.

DeepSpeed makes all masters, moments and gradients in host memory. They move between steps, when the length of the tail changes. For
DeepSpeed they stay those of the optimizer on the CPU: checkpoints have their moments, and schedulers set their learning rate."""

from __future__ import annotations

import ctypes
from typing import Any

from .. import _native
from .._held_signals import HeldSignals
from .._native_handle import record
from .._tail_search import AskedTail, room
from ..gpu import Gpu
from . import _optimizer_ops, _rounds, _stage3

_MOMENTS = ("exp_avg", "exp_avg_sq")
#: Bytes of a parameter on the device: master, moments and gradient, in float32.
_BYTES = 16


class DeviceTail:
    """The sub-groups of one optimizer that are on the device.

    Args:
        stage3: DeepSpeed's optimizer.
        sub_groups: The sub-groups that may be in the tail. The first that backward completes stays in host memory.
        asked: The number of sub-groups, or "auto".

    Attributes:
        members: The sub-groups of the tail, in the order of a step.
        asked: How many they are at the next step.

    Raises:
        NoDeviceError: The device is none that the library steps on."""

    def __init__(self, stage3: Any, sub_groups: list[int], asked: int | str):
        self.members: list[int] = []
        # In the order in which backward has completed them.
        self._order = dict.fromkeys(reversed(sub_groups))
        self.asked = AskedTail(asked)
        self._device: Any = None
        self._gpu: Any = None
        if asked:
            self._open()

    def _open(self) -> None:
        import torch
        from deepspeed.accelerator import get_accelerator

        self._device = torch.device(get_accelerator().current_device_name())
        if self._device.type != "cpu":
            self._gpu = Gpu(self._device.index or 0)

    def completed(self, sub_group: int) -> None:
        """Called when backward has completed the gradients of a sub-group."""
        self._order.pop(sub_group, None)
        self._order[sub_group] = None

    def step(self, outcome: list[int], optimizer_id: int, call: Any, master: Any, state: Any) -> None:
        """Steps a sub-group, with DeepSpeed's id and the C record of the step. `outcome` becomes the status of the library's call."""
        arrays = (master.data, master.grad, *(state[name] for name in _MOMENTS))
        outcome.clear()
        if self._gpu is not None:
            self._gpu.ds_step(optimizer_id, call, arrays, outcome=outcome)
        else:
            tensor = _optimizer_ops.tensor(*arrays[:2], **dict(zip(_MOMENTS, arrays[2:])))
            record(outcome, "spw_ds_adam_update", None, optimizer_id, ctypes.byref(call), ctypes.byref(tensor))
            _native.check(outcome[0])
        _rounds.count("stepped_on_device")

    # Where the sub-groups are.

    def place(self, stage3: Any, sub_group: int) -> None:
        """Has the tensors of a sub-group where they are stepped. A load of a checkpoint may have put moments elsewhere."""
        if self._gpu is None:
            return
        import torch

        master = stage3.fp32_partitioned_groups_flat[sub_group]
        state = _stage3.state_of(stage3, master)
        device = self._device if sub_group in self.members else torch.device("cpu")
        if all(tensor.device == device for tensor in (master, *(state[name] for name in _MOMENTS))):
            return
        moved = {name: state[name].to(device) for name in _MOMENTS}
        weights, grad = master.data.to(device), master.grad.to(device)
        if device.type == "cpu" and stage3.offload_optimizer_pin_memory:
            grad = grad.pin_memory()
        signals = HeldSignals()
        signals.hold()
        try:
            master.grad = None
            master.data, master.grad = weights, grad
            state.update(moved)
        finally:
            signals.release()

    def resize(self) -> None:
        """Between two steps: chooses as many sub-groups as the next step is to have on the device. `place` moves them."""
        wanted = min(self.asked.buckets, self._most)
        if len(self.members) != wanted:
            self.members = sorted([*self._order][len(self._order) - wanted :])

    @property
    def _most(self) -> int:
        return max(0, len(self._order) - 1)

    # How many they are.

    def stop_clock(self, stage3: Any, clipped: bool) -> None:
        """A step is over: what the program has waited for it corrects the tail."""
        self.asked.stop(not clipped, len(self._order), lambda: min(self._room(stage3), self._most))

    def _room(self, stage3: Any) -> int:
        if self._gpu is None:
            return len(self._order)
        from ..torch.inner import unused_bytes

        sizes = {sub_group: _BYTES * stage3.fp32_partitioned_groups_flat[sub_group].numel() for sub_group in self._order}
        kept = sum(sizes[sub_group] for sub_group in self.members)
        return room(len(sizes), sum(sizes.values()), kept, unused_bytes(self._device))

    def close(self) -> None:
        """Closes the GPU."""
        if self._gpu is not None:
            self._gpu.close()
