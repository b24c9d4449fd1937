"""Checkpoints of optimizer states on a tier.

With "snapshot_checkpoints" the states are a snapshot of the tier. save_checkpoint() commits, removes an older snapshot of the tag, begins a
snapshot in its folder, and saves the rest as DeepSpeed does. The states are written while training continues. The file `latest` names the
tag once the parts of all ranks are finished: each rank that sees them all writes it. A run that is killed before has the former `latest`.

A universal checkpoint of DeepSpeed is a folder for each parameter, with the whole parameter and its moments. Number of ranks and
sub_group_size may be others than those of the run that saved. One sub-group is gathered and written at a time."""

from __future__ import annotations

import contextlib
import os
import weakref

from .. import _snapshot
from ..errors import InvalidArgumentError, SpillwayError

#: The folder of the snapshot in that of the tag, and the entry of a checkpoint's optimizer states that says so.
FOLDER, ENTRY = "spillway-snapshot", "spillway_snapshot"
#: The states of a parameter in a universal checkpoint.
_STATES = ("fp32", "exp_avg", "exp_avg_sq")


class Snapshots:
    """The snapshots of one TierSwapper.

    Args:
        tiered: Its open tier.
        bytes_per_second: Limit of the speed of a rank; 0: no limit.

    Attributes:
        saving: True while DeepSpeed saves a checkpoint whose states are in a snapshot."""

    def __init__(self, tiered, bytes_per_second):
        self._tiered, self._bytes_per_second, self.saving = tiered, bytes_per_second, False
        # The one that is being written.
        self._writing: list[_Writing] = []
        # Also at the end of the interpreter, before the tier closes.
        weakref.finalize(self, _finish, self._writing)

    def clear(self, folder):
        """Removes a finished snapshot of this folder in all ranks. None of its parts may count as one of the snapshot that replaces it."""
        together = self._tiered.place.together
        together(self.wait)
        together(lambda: _snapshot.remove(self._tiered.part_of(folder)))

    def begin(self, folder):
        """Begins a snapshot of the last commit, in a folder that clear() has served."""
        tiered, together = self._tiered, self._tiered.place.together
        snapshot = together(lambda: tiered.snapshot(folder, self._bytes_per_second, None), _snapshot.Snapshot.close)
        self._writing.append(_Writing(snapshot, folder, tiered.place))

    def name(self, save_dir, tag):
        """`latest` in this folder names the tag once the snapshot is finished."""
        self._writing[-1].latest = os.path.join(save_dir, "latest"), tag
        self.poll()

    def poll(self):
        """Notes the end of a snapshot; raises its error."""
        if self._writing and self._writing[0].snapshot.progress().ended:
            self.wait()

    def wait(self):
        """Waits for the end of a snapshot; raises its error."""
        _finish(self._writing)

    def rest(self):
        """Waits for the end of a snapshot, whose error wait() raises."""
        for writing in self._writing:
            with contextlib.suppress(SpillwayError):
                writing.snapshot.wait()


class _Writing:
    def __init__(self, snapshot, folder, place):
        self.snapshot, self._folder, self._place = snapshot, folder, place
        self.latest, self._process = None, os.getpid()

    def finish(self):
        if os.getpid() != self._process:
            return
        self.snapshot.wait()
        if self.latest is None or not _snapshot.is_finished(self._folder, self._place.world):
            return
        file, tag = self.latest
        # Several ranks may write it at once.
        part = f"{file}.rank-{self._place.rank}.part"
        with open(part, "w") as latest:
            latest.write(tag)
            latest.flush()
            os.fsync(latest.fileno())
        os.replace(part, file)


def _finish(writing):
    while writing:
        first = writing[0]
        try:
            first.finish()
        except (SpillwayError, OSError):
            _end(writing, first)
            raise
        # An interrupt ends the wait, not the snapshot: the entry stays, and the next call waits for it.
        _end(writing, first)


def _end(writing, first):
    writing.remove(first)
    first.snapshot.close()


def check_snapshots(engine):
    """Raises InvalidArgumentError if checkpoints of this engine cannot have snapshots."""
    if getattr(engine.checkpoint_engine, "is_decoupled", lambda: False)():
        raise InvalidArgumentError(
            "spillway.snapshot_checkpoints is true, and a decoupled checkpoint engine writes `latest` itself; take one of them out"
        )


def load_universal(stage3, swapper, folder, load_optimizer_states, load_from_fp32_weights):
    """Sets the states of all sub-groups, and the model's weights.

    Args:
        stage3: The optimizer.
        swapper: Its TierSwapper.
        folder: The checkpoint's folder of this tag.
        load_optimizer_states: False leaves moments and steps as they are.
        load_from_fp32_weights: Without optimizer states: False rounds the masters to the dtype of the model.

    Raises:
        InvalidArgumentError: The checkpoint lacks a parameter of the model; nothing was changed."""
    folder = os.path.join(folder, "zero")
    names = _STATES if load_optimizer_states else _STATES[:1]
    _check_universal(stage3, folder, names, load_optimizer_states)
    step = _take_options(stage3, folder) if load_optimizer_states else None
    for index, params in enumerate(stage3.fp16_groups):
        parts = [_gathered(stage3, params, swapper.elements[index], folder, name) for name in names]
        if not load_optimizer_states and not load_from_fp32_weights:
            parts = [parts[0].to(params[0].dtype).float()]
        swapper.give(index, *parts, *[None] * (len(_STATES) - len(parts)), step)
    swapper.publish_all()


def _check_universal(stage3, folder, names, with_options):
    files = [os.path.join(folder, "optimizer_state.pt")] if with_options else []
    for param in (param for params in stage3.fp16_groups for param in params):
        files += [os.path.join(folder, stage3.param_names[param], f"{name}.pt") for name in names]
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise InvalidArgumentError(
            f"the universal checkpoint lacks {missing[0]}, and {len(missing) - 1} more files that this model needs; pass one that "
            "DeepSpeed's ds_to_universal made from a checkpoint of this model"
        )


def _take_options(stage3, folder):
    """Takes over the options of the parameter groups and the loss scale; returns the number of steps."""
    import torch

    found = torch.load(os.path.join(folder, "optimizer_state.pt"), weights_only=False)
    stage3._load_global_state_stage3(found)
    saved, groups = found["optimizer_state_dict"], stage3.optimizer.param_groups
    # DeepSpeed gives all groups the options of the first one. Other numbers of groups leave no better choice.
    options = saved["param_groups"] if len(saved["param_groups"]) == len(groups) else saved["param_groups"][:1] * len(groups)
    for group, before in zip(groups, options):
        group.update({name: value for name, value in before.items() if name != "params"})
    # A checkpoint from before the first step has no state of a parameter.
    return next((int(state["step"]) for state in saved["state"].values()), 0)


def _gathered(stage3, params, elements, folder, name):
    """This rank's part of one state of a sub-group."""
    import torch

    flat, first = torch.zeros(elements, dtype=torch.float32), 0
    for param in params:
        part = stage3.load_hp_checkpoint_state(os.path.join(folder, stage3.param_names[param]), name, **_of(stage3, param))
        flat.narrow(0, first, part.numel()).copy_(part)
        first += part.numel()
    return flat


def _of(stage3, param):
    """The argument that names the parameter; older versions have none, and no groups of their own for parameters."""
    return {"param": param} if "param" in stage3.load_hp_checkpoint_state.__code__.co_varnames else {}
