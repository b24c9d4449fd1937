"""Stores ZeRO-3's optimizer states on a tier, instead of DeepSpeed's PartitionedOptimizerSwapper and
PipelinedOptimizerSwapper.

One update steps all sub-groups: each is fetched, stepped, published as the model's 16-bit weights and written back, and
these phases overlap. Gradients stay in host memory where stage 3 accumulates them, in their own dtype. The arithmetic
is DeepSpeed's: losses and weights are bit-identical to a run with states in host memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import json
import logging
import weakref

from .. import _abi, _native, _values
from .._parts import Commits
from .._snapshot import RECORD
from ..errors import CorruptError, InvalidArgumentError
from ..swap import STATES, Swap, state_bytes
from ..tier import Tier
from ..tiered import Prepared, Tiered
from . import _installed, _lifetime, _optimizer_ops, _ranges, _scratch, _stage3
from ._checkpoints import Snapshots
from ._sub_groups import Gradients, SubGroupParts, floats
from ._tier_overlap import Overlap

_log = logging.getLogger("spillway")

# The sizes of extents with a record are multiples of it.
_PIECE = 1 << 20
_BY = "deepspeed"
_CURE = 'load a checkpoint, with "resume": false in the spillway block'

# All TierSwappers of this process, for active().
_swappers: weakref.WeakSet[TierSwapper] = weakref.WeakSet()


class TierSwapper:
    """The optimizer swapper interface of stage 3, and the update. Gradients has the gradients."""

    def __init__(self, stage3, settings, reassign):
        from deepspeed import comm as dist

        self._stage3, self.settings, self._reassign = weakref.proxy(stage3), settings, reassign
        #: The steps beside backward; None: a step waits for all gradients.
        self.overlap: Overlap | None = None
        #: The snapshots of checkpoints; None: checkpoints have the states themselves.
        self.snapshots: Snapshots | None = None
        self.elements = [int(count) for count in stage3.fp16_partitioned_groups_flat_numel]
        if _swappers:
            # An unreferenced swapper may still hold the tier and its memory.
            gc.collect()
        self.parts = SubGroupParts(self.elements, settings.part_elements)
        self._tiered, others = _opened(settings, self.elements, self.parts.sizes, dist.get_rank(), dist.get_world_size())
        if others is not None:
            self._begin_from(others)
        _lifetime.opened(self)
        self.resumed = self._tiered.resumed_step is not None
        if self.resumed and dist.get_rank() == 0:
            self._tell_of_resume()
        self.swap_folder = self._tiered.directory
        self.steps, self.configured = [0] * len(self.elements), []
        self.gradients = Gradients(self._stage3, [0, *itertools.accumulate(self.elements)], settings.missing_gradients == "stale")
        # The parameters whose gradients a function of stage 3 is setting.
        self._setting = ()
        # The bf16 weights of sub-groups whose master weights were set, until the model has these weights.
        self._belonging = {}
        #: The weights that a step cannot write to the model.
        self.host_weights = _stage3.HostWeights(stage3)
        if settings.snapshot_checkpoints:
            self.snapshots = Snapshots(self._tiered, settings.snapshot_bytes_per_second)
        #: The snapshot of the checkpoint that is loaded, and where that has swap files of DeepSpeed's own swapper.
        self.found, self.swap_files = None, None
        if settings.overlap:
            self.overlap = Overlap(self, stage3)
        if self.resumed and settings.split_master:
            self._get_weights()
        _swappers.add(self)

    def _tell_of_resume(self):
        """Logs that the job resumes: its user may have meant a new job."""
        paths = ", ".join(str(path.directory) for path in self.settings.paths)
        _log.warning(
            'the job %r goes on at step %d, with the states on %s; another "job" in the spillway block begins anew',
            self.settings.job,
            self._tiered.resumed_step,
            paths,
        )

    @property
    def tiered(self):
        """The open tier and the update on it, whose subgroups are parts."""
        if self._tiered.closed:
            raise InvalidArgumentError(
                "the optimizer states on the tier were closed with their engine; make a new engine, and load a checkpoint or resume"
            )
        return self._tiered

    def close(self):
        """Closes the update and the tier; removes scratch directories."""
        _swappers.discard(self)
        try:
            if self.overlap is not None:
                self.overlap.close()
            if self.snapshots is not None:
                self.snapshots.wait()
        finally:
            self._tiered.close()

    # Called by stage 3 during setup.

    def is_swappable_tensor(self, tensor=None, numel=None):
        """Always true: every sub-group is on the tier, regardless of its size."""
        return True

    def initialize_parameters(self, parameters, src_tensors):
        """Sets the initial state of sub-groups, unless the tier was resumed."""
        if self.resumed:
            return
        for parameter, source in zip(parameters, src_tensors):
            zeros = floats(source.numel()).zero_()
            self.write(self._index(parameter), _cpu_floats(source), zeros, zeros)

    def publish_all(self, sub_groups=None):
        """Copies the tier's weights of these sub-groups to the model, or of all."""
        for index in range(len(self.elements)) if sub_groups is None else sub_groups:
            param = floats(self.elements[index])
            self.read(index, param)
            self.show(index, param)
            self._belonging.pop(index, None)

    # The step.

    def step(self, factor):
        """Runs one step of all sub-groups, in all processes; `factor` multiplies the gradients. The model then has the new weights."""
        self.tiered.step(lambda: self._step(factor), self._most_steps)
        # A commit would end the fetches.
        if self.overlap is not None and not self.settings.resume:
            self.overlap.fetch()

    def _most_steps(self):
        return max(self.steps, default=0)

    def _step(self, factor):
        self.tiered.changes()
        stage3 = self._stage3
        everything = range(len(self.elements))
        gradients = [self.gradients.for_step(index) for index in everything]
        scaler = _stage3.grad_scaler(stage3)
        if scaler is not None:
            gradients, factor = self.gradients.unscale(gradients, factor, scaler), 1.0
        if self.overlap is not None:
            self.overlap.step(gradients, factor)
        else:
            self._step_at_once(gradients, factor)
        self._belonging.clear()
        for index, elements in enumerate(self.elements):
            self._set_step(index, self.steps[index] + 1)
            _optimizer_ops.count("cpu_adam", elements)
        self.gradients.stepped(factor)

    def _step_at_once(self, gradients, factor):
        stage3, everything = self._stage3, range(len(self.elements))
        direct = [self.weight(index) for index in everything]
        weights = [self.host_weights.of(index) if weight is None else weight for index, weight in enumerate(direct)]
        shown = _Shown(self, {index: weights[index] is None for index in everything if direct[index] is None})
        self.parts.ds_step(
            self.tiered.swap,
            stage3.optimizer.opt_id,
            [_stage3.call_of(stage3, index, self.steps[index] + 1, factor) for index in everything],
            [(gradients[index], weights[index], self._belonging.get(index)) for index in everything],
            shown if shown.apart else None,
        )
        if shown.apart:
            _stage3.wait_for_copies()

    def publish(self, sub_group):
        """No-op: the step did it."""

    def gradient(self, param, buffer):
        """The gradient stays in the accumulation buffer."""
        self.gradients.arrived(param)
        return True

    def accumulating(self, params):
        """Called before backward adds to gradients that are not complete."""
        self.changing(params)
        self.gradients.accumulating(params)

    def reading(self):
        """No-op: `gradients` has them."""

    def changing(self, params):
        """Called before backward changes gradients of these parameters."""
        if self.overlap is not None:
            self.overlap.changing(params)

    def completed(self, params):
        """Called when backward has completed gradients of these parameters."""
        if self.overlap is not None:
            self.overlap.completed(params)

    def skip(self):
        """The step does not happen."""
        if self.overlap is not None:
            self.overlap.skip()

    def rest(self):
        """Before a use of the states, or a move of the weights that a step writes: takes back what was submitted of the next step."""
        if self.overlap is not None:
            self.overlap.abandon()

    def weight(self, index):
        """The model's weights of a sub-group if the step can write them directly (contiguous, 16 bits, in host memory),
        else None."""
        flat = self._stage3.fp16_partitioned_groups_flat[index]
        return flat if flat is not None and flat.is_cpu and flat.element_size() == 2 else None

    def show(self, index, param):
        """Copies master weights to the model's weights by stage 3's own method."""
        master = self._stage3.fp32_partitioned_groups_flat[index]
        master.data = param
        try:
            self._reassign(index)
        finally:
            master.data = floats(0)

    # Access to one sub-group's state between steps.

    def swap_in_optimizer_state(self, parameter, async_parameter=None):
        """Loads state and gradient into the attributes where stage 3 expects them."""
        index = self._index(parameter)
        parts = [floats(self.elements[index]) for _ in STATES]
        self.read(index, *parts)
        parameter.data, parameter.grad = parts[0], _cpu_floats(self.gradients.read(index)).clone()
        self._stage3.optimizer.state[parameter].update(exp_avg=parts[1], exp_avg_sq=parts[2], step=self.steps[index])

    def swap_out_optimizer_state(self, parameter, async_swap=False):
        """Stores the state from these attributes on the tier."""
        self.writeback_optimizer_state_and_gradients(parameter, True, False)

    def writeback_optimizer_state_and_gradients(self, parameter, write_opt_state, write_gradients):
        """Stores the state, the gradient, or both."""
        index, state = self._index(parameter), self._stage3.optimizer.state[parameter]
        if write_opt_state:
            self.write(index, parameter.data, state["exp_avg"], state["exp_avg_sq"])
        if write_gradients:
            self.gradients.set(index, parameter.grad, self._setting or self._stage3.fp16_groups[index])
        self.release_swap_buffers(parameter)

    @contextlib.contextmanager
    def setting(self, params):
        """While this is open, stage 3 sets the gradients of these parameters."""
        self._setting = params
        try:
            yield
        finally:
            self._setting = ()

    def swap_out_gradients(self, parameter, gradient_offsets, gradient_tensors):
        """Called by versions without _offload_grad_partition_at_boundary. The gradients are in the buffer as well."""
        index = self._index(parameter)
        for offset in gradient_offsets:
            self.gradients.arrived_at(index, offset)

    def release_swap_buffers(self, parameter):
        """Releases the attributes' memory."""
        parameter.data, parameter.grad = floats(0), None
        for name in STATES[1:]:
            self._stage3.optimizer.state[parameter].pop(name, None)

    def give(self, index, param, exp_avg, exp_avg_sq, step):
        """Sets a sub-group's state from arrays of any dtype; None keeps a part."""
        self.write(index, *(None if part is None else _cpu_floats(part) for part in (param, exp_avg, exp_avg_sq)))
        if step is not None:
            self._set_step(index, int(step))

    def read(self, index, *arrays):
        """Copies param, exp_avg and exp_avg_sq of a sub-group, or the first of them, into float32 arrays."""
        self.rest()
        self.parts.read(self.tiered, index, *arrays, weights=self.belonging(index))

    def write(self, index, param, exp_avg, exp_avg_sq):
        """Sets a sub-group's state from float32 arrays; None keeps a part."""
        import torch

        self.rest()
        self.parts.write(self.tiered, index, param, exp_avg, exp_avg_sq)
        if self.settings.split_master and param is not None:
            self._belonging[index] = param.to(torch.bfloat16)

    def belonging(self, index):
        """With split masters, the bf16 weights that belong to a sub-group's state; else None."""
        return self._weights_of(index) if self.settings.split_master else None

    def _weights_of(self, index):
        return self._belonging.get(index, self.weight(index))

    def _put_weights(self):
        tier = self.tiered.tier
        tier._transfer(tier.put(extent, [self._weights_of(index)]) for index, extent in self._weight_extents())

    def _get_weights(self):
        """Loads the weights of the last commit into the model. A commit without a split master has none and needs
        none."""
        tier = self.tiered.tier
        known = {extent.name for extent in tier.extents() if extent.generation}
        extents = ((index, extent) for index, extent in self._weight_extents() if _weights_name(index) in known)
        tier._transfer(tier.get(extent, [self.weight(index)]) for index, extent in extents)

    def _weight_extents(self):
        for index, elements in enumerate(self.elements):
            if elements:
                yield index, self.tiered.tier.define(_weights_name(index), [2 * elements])

    def set_steps(self, steps):
        """Sets the number of steps of each sub-group."""
        for index, step in enumerate(steps):
            self._set_step(index, step)

    def commit(self, step, record, wait):
        """Makes all state durable; returns after all ranks have committed, or without `wait` once they have begun. `record()` returns the
        values that are stored beside it."""

        def prepared():
            self.rest()
            facts = self._facts(list(self.steps), self._adam_state())
            if self.settings.split_master:
                self._put_weights()
            return Prepared(step, self._most_steps(), facts, store(self.tiered.tier, record(), self.tiered.room(facts)))

        self.tiered.commit(prepared, wait)
        if self.overlap is not None:
            self.overlap.fetch()

    def _facts(self, steps, adam_state):
        held = _ranges.of(self._stage3)
        return {"elements": self.elements, "steps": steps, "adam_state": adam_state, "held": held, **_form(self.settings)}

    def _begin_from(self, others):
        """Begins with the elements of another run's commit, and commits them at its step with the rest of its record. A kill before that
        leaves a tier without a commit, which begins anew."""
        tiered, before = self._tiered, others.records[others.own]
        try:
            own = _ranges.holding(self._facts([0] * len(self.elements), before.facts["adam_state"]))
            steps = _ranges.steps(own, others.give(tiered, own), len(self.elements))
            facts = self._facts(steps, before.facts["adam_state"])

            def prepared():
                with others.opened() as old:
                    payload = store(tiered.tier, load(old, before.payload), tiered.room(facts))
                return Prepared(others.step, max(steps, default=0), facts, payload)

            tiered.commit(prepared)
            tiered.resumed_step = others.step
        except BaseException:
            tiered.close()
            raise

    def restore(self):
        """Takes over the step counts and the state of DeepSpeed's arithmetic from the last commit. AdamW or L2 follows this run's
        configuration."""
        facts = self.tiered.committed.facts
        self.set_steps(facts["steps"])
        mode = int(self._stage3.optimizer.adam_w_mode)
        state = _abi.DsAdamState(ctypes.sizeof(_abi.DsAdamState), **{**facts["adam_state"], "adamw_mode": mode})
        _native.call("spw_ds_adam_set_state", self._stage3.optimizer.opt_id, ctypes.byref(state))

    def record(self):
        """The values that are stored beside the last commit."""
        return load(self.tiered.tier, self.tiered.committed.payload)

    def find_snapshot(self, directory, step, at, commit):
        """Finds a finished snapshot of this step for take_snapshot(). Commits states that have changed by commit(), at the step `at`."""

        def check(record):
            _check_elements(record, self.elements)
            _check_form(record, self.elements, self.settings, f"the snapshot {directory}")

        found = self.tiered.snapshot_of(directory, check)

        def check_step():
            if found.step != step:
                raise InvalidArgumentError(
                    f"the snapshot {directory} is of step {found.step}, and the rest of the checkpoint of step {step}: a run was killed "
                    "while it saved another step under this tag; load another tag"
                )

        self.tiered.place.together(check_step)
        self.tiered.keep(found, at, commit)
        self.found = found

    def take_snapshot(self, with_moments):
        """Takes over and commits states, step counts and the state of DeepSpeed's arithmetic from the snapshot that was found. Without
        moments, these and the step counts are zero then. The model has the weights."""
        if self.found is None:
            raise InvalidArgumentError("the checkpoint's optimizer states are a snapshot of a tier; load it by engine.load_checkpoint()")

        def take():
            self.rest()
            self.tiered.take(self.found)
            self._take_committed()
            if not with_moments:
                self.purge_state()
            self.publish_all()

        self.tiered.whole(take)

    def _take_committed(self):
        self._belonging.clear()
        self.restore()
        if self.settings.split_master:
            self._get_weights()

    def go_back(self):
        """Returns to the last commit, weights included, after a load that did not end."""
        self.tiered.rollback()
        self._take_committed()
        self.publish_all()

    def purge_state(self):
        """Resets moments and step counts; the master weights are kept."""
        for index, elements in enumerate(self.elements):
            zeros = floats(elements).zero_()
            self.give(index, None, zeros, zeros, 0)

    def _set_step(self, index, step):
        self.steps[index] = step
        self._stage3.optimizer.state[self._stage3.fp32_partitioned_groups_flat[index]]["step"] = step

    def _index(self, parameter):
        for index, other in enumerate(self._stage3.fp32_partitioned_groups_flat):
            if other is parameter:
                return index
        raise InvalidArgumentError(
            "spillway: the parameter is no sub-group's master weights of this optimizer; pass one of its fp32_partitioned_groups_flat"
        )

    # Parts of DeepSpeed's swapper interface without a function here: nothing is timed.

    def init_timers(self):
        """No-op."""

    log_timers = pre_backward = post_backward = init_timers

    def _adam_state(self):
        """The state that DeepSpeed's arithmetic keeps between steps, as a dict of numbers."""
        state = _abi.sized(_abi.DsAdamState)
        _native.call("spw_ds_adam_get_state", self._stage3.optimizer.opt_id, ctypes.byref(state))
        return {name: getattr(state, name) for name, _ in state._fields_[1:]}


class _Shown:
    """Publishes the weights of sub-groups that the step cannot write directly; `apart`: their numbers, and whether it needs masters."""

    def __init__(self, swapper, apart):
        self.apart, self._swapper = apart, swapper

    def wants(self, index):
        return index in self.apart

    def wants_masters(self, index):
        return self.apart[index]

    def __call__(self, index, param):
        if not self._swapper.host_weights.publish(index):
            self._swapper.show(index, param)


def served():
    """Reports of this process's tiers, for active()."""
    return [
        {
            "paths": [path._asdict() for path in tiered.tier.paths()],
            **tiered.swap.stats()._asdict(),
            **tiered.swap.budget._asdict(),
            "subgroups": len(swapper.elements),
            "parts": len(tiered.swap),
            "commits": tiered.commits,
            "resumed_at": tiered.resumed_step,
            "submitted_early": 0 if swapper.overlap is None else swapper.overlap.submitted_early,
        }
        for swapper, tiered in [(swapper, swapper.tiered) for swapper in _swappers]
    ]


_installed.counted(lambda: {"tier": found} if (found := served()) else {})


def store(tier, record, room):
    """The payload for a tier's commit: the record, or a reference to an extent that stores it if it has more than `room` bytes."""
    data = _values.pack(record)
    if len(data) <= room:
        return data
    size = -(-len(data) // _PIECE) * _PIECE
    name = f"{RECORD}{size // _PIECE}"
    old = next((extent for extent in tier.extents() if extent.name.startswith(RECORD) and extent.name != name), None)
    if old is not None:
        tier.remove(old.number)
    padded = bytearray(size)
    padded[: len(data)] = data
    tier._transfer(tier.put(extent, [padded]) for extent in [tier.define(name, [size])])
    return _values.pack({"record": name, "bytes": len(data)})


def load(tier, payload):
    """The record of a payload of store()."""
    record = _values.unpack(payload)
    if not isinstance(record, dict):
        raise CorruptError("the commit's record is damaged: it is no dictionary")
    if "record" not in record:
        return record
    extent = next((extent for extent in tier.extents() if extent.name == record["record"]), None)
    if extent is None or not extent.name.startswith(RECORD) or not 0 <= record["bytes"] <= extent.bytes:
        raise CorruptError(f"the commit's record is damaged: it refers to the extent {record['record']!r}, which the tier lacks")
    padded = bytearray(extent.bytes)
    tier._transfer(tier.get(number, [padded]) for number in [tier.define(extent.name, [extent.bytes])])
    return _values.unpack(padded[: record["bytes"]])


def _opened(settings, elements, sizes, rank, world):
    """Opens the tier and the update of sub-groups with these numbers of elements, in parts of these sizes. Returns also the commit of
    another run with which a new tier begins, or None."""
    encoding = {"split_master": settings.split_master, "moment_dtype": settings.moment_dtype}
    state = int(state_bytes(**encoding) * sum(elements))

    def update(tier, committed):
        if committed is not None:
            _check_elements(committed, elements)
            _check_form(committed, elements, settings, "the tier")
        return Swap(
            tier,
            sizes,
            host_memory=settings.host_memory,
            ratio=settings.ratio,
            speeds=settings.speeds,
            huge_pages=settings.pin_memory,
            pin_memory=settings.pin_memory,
            **encoding,
        )

    def limit(_):
        limits = {f"spillway.paths[{index}].limit_bytes": path.limit_bytes for index, path in enumerate(settings.paths) if path.limit_bytes}
        given = ", ".join(f"{name} is {limit}" for name, limit in limits.items())
        return (
            None
            if not limits
            else InvalidArgumentError(
                f"{given}: too small for the optimizer states of this rank, which take {state} bytes, rounded up to "
                "whole blocks; raise the limits, or add a path"
            )
        )

    foreign = f'the tier of the job "{settings.job}" was committed by another program; set another "job" in the spillway block'
    place = _scratch.place_of(
        settings, settings.job, rank, world, block_bytes=_block_bytes(int(settings.part_elements * state_bytes(**encoding)))
    )
    others: list[Commits] = []

    def found(committed):
        if committed is None and settings.begin_from is not None:
            others.append(Commits(settings.begin_from, place, _BY, lambda record: _ranges.holding(record.facts)))

    if not settings.resume:
        opener = functools.partial(_scratch.open_scratch, place)
        return Tiered("TierSwapper", _BY, place, _CURE, foreign, update, limit, opener, Tier.destroy), None
    place = place._replace(options={**place.options, "durability": settings.durability})
    tiered = Tiered("TierSwapper", _BY, place, _CURE, foreign, update, limit, found=found)
    return tiered, others[0] if others else None


def _check_elements(committed, elements):
    if committed.facts["elements"] != elements:
        raise InvalidArgumentError(
            f"the tier holds sub-groups of {committed.facts['elements']} elements, this run has {elements}; use the "
            "model, sub_group_size and number of ranks of the run that committed. To change the latter two, begin_from its directory with "
            "another job"
        )


def _form(settings):
    """What the extents of a tier depend on, beside the sub-groups."""
    return {name: getattr(settings, name) for name in ("part_elements", "split_master", "moment_dtype")}


def _check_form(committed, elements, settings, what):
    """Raises InvalidArgumentError if extents of a commit do not fit these settings. Other part_elements may give the same parts."""
    stored, own = committed.facts, _form(settings)
    changed = [name for name in own if stored[name] != own[name]]
    if (
        changed == ["part_elements"]
        and SubGroupParts(elements, stored["part_elements"]).sizes == SubGroupParts(elements, own["part_elements"]).sizes
    ):
        return
    if changed:
        keys = ", ".join(f"{name} {json.dumps(stored[name])}, and this run has {json.dumps(own[name])}" for name in changed)
        raise InvalidArgumentError(f"{what} was written with {keys} in the spillway block; use the settings of the run that committed")


def _block_bytes(part_bytes):
    """Block size with at least 128 blocks per part, because paths share a part in whole blocks; limited to 16 KiB..1
    MiB."""
    return min(max(part_bytes // 128 // 4096 * 4096, 16 << 10), 1 << 20)


def _weights_name(index):
    return f"weights-{index:06}"


def _cpu_floats(tensor):
    import torch

    return tensor.detach().to("cpu", torch.float32).flatten()
