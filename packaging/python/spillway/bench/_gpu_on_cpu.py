"""A GPU on the CPU: what Megatron's HybridDeviceOptimizer asks of CUDA, done at once in host memory. For benchmarks and tests on machines
without a GPU.

A parameter "on the GPU" is a tensor of a subclass whose `is_cuda` is True. What is computed from it is of the subclass too, until `cpu()`
makes it a plain tensor. Streams and events record what they are asked for, in order."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

#: What was asked of streams and events, with the streams.
asked: list[tuple[Any, ...]] = []


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def cpu(self):
        return self.detach().as_subclass(torch.Tensor).clone()

    def to(self, *args, **options):
        return super().to(*(arg for arg in args if arg != "cuda"), **options)

    def __deepcopy__(self, memo):
        memo[id(self)] = made = self.detach().clone().requires_grad_(self.requires_grad)
        return made


class Stream:
    """A stream, which does all work when it is asked for it."""

    def wait_stream(self, other):
        asked.append(("wait_stream", self, other))

    def record_event(self):
        asked.append(("record", self))
        return Event(self)


class Event:
    """An event of a stream."""

    def __init__(self, stream):
        self._stream = stream

    def synchronize(self):
        asked.append(("synchronize", self._stream))

    def wait(self, stream):
        asked.append(("wait", stream, self._stream))


_current = Stream()


def install(set_attribute=setattr):
    """Puts the streams in the place of CUDA's, and pageable memory in the place of pinned memory.

    Args:
        set_attribute: setattr, or a function like it whose changes can be reverted."""
    asked.clear()
    empty = torch.empty
    set_attribute(torch.cuda, "Stream", Stream)
    set_attribute(torch.cuda, "current_stream", lambda: _current)
    set_attribute(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    set_attribute(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    set_attribute(torch.Tensor, "pin_memory", lambda tensor: tensor)


def parameter(values):
    """A parameter on the GPU."""
    return torch.Tensor._make_subclass(OnGpu, values.clone(), True)
