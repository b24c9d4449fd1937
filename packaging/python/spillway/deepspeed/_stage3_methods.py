"""The methods of DeepSpeed's ZeRO stage 3 that an update of Spillway replaces: of states on a tier, or of sub-groups that CPU and GPU step
together. Without an update each method runs DeepSpeed's own.

The unscaling of the first sub-group, when the norm is known, starts the update of all."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import weakref
from typing import Any

from ..errors import InvalidArgumentError, UnsupportedError
from ..swap import STATES, UNROUNDED
from ..tiered import mapped
from . import _checkpoints, _lifetime, _muon, _stage3, _swap_files, _versions, _watched
from ._interleave import InterleavedUpdate
from ._tier import TierSwapper

# Functions of stage 3 that set gradients: (value, parameter) or (function, parameters).
_SETTERS = ("set_fp32_grad_for_param", "set_local_grad_for_param", "update_fp32_grad_for_param_vectorized")


def overrides(stage3):
    """Methods for DeepSpeed's DeepSpeedZeroOptimizer_Stage3, by name."""
    found = {**_setting_up(stage3), **_stepping(stage3), **_gradients(stage3), **_moving(stage3), **_checkpointing(stage3)}
    return {**{name: method for name, method in found.items() if hasattr(stage3, name)}, _watched.MASTERS: _watched.masters()}


def tiered(stage3):
    """The TierSwapper of an optimizer, or None."""
    swapper = getattr(stage3, "optimizer_swapper", None)
    return swapper if isinstance(swapper, TierSwapper) else None


def update_of(stage3):
    """The Update of an optimizer, or None."""
    return tiered(stage3) or getattr(stage3, "_spillway_interleave", None)


def _inside(stage3):
    """While it is open, masters and states are used by an interleaved update, and not by code outside. SuperOffload says this itself."""
    return _watched.inside(stage3) if getattr(stage3, "_spillway_interleave", None) else contextlib.nullcontext()


def _setting_up(stage3):
    own_configure, own_initialize = stage3._configure_tensor_swapping, stage3.initialize_optimizer_states
    own_reassign = stage3._reassign_or_swap_out_partitioned_parameters

    def configure(self, offload_optimizer_config, aio_config):
        from . import _settings

        block = _lifetime.block()
        settings = _settings.of_tier(block, offload_optimizer_config.nvme_path)
        reason = _untiered(self)
        if settings.enabled and block is not None and reason:
            raise InvalidArgumentError(f'spillway: {reason}; set "enabled": false to leave the states to DeepSpeed\'s own swapper')
        narrow = settings.moment_dtype == "bf16"
        for name, asked, lacks in (("split_master", settings.split_master, _unsplit), ("moment_dtype", narrow, _unrounded)):
            if settings.enabled and asked and not reason and (lacking := lacks(self)):
                raise InvalidArgumentError(f"spillway: {name}: {lacking}")
        if reason or not settings.enabled:
            return own_configure(self, offload_optimizer_config, aio_config)
        # DeepSpeed's fast initialization would write and read files by itself.
        self.offload_optimizer_fast_init = False
        of = weakref.proxy(self)
        self.optimizer_swapper = TierSwapper(self, settings, lambda sub_group: own_reassign(of, sub_group))

    def initialize(self):
        swapper = tiered(self)
        if swapper is None:
            self._spillway_interleave = _interleaved(self)
            return own_initialize(self)
        flats = self.fp16_partitioned_groups_flat
        swapper.set_steps([0] * len(flats))
        swapper.publish_all([index for index, flat in enumerate(flats) if flat is None or swapper.resumed])

    return {"_configure_tensor_swapping": configure, "initialize_optimizer_states": initialize}


def _interleaved(stage3):
    given = _lifetime.block()
    if given is None or _versions.lacking("interleave"):
        return None
    from . import _settings

    settings = _settings.of_interleave(given)
    return None if settings is None else InterleavedUpdate(stage3, settings)


def _untiered(stage3):
    """The reason why the states of this optimizer cannot be on a tier; None if they can."""
    if reason := _versions.lacking("states") or _stage3.optimizer_lacks(stage3) or _stage3.offload_lacks(stage3):
        return reason
    return "ZenFlow runs its own update" if getattr(stage3, "zenflow", False) else None


def _unsplit(stage3):
    """The reason why master weights cannot be split; None if they can."""
    import torch

    for flat in stage3.fp16_partitioned_groups_flat:
        if flat is None or not flat.is_cpu or flat.dtype is not torch.bfloat16:
            return "the model's weights have to be bfloat16 in host memory, because the master weights are rebuilt from them"
    return None


def _stepping(stage3):
    own: dict[str, Any] = {
        name: getattr(stage3, name, None)
        for name in (
            "_prepare_sub_group",
            "unscale_and_clip_grads",
            "_optimizer_step",
            "_reassign_or_swap_out_partitioned_parameters",
            "_release_sub_group",
            "reset_swap_buffers",
            "_overflow_clean_up",
            "step",
        )
    }

    def step(self, *arguments, **named):
        with _inside(self):
            return own["step"](self, *arguments, **named)

    def without(updates, name):
        def method(self, *arguments, **named):
            return None if updates(self) else own[name](self, *arguments, **named)

        return method

    def unscale_and_clip_grads(self, sub_group_id, total_norm):
        update = update_of(self)
        if update is None:
            own["unscale_and_clip_grads"](self, sub_group_id, total_norm)
        elif sub_group_id == 0:
            update.step(_stage3.gradient_factor(self, total_norm))

    def reassign(self, sub_group_id):
        update = update_of(self)
        if update is None:
            return own["_reassign_or_swap_out_partitioned_parameters"](self, sub_group_id)
        update.publish(sub_group_id)

    def reset_swap_buffers(self):
        tiered(self).publish_all() if tiered(self) else own["reset_swap_buffers"](self)

    def overflow_clean_up(self, prev_scale):
        update = update_of(self)
        if update is not None:
            # While the parameters whose gradients are new are known.
            update.reading()
        own["_overflow_clean_up"](self, prev_scale)
        if update is not None:
            update.skip()

    return {
        "step": step,
        "_prepare_sub_group": without(tiered, "_prepare_sub_group"),
        "unscale_and_clip_grads": unscale_and_clip_grads,
        "_optimizer_step": without(update_of, "_optimizer_step"),
        "_reassign_or_swap_out_partitioned_parameters": reassign,
        "_release_sub_group": without(tiered, "_release_sub_group"),
        "reset_swap_buffers": reset_swap_buffers,
        "_overflow_clean_up": overflow_clean_up,
    }


def _gradients(stage3):
    names = ("partition_grads", "_offload_grad_partition_at_boundary", "_get_fp32_grad_state_partition", "get_fp32_grad_partitions")
    own: dict[str, Any] = {name: getattr(stage3, name, None) for name in (*names, *_SETTERS)}

    def partition_grads(self, params_to_release, grad_partitions):
        update = update_of(self)
        # A method in recent versions, an attribute in earlier ones.
        boundary = self.is_gradient_accumulation_boundary
        completes, swapper = bool(boundary() if callable(boundary) else boundary), tiered(self)
        if update is not None and not completes:
            update.accumulating(params_to_release)
        if swapper is not None and completes:
            swapper.changing(params_to_release)
        with _inside(self):
            buffers = own["partition_grads"](self, params_to_release, grad_partitions)
        if swapper is not None and completes:
            swapper.completed(params_to_release)
        return buffers

    def at_boundary(self, param, grad_buffer, *gradients):
        update = update_of(self)
        if update is None or not update.gradient(param, grad_buffer):
            return own["_offload_grad_partition_at_boundary"](self, param, grad_buffer, *gradients)
        self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(grad_buffer)

    def get_state_partition(self, *arguments, **named):
        with _inside(self):
            if update_of(self):
                update_of(self).reading()
            return own["_get_fp32_grad_state_partition"](self, *arguments, **named)

    def get_fp32_grad_partitions(self):
        swapper = tiered(self)
        if swapper is not None:
            return swapper.gradients.lend_all()
        with _inside(self):
            if update_of(self):
                update_of(self).reading()
            return own["get_fp32_grad_partitions"](self)

    def setter(name):
        def method(self, value, *arguments, **named):
            given = [*arguments, *named.values()][0]
            params, update = given if isinstance(given, (list, tuple)) else [given], update_of(self)
            with update.setting(params) if update else contextlib.nullcontext():
                return own[name](self, value, *arguments, **named)

        return method

    return {
        "partition_grads": partition_grads,
        "_offload_grad_partition_at_boundary": at_boundary,
        "_get_fp32_grad_state_partition": get_state_partition,
        "get_fp32_grad_partitions": get_fp32_grad_partitions,
        **{name: setter(name) for name in _SETTERS},
    }


def _moving(stage3):
    """Methods that move weights, before which a tier's steps that write them are taken back."""

    def resting(own):
        @functools.wraps(own)
        def method(self, *arguments, **named):
            if (swapper := tiered(self)) is not None:
                swapper.rest()
            return own(self, *arguments, **named)

        return method

    return {name: resting(getattr(stage3, name)) for name in ("offload_states", "reload_states") if hasattr(stage3, name)}


def _checkpointing(stage3):
    """Checkpoint methods. The format is that of a run with states in host memory: either run loads the other's."""
    own_save, own_load, own_restore = stage3._rigid_state_dict, stage3._rigid_load_state_dict, stage3._restore_from_bit16_weights
    own_universal: Any = getattr(stage3, "_load_universal_checkpoint", None)

    def rigid_state_dict(self):
        swapper = tiered(self)
        if swapper is None:
            return own_save(self)
        if swapper.snapshots is not None and swapper.snapshots.saving:
            return {**own_save(self), _checkpoints.ENTRY: swapper.tiered.committed_step}
        masters = self.fp32_partitioned_groups_flat
        with _in_files(swapper, masters, self.optimizer.state):
            found = own_save(self)
            # Keep the data: the attributes of masters and states are released again.
            found["fp32_flat_groups"] = [master.data for master in masters]
            saved = found["optimizer_state_dict"]
            saved["state"] = {place: dict(state) for place, state in saved["state"].items()}
        return found

    def rigid_load_state_dict(self, state_dict, load_optimizer_states=True):
        swapper, in_snapshot = tiered(self), _checkpoints.ENTRY in state_dict
        if swapper is None:
            if in_snapshot:
                raise InvalidArgumentError(
                    "the checkpoint's optimizer states are a snapshot of a tier, and this run has none; load it in a run with states on a "
                    "tier, and save it there without snapshot_checkpoints"
                )
            found = own_load(self, state_dict, load_optimizer_states)
            if load_optimizer_states and _muon.is_muon(self):
                _muon.relink(self)
            return found
        masters, states = None, None
        if not in_snapshot:
            saved_states = state_dict["optimizer_state_dict"]["state"] if load_optimizer_states else {}

            def checked():
                order, masters = _stage3.order(self), state_dict["fp32_flat_groups"]
                found = _swap_files.taken_over(self, swapper.elements, swapper.swap_files, masters, saved_states, order)
                _stage3.check_masters(swapper.elements, found[0], order)
                return found

            # What one rank lacks is an error of all, before any has changed a state.
            masters, states = swapper.tiered.place.together(checked)
        self.loss_scaler, self.dynamic_loss_scale = state_dict["loss_scaler"], state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        saved = state_dict["optimizer_state_dict"] if load_optimizer_states else {"state": {}, "param_groups": []}
        for group, before in zip(self.optimizer.param_groups, saved["param_groups"]):
            group.update({name: value for name, value in before.items() if name != "params"})

        def take():
            _take_over(swapper, masters, states, _stage3.order(self))
            swapper.publish_all()

        if in_snapshot:
            swapper.take_snapshot(load_optimizer_states)
        else:
            swapper.tiered.whole(take)

    def restore_from_bit16_weights(self):
        swapper = tiered(self)
        if swapper is None:
            return own_restore(self)
        if swapper.found is not None:
            return swapper.take_snapshot(False)
        for index, flat in enumerate(self.fp16_partitioned_groups_flat):
            if flat is None:
                raise UnsupportedError(
                    "Spillway cannot start from the 16-bit weights of a checkpoint while the parameters "
                    "are in files; load the optimizer states too"
                )
            swapper.give(index, flat, None, None, None)

    def load_universal_checkpoint(self, *arguments, **named):
        swapper = tiered(self)
        if swapper is None:
            return own_universal(self, *arguments, **named)
        _checkpoints.load_universal(self, swapper, *arguments, **named)

    return {
        "_rigid_state_dict": rigid_state_dict,
        "_rigid_load_state_dict": rigid_load_state_dict,
        "_restore_from_bit16_weights": restore_from_bit16_weights,
        "_load_universal_checkpoint": load_universal_checkpoint,
    }


def _take_over(swapper, masters, states, order):
    for place, index in enumerate(order):
        state = states.get(place, {})
        swapper.give(index, masters[index], state.get("exp_avg"), state.get("exp_avg_sq"), state.get("step"))


@contextlib.contextmanager
def _in_files(swapper, masters, states):
    """Loads all states into the attributes where stage 3 expects them, memory-mapped from temporary files, because they
    may exceed the host memory. The files are on the first path that is a directory, take 12 bytes per parameter in
    addition to the tier, and ignore its limit."""
    for index, master in enumerate(masters):
        parts = [mapped(swapper.elements[index], swapper.swap_folder or tempfile.gettempdir()) for _ in STATES]
        swapper.read(index, *parts)
        master.data = parts[0]
        states[master].update(exp_avg=parts[1], exp_avg_sq=parts[2])
    try:
        yield
    finally:
        for master in masters:
            swapper.release_swap_buffers(master)


def _unrounded(stage3):
    """The reason why moments cannot be bfloat16; None if they can."""
    import torch

    return UNROUNDED if stage3.dtype is torch.float16 else None
