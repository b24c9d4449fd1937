"""Rows of C tables of tensors. All tables of this package are filled here.

| property of an array | checked by |
|---|---|
| dtype, device, layout, values in memory | `_arrays.span`, `gpu.device_span`, and _tensors.py of spillway.torch, which read the array |
| number of elements, and one dtype for both moments and for a span and its shadow | `put_all` |
| alignment, overlap with other tensors, combination of dtypes | the library, at each call |"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

from . import _arrays
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
    """Writes an array into a row that was begun; see put_all()."""
    put_all(row, ((field, span, argument),), dtypes)


def put_all(row: Any, spans: Iterable[tuple[str, tuple[int, int, int], str]], dtypes: Any = None) -> None:
    """Writes arrays into a row that was begun.

    Args:
        row: The row.
        spans: For each array the name of its span in the row, its address, number of elements and dtype code, and its name in messages.
        dtypes: The struct with the dtypes of the row; None: the row itself.

    Raises:
        InvalidArgumentError: The number of elements is not that of the row, or the dtype is not that of the spans that share its field."""
    dtypes = row if dtypes is None else dtypes
    count = row.n
    for field, (address, elements, code), argument in spans:
        kind = DTYPE_FIELDS[field]
        known = getattr(dtypes, kind)
        if elements != count or (known and known != code):
            raise _misfit(row, argument, elements)
        setattr(row, field, address)
        if not known:
            setattr(dtypes, kind, code)


def fill(row: Any, fields: Iterable[str], arrays: Sequence[Any], arguments: Iterable[str], uint16_dtype: str | None = None) -> Any:
    """Writes the arrays of one tensor into a row, and returns it.

    Args:
        row: The row.
        fields: Names of the spans in the row; the first is "param".
        arrays: For each field a numpy array or torch tensor. All have one shape, or are flat with as many elements.
        arguments: Names of the arrays in messages.
        uint16_dtype: The dtype of the values of uint16 arrays.

    Raises:
        InvalidArgumentError: An array cannot be passed, or does not fit the first."""
    spans: list[tuple[str, tuple[int, int, int], str]] = []
    first = ""
    for field, array, argument in zip(fields, arrays, arguments):
        span = _arrays.span(array, argument, field != "grad", uint16_dtype)
        if not spans:
            row.struct_size, row.n = ctypes.sizeof(row), span[1]
            shape, first = array.shape, argument
        elif array.shape != shape:
            _arrays.same_shape(array, arrays[0], argument, first)
        spans.append((field, span, argument))
    put_all(row, spans)
    return row


def _misfit(row: Any, argument: str, elements: int) -> InvalidArgumentError:
    if elements != row.n:
        return InvalidArgumentError(f"{argument} has {elements} elements, and its tensor has {row.n}; pass arrays of one size")
    return InvalidArgumentError(
        f"{argument} has another dtype than the arrays of its kind before it; both moments have one dtype, and so have a "
        "span and its shadow"
    )
