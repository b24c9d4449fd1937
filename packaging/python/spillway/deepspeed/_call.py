"""Shared by the optimizer modules: argument checks, the C record of a tensor, and call counters."""

from __future__ import annotations

import ctypes
import threading

from .. import _abi, _arguments, _arrays, _log, _native, _tensor_rows
from ..errors import InvalidArgumentError, UnknownIdError

# Counters per thread, without a lock that a fork could leave locked.
_local = threading.local()
_per_thread: list[dict[str, tuple[int, int]]] = []
_CALL_SIZE = ctypes.sizeof(_abi.DsAdamCall)


def update(op, function, optimizer_id, step, hyper, params, grads, **states):
    """Runs one tensor's step by optimizer id. `hyper` has the hyper-parameters in the order of the C function, `states`
    the optimizer's moments."""
    step = integer(step, "step", 1 << 64)
    record = tensor(params, grads, **states)
    invoke(function, optimizer_id, step, *hyper, ctypes.byref(record))
    count(op, record.n)
    return 0


def tensor(params, grads, **states):
    """The C record of one tensor."""
    param = _arrays.span(params, "params", True)
    grad = _arrays.span(grads, "grads", False)
    _arrays.same_shape(grads, params, "grads", "params")
    made = _tensor_rows.begin(_abi.Tensor(), param[1])
    _tensor_rows.put(made, "param", param, "params")
    _tensor_rows.put(made, "grad", grad, "grads")
    for name, state in states.items():
        span = _arrays.span(state, name, True)
        _arrays.same_shape(state, params, name, "params")
        _tensor_rows.put(made, name, span, name)
    return made


def no_elements():
    """The C record of a tensor without elements."""
    return _tensor_rows.begin(_abi.Tensor(), 0)


def adam_call(step, lr, beta1, beta2, eps, weight_decay, bias_correction):
    """The C record of the arguments of a step of DeepSpeed's Adam."""
    return _abi.DsAdamCall(_CALL_SIZE, bias_correction, step, lr, beta1, beta2, eps, weight_decay, 1.0)


def invoke(function, optimizer_id, *arguments):
    """Calls a C function for an id; raises InvalidArgumentError for an id that does not fit its C type."""
    optimizer_id = identity(optimizer_id)
    _native.call(function, optimizer_id, *arguments)
    return 0


def identity(optimizer_id):
    """The id, checked to be a 32-bit integer."""
    return integer(optimizer_id, "optimizer_id", 1 << 31, -(1 << 31))


def integer(value, argument, end, start=0):
    """The value as an int, if it is an integer from `start` to `end` - 1."""
    if type(value) is int and start <= value < end:
        return value
    return _arguments.between(argument, value, start, end - 1)


def numbers(**given):
    """Hyper-parameters as floats, in the given order; any type with __float__ is accepted, as in DeepSpeed."""
    floats = []
    for name, value in given.items():
        try:
            floats.append(float(value))
        except (TypeError, ValueError, RuntimeError):
            raise InvalidArgumentError(f"{name} is {value!r}; pass a number") from None
    return floats


def destroy(function, optimizer_id):
    """Destroys an optimizer. An unknown id is not an error, as in DeepSpeed, which calls this from __del__."""
    try:
        invoke(function, optimizer_id)
    except UnknownIdError:
        pass
    return 0


def counted(op):
    """(calls, elements) of an op in this process."""
    counts = [of_thread.get(op, (0, 0)) for of_thread in list(_per_thread)]
    return sum(calls for calls, _ in counts), sum(elements for _, elements in counts)


def count(op, n):
    """Counts a call that was served."""
    counts = getattr(_local, "counts", None)
    if counts is None:
        counts = _local.counts = {}
        _per_thread.append(counts)
    calls, elements = counts.get(op, (0, 0))
    if not calls:
        _log.first_served("deepspeed", op)
    counts[op] = (calls + 1, elements + n)
