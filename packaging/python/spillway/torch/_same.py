"""Whether tensors still have the properties that they had: type, dtype, device, layout, shape and strides."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from ._rows import holds_values

TensorGuards: Any = None
try:
    # The guards of torch.compile compare a list of tensors in C++: a sixth of the time of the passes below.
    from torch._C._dynamo import guards as _guards

    TensorGuards = _guards.TensorGuards
except (ImportError, AttributeError):
    pass

_PROPERTIES = [attrgetter(name) for name in ("dtype", "device", "layout", "shape")]


def properties_of(tensors: list[torch.Tensor]) -> Callable[[list[Any]], bool]:
    """Returns a function that compares other tensors with these, which must be contiguous. A tensor whose memory does not hold its values
    differs from them."""
    if tensors and TensorGuards is not None and _guards_work():
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        # The functions keep none of the tensors alive. Guards refuse a list with the same tensor twice.
        count = len(tensors)
        if guards.check(*tensors):
            return lambda others: len(others) == count and guards.check(*others)
    return _slow_properties_of(tensors)


def _slow_properties_of(tensors: list[torch.Tensor]) -> Callable[[list[Any]], bool]:
    types, known = list(map(type, tensors)), [list(map(get, tensors)) for get in _PROPERTIES]
    return lambda others: (
        list(map(type, others)) == types
        and all(map(torch.Tensor.is_contiguous, others))
        and all(map(holds_values, others))
        and all(list(map(get, others)) == own for get, own in zip(_PROPERTIES, known))
    )


def _guards_work() -> bool:
    """True if this version of torch tells these tensors apart. Its guards are not part of its documented interface."""
    global _verdict
    if _verdict is None:
        some = torch.zeros(2, 3, device="cpu")
        other = torch.zeros(3, 2, device="cpu")
        others = [
            other,
            other.t(),
            some.double(),
            some.to("meta"),
            some.to_sparse(),
            torch.nn.Parameter(some),
            None,
            torch._neg_view(some),
            torch._efficientzerotensor(2, 3),
        ]
        try:
            check = TensorGuards(some, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            _verdict = check(torch.ones_like(some)) and not any(check(other) for other in others)
        except Exception:  # another signature in another version
            _verdict = False
    return _verdict


_verdict: bool | None = None
