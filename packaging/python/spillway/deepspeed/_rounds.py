"""Rounds of SuperOffload: sub-groups step while backward goes on, and a verdict settles all of them.

The step that waits gives the sub-groups one after another to DeepSpeed's Adam, which keeps powers of beta per optimizer and
not per sub-group. A round computes first which powers each sub-group finds in that order, so that any order of arrival
has the same bits."""

import ctypes
import os
import weakref
from typing import NamedTuple

from .. import _abi, _arrays, _native
from ..errors import InvalidArgument
from ..optim import Adam
from ..speculate import Speculation
from . import _call, _lifetime, _ops

# Engines of this process, for active().
_engines = weakref.WeakSet()
# Counters of engines that were closed, and of steps that waited, added up.
_retired = {}


class Call(NamedTuple):
    """What DeepSpeed's adam_update is told for a sub-group."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: int


class SuperOffloadCPUOptimizer:
    """Steps sub-groups in rounds. The parameters are those of DeepSpeed's own. cpuadam_cores_perc, max_grad_numel and pin_memory
    have no effect here: the threads are Spillway's, and the gradient is read where it is."""

    def __init__(self, optimizer_config, cpuadam_cores_perc=0.8, max_grad_numel=1000000, pin_memory=True):
        if not 0 < cpuadam_cores_perc <= 1:
            raise InvalidArgument("cpuadam_cores_perc must be between 0 and 1")
        configs = optimizer_config if isinstance(optimizer_config, list) else [optimizer_config]
        if any(config.get("amsgrad") for config in configs):
            raise InvalidArgument("amsgrad is not supported")
        _lifetime.opened(self)
        self._powers = None
        self._engine, self._closed, self._open = None, False, False
        self._calls, self._submitted = {}, set()

    def begin(self, optimizer_id, calls, loss_scale, max_norm):
        """Opens a round. `calls` has the Call of each sub-group, in the order of the step that waits; `optimizer_id` is
        DeepSpeed's, whose powers of beta advance when the round is resolved."""
        if self._closed:
            raise InvalidArgument("SuperOffload's optimizer was closed with its engine; make a new engine")
        if self._engine is None or list(calls) != list(self._calls):
            self._retire()
            self._engine = Speculation(len(calls), publish="staged")
            _engines.add(self._engine)
        if self._powers is None:
            self._powers = _Powers()
        self._engine.begin(Adam(), grad_scale=1.0 / loss_scale, max_norm=max_norm)
        self._optimizer_id, self._calls, self._scale = optimizer_id, dict(calls), _float(1.0 / loss_scale)
        self._found, self._after = self._powers.plan(optimizer_id, calls)
        self._submitted.clear()
        self._open = True

    @property
    def is_open(self):
        """True between begin and the verdict."""
        return self._open

    @property
    def calls(self):
        """The Call of each sub-group of the round."""
        return self._calls

    def has(self, sub_group):
        """True if a sub-group was submitted in the open round."""
        return self._open and sub_group in self._submitted

    def missing(self):
        """Sub-groups that have not been submitted in this round."""
        return [sub_group for sub_group in self._calls if sub_group not in self._submitted]

    def submit(self, sub_group, param, grad, exp_avg, exp_avg_sq):
        """Hands a sub-group over; it steps at once. Its memory belongs to the engine until the verdict."""
        arrays = (param, grad, exp_avg, exp_avg_sq)
        tensor = _call.tensor(param, grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        _restore(self._powers.id, self._found[sub_group])
        self._engine.submit_table(
            "spw_spec_submit_ds_adam", list(self._calls).index(sub_group), [_arrays.held(array) for array in arrays],
            self._powers.id, *self._calls[sub_group], ctypes.byref(tensor), None)
        self._submitted.add(sub_group)

    def resolve(self, factor):
        """Lets the steps stand if `factor` is the one on the gradient that they had; else all are done again with it."""
        self._engine.local_result()
        self._engine.resolve_as("commit" if factor == self._scale else "redo", factor)
        _restore(self._optimizer_id, self._after)
        self._open = False

    def abort(self):
        """Takes an open round back: after it no step of the round has happened."""
        if self._open:
            self._engine.abort()
            self._open = False

    def wait(self, sub_group):
        """Waits until a sub-group is as the verdict wants it."""
        self._engine.wait(list(self._calls).index(sub_group))

    def finish(self):
        """Waits for all of them."""
        self._engine.finish()

    def stats(self):
        """The engine's counters."""
        return self._engine.stats() if self._engine else {}

    def close(self):
        """Ends the engine; an open round is taken back."""
        self._closed = True
        self._retire()

    def _retire(self):
        engine, self._engine, self._open = self._engine, None, False
        if engine is not None:
            _engines.discard(engine)
            _add(_retired, engine.stats())
            engine.close()


class _Powers:
    """An id of DeepSpeed's Adam to compute powers of beta with."""

    def __init__(self):
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        self.id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        _ops.module("cpu_adam").create_adam(self.id, 0.0, 0.0, 0.0, 0.0, 0.0, True, False)
        weakref.finalize(self, _destroy, self.id, os.getpid())

    def plan(self, optimizer_id, calls):
        """The state that each sub-group finds, and the one after the last of them."""
        found, state, nothing = {}, _saved(optimizer_id), _abi.sized(_abi.Tensor)
        for sub_group, call in calls.items():
            found[sub_group] = state
            _restore(self.id, state)
            # A step of no elements: only the powers advance.
            _native.check(_native.library().spw_ds_adam_update(self.id, *call, ctypes.byref(nothing)))
            state = _saved(self.id)
        return found, state


def _saved(optimizer_id):
    state = _abi.sized(_abi.DsAdamState)
    _native.check(_native.library().spw_ds_adam_save(optimizer_id, ctypes.byref(state)))
    return state


def _restore(optimizer_id, state):
    _native.check(_native.library().spw_ds_adam_restore(optimizer_id, ctypes.byref(state)))


def _destroy(optimizer_id, process):
    if process == os.getpid():
        _ops.module("cpu_adam").destroy_adam(optimizer_id)


def _float(value):
    """A number as the f32 that it is rounded to where it meets a gradient."""
    return ctypes.c_float(float(value)).value


def _add(total, stats):
    for name, value in stats.items():
        total[name] = total.get(name, 0) + value


def count_waited():
    """Counts a step that began only in step()."""
    _add(_retired, {"waited": 1})


def served():
    """The counters of all engines of this process, added up."""
    total = dict(_retired)
    for engine in list(_engines):
        _add(total, engine.stats())
    return total
