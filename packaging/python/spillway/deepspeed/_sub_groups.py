"""Sub-groups of ZeRO-3 on a tier: the parts of their states, and the gradients with which they step.

DeepSpeed's default sub-group of 10^9 elements has 12 GB of state, and an update would hold several of them in memory. SubGroupParts are the
subgroups of the tier: they are fetched, stepped, written back and cached. Callers use sub-groups.

With states in host memory DeepSpeed keeps a float32 gradient per parameter. Backward replaces it at an accumulation boundary, and the
program may set it. A step multiplies it by the step's factor, and a parameter that gets no other gradient steps with it again.

Here gradients stay in the buffer where stage 3 accumulates them. Only a gradient that differs from the buffer is kept apart: one that the
program set, and with "missing_gradients": "stale" that of an earlier step. With "zero" a parameter steps with zeros if it got no gradient
since the last step."""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import InvalidArgumentError
from ..swap import STATES


class SubGroupParts:
    """Parts of at most `most` elements of sub-groups with these numbers of elements.

    Attributes:
        sizes: Number of elements of each part."""

    def __init__(self, elements, most):
        self._elements = list(elements)
        self._parts = [
            (index, start, min(start + most, count))
            for index, count in enumerate(self._elements)
            for start in range(0, max(count, 1), most)
        ]
        self.sizes = [end - start for _, start, end in self._parts]
        self._of: list[list[tuple[int, int, int]]] = [[] for _ in self._elements]
        for place, (index, start, end) in enumerate(self._parts):
            self._of[index].append((place, start, end))

    def read(self, tiered, index, *arrays, weights=None):
        """Copies parts of a sub-group's state into float32 arrays; with a split master `weights` has its bf16
        weights."""
        for place, start, end in self._places(index, arrays):
            tiered.read(place, *_cut(arrays, start, end), weights=None if weights is None else weights[start:end])

    def write(self, tiered, index, *arrays):
        """Sets parts of a sub-group's state; None keeps a part."""
        for place, start, end in self._places(index, arrays):
            tiered.write(place, *_cut(arrays, start, end))

    def _places(self, index, arrays):
        for name, array in zip(STATES, arrays):
            if array is not None and len(array) != self._elements[index]:
                raise InvalidArgumentError(
                    f"{name} has {len(array)} elements, sub-group {index} has {self._elements[index]}; pass a "
                    "tensor of the sub-group's size"
                )
        return self._of[index]

    def pieces(self, index, first, count):
        """Part, first element in it and number of elements, of `count` elements of a sub-group from `first` on."""
        return [
            (place, max(first - start, 0), min(first + count, end) - max(first, start))
            for place, start, end in self._of[index]
            if start < first + count and first < end
        ]

    def counts(self):
        """Number of parts of each sub-group."""
        return [len(parts) for parts in self._of]

    def sub_group(self, place):
        """The sub-group of a part."""
        return self._parts[place][0]

    def rows(self, calls):
        """The call of each part, from one per sub-group. Repeated calls of the same step use the same coefficients, as in DeepSpeed."""
        return [calls[index] for index, _, _ in self._parts]

    def submit(self, update, index, *tensors):
        """Submits a sub-group to a SwapUpdate, with the arrays of SwapUpdate.submit()."""
        for place, start, end in self._of[index]:
            update.submit(place, *_cut(tensors, start, end))

    def ds_step(self, swap, optimizer_id, calls, tensors, stepped=None):
        """Runs one step, with a call and a row of Swap.table() per sub-group. Calls `stepped(index, param)` for each sub-group for which
        `stepped.wants(index)` is true, with its new master weights, or None unless `stepped.wants_masters(index)`."""
        table = swap.table([_cut(tensors[index], start, end) for index, start, end in self._parts])
        swap.ds_step(optimizer_id, self.rows(calls), table, stepped and self._gathered(stepped))

    def _gathered(self, stepped):
        """Collects parts, which complete in any order, and reports a sub-group once all its parts are stepped."""
        missing: dict[int, int] = {}
        whole: dict[int, Any] = {}

        def part_stepped(place, address):
            index, start, end = self._parts[place]
            if not stepped.wants(index):
                return
            masters = stepped.wants_masters(index)
            if masters and len(self._of[index]) == 1:
                stepped(index, floats_at(address, end - start))
                return
            if masters:
                if index not in whole:
                    whole[index] = floats(self._elements[index])
                whole[index][start:end] = floats_at(address, end - start)
            missing[index] = missing.get(index, len(self._of[index])) - 1
            if missing[index] == 0:
                stepped(index, whole.pop(index, None))

        return part_stepped


def _cut(arrays, start, end):
    return [None if array is None else array[start:end] for array in arrays]


def floats(count):
    """An uninitialized float32 tensor."""
    import torch

    return torch.empty(count, dtype=torch.float32)


def floats_at(address, count):
    """A float32 tensor over existing memory, without a copy."""
    import torch

    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


class Gradients:
    """The gradients of one TierSwapper."""

    def __init__(self, stage3, starts, stale):
        self._stage3, self._starts, self._stale = stage3, starts, stale
        # Per parameter: a gradient that differs from the buffer; a copy that the program may change in place.
        self._apart, self._lent = {}, {}
        # The factor of the last step, for gradients in the buffer that were stepped and are still there.
        self._factor = {}

    # What happens between two steps.

    def arrived(self, param):
        """Called when backward completed a parameter's gradient at an accumulation boundary."""
        for kept in (self._apart, self._lent, self._factor):
            kept.pop(param, None)

    def arrived_at(self, index, offset):
        """The same for the parameter at an offset of a sub-group."""
        for param in self._stage3.fp16_groups[index]:
            _, start, count = self._position(param)
            if start == offset and count:
                self.arrived(param)

    def accumulating(self, params):
        """Called before backward changes the buffer elsewhere than at a boundary, which replaces no gradient."""
        for param in params:
            if self._stale:
                self._separate(param)
            self._factor.pop(param, None)

    def set(self, index, gradient, params):
        """Stores the gradients of these parameters that the program set in a gradient of their sub-group."""
        for param in self._stage3.fp16_groups[index]:
            if any(param is other for other in params):
                self.arrived(param)
                self._apart[param] = self._part(gradient, param).float().clone()

    def lend(self, param):
        """A float32 gradient of a parameter, which the program may change in place until the step."""
        if param not in self._lent:
            self._lent[param] = self._part(self.read(self._position(param)[0]), param).float().clone()
        return self._lent[param]

    def lend_all(self):
        """These gradients by sub-group, and by place of the parameter in it."""
        return {
            index: {place: self.lend(param) for place, param in enumerate(group)} for index, group in enumerate(self._stage3.fp16_groups)
        }

    def read(self, index):
        """The gradient of a sub-group as the program sees it. Once a backward has begun, it is that of the next step."""
        found, missing = self._kept(index), self._missing(index).difference(self._apart)
        if missing and self._stage3.norm_for_param_grads:
            found = found.clone()
            for param in missing:
                self._part(found, param).zero_()
        return found

    def _missing(self, index):
        """The parameters of a sub-group that step with zeros, unless the program sets their gradients."""
        with_gradients = self._stage3.norm_for_param_grads
        group = [] if self._stale else self._stage3.fp16_groups[index]
        return {param for param in group if self._stage3.get_param_id(param) not in with_gradients}

    def _kept(self, index):
        """What is kept of a sub-group's gradient; a copy unless it is the buffer's."""
        apart = [param for param in self._stage3.fp16_groups[index] if param in self._apart or param in self._factor]
        if not apart:
            return self._buffer(index)
        found = self._buffer(index).float().clone()
        for param in apart:
            part = self._part(found, param)
            part.copy_(self._apart[param]) if param in self._apart else part.mul_(self._factor[param])
        return found

    # The step.

    def for_step(self, index):
        """The gradient of a sub-group for the step, before the step's factor."""
        import torch

        found, apart = self._buffer(index), []
        missing = self._missing(index)
        for param in self._stage3.fp16_groups[index]:
            lent = self._lent.get(param)
            if lent is not None and not torch.equal(lent, self._part(self._kept(index), param).float()):
                self._apart[param] = lent
            if self._stale and param in self._factor:
                self._separate(param)
            if param in self._apart:
                apart.append(param)
            elif param in missing:
                self._part(found, param).zero_()
        if apart and found.dtype is not torch.float32:
            found = found.float()
        for param in apart:
            self._part(found, param).copy_(self._apart[param])
        return found

    def untouched(self, index):
        """The gradient of a sub-group, if it is that of the buffer as backward left it; else None."""
        kept = (self._apart, self._lent, self._factor)
        if any(param in other for other in kept for param in self._stage3.fp16_groups[index]):
            return None
        return self._buffer(index)

    def unscale(self, gradients, factor, scaler):
        """Multiplies the gradients of all sub-groups by the factor, and unscales them by torch's gradient scaler as DeepSpeed
        does, one sub-group after another. Returns the gradients. Raises before any change if one is not finite."""
        import torch

        for index, gradient in enumerate(gradients):
            if not torch.isfinite(gradient).all():
                raise InvalidArgumentError(
                    f"a gradient of sub-group {index} is not finite: the program set it, or it is old and has "
                    "missed a skipped step. torch's gradient scaler would step only the other sub-groups; set finite "
                    "gradients"
                )
        found = []
        for index, gradient in enumerate(gradients):
            gradient = gradient.float()
            gradient.mul_(factor)
            part = _GradientAsOptimizer(gradient)
            scaler.step(part)
            scaler.update()
            found.append(gradient)
            for param in self._stage3.fp16_groups[index]:
                if param in self._apart or (self._stale and gradient.dtype is not self._buffer(index).dtype):
                    self._apart[param] = self._part(gradient, param).clone()
        return found

    def stepped(self, factor):
        """Applies a step's factor to the gradients that later steps may use again."""
        self._lent.clear()
        if not self._stale:
            self._apart.clear()
        if factor != 1.0:
            for gradient in self._apart.values():
                gradient.mul_(factor)
            for group in self._stage3.fp16_groups:
                self._factor.update((param, factor) for param in group if param not in self._apart)

    def _separate(self, param):
        if param not in self._apart:
            index, *_ = self._position(param)
            self._apart[param] = self._part(self._buffer(index), param).float().clone().mul_(self._factor.pop(param, 1.0))

    def _buffer(self, index):
        return self._stage3.grad_partitions_flat_buffer[self._starts[index] : self._starts[index + 1]]

    def _part(self, gradient, param):
        _, offset, count = self._position(param)
        return gradient.narrow(0, offset, count)

    def _position(self, param):
        return self._stage3.grad_position[self._stage3.get_param_id(param)]


class _GradientAsOptimizer:
    """A sub-group's gradient in the form of an optimizer, for torch's gradient scaler."""

    def __init__(self, gradient):
        part = gradient.detach()
        part.grad = gradient
        self.param_groups = [{"params": [part]}]

    def step(self):
        """Called by the scaler if the gradient is finite."""
