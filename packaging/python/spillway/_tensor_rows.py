"""Rows of C tables of tensors. All tables of this package are filled here.

| property of an array | checked by |
|---|---|
| dtype, device, layout, values in memory | `_arrays.span`, `gpu.device_span`, and _tensors.py of spillway.torch, which read the array |
| number of elements, and one dtype for both moments and for a span and its shadow | `put` |
| alignment, overlap with other tensors, combination of dtypes | the library, at each call |"""

from __future__ import annotations

import ctypes
from typing import Any

from .errors import InvalidArgumentError

#: The field with the dtype of each span.
DTYPE_FIELDS = {
    "param": "param_dtype",
    "grad": "grad_dtype",
    "host_grad": "grad_dtype",
    "exp_avg": "state_dtype",
    "exp_avg_sq": "state_dtype",
    "param_copy": "copy_dtype",
    "shadow_param": "param_dtype",
    "shadow_exp_avg": "state_dtype",
    "shadow_exp_avg_sq": "state_dtype",
}


def begin(row: Any, elements: int) -> Any:
    """Begins a row of `elements` elements; returns it."""
    row.struct_size, row.n = ctypes.sizeof(row), elements
    return row


def put(row: Any, field: str, span: tuple[int, int, int], argument: str, dtypes: Any = None) -> None:
    """Writes an array into a row that was begun.

    Args:
        row: The row.
        field: Name of the span in the row.
        span: Address, number of elements and dtype code of the array.
        argument: Name of the array in messages.
        dtypes: The struct with the dtypes of the row; None: the row itself.

    Raises:
        InvalidArgumentError: The number of elements is not that of the row, or the dtype is not that of the spans that share its field."""
    address, elements, code = span
    kind = DTYPE_FIELDS[field]
    dtypes = row if dtypes is None else dtypes
    known = getattr(dtypes, kind)
    if elements != row.n or (known and known != code):
        raise _misfit(row, argument, elements)
    setattr(row, field, address)
    if not known:
        setattr(dtypes, kind, code)


def _misfit(row: Any, argument: str, elements: int) -> InvalidArgumentError:
    if elements != row.n:
        return InvalidArgumentError(f"{argument} has {elements} elements, and its tensor has {row.n}; pass arrays of one size")
    return InvalidArgumentError(
        f"{argument} has another dtype than the arrays of its kind before it; both moments have one dtype, and so have a "
        "span and its shadow"
    )
