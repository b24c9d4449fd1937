"""Converts numpy arrays and torch tensors to (address, elements, dtype), without copies.

Neither numpy nor torch is imported here: an argument can only be a tensor if its library is already loaded."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any, Protocol

from . import _abi
from .errors import InvalidArgumentError

_torch_dtypes: dict[Any, int] = {}
# numpy's dtypes whose arrays have a buffer, and the flags (contiguous, aligned, writable) with which ctypes returns its address: a third of
# the time of ndarray.ctypes.
_numpy_dtypes: dict[Any, int] = {}
_PLAIN = 0x1 | 0x100 | 0x400
_EXPECTED = "float32, float16 or bfloat16"
#: Why a torch tensor is refused whose memory does not have its values.
_NO_VALUES = (
    "has torch's negative or conjugate bit, or is a zero tensor, so its memory does not have its "
    "values; pass a tensor that tensor.resolve_neg(), tensor.resolve_conj() or tensor + 0 returns"
)


class Array(Protocol):
    """A numpy array or a torch tensor."""

    @property
    def shape(self) -> Any:
        """Lengths of the dimensions."""

    @property
    def dtype(self) -> Any:
        """Type of the elements."""


def span(array: Any, argument: str, write: bool, uint16_dtype: str | None = None) -> tuple[int, int, int]:
    """(address, element count, dtype code) of an array; InvalidArgumentError names `argument` and the reason."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        code = (_torch_dtypes or _read_torch_dtypes(torch)).get(array.dtype)
        # Without another call: DeepSpeed passes four tensors per step, one step per parameter. Only complex tensors are conjugated.
        if code is not None and array.is_cpu and array.layout is torch.strided and array.is_contiguous():
            if not (array.is_neg() or array._is_zerotensor()):
                return array.data_ptr(), array.numel(), code
        raise _torch_refusal(torch, array, argument)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _numpy_span(array, argument, write, uint16_dtype)
    raise InvalidArgumentError(f"{argument} is a {type(array).__name__}; pass a numpy array or a torch tensor")


def memory(array: Any, argument: str, write: bool) -> tuple[int, int]:
    """(address, bytes) of a numpy array or torch tensor of plain values of any dtype, or of a bytearray."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        if not (array.is_cpu and array.layout is torch.strided and array.is_contiguous()):
            raise InvalidArgumentError(f"{argument} is not contiguous in CPU memory; pass a contiguous CPU tensor")
        if array.is_neg() or array.is_conj() or array._is_zerotensor():
            raise InvalidArgumentError(f"{argument} {_NO_VALUES}")
        address, size = array.data_ptr(), array.numel() * array.element_size()
        if size and not address:
            raise InvalidArgumentError(
                f"{argument} has no memory, because its storage was freed or is of another tensor; pass a tensor with values"
            )
        return address, size
    if numpy is not None and isinstance(array, numpy.ndarray):
        if array.dtype.hasobject:
            raise InvalidArgumentError(
                f"{argument} has dtype {array.dtype}, whose elements are addresses of Python objects; pass an array of plain values"
            )
        if not array.flags.c_contiguous:
            raise InvalidArgumentError(f"{argument} is not contiguous; pass a contiguous array")
        if write and not array.flags.writeable:
            raise InvalidArgumentError(f"{argument} is read-only, and the call writes to it; pass a writable array")
        return array.ctypes.data, array.nbytes
    if isinstance(array, bytearray):
        return ctypes.addressof((ctypes.c_char * len(array)).from_buffer(array)), len(array)
    raise InvalidArgumentError(f"{argument} is a {type(array).__name__}; pass a numpy array, a torch tensor or a bytearray")


def same_shape(array: Any, other: Any, argument: str, other_argument: str) -> None:
    """Raises InvalidArgumentError if two arrays differ in shape; a flat array matches any shape with as many elements."""
    if array.shape == other.shape:
        return
    shape, wanted = tuple(array.shape), tuple(other.shape)
    if shape == wanted:
        return
    if (len(shape) == 1 or len(wanted) == 1) and _count(shape) == _count(wanted):
        return
    raise InvalidArgumentError(
        f"{argument} has shape {shape}, {other_argument} has {wanted}; the shapes must agree, or one be flat with as many elements"
    )


def held(array: Any) -> Any:
    """A reference that keeps an array's memory alive, even if the array gets other storage. A bytearray cannot be resized meanwhile."""
    if isinstance(array, bytearray):
        return memoryview(array)
    return array.detach() if hasattr(array, "detach") else array


def all_held(rows: Iterable[Iterable[Any]]) -> list[Any]:
    """References as those of held(), for all arrays of all rows."""
    return [held(array) for row in rows for array in row if array is not None]


def dtype_code(name: Any) -> int:
    """The code of a dtype name such as "bf16"; raises InvalidArgumentError for an unknown name."""
    try:
        return _abi.DTYPES[name]
    except (KeyError, TypeError):
        raise InvalidArgumentError(f"the dtype {name!r} is unknown; pass one of {', '.join(sorted(_abi.DTYPES))}") from None


def _read_torch_dtypes(torch: Any) -> dict[Any, int]:
    _torch_dtypes.update({torch.float32: _abi.DTYPE_F32, torch.float16: _abi.DTYPE_F16, torch.bfloat16: _abi.DTYPE_BF16})
    return _torch_dtypes


def _torch_refusal(torch: Any, tensor: Any, argument: str) -> InvalidArgumentError:
    if tensor.dtype not in _torch_dtypes:
        reason = f"has dtype {str(tensor.dtype).removeprefix('torch.')}; pass {_EXPECTED}"
    elif not tensor.is_cpu:
        reason = f"is on device {tensor.device}; pass a tensor in CPU memory"
    elif tensor.layout is not torch.strided:
        reason = f"is sparse ({tensor.layout}); pass its values()"
    elif not tensor.is_contiguous():
        reason = (
            f"is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}); "
            "pass the contiguous tensor itself, because a step on a copy would be lost"
        )
    else:
        reason = _NO_VALUES
    return InvalidArgumentError(f"{argument} {reason}")


def _numpy_span(array: Any, argument: str, write: bool, uint16_dtype: str | None) -> tuple[int, int, int]:
    code = _numpy_dtypes.get(array.dtype)
    if code is not None and array.flags.num & _PLAIN == _PLAIN and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array)), array.size, code
    name, native = array.dtype.name, array.dtype.isnative
    if name == "uint16" and uint16_dtype is not None:
        code = dtype_code(uint16_dtype)
        if code == _abi.DTYPE_F32:
            raise InvalidArgumentError(f'{argument} has dtype uint16, which cannot hold {uint16_dtype}; pass uint16_dtype="bf16" or "f16"')
    else:
        code = _abi.DTYPES.get(name)
    if code is None or not native:
        hint = ', or uint16_dtype="bf16" if it holds bfloat16 bits' if name == "uint16" else ""
        order = "" if native else " in foreign byte order"
        raise InvalidArgumentError(f"{argument} has dtype {name}{order}; pass {_EXPECTED}{hint}")
    flags = array.flags
    if not flags.c_contiguous:
        raise InvalidArgumentError(f"{argument} is not contiguous (shape {array.shape}, strides {array.strides}); pass a contiguous array")
    if not flags.aligned:
        raise InvalidArgumentError(f"{argument} is not aligned to its {array.itemsize} bytes per element; pass an aligned copy")
    if write and not flags.writeable:
        raise InvalidArgumentError(f"{argument} is read-only, and the call writes to it; pass a writable array")
    if name in ("float32", "float16"):
        _numpy_dtypes[array.dtype] = code
    return array.ctypes.data, array.size, code


def _count(shape: Any) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
