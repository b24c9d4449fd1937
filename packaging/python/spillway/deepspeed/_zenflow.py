"""ZenFlow's part of cpu_adam: a process of its own steps the optimizer while the trainer computes.

The trainer makes a control block in shared memory, submits steps and waits for them. The optimizer process registers
its parameter groups, and steps them with `adam_update` of one id, group after group, so the bits are those of
DeepSpeed's worker. Each group has two gradients and two sets of moments; `now_state` selects them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os

import spillway

from .. import _abi, _arguments, _arrays, _native
from ..errors import InvalidArgumentError, UnknownIdError
from . import _installed, _optimizer_ops, _zenflow_control

_HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay")
# The id on which hyper-parameters are checked; DeepSpeed counts its ids from 0.
_CHECK_ID = -1
# Linux's mask of cores has as many bits as the largest core; larger numbers are not cores.
_MOST_CORES = 1 << 16

_handles: dict[int, _Worker] = {}
_numbers = itertools.count()


def zenflow_adam_create(optimizer_id, zf_affinity, /):
    """Creates a worker of the optimizer `optimizer_id`, with one thread per listed core, or one thread for an empty
    list. Returns its handle."""
    optimizer_id = _optimizer_ops.identity(optimizer_id)
    try:
        cores = [_arguments.signed("zf_affinity", core) for core in zf_affinity]
    except TypeError:
        raise InvalidArgumentError(f"zf_affinity is {zf_affinity!r}; pass a list of cores") from None
    handle = next(_numbers)
    _handles[handle] = _Worker(optimizer_id, cores)
    return handle


def zenflow_adam_register_group(handle, param, grad0, grad1, exp_avg0, exp_avg1, exp_avg_sq0, exp_avg_sq1, stale, /):
    """Adds a parameter group. After each step `stale` receives a copy of `param`; None for no copy."""
    worker = _worker(handle)
    if len(worker.groups) == _zenflow_control.MOST_GROUPS:
        raise InvalidArgumentError(f"a ZenFlow worker has at most {_zenflow_control.MOST_GROUPS} groups")
    records = (
        _optimizer_ops.tensor(param, grad0, exp_avg=exp_avg0, exp_avg_sq=exp_avg_sq0),
        _optimizer_ops.tensor(param, grad1, exp_avg=exp_avg1, exp_avg_sq=exp_avg_sq1),
    )
    if records[0].grad_dtype != records[0].param_dtype or records[1].grad_dtype != records[0].param_dtype:
        raise InvalidArgumentError("grad0 or grad1 has another dtype than param; ZenFlow's gradients have the dtype of param")
    if stale is not None:
        if _arrays.span(stale, "stale", True)[2] != records[0].param_dtype:
            raise InvalidArgumentError("stale has another dtype than param; it is a copy of param")
        _arrays.same_shape(stale, param, "stale", "param")
    arrays = (param, grad0, grad1, exp_avg0, exp_avg1, exp_avg_sq0, exp_avg_sq1, stale)
    worker.groups.append(_Group(records, [_arrays.held(array) for array in arrays]))


def zenflow_adam_destroy(handle, /):
    """Destroys a worker. An unknown handle is not an error, as in DeepSpeed."""
    _handles.pop(_arguments.signed("handle", handle), None)


def zenflow_adam_ctrl_size():
    """Bytes of a control block."""
    return _zenflow_control.SIZE


def zenflow_adam_ctrl_init(control_ptr, num_groups, /):
    """Makes a control block for `num_groups` groups, at most 1024, in shared memory at `control_ptr`."""
    _zenflow_control.create(control_ptr, num_groups)


def zenflow_adam_run_worker(handle, control_ptr, /):
    """Steps until zenflow_adam_ctrl_exit, or until the trainer's process has ended. An error is raised here, and by
    zenflow_adam_wait in the trainer."""
    worker = _worker(handle)
    with _zenflow_control.Attached(control_ptr, len(worker.groups)) as attached, worker.on_its_cores():
        for now_state, step, groups in attached.steps():
            worker.step(now_state, step, groups)


def zenflow_adam_submit(control_ptr, now_state, step, lr, beta1, beta2, eps, weight_decay, bias_correction, /):
    """Submits a step, with one value per group in each list. Two steps may be submitted before the worker begins the
    first of them; a third is an error."""
    now_state = _arguments.between("now_state", now_state, 0, 1)
    step = _arguments.between("step", step, 1, (1 << 63) - 1)
    columns = _columns(dict(zip(_HYPER, (lr, beta1, beta2, eps, weight_decay))))
    flags = [_arguments.between("bias_correction", flag, 0, 1) for flag in _values("bias_correction", bias_correction)]
    lengths = {len(column) for column in (*columns, flags)}
    if len(lengths) != 1:
        raise InvalidArgumentError(f"the lists of hyper-parameters have {sorted(lengths)} values; pass one value per group in each")
    groups = [_zenflow_control.Group(*row) for row in zip(*columns, flags)]
    for index, group in enumerate(groups):
        _check(index, step, group)
    _zenflow_control.submit(control_ptr, now_state, step, groups)
    _optimizer_ops.count("zenflow_submitted", 0)


def zenflow_adam_wait(control_ptr, timeout_s, /):
    """True once a submitted step is complete, each step once; False after `timeout_s` seconds. Raises if the worker
    has ended."""
    completed = _zenflow_control.wait(control_ptr, _optimizer_ops.numbers(timeout_s=timeout_s)[0])
    if completed:
        _optimizer_ops.count("zenflow_completed", 0)
    return completed


def zenflow_adam_ctrl_exit(control_ptr, /):
    """Makes the worker return after the steps that were submitted."""
    _zenflow_control.leave(control_ptr)


#: Functions of cpu_adam.
SERVED = (
    zenflow_adam_create,
    zenflow_adam_register_group,
    zenflow_adam_destroy,
    zenflow_adam_ctrl_size,
    zenflow_adam_ctrl_init,
    zenflow_adam_run_worker,
    zenflow_adam_submit,
    zenflow_adam_wait,
    zenflow_adam_ctrl_exit,
)


def served():
    """Steps of this process's optimizer processes, for active(); empty if none was submitted."""
    submitted, completed = (_optimizer_ops.served(f"zenflow_{name}")["calls"] for name in ("submitted", "completed"))
    return {"zenflow": {"submitted": submitted, "completed": completed}} if submitted else {}


_installed.counted(served, *_installed.OPS)


class _Group:
    def __init__(self, records, arrays):
        self.records, self._arrays = records, arrays

    def publish(self):
        """Copies param to stale."""
        param, stale = self._arrays[0], self._arrays[-1]
        if stale is None:
            return
        if hasattr(stale, "copy_"):
            stale.view(-1).copy_(param.view(-1))
        else:
            stale.reshape(-1)[...] = param.reshape(-1)


class _Worker:
    """The groups of one handle."""

    def __init__(self, optimizer_id, cores):
        self.groups, self._id, self._cores = [], optimizer_id, cores

    def step(self, now_state, step, hyper):
        for group, values in zip(self.groups, hyper):
            record = group.records[now_state]
            _native.call("spw_ds_adam_update", None, self._id, ctypes.byref(_record(step, values)), ctypes.byref(record))
            group.publish()
            _optimizer_ops.count("cpu_adam", record.n)

    @contextlib.contextmanager
    def on_its_cores(self):
        """Runs steps on the worker's cores, with a thread for each. Threads inherit the mask of the thread that starts
        them. Cores that this process may not use are not an error, as in DeepSpeed."""
        mask, threads = os.sched_getaffinity(0), spillway.num_threads()
        with contextlib.suppress(OSError):
            if self._cores:
                os.sched_setaffinity(0, {core for core in self._cores if 0 <= core < _MOST_CORES} or mask)
        spillway.set_num_threads(max(1, len(self._cores)))
        try:
            yield
        finally:
            spillway.set_num_threads(threads)
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, mask)


def _worker(handle):
    handle = _arguments.signed("handle", handle)
    if handle not in _handles:
        raise UnknownIdError(f"no ZenFlow worker has the handle {handle}; call zenflow_adam_create in this process")
    return _handles[handle]


def _values(name, given):
    try:
        return list(given)
    except TypeError:
        raise InvalidArgumentError(f"{name} is {given!r}; pass a list with one value per group") from None


def _columns(lists):
    return [[_optimizer_ops.numbers(**{name: value})[0] for value in _values(name, given)] for name, given in lists.items()]


def _check(index, step, group):
    """Raises for hyper-parameters that the worker's step would refuse: a step of no elements checks them here."""
    try:
        _native.call("spw_ds_adam_create", _CHECK_ID, group.beta1, group.beta2, 1)
        nothing = _abi.sized(_abi.Tensor)
        _native.call("spw_ds_adam_update", None, _CHECK_ID, ctypes.byref(_record(step, group)), ctypes.byref(nothing))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"group {index}: {error}") from None


def _record(step, group):
    return _optimizer_ops.adam_call(step, group.lr, group.beta1, group.beta2, group.eps, group.weight_decay, group.bias_correction)
