"""Converts numpy arrays and torch tensors to (address, elements, dtype), without copies.

Neither numpy nor torch is imported here: an argument can only be a tensor if its library is already loaded."""

import ctypes
import sys

from . import _abi
from .errors import InvalidArgument

_torch_dtypes = {}
_EXPECTED = "float32, float16 or bfloat16"


def span(array, argument, write, uint16_as=None):
    """(address, element count, dtype code) of an array; InvalidArgument names `argument` and the reason."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_span(torch, array, argument)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _numpy_span(array, argument, write, uint16_as)
    raise InvalidArgument(f"{argument} is a {type(array).__name__}; a numpy array or a torch tensor is needed")


def memory(array, argument, write):
    """(address, bytes) of a numpy array or torch tensor of any dtype, or of a bytearray."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        if not (array.is_cpu and array.layout is torch.strided and array.is_contiguous()):
            raise InvalidArgument(f"{argument} is not contiguous in CPU memory")
        return array.data_ptr(), array.numel() * array.element_size()
    if numpy is not None and isinstance(array, numpy.ndarray):
        if not array.flags.c_contiguous or write and not array.flags.writeable:
            raise InvalidArgument(f"{argument} is not contiguous, or read-only and would be written")
        return array.ctypes.data, array.nbytes
    if isinstance(array, bytearray):
        return ctypes.addressof((ctypes.c_char * len(array)).from_buffer(array)), len(array)
    raise InvalidArgument(f"{argument} is a {type(array).__name__}; a numpy array, torch tensor or bytearray is needed")


def same_shape(array, other, argument, other_argument):
    """Raises InvalidArgument if two arrays differ in shape; a flat array matches any shape with as many elements."""
    shape, wanted = tuple(array.shape), tuple(other.shape)
    if shape == wanted:
        return
    if (len(shape) == 1 or len(wanted) == 1) and _count(shape) == _count(wanted):
        return
    raise InvalidArgument(f"{argument} has shape {shape}, {other_argument} has {wanted}")


def held(array):
    """A reference that keeps an array's memory alive, even if the array gets other storage."""
    return array.detach() if hasattr(array, "detach") else array


def dtype_code(name):
    """The code of a dtype name such as "bf16"; raises InvalidArgument for an unknown name."""
    try:
        return _abi.DTYPES[name]
    except (KeyError, TypeError):
        raise InvalidArgument(f"unknown dtype {name!r}; one of {', '.join(sorted(_abi.DTYPES))}") from None


def _torch_span(torch, tensor, argument):
    if not _torch_dtypes:
        _torch_dtypes.update({torch.float32: _abi.DTYPE_F32, torch.float16: _abi.DTYPE_F16,
                              torch.bfloat16: _abi.DTYPE_BF16})
    code = _torch_dtypes.get(tensor.dtype)
    if code is None:
        raise InvalidArgument(f"{argument} has dtype {str(tensor.dtype).removeprefix('torch.')}; {_EXPECTED} expected")
    if not tensor.is_cpu:
        raise InvalidArgument(f"{argument} is on device {tensor.device}; it must be in CPU memory")
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{argument} is sparse ({tensor.layout}); give its values()")
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{argument} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}); "
                              "a copy of it would be updated and lost")
    return tensor.data_ptr(), tensor.numel(), code


def _numpy_span(array, argument, write, uint16_as):
    name, native = array.dtype.name, array.dtype.isnative
    if name == "uint16" and uint16_as is not None:
        code = dtype_code(uint16_as)
        if code == _abi.DTYPE_F32:
            raise InvalidArgument(f"{argument} has dtype uint16, which cannot hold {uint16_as}")
    else:
        code = _abi.DTYPES.get(name)
    if code is None or not native:
        hint = "; say uint16_as=\"bf16\" if it holds bfloat16 bits" if name == "uint16" else ""
        order = "" if native else " in foreign byte order"
        raise InvalidArgument(f"{argument} has dtype {name}{order}; {_EXPECTED} expected{hint}")
    flags = array.flags
    if not flags.c_contiguous:
        raise InvalidArgument(f"{argument} is not contiguous (shape {array.shape}, strides {array.strides})")
    if not flags.aligned:
        raise InvalidArgument(f"{argument} is not aligned to its {array.itemsize} bytes per element")
    if write and not flags.writeable:
        raise InvalidArgument(f"{argument} is read-only and would be written")
    return array.ctypes.data, array.size, code


def _count(shape):
    count = 1
    for length in shape:
        count *= length
    return count
