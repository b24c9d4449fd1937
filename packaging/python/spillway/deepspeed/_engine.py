"""State that a commit stores in addition to the optimizer states, so that a resumed run is bit-identical to an
uninterrupted one: the engine's counters, options of the parameter groups and the learning rate schedule, the loss
scale, random number generators, model buffers, and the caller's data. Trainable weights are not included, since the
master weights are on the tier. The caller loads frozen weights."""

import contextlib
import os
import random
import sys
import time

from .. import _ranks
from .._live.publisher import Figures
from ..errors import InvalidArgumentError
from . import _checkpoints, _lifetime, _stage3, _stage3_methods, _versions

_FIGURES = "_spillway_figures"
_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def _figures(engine):
    """The figures of an engine's steps that are published; a tier publishes its own beside them."""
    if _FIGURES not in engine.__dict__:
        stage = engine.zero_optimization_stage()
        engine.__dict__[_FIGURES] = Figures("DeepSpeed engine", engine, lambda _: {"where": f"ZeRO stage {stage}"})
    return engine.__dict__[_FIGURES]


def overrides(engine_type):
    """Methods for DeepSpeedEngine, by name."""
    own_init, own_optimizer, own_step = engine_type.__init__, engine_type._configure_zero_optimizer, engine_type.step
    own_destroy, own_check = engine_type.destroy, engine_type._do_sanity_check
    own_load, own_load_checkpoint = engine_type._load_zero_checkpoint, engine_type.load_checkpoint
    own_load_files = engine_type._load_checkpoint
    own_save, own_save_checkpoint = engine_type._save_zero_checkpoint, engine_type.save_checkpoint

    def init(self, *arguments, **named):
        with _lifetime.making() as opened:
            own_init(self, *arguments, **named)
            swapper = _stage3_methods.tiered(self.optimizer)
            if swapper is not None:
                swapper.configured = _groups(self)
                if swapper.resumed:
                    _restore(self, swapper)
            _lifetime.keep(self, opened)

    def do_sanity_check(self):
        own_check(self)
        _refuse_what_is_not_served(self)

    def destroy(self, *arguments, **named):
        swapper = _stage3_methods.tiered(getattr(self, "optimizer", None))
        if swapper is not None and swapper.snapshots is not None:
            # After an interrupt of this wait the engine can be used and destroyed.
            swapper.snapshots.rest()
        try:
            own_destroy(self, *arguments, **named)
        finally:
            _lifetime.end(self)

    def configure_zero_optimizer(self, *arguments, **named):
        with _lifetime.configuring(self):
            return own_optimizer(self, *arguments, **named)

    def step(self, *arguments, **named):
        before, begun = self.global_steps, time.perf_counter()
        own_step(self, *arguments, **named)
        if self.global_steps != before:
            _figures(self).stepped(begun)
        swapper = _stage3_methods.tiered(self.optimizer)
        if swapper is not None and swapper.settings.resume and self.global_steps != before:
            interval = swapper.settings.commit_interval
            if interval and self.global_steps % interval == 0:
                commit(self, wait=not swapper.settings.background_commits)
        if swapper is not None and swapper.snapshots is not None:
            swapper.snapshots.poll()

    def load_checkpoint(self, *arguments, **named):
        swapper = _stage3_methods.tiered(self.optimizer)
        if swapper is not None:
            swapper.tiered.finish()
        try:
            found = own_load_checkpoint(self, *arguments, **named)
        except BaseException:
            if swapper is not None:
                _go_back(self, swapper)
            raise
        finally:
            if swapper is not None:
                swapper.found = None
        # Commit the loaded state before training reaches a step number that was committed before; not if the caller
        # commits.
        if swapper is not None and swapper.settings.resume and swapper.settings.commit_interval:
            if found[0] and swapper.tiered.committed_step != self.global_steps:
                commit(self)
        return found

    def load_files(
        self,
        load_dir,
        tag,
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
        custom_load_fn=None,
    ):
        swapper = _stage3_methods.tiered(self.optimizer)
        if swapper is not None and not (load_module_only and load_optimizer_states) and not self.load_universal_checkpoint():
            # Before DeepSpeed changes anything.
            _find_snapshot(self, swapper, load_dir, str(tag))
            # Without the states, DeepSpeed would look for the masters in the optimizer's file.
            load_optimizer_states = load_optimizer_states or swapper.found is not None
        return own_load_files(
            self,
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )

    def load_zero_checkpoint(self, load_dir, tag, *arguments, **named):
        swapper = _stage3_methods.tiered(self.optimizer)
        if swapper is None:
            return own_load(self, load_dir, tag, *arguments, **named)
        with _by_pages(self):
            return own_load(self, load_dir, tag, *arguments, **named)

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        swapper = _stage3_methods.tiered(self.optimizer)
        named = {"client_state": client_state or {}, "exclude_frozen_parameters": exclude_frozen_parameters}
        if swapper is None or swapper.snapshots is None:
            return own_save_checkpoint(self, save_dir, tag, save_latest=save_latest, **named)
        _checkpoints.check_snapshots(self)
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        tiered = swapper.tiered
        tiered.finish()
        changed = tiered.changed or tiered.committed_step != self.global_steps
        # All ranks commit, or none does.
        if any(_ranks.gathered(changed, tiered.place.world, tiered.place.group)):
            commit(self)
        # Before DeepSpeed replaces the first file of the tag: the files of two saves must not load together.
        swapper.snapshots.clear(os.path.join(save_dir, tag, _checkpoints.FOLDER))
        # `latest` follows once the snapshot is finished.
        saved = own_save_checkpoint(self, save_dir, tag, save_latest=False, **named)
        if save_latest:
            swapper.snapshots.name(save_dir, tag)
        return saved

    def save_zero_checkpoint(self, save_path, tag):
        swapper = _stage3_methods.tiered(self.optimizer)
        if swapper is None or swapper.snapshots is None:
            return own_save(self, save_path, tag)
        swapper.snapshots.begin(os.path.join(save_path, str(tag), _checkpoints.FOLDER))
        swapper.snapshots.saving = True
        try:
            own_save(self, save_path, tag)
        finally:
            swapper.snapshots.saving = False

    found = {
        "__init__": init,
        "destroy": destroy,
        "_do_sanity_check": do_sanity_check,
        "step": step,
        "_configure_zero_optimizer": configure_zero_optimizer,
        "load_checkpoint": load_checkpoint,
        "_load_checkpoint": load_files,
        "_load_zero_checkpoint": load_zero_checkpoint,
        "save_checkpoint": save_checkpoint,
        "_save_zero_checkpoint": save_zero_checkpoint,
    }
    # States on a tier are saved and loaded like those in host memory, not like DeepSpeed's swap files.
    for name in ("zero_nvme_offload_optimizer", "zero_has_nvme_offload"):
        if hasattr(engine_type, name):
            found[name] = _unless_tiered(getattr(engine_type, name))
    return found


def _refuse_what_is_not_served(engine):
    """Raises InvalidArgumentError for a wrong block, or one that this configuration or version of DeepSpeed does not
    support."""
    given = getattr(engine._config, "_param_dict", {})
    if "spillway" not in given:
        return
    # pydantic is installed with DeepSpeed; it is imported only if a block is given.
    from . import _settings

    block, zero = _settings.read(given["spillway"]), engine._config.zero_config
    for part in _settings.parts(block, zero):
        reason = _versions.lacking(part)
        if reason:
            raise InvalidArgumentError(f"spillway: {reason}; install a version that fits, or take the block out of the configuration")
    _settings.refuse_unserved(block, zero)


@contextlib.contextmanager
def _by_pages(engine):
    """Makes torch map the engine's checkpoints instead of reading them into memory, which may be smaller than the state. Files in torch's
    old format cannot be mapped, and are read."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        yield
        return
    reader = engine.checkpoint_engine
    own = reader.load

    def load(path, *arguments, **named):
        with config.patch({"load.mmap": _is_archive(path)}):
            return own(path, *arguments, **named)

    reader.load = load
    try:
        yield
    finally:
        del reader.load


def _is_archive(path):
    """True for a file in torch's present format, a zip archive."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        # The reader says what is wrong.
        return False


def _find_snapshot(engine, swapper, load_dir, tag):
    """Finds the snapshot of a checkpoint, if its states are in one, and commits what its load would replace."""
    place = swapper.tiered.place

    def saved_step():
        file = engine._get_zero_ckpt_name(load_dir, tag)
        if not os.path.exists(file):
            return None
        with _by_pages(engine):
            step = engine.checkpoint_engine.load(file, map_location="cpu")["optimizer_state_dict"].get(_checkpoints.ENTRY)
            if step is None:
                return None
            of_model = engine.checkpoint_engine.load(engine._get_ckpt_name(load_dir, tag), map_location="cpu")["global_steps"]
        if of_model != step:
            raise InvalidArgumentError(
                f"{os.path.join(load_dir, tag)} has the model of step {of_model} and the optimizer states of step {step}: a save under "
                "this tag was interrupted; load another tag"
            )
        return step

    steps = _ranks.gathered(place.together(saved_step), place.world, place.group)
    if any(step is not None for step in steps):
        folder = os.path.join(load_dir, tag, _checkpoints.FOLDER)
        swapper.find_snapshot(folder, steps[place.rank], engine.global_steps, lambda: commit(engine))


def _go_back(engine, swapper):
    """Returns to the last commit, if a load has replaced a part of the states."""
    tiered = swapper.tiered
    if not tiered.mixed or tiered.apart or tiered.committed is None:
        return

    def back():
        swapper.go_back()
        _restore(engine, swapper)

    tiered.whole(back)


def _unless_tiered(own):
    return lambda self: False if _stage3_methods.tiered(self.optimizer) else own(self)


def commit(engine, wait=True):
    """Makes the states on the tier and the run's further state durable as the engine's global step. Valid only between
    two steps, because gradients are not stored. With several ranks each step can be committed once: two commits of one
    step could not be told apart after a crash. Without `wait` the commit continues beside the next step."""
    swapper = _swapper(engine)
    swapper.tiered.finish()
    if _between_micro_batches(engine):
        raise InvalidArgumentError(
            "commit: the engine is between two micro-batches of a step, whose gradients a commit does not store; commit after the step"
        )
    if swapper.tiered.committed_step == engine.global_steps and swapper.tiered.place.world > 1:
        raise InvalidArgumentError(
            f"commit: step {engine.global_steps} is already committed, and with several ranks a step can be committed "
            'once; set "commit_interval": 0 to commit by calls alone'
        )
    swapper.commit(engine.global_steps, lambda: _record(engine, swapper), wait)


def _between_micro_batches(engine):
    """True if a step has begun. The engine counts micro-batches only if it chooses the boundaries itself: a caller that sets
    them may run several micro-batches for each call of step()."""
    managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    if managed and getattr(engine, "_is_gradient_accumulation_boundary", None) is None:
        return engine.micro_steps % engine.gradient_accumulation_steps() != 0
    optimizer = engine.optimizer
    return bool(optimizer.micro_step_id or getattr(optimizer, "_epilogue_ran_this_backward", False))


def client_state(engine):
    """A dict for the caller's own data that every commit stores, such as the position in the data set. After a resume
    it has the content of the last commit. For the allowed types see _values."""
    swapper = _swapper(engine)
    if not hasattr(swapper, "client_state"):
        swapper.client_state = {}
    return swapper.client_state


def resumed_step(engine):
    """The global step at which the run was resumed; None for a new run."""
    return _swapper(engine).tiered.resumed_step


def _swapper(engine):
    swapper = _stage3_methods.tiered(engine.optimizer)
    if swapper is None:
        raise InvalidArgumentError(
            "the engine's optimizer states are not on a tier; put offload_optimizer on the device nvme under ZeRO stage 3"
        )
    return swapper


def _record(engine, swapper):
    return {
        "counts": {name: getattr(engine, name) for name in _COUNTS},
        "groups": _groups(engine),
        "configured": swapper.configured,
        "loss_scaler": dict(vars(engine.optimizer.loss_scaler)),
        "random": _random_state(),
        "grad_scaler": scaler.state_dict() if (scaler := _stage3.grad_scaler(engine.optimizer)) is not None else None,
        "lr_scheduler": engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None,
        "buffers": {name: buffer.detach().cpu() for name, buffer in _buffers(engine.module)},
        "client_state": client_state(engine),
    }


def _restore(engine, swapper):
    swapper.restore()
    record = swapper.record()
    for name, count in record["counts"].items():
        setattr(engine, name, count)
    _restore_groups(engine, record, swapper.configured)
    if engine.lr_scheduler is not None and record["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(record["lr_scheduler"])
    vars(engine.optimizer.loss_scaler).update(record["loss_scaler"])
    scaler = _stage3.grad_scaler(engine.optimizer)
    if scaler is not None and record.get("grad_scaler") is not None:
        scaler.load_state_dict(record["grad_scaler"])
    for name, buffer in _buffers(engine.module):
        buffer.copy_(record["buffers"][name])
    persistent = engine.optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
    swapper.client_state = record["client_state"]
    _set_random_state(record["random"])


def _groups(engine):
    """The options of each parameter group."""
    return [{name: value for name, value in group.items() if name != "params"} for group in engine.optimizer.param_groups]


def _restore_groups(engine, record, configured):
    """Restores each option of a group, unless the configuration has changed the option since the commit."""
    before = record.get("configured", configured)
    if len(record["groups"]) != len(configured) or len(before) != len(configured):
        raise InvalidArgumentError(
            f"the commit has {len(record['groups'])} parameter groups, this run has {len(configured)}; give the "
            'model the groups that it had, or load a checkpoint with "resume": false in the spillway block'
        )
    for group, committed, old, new in zip(engine.optimizer.param_groups, record["groups"], before, configured):
        group.update({name: value for name, value in committed.items() if name not in new or _same(old.get(name), new[name])})


def _same(one, other):
    """True if the values are equal; a list equals a tuple with the same items."""
    return (list(one) if isinstance(one, tuple) else one) == (list(other) if isinstance(other, tuple) else other)


def _buffers(module):
    """The model's persistent buffers, which a checkpoint stores beside its parameters."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _random_state():
    import torch

    found = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_random_state(found):
    import torch

    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    if "numpy" in found:
        import numpy

        numpy.random.set_state(found["numpy"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
