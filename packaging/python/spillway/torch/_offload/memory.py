"""Bytes of memory of offload(): what its parameters need on the host, whether a limit allows it, and what there is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import InvalidArgumentError
from .._states import Precision, kind_of
from .._tensors import has_memory, local
from .slot import Slot, elements_of, state_dtypes

_KINDS = ("gradients", "weights", "moments", "masters")


class Memory(NamedTuple):
    """Bytes by kind, without the log of a step that has no verdict, and without parameters and their gradients on a device.

    Attributes:
        host: "gradients", "weights", "moments", "masters"; with a tier "buffers" of states, and "copies" of gradients and weights; if some
            of these are pageable "staging", the page-locked blocks through which a device copies them.
        device: "moments" and "masters", with offload() those of the tail; "second copies" of weights."""

    host: dict[str, int]
    device: dict[str, int]


def needed(params: Iterable[torch.Tensor], precision: Precision) -> dict[str, int]:
    """Bytes of host memory for these parameters, by kind."""
    found = dict.fromkeys(_KINDS, 0)
    for param in params:
        elements = local(param).numel()
        found["gradients"] += elements * param.element_size()
        found["weights"] += elements * param.element_size()
        for name, dtype in state_dtypes(param, precision).items():
            found[kind_of(name)] += elements_of(name, elements) * dtype.itemsize
    return found


def check_fits(params: Sequence[torch.Tensor], precision: Precision, limit: int) -> None:
    """Raises InvalidArgumentError if these parameters need more host memory than the limit."""
    kinds = needed(params, precision)
    total = sum(kinds.values())
    if total <= limit:
        return
    told = ", ".join(f"{name} {_size(size)}" for name, size in kinds.items() if size)
    cure = "Pass states on disks: spillway.torch.AdamW(..., tier=..., overlap=True)"
    narrow = [
        ("moment_dtype=torch.bfloat16", precision._replace(moment_dtype=torch.bfloat16)),
        ("moment_dtype=torch.bfloat16 and master='split'", precision._replace(moment_dtype=torch.bfloat16, master="split")),
        ("moment_dtype='int8' and master='split'", precision._replace(moment_dtype=torch.uint8, master="split")),
    ]
    for said, other in narrow if all(param.dtype is not torch.float16 for param in params) else ():
        size = sum(needed(params, other).values())
        if size < total and (size <= limit or other is narrow[-1][1]):
            cure = f"With {said} they need {_size(size)}, {'which fits' if size <= limit else 'which is too much as well'}. {cure}"
            break
    raise InvalidArgumentError(
        f"offload: the parameters need {_size(total)} of host memory ({told}), and host_memory is {_size(limit)}; nothing was allocated. "
        f"{cure}"
    )


def of_states(states: Iterable[dict[str, Any]]) -> Memory:
    """The memory of states of parameters."""
    host, device = dict.fromkeys(_KINDS[2:], 0), dict.fromkeys(_KINDS[2:], 0)
    for state in states:
        for name, part in state.items():
            if name != "step" and isinstance(part, torch.Tensor) and has_memory(own := local(part)):
                where = host if own.is_cpu else device
                where[kind_of(name)] += own.nbytes
    return Memory(host, device)


def present(slots: Collection[Slot], seconds: Iterable[Any]) -> Memory:
    """The memory of these parameters, and of second copies."""
    host, device = dict.fromkeys(_KINDS, 0), dict.fromkeys(_KINDS[2:], 0)
    for slot in slots:
        if not slot.stays:
            host["gradients"] += slot.grad.nbytes
            host["weights"] += slot.weights.nbytes
        for name, part in slot.parts.items():
            if name != "step":
                where = host if part.is_cpu else device
                where[kind_of(name)] += part.nbytes
    host.update(staging(sum(link.staging_bytes for link in {slot.link for slot in slots})))
    return Memory(host, {"second copies": sum(second.nbytes() for second in seconds), **device})


def staging(size: int) -> dict[str, int]:
    """The entry for the page-locked blocks through which pageable memory is copied: `size` bytes in all. Empty if there are none."""
    return {"staging": size} if size else {}


def _size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= 10 * unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
