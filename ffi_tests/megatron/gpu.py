"""A GPU on the CPU: what Megatron's HybridDeviceOptimizer asks of CUDA, done at once in host memory.

A parameter "on the GPU" is a tensor of a subclass whose `is_cuda` is True. What is computed from it is of the subclass too, until `cpu()`
makes it a plain tensor. A stream records what is done with it, so that a test sees the order of copies, events and waits."""

import contextlib

import torch

#: What was asked of streams and events, in order.
asked = []


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def cpu(self):
        return self.detach().as_subclass(torch.Tensor).clone()

    def to(self, *args, **options):
        return super().to(*(arg for arg in args if arg != "cuda"), **options)


class Stream:
    """A stream and an event at once: all work is done when it is asked for."""

    def wait_stream(self, other):
        asked.append("wait_stream")

    def record_event(self):
        asked.append("record")
        return self

    def synchronize(self):
        asked.append("synchronize")

    def wait(self, stream):
        asked.append("wait")


def install(set_attribute):
    """Puts the streams in the place of CUDA's, and pageable memory in the place of pinned memory."""
    asked.clear()
    empty = torch.empty
    set_attribute(torch.cuda, "Stream", Stream)
    set_attribute(torch.cuda, "current_stream", Stream)
    set_attribute(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    set_attribute(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    set_attribute(torch.Tensor, "pin_memory", lambda tensor: tensor)


def parameter(values):
    """A parameter on the GPU."""
    return values.clone().as_subclass(OnGpu).requires_grad_()
