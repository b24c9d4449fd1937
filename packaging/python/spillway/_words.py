"""A sum over the memory of a tensor: a write that leaves no trace in the tensor's version changes it."""

from __future__ import annotations

from typing import Any


def sum_of_words(tensor: Any) -> tuple[int, list[int]]:
    """The sum of the words of a contiguous torch tensor in host memory, modulo 2**64, and the bytes that fill no word."""
    import torch

    memory = tensor.detach().view(-1).view(torch.uint8)
    if memory.storage_offset() % 8:
        memory = memory.clone()
    words = memory.numel() // 8 * 8
    return int(memory[:words].view(torch.int64).sum()), memory[words:].tolist()
