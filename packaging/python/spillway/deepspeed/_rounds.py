"""The steps of SuperOffload, as _early/ has them: sub-groups step during backward, and one verdict keeps, redoes or rolls back all of them.

A step without speculation passes the sub-groups in a fixed order to DeepSpeed's Adam, which keeps beta powers per
optimizer, not per sub-group. A round first computes the powers for each sub-group in that order. Results are therefore
bit-identical for any order of arrival."""

from __future__ import annotations

import ctypes
import os
import warnings
import weakref
from typing import Any

from .. import _abi, _arrays, _log, _native, topo
from .._early import gpu_events
from .._early.arrivals import Arrivals
from .._early.memory_step import MemoryStep
from .._groups import but_factor
from ..errors import InvalidArgumentError, SpillwayError
from ..optim import Adam
from ..speculate import Speculation
from . import _installed, _lifetime, _optimizer_ops

# Engines of this process, for active().
_engines: weakref.WeakSet[Speculation] = weakref.WeakSet()
# Counters of closed engines and of steps without speculation, summed.
_retired: dict[str, float] = {}


class SuperOffloadCPUOptimizer(MemoryStep[int]):
    """The step of all sub-groups; parameters as in DeepSpeed. max_grad_numel and pin_memory have no effect: gradients are read
    in place.

    cpuadam_cores_perc is the share of this rank's cores to which the workers are bound; DeepSpeed gives the other cores to the
    trainer. Here the trainer's affinity stays as it is.

    Attributes:
        settings: The `superoffload` object of the engine's `spillway` block.
        verdict: The factor of the gradients of the step.
        tail: The sub-groups on the device; None before the first gradient.
        before_close: A weak reference to what close() calls first."""

    tail: Any = None
    before_close: Any = None

    def __init__(self, optimizer_config, cpuadam_cores_perc=0.8, max_grad_numel=1000000, pin_memory=True):
        if not 0 < cpuadam_cores_perc <= 1:
            raise InvalidArgumentError(f"cpuadam_cores_perc is {cpuadam_cores_perc}; pass a number above 0 and up to 1")
        configs = optimizer_config if isinstance(optimizer_config, list) else [optimizer_config]
        if any(config.get("amsgrad") for config in configs):
            raise InvalidArgumentError("SuperOffload: amsgrad is not supported; set amsgrad to false")
        # pydantic is imported where a block may be given.
        from . import _settings

        self.settings = _settings.of_superoffload(_lifetime.block())
        _lifetime.opened(self)
        self._bound = _bind(cpuadam_cores_perc)
        self._powers: Any = None
        self._closed = False
        self._calls, self._hosts = {}, []
        # _superoffload.py knows the gradients of the sub-groups.
        super().__init__(Arrivals({}))

    def open(self, optimizer_id, calls, loss_scale, max_norm, tail=()):
        """Opens a round. `calls` has the C record of each sub-group, in the order of a step without speculation.
        `optimizer_id` is DeepSpeed's id, whose beta powers advance when the round is resolved. The sub-groups of `tail` are not submitted;
        `step_of` tells their steps."""
        if self._closed:
            raise InvalidArgumentError("this SuperOffload optimizer was closed with its engine; make a new engine")
        hosts = [sub_group for sub_group in calls if sub_group not in tail]
        if not self.speculations or hosts != self._hosts:
            self._retire()
            self.speculations = [Speculation(len(hosts), publish="staged")]
            _log.first_served("deepspeed", "SuperOffload")
            _engines.update(self.speculations)
        if self._powers is None:
            self._powers = _Powers()
        self._optimizer_id, self._calls, self._hosts, self._scale = optimizer_id, dict(calls), hosts, _float(1.0 / loss_scale)
        self._found, self._after = self._powers.plan(optimizer_id, calls)
        self.is_open = True
        try:
            self.speculations[0].begin(Adam(), grad_scale=1.0 / loss_scale, max_norm=max_norm)
        except BaseException:
            self.drop()
            raise

    def is_of(self, calls):
        """True if open() got the same calls."""
        return calls.keys() == self._calls.keys() and all(but_factor(calls[group]) == but_factor(own) for group, own in self._calls.items())

    def missing(self):
        """Sub-groups that were not submitted in this round."""
        return [sub_group for sub_group in self._hosts if sub_group not in self.submitted]

    def start(self, sub_group, param, grad, exp_avg, exp_avg_sq, param_copy=None, events=()):
        """Submits a sub-group, whose step starts after these events, at once if there are none. The step writes its weights in 16 bits to
        `param_copy`. Its memory must not be used until the verdict."""
        states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, **({} if param_copy is None else {"param_copy": param_copy})}
        after = gpu_events.after(events[0]) if len(events) == 1 else None
        self.submit(sub_group, events if after is None else (), self._send, sub_group, param, grad, states, after)

    def _send(self, sub_group, param, grad, states, after):
        arrays = (param, grad, *states.values())
        tensor = _optimizer_ops.tensor(param, grad, **states)
        _restore(self._powers.id, self._found[sub_group])
        self.speculations[0].submit_table(
            "spw_spec_submit_ds_adam",
            self._hosts.index(sub_group),
            [_arrays.held(array) for array in arrays],
            self._powers.id,
            ctypes.byref(self._calls[sub_group]),
            ctypes.byref(tensor),
            **({} if after is None else after._asdict()),
        )

    def resolve(self):
        """As of the base: keeps the steps if they used the factor of the step; otherwise redoes all of them with it."""
        super().resolve()
        _restore(self._optimizer_id, self._after)

    def _give_verdict(self, speculation, status):
        self.wait()
        speculation.local_result()
        speculation._resolve_as(status, "redo" if self.clips(self.verdict) else "commit", self.verdict)

    def clips(self, factor):
        """True if the gradient factor `factor` is not that of the steps of this round."""
        return factor != self._scale

    def step_of(self, sub_group, factor):
        """The step of a sub-group of the tail in the last round: an id of DeepSpeed's Adam with its beta powers, and its C record with the
        gradient factor `factor`."""
        call = _abi.DsAdamCall.from_buffer_copy(self._calls[sub_group])
        call.grad_scale = factor
        _restore(self._powers.id, self._found[sub_group])
        return self._powers.id, call

    def wait_for(self, sub_group):
        """Waits until a sub-group has its final state."""
        self.speculations[0].wait(self._hosts.index(sub_group))

    def stats(self):
        """The engine's counters."""
        return self.speculations[0].stats()._asdict() if self.speculations else {}

    def close(self):
        """Closes the engine; an open round is rolled back."""
        try:
            if self.before_close is not None and (method := self.before_close()) is not None:
                method()
        finally:
            self._closed = True
            self._retire()
        if self.tail is not None:
            self.tail.close()
        # Unless another engine or the program has bound the workers since.
        if self._bound and topo.workers() == self._bound:
            topo.unbind()
        self._bound = ()

    def _retire(self):
        self.forget()
        retired, self.speculations = self.speculations, []
        for speculation in retired:
            _engines.discard(speculation)
            _add(_retired, speculation.stats()._asdict())
            speculation.close()
        self.begin()


def _bind(share):
    """Binds the workers to their share of the cores. Returns their processors; none if the program has bound them already, or
    if the system refuses."""
    if topo.workers():
        return ()
    try:
        workers = topo.split(share).workers
        topo.bind(workers)
    except SpillwayError as error:
        warnings.warn(f"SuperOffload: the optimizer's threads are not bound to cores: {error}", RuntimeWarning, stacklevel=3)
        return ()
    return workers


class _Powers:
    """A separate id of DeepSpeed's Adam, for the computation of beta powers."""

    def __init__(self):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        _optimizer_ops.create_adam(self.id, 0.0, 0.0, 0.0, 0.0, 0.0, True, False)
        weakref.finalize(self, _destroy, self.id, os.getpid())

    def plan(self, optimizer_id, calls):
        """Returns the Adam state for each sub-group, and the state after the last one."""
        found, state, nothing = {}, _saved(optimizer_id), _abi.sized(_abi.Tensor)
        for sub_group, call in calls.items():
            found[sub_group] = state
            _restore(self.id, state)
            # A step over no elements advances only the powers.
            _native.call("spw_ds_adam_update", None, self.id, ctypes.byref(call), ctypes.byref(nothing))
            state = _saved(self.id)
        return found, state


def _saved(optimizer_id):
    state = _abi.sized(_abi.DsAdamState)
    _native.call("spw_ds_adam_get_state", optimizer_id, ctypes.byref(state))
    return state


def _restore(optimizer_id, state):
    _native.call("spw_ds_adam_set_state", optimizer_id, ctypes.byref(state))


def _destroy(optimizer_id, process):
    if process == os.getpid():
        _optimizer_ops.destroy_adam(optimizer_id)


def _float(value):
    """The value rounded to f32, as it is multiplied with a gradient."""
    return ctypes.c_float(float(value)).value


def _add(total, stats):
    for name, value in stats.items():
        total[name] = total.get(name, 0) + value


def count(name):
    """Counts a step: "waited", without speculation in step(); "deferred", completed after step(); "stepped_on_device", of a sub-group of
    the tail."""
    _add(_retired, {name: 1})


def served():
    """Counters summed over all engines of this process."""
    total = dict(_retired)
    for engine in list(_engines):
        _add(total, engine.stats()._asdict())
    return total


_installed.counted(lambda: {"superoffload": found} if (found := served()) else {}, "superoffload")
