"""Replacements of DeepSpeed's cpu_adam, cpu_adagrad and cpu_lion: DeepSpeed's functions, the C records of their arguments, and counters.

cpu_adagrad has the arithmetic of torch.optim.Adagrad, cpu_lion that of Lion's paper.

Steps that DeepSpeed may roll back with adam_rollback are recorded. In DeepSpeed only SuperOffload rolls steps back, and only it calls
DeepSpeedCPUAdam.step_subgroup. Mode "auto" therefore records the steps of step_subgroup, and those of every id that was rolled back before;
plain ZeRO-Offload has no cost. A recording takes about a tenth of a step's time, and per parameter 1.2 bytes in steady state, 3.4 at step
2 and at most 13. Between steps at most 3 bytes per parameter stay allocated."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from functools import partial

from .. import _abi, _arguments, _log, _native, _tensor_rows
from ..errors import UnknownIdError
from . import _installed

# cpu_adam.


def create_adam(optimizer_id, alpha, betta1, betta2, eps, weight_decay, adamw_mode, should_log, /):
    """Creates an optimizer, replacing one with the same id. Every update passes the other hyper-parameters again.
    should_log has no effect: see spillway.set_log."""
    _, beta1, beta2, _, _ = numbers(alpha=alpha, betta1=betta1, betta2=betta2, eps=eps, weight_decay=weight_decay)
    _forget(identity(optimizer_id))
    _native.call("spw_ds_adam_create", optimizer_id, beta1, beta2, 1 if adamw_mode else 0)
    return 0


def adam_update(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, params, grads, exp_avg, exp_avg_sq, /):
    """One step over one tensor, with DeepSpeed's beta powers per id; recorded if it may be rolled back."""
    call = adam_call(step, lr, beta1, beta2, epsilon, weight_decay, bias_correction)
    optimizer_id = identity(optimizer_id)
    row = _tensor_rows.fill(_abi.Tensor(), _ADAM_FIELDS, (params, grads, exp_avg, exp_avg_sq), _ADAM_ARGUMENTS)
    update = (_native._library or _native.library()).spw_ds_adam_update
    if _is_recorded(optimizer_id):
        with _recording(optimizer_id, row, True) as recording:
            status = update(recording, optimizer_id, call, row)
    else:
        status = update(None, optimizer_id, call, row)
    if status:
        _native.check(status)
    count("cpu_adam", row.n)
    return 0


def adam_rollback(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, params, grads, exp_avg, exp_avg_sq, /):
    """Rolls back the step that adam_update did with the same arguments: bit for bit if it was recorded, else by the
    inverse formula. The formula raises for Inf and NaN, where DeepSpeed's own overwrites parameters."""
    call = adam_call(step, lr, beta1, beta2, epsilon, weight_decay, bias_correction)
    optimizer_id = identity(optimizer_id)
    row, exact = tensor(params, grads, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq), ctypes.c_uint32()
    with _recording(optimizer_id, row, False) as recording:
        _native.call("spw_ds_adam_rollback", recording, optimizer_id, ctypes.byref(call), ctypes.byref(row), ctypes.byref(exact))
    _rolled_back.add(optimizer_id)
    (_exact if exact.value else _nearly).append(None)
    return 0


def destroy_adam(optimizer_id, /):
    """Destroys an optimizer."""
    _forget(identity(optimizer_id))
    # An unknown id is not an error, as in DeepSpeed, which calls this from __del__.
    with contextlib.suppress(UnknownIdError):
        _native.call("spw_ds_adam_destroy", optimizer_id)
    return 0


# cpu_adagrad.


def create_adagrad(optimizer_id, alpha, eps, weight_decay, should_log, /):
    """Creates an optimizer, replacing one with the same id. Every update passes the hyper-parameters again. should_log
    has no effect: see spillway.set_log."""
    numbers(alpha=alpha, eps=eps, weight_decay=weight_decay)
    return _create("cpu_adagrad", optimizer_id)


def adagrad_update(optimizer_id, step, lr, eps, weight_decay, params, grads, exp_avg_sq, /):
    """One step over one tensor."""
    options = _abi.sized(_abi.AdagradOptions)
    options.lr, options.eps, options.weight_decay = _singles(lr=lr, eps=eps, weight_decay=weight_decay)
    options.step, options.grad_scale = _arguments.unsigned("step", step), 1.0
    return _update("cpu_adagrad", "spw_adagrad_step", optimizer_id, options, tensor(params, grads, exp_avg_sq=exp_avg_sq))


def destroy_adagrad(optimizer_id, /):
    """Destroys an optimizer."""
    _stateless["cpu_adagrad"].discard(identity(optimizer_id))
    return 0


# cpu_lion.


def create_lion(optimizer_id, alpha, betta1, betta2, weight_decay, should_log, /):
    """Creates an optimizer, replacing one with the same id. Every update passes the hyper-parameters again. should_log
    has no effect: see spillway.set_log."""
    numbers(alpha=alpha, betta1=betta1, betta2=betta2, weight_decay=weight_decay)
    return _create("cpu_lion", optimizer_id)


def lion_update(optimizer_id, step, lr, beta1, beta2, weight_decay, params, grads, exp_avg, /):
    """One step over one tensor."""
    options = _abi.sized(_abi.LionOptions)
    hyper = _singles(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    options.lr, options.beta1, options.beta2, options.weight_decay = hyper
    options.grad_scale = 1.0
    # Lion ignores the number.
    _arguments.between("step", step, 1, (1 << 64) - 1)
    return _update("cpu_lion", "spw_lion_step", optimizer_id, options, tensor(params, grads, exp_avg=exp_avg))


def destroy_lion(optimizer_id, /):
    """Destroys an optimizer."""
    _stateless["cpu_lion"].discard(identity(optimizer_id))
    return 0


#: The functions of each op.
SERVED = {
    "cpu_adam": (create_adam, adam_update, adam_rollback, destroy_adam),
    "cpu_adagrad": (create_adagrad, adagrad_update, destroy_adagrad),
    "cpu_lion": (create_lion, lion_update, destroy_lion),
}
#: For each op the function that is not served, and what to call instead.
NOT_SERVED = {
    f"cpu_{name}": {
        f"{name}_update_copy": f"it copies to a GPU and exists up to DeepSpeed 0.14.2; use {name}_update and copy the parameter"
    }
    for name in ("adam", "adagrad", "lion")
}

# C records of arguments.


_ADAM_FIELDS = ("param", "grad", "exp_avg", "exp_avg_sq")
_ADAM_ARGUMENTS = ("params", "grads", "exp_avg", "exp_avg_sq")


def tensor(params, grads, **states):
    """The C record of one tensor; `states` are the optimizer's moments."""
    return _tensor_rows.fill(_abi.Tensor(), ("param", "grad", *states), (params, grads, *states.values()), ("params", "grads", *states))


# Copied per step: this is faster than the constructor, whose keywords are checked one by one.
_CALLS = tuple(_abi.DsAdamCall(ctypes.sizeof(_abi.DsAdamCall), corrected, grad_scale=1.0) for corrected in (0, 1))


def adam_call(step, lr, beta1, beta2, epsilon, weight_decay, bias_correction):
    """The C record of the arguments of a step of DeepSpeed's Adam."""
    call = _abi.DsAdamCall.from_buffer_copy(_CALLS[1 if bias_correction else 0])
    call.step = step
    try:
        call.lr, call.beta1, call.beta2, call.eps, call.weight_decay = lr, beta1, beta2, epsilon, weight_decay
    except (TypeError, ValueError, RuntimeError, OverflowError):
        hyper = numbers(lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay)
        call.lr, call.beta1, call.beta2, call.eps, call.weight_decay = hyper
    return call


def identity(optimizer_id):
    """The id, checked to be a 32-bit integer."""
    if type(optimizer_id) is int and -(1 << 31) <= optimizer_id < 1 << 31:
        return optimizer_id
    return _arguments.signed("optimizer_id", optimizer_id)


def numbers(**given):
    """Hyper-parameters as floats, in the given order; any type with __float__ is accepted, as in DeepSpeed."""
    return [_arguments.real(name, value) for name, value in given.items()]


def _singles(**given):
    """As `numbers`, rounded to float32, the type of DeepSpeed's arguments."""
    return [ctypes.c_float(value).value for value in numbers(**given)]


#: Ids of the optimizers that keep no state between calls.
_stateless: dict[str, set[int]] = {"cpu_adagrad": set(), "cpu_lion": set()}


def _create(op, optimizer_id):
    _stateless[op].add(identity(optimizer_id))
    return 0


def _update(op, function, optimizer_id, options, row):
    """One step of an optimizer that keeps no state."""
    if identity(optimizer_id) not in _stateless[op]:
        raise UnknownIdError(f"{op} has no optimizer of the id {optimizer_id}: it does not exist (never created, or destroyed)")
    _native.call(function, ctypes.byref(options), ctypes.addressof(row), 1, None)
    count(op, row.n)
    return 0


# Counters per thread, without a lock that a fork could leave locked.


class _Local(threading.local):
    #: The calls of each op and their elements; None before the first call.
    counts: dict[str, tuple[int, int]] | None = None
    #: The steps of this thread are those of step_subgroup.
    subgroup = False


_local = _Local()
_per_thread: list[dict[str, tuple[int, int]]] = []


def count(op, n):
    """Counts a call that was served."""
    counts = _local.counts
    if counts is None:
        counts = _local.counts = {}
        _per_thread.append(counts)
    calls, elements = counts.get(op, (0, 0))
    if not calls:
        _log.first_served("deepspeed", op)
    counts[op] = (calls + 1, elements + n)


def served(op):
    """The calls of an op in this process, and their elements."""
    counts = [of_thread.get(op, (0, 0)) for of_thread in list(_per_thread)]
    return {"calls": sum(calls for calls, _ in counts), "elements": sum(elements for _, elements in counts)}


# Recordings, by id and the address of exp_avg: SuperOffload passes param and grad at changing addresses.

_DELTA = _abi.UNDO_MODE_DELTA
_recordings: dict[tuple[int, int], _Recording] = {}
_rolled_back: set[int] = set()
_exact: list[None] = []
_nearly: list[None] = []


@contextlib.contextmanager
def subgroup_step():
    """Marks the steps of this thread as those of step_subgroup."""
    before, _local.subgroup = _local.subgroup, True
    try:
        yield
    finally:
        _local.subgroup = before


def _is_recorded(optimizer_id):
    mode = _installed.undo or _installed.read_undo()
    if mode == "auto":
        return _local.subgroup or optimizer_id in _rolled_back
    return mode == "always"


@contextlib.contextmanager
def _recording(optimizer_id, row, make):
    """The handle of this tensor's recording; None if there is none and `make` is false.

    The handle is removed from the table while it is in use, so no other thread finds it."""
    key = (optimizer_id, row.exp_avg)
    found = _recordings.pop(key, None)
    if found and make and found.elements < row.n:
        found = None
    if found is None and make:
        found = _Recording(row.n)
    try:
        yield found and found.handle
    finally:
        if found:
            _recordings[key] = found


def _forget(optimizer_id):
    _rolled_back.discard(optimizer_id)
    for key in [key for key in list(_recordings) if key[0] == optimizer_id]:
        _recordings.pop(key, None)


class _Recording:
    """An spw_undo handle that is closed with its last reference."""

    def __init__(self, elements):
        self.elements, self.handle = elements, ctypes.c_void_p()
        options = _abi.sized(_abi.UndoOptions)
        options.mode, options.elements, options.tensors = _DELTA, elements, 1
        _native.call("spw_undo_open", ctypes.byref(options), ctypes.byref(self.handle))
        self._close = _native.library().spw_undo_close

    def bytes(self):
        used = ctypes.c_uint64()
        _native.call("spw_undo_get_log_bytes", self.handle, ctypes.byref(used))
        return used.value

    def __del__(self):
        if self.handle:
            self._close(self.handle)


def recordings():
    """The recordings of this process; empty if nothing was recorded or rolled back."""
    if not (_recordings or _exact or _nearly):
        return {}
    return {
        "mode": _installed.undo or _installed.read_undo(),
        "recordings": len(_recordings),
        "log_bytes": sum(recording.bytes() for recording in list(_recordings.values())),
        "exact_rollbacks": len(_exact),
        "arithmetic_rollbacks": len(_nearly),
    }


def _served(op):
    return {op: served(op)}


def _preloaded():
    """The calls that the preload library served of the ops that DeepSpeed compiled, their elements, and the calls that went to DeepSpeed's
    own function. Empty if the library is not loaded, or is too old to count."""
    try:
        counts_of = ctypes.CDLL(None).spillway_preload_counts
    except AttributeError:
        return {}
    counts = (ctypes.c_uint64 * 3)()
    names = ("calls", "elements", "left_to_deepspeed")
    return {"preload": {op: dict(zip(names, counts)) for op in SERVED if counts_of(op.encode(), counts)}}


for _op in SERVED:
    _installed.counted(partial(_served, _op), _op)
_installed.counted(lambda: {"undo": found} if (found := recordings()) else {}, *_installed.OPS)
_installed.counted(lambda: {"kernel": _native.kernel_name()}, *_installed.OPS)
_installed.counted(_preloaded)
