"""Which parameters Spillway steps, the error messages about the others, and whether tensors still have the properties that they had.

A parameter is served if its step is one row of the C table: parameter, gradient and states are contiguous in CPU memory, with dtypes
that the kernels know. All other parameters go to torch's own step. If neither can step a parameter, an error names it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch

from .. import _abi
from .._written import is_dense
from ..errors import InvalidArgumentError, UnsupportedError

try:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
except ImportError:  # a build of torch without distributed

    class DTensor:  # type: ignore[no-redef]
        """Stands in where torch has no DTensor."""


TensorGuards: Any = None
try:
    # The guards of torch.compile compare a list of tensors in C++: a sixth of the time of the passes of `_slow_properties_of`.
    from torch._C._dynamo import guards as _guards

    TensorGuards = _guards.TensorGuards
except (ImportError, AttributeError):
    pass

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")
CODES = {torch.float32: _abi.DTYPE_F32, torch.float16: _abi.DTYPE_F16, torch.bfloat16: _abi.DTYPE_BF16}
PLAIN = (torch.Tensor, torch.nn.Parameter)
_PROPERTIES = [attrgetter(name) for name in ("dtype", "device", "layout", "shape")]


class Row(NamedTuple):
    """A parameter that Spillway steps; the tensors are local parts of DTensors."""

    group: int
    place: int
    param: torch.Tensor
    grad: torch.Tensor
    states: tuple[torch.Tensor, ...]
    #: The f32 weights that are stepped instead of a 16-bit parameter, which receives a copy; or int16 low bits of a split master.
    master: torch.Tensor | None = None
    #: Receives the stepped float32 parameter, rounded to 16 bits.
    copy: torch.Tensor | None = None
    #: The sums of a parameter with low bits.
    low_sums: torch.Tensor | None = None


def name_of(group: dict[str, Any], number: int, place: int) -> str:
    """How messages name a parameter."""
    names = group.get("param_names")
    given = f" ({names[place]})" if names else ""
    return f"param_groups[{number}]['params'][{place}]{given}"


def without_gradients(work: Callable[[], _Result]) -> _Result:
    """work(), with gradients off. torch.no_grad() leaves them off if a signal handler raises at the begin of its __exit__."""
    before = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)
        return work()
    finally:
        # Python runs no signal handler between the begin of this block and the end of this call.
        torch._C._set_grad_enabled(before)


def lasting(method: _Method) -> _Method:
    """A function whose tensors are ordinary ones, also in torch.inference_mode. Tensors of that mode have no versions, and can be
    written to in that mode only. Gradients are off."""

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        work = functools.partial(method, *arguments, **options)
        if not torch.is_inference_mode_enabled():
            # The guard of that mode sets gradients too: again, if an exception keeps it alive.
            return without_gradients(work)
        with torch.inference_mode(False):
            return without_gradients(work)

    return cast(_Method, call)


def is_trained(param: torch.Tensor) -> bool:
    """True if a step may change a parameter. Others may have any type, dtype and device."""
    return param.requires_grad or param.grad is not None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def has_dtensors(tensors: Iterable[Any]) -> bool:
    """True if one of these is a DTensor. Thousands of tensors have one or two types."""
    return any(issubclass(kind, DTensor) for kind in {*map(type, tensors)})


def locals_of(tensors: Sequence[Any]) -> Sequence[Any]:
    """The parts of all; the same sequence if there is no DTensor."""
    return [*map(local, tensors)] if has_dtensors(tensors) else tensors


def unused_bytes(device: torch.device) -> int:
    """Bytes of a device's memory that are free, and that the program had free when it used most; 0 if the device does not say."""
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    return max(0, module.mem_get_info(device)[0] + module.memory_reserved(device) - module.max_memory_allocated(device))


def like(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor whose part in this process is `part`, placed as a parameter is; for a plain parameter `part` itself.

    A DTensor is not made by `from_local`, which would move a part in host memory to the device of the mesh."""
    if not isinstance(param, DTensor):
        return part
    alike = part.stride() == local(param).stride()
    stride = param.stride() if alike else torch.empty(param.shape, device="meta").stride()
    meta = TensorMeta(param.shape, stride, part.dtype)
    return DTensor(part, DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta), requires_grad=False)


def apart(param: torch.Tensor, grad: torch.Tensor) -> str:
    """Why a gradient is not placed as its parameter is; empty if it is."""
    if isinstance(param, DTensor) != isinstance(grad, DTensor):
        return "one of parameter and gradient is a DTensor; pass both as DTensors"
    if isinstance(param, DTensor) and grad.placements != param.placements:
        return f"the gradient is placed as {grad.placements}, the parameter as {param.placements}; redistribute the gradient"
    return ""


def holds_values(tensor: torch.Tensor) -> bool:
    """True if the memory of a tensor has its values: torch negates those of a tensor with the negative bit, and a zero tensor has none."""
    return not (tensor.is_neg() or tensor._is_zerotensor())


def has_memory(tensor: torch.Tensor) -> bool:
    """False if the storage of a strided tensor was made shorter than the tensor, as FSDP frees the parameters of other processes."""
    if tensor.layout is not torch.strided:
        return True
    end = tensor.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return not tensor.numel() or end * tensor.element_size() <= tensor.untyped_storage().nbytes()


def check_has_memory(tensor: torch.Tensor, what: str) -> None:
    """Raises an error for a tensor whose memory was freed."""
    if not has_memory(tensor):
        raise InvalidArgumentError(f"{what}: its storage is shorter than the tensor; give it its memory back before the call")


def is_partial(tensor: torch.Tensor) -> bool:
    """True if processes hold terms of a sum, which are no values of the tensor."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def averages_later(param: torch.Tensor) -> bool:
    """True if another wrapper averages a gradient after backward has completed it, as DistributedDataParallel does. FSDP2 calls the
    hooks of its parameters after it has."""
    distributed = torch.distributed
    return (
        not isinstance(param, DTensor) and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    )


def is_served(param: torch.Tensor, grad: torch.Tensor, name: str, copied: bool = False) -> bool:
    """True if Spillway steps a parameter, without regard to its states; False leaves it to torch. `copied`: also one that is not contiguous
    in host memory, for which the library gets a copy of the gradient and writes a copy of the weights.

    Raises:
        InvalidArgumentError: Parameter and gradient do not fit each other."""
    if type(param) not in PLAIN and not isinstance(param, DTensor):
        return False
    if reason := apart(param, grad):
        raise InvalidArgumentError(f"{name}: {reason}")
    if is_partial(param):
        return False
    param, grad = local(param), local(grad)
    if type(grad) not in PLAIN or grad.layout is not torch.strided:
        return False
    if param.device != grad.device:
        raise InvalidArgumentError(f"{name} is on {param.device}, its gradient on {grad.device}; move the gradient")
    if param.shape != grad.shape:
        raise InvalidArgumentError(f"{name} has shape {tuple(param.shape)}, its gradient {tuple(grad.shape)}; compute the gradient again")
    served = (
        param.dtype in CODES
        and grad.dtype in CODES
        and (is_dense(param) if copied else param.is_cpu and param.is_contiguous() and grad.is_contiguous())
        and holds_values(param)
        and holds_values(grad)
    )
    if served:
        check_has_memory(param, name)
        check_has_memory(grad, f"the gradient of {name}")
    return served


def lay_out(param: torch.Tensor, states: dict[str, Any], keys: list[str]) -> None:
    """Replaces states by contiguous copies, as a contiguous parameter needs them. Saved states of channels_last parameters have other
    strides."""
    for key in keys:
        own = local(states[key]) if isinstance(states.get(key), torch.Tensor) else None
        if own is not None and own.shape == local(param).shape and own.is_cpu and own.layout is torch.strided and not own.is_contiguous():
            states[key] = states[key].detach().contiguous()


def check_layout(grad: torch.Tensor, name: str, kind: str, sparse: bool) -> None:
    """Raises an error for gradients that torch's class refuses too, so that it names the parameter."""
    if not sparse and local(grad).layout is not torch.strided:
        raise UnsupportedError(
            f"{name}: {kind} does not support sparse gradients, and this one is {local(grad).layout}; pass dense gradients, or "
            "leave the parameter to torch.optim.SparseAdam"
        )


def check_kinds(states: Any, keys: Iterable[str], name: str) -> None:
    """Raises an error if the states of a parameter are none: a dict, whose values for `keys` are tensors."""
    if not isinstance(states, dict):
        raise InvalidArgumentError(
            f"{name}: optimizer.state has {states!r} for it; load the state of this parameter, or delete optimizer.state[parameter]"
        )
    for key in keys:
        if key in states and not isinstance(states[key], torch.Tensor):
            raise InvalidArgumentError(
                f"{name}: its state {key!r} is {states[key]!r}; load the state of this parameter, or delete optimizer.state[parameter]"
            )


def check_complete(states: dict[str, Any], keys: Iterable[str], name: str) -> None:
    """Raises an error if one of the states of a parameter is missing."""
    for key in keys:
        if key not in states:
            raise InvalidArgumentError(
                f"{name}: its state lacks {key!r}; load the state of this optimizer, or delete optimizer.state[parameter]"
            )


def check_versions(tensors: Iterable[torch.Tensor], name: str) -> None:
    """Raises an error for tensors in which torch does not note writes."""
    if any(tensor.is_inference() for tensor in tensors):
        raise InvalidArgumentError(
            f"{name}: the parameter, its gradient or a state is an inference tensor, in which torch notes no writes, as undo and "
            "master need them; clone it outside of torch.inference_mode"
        )


def check_state(param: torch.Tensor, state: torch.Tensor, key: str, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises an error if a state does not belong to its parameter, or has none of `dtypes`."""
    if state.shape != param.shape:
        raise InvalidArgumentError(
            f"{name} has shape {tuple(param.shape)}, its state {key!r} {tuple(state.shape)}; load the state of "
            "this parameter, or delete optimizer.state[parameter]"
        )
    if not (state.is_cpu and state.is_contiguous() and holds_values(state)):
        raise InvalidArgumentError(
            f"{name}: its state {key!r} is not contiguous in CPU memory as the parameter is, or has torch's negative "
            "bit; replace the state by a copy in CPU memory"
        )
    check_has_memory(state, f"the state {key!r} of {name}")
    if state.dtype not in dtypes:
        raise UnsupportedError(
            f"{name} is {param.dtype}, its state {key!r} {state.dtype}; cast the state to {' or '.join(dict.fromkeys(map(str, dtypes)))}"
        )


def check_memory(spans: Iterable[tuple[torch.Tensor, int, bool]], name: Callable[[int], str]) -> None:
    """Raises an error if a tensor that a step writes shares memory with another tensor of the step.

    Args:
        spans: The contiguous tensors of a step, each with the number of its row, and whether the step writes it.
        name: The name of a row."""
    parts = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, row, written)
        for tensor, row, written in spans
        if tensor.numel()
    )
    # Of the tensors so far, and of those that are written: the device, the furthest end, and the row.
    furthest = furthest_written = ("", 0, 0)
    for device, start, end, row, written in parts:
        other = furthest if written else furthest_written
        if other[0] == device and start < other[1]:
            raise InvalidArgumentError(
                f"{name(other[2])} and {name(row)} share memory of parameters, states or gradients; pass a shared parameter once"
            )
        furthest = max(furthest, (device, end, row))
        if written:
            furthest_written = max(furthest_written, (device, end, row))


def properties_of(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """Returns a function that compares as many other tensors with these, which must be contiguous: their types, dtypes, devices, layouts,
    shapes and strides. A tensor whose memory does not hold its values differs from them."""
    if tensors and TensorGuards is not None and _guards_work():
        # The function keeps none of the tensors alive. Guards refuse a list with the same tensor twice.
        check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if check(*tensors):
            return check
    return _slow_properties_of(tensors)


def _slow_properties_of(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    types, known = list(map(type, tensors)), [list(map(get, tensors)) for get in _PROPERTIES]
    return lambda *others: (
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
