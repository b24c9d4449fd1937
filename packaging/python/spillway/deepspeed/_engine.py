"""Replacements of methods of DeepSpeed's engine. They open, commit, save, load and close states on a tier, and refuse what this version
does not serve. Without states on a tier each of them does what DeepSpeed's method does."""

import contextlib
import functools
import inspect
import os
import time

from .. import _ranks
from .._live.publisher import Figures
from ..errors import InvalidArgumentError
from . import _checkpoints, _lifetime, _muon, _stage3_methods, _swap_files, _versions
from ._engine_state import commit, groups, restore

_FIGURES = "_spillway_figures"


def _figures(engine):
    """The figures of an engine's steps that are published; a tier publishes its own beside them."""
    if _FIGURES not in engine.__dict__:
        stage = engine.zero_optimization_stage()
        engine.__dict__[_FIGURES] = Figures("DeepSpeed engine", engine, lambda _: {"where": f"ZeRO stage {stage}"})
    return engine.__dict__[_FIGURES]


def _init(own, engine, *arguments, **named):
    with _lifetime.making() as opened:
        own(engine, *arguments, **named)
        swapper = _stage3_methods.tiered(engine.optimizer)
        if swapper is not None:
            swapper.configured = groups(engine)
            if swapper.resumed:
                restore(engine, swapper)
        _lifetime.keep(engine, opened)


def _do_sanity_check(own, engine):
    own(engine)
    _muon.refuse_superoffload(engine)
    _refuse_what_is_not_served(engine)


def _destroy(own, engine, *arguments, **named):
    swapper = _stage3_methods.tiered(getattr(engine, "optimizer", None))
    if swapper is not None and swapper.snapshots is not None:
        # After an interrupt of this wait the engine can be used and destroyed.
        swapper.snapshots.rest()
    try:
        own(engine, *arguments, **named)
    finally:
        _lifetime.end(engine)


def _configure_zero_optimizer(own, engine, *arguments, **named):
    with _lifetime.configuring(engine):
        return own(engine, *arguments, **named)


def _step(own, engine, *arguments, **named):
    before, begun = engine.global_steps, time.perf_counter()
    own(engine, *arguments, **named)
    if engine.global_steps != before:
        _figures(engine).stepped(begun)
    swapper = _stage3_methods.tiered(engine.optimizer)
    if swapper is not None and swapper.settings.resume and engine.global_steps != before:
        interval = swapper.settings.commit_interval
        if interval and engine.global_steps % interval == 0:
            commit(engine, wait=not swapper.settings.background_commits)
    if swapper is not None and swapper.snapshots is not None:
        swapper.snapshots.poll()


def _load_checkpoint(own, engine, *arguments, **named):
    swapper = _stage3_methods.tiered(engine.optimizer)
    if swapper is not None:
        swapper.tiered.finish()
    try:
        found = own(engine, *arguments, **named)
        if swapper is None and found[0]:
            _complete(engine, os.path.dirname(found[0]), lambda: inspect.signature(own).bind(engine, *arguments, **named))
    except BaseException:
        if swapper is not None:
            _go_back(engine, swapper)
        raise
    finally:
        if swapper is not None:
            swapper.found = swapper.swap_files = None
    # Commit the loaded state before training reaches a step number that was committed before; not if the caller
    # commits.
    if swapper is not None and swapper.settings.resume and swapper.settings.commit_interval:
        if found[0] and swapper.tiered.committed_step != engine.global_steps:
            commit(engine)
    return found


def _complete(engine, folder, given):
    """Restores what DeepSpeed's own swapper has not loaded of a checkpoint; `given()` are the arguments of the load."""
    # Versions before 0.16.9 write no single sub-group back.
    swaps = engine.zero_nvme_offload_optimizer() and hasattr(engine.optimizer, "_writeback_swap_state")
    if not swaps or engine.load_universal_checkpoint():
        return
    bound = given()
    bound.apply_defaults()
    if bound.arguments["load_optimizer_states"] and not bound.arguments["load_module_only"]:
        with _by_pages(engine):
            _swap_files.restore(engine, folder, _swap_files.saved_by(engine, folder))


def _load_files(
    own,
    engine,
    load_dir,
    tag,
    load_module_strict=True,
    load_optimizer_states=True,
    load_lr_scheduler_states=True,
    load_module_only=False,
    custom_load_fn=None,
):
    swapper = _stage3_methods.tiered(engine.optimizer)
    if swapper is not None and not (load_module_only and load_optimizer_states) and not engine.load_universal_checkpoint():
        swapper.swap_files = _swap_files.of_rank(engine, os.path.join(load_dir, str(tag)))
        # Before DeepSpeed changes anything.
        _find_snapshot(engine, swapper, load_dir, str(tag))
        # Without the states, DeepSpeed would look for the masters in the optimizer's file.
        load_optimizer_states = load_optimizer_states or swapper.found is not None
    if swapper is None and engine.zero_nvme_offload_optimizer():
        _check_swap_files(engine, os.path.join(load_dir, str(tag)))
    return own(
        engine,
        load_dir,
        tag,
        load_module_strict=load_module_strict,
        load_optimizer_states=load_optimizer_states,
        load_lr_scheduler_states=load_lr_scheduler_states,
        load_module_only=load_module_only,
        custom_load_fn=custom_load_fn,
    )


def _check_swap_files(engine, folder):
    """Raises InvalidArgumentError if DeepSpeed's NVMe swapper has nothing to load from a checkpoint."""
    if os.path.isdir(folder) and not os.path.isdir(os.path.join(folder, _swap_files.FOLDER)):
        on_tier = "" if _muon.is_muon(engine.optimizer) else ', or on a tier: take "enabled": false out of the block'
        raise InvalidArgumentError(
            f"{folder} has no swap files, which DeepSpeed's NVMe swapper loads: it was saved with states on a tier, or in host memory. "
            f'Load it with "offload_optimizer": {{"device": "cpu"}}{on_tier}; nothing was loaded'
        )


def _load_zero_checkpoint(own, engine, load_dir, tag, *arguments, **named):
    swapper = _stage3_methods.tiered(engine.optimizer)
    if swapper is None:
        return own(engine, load_dir, tag, *arguments, **named)
    with _by_pages(engine):
        return own(engine, load_dir, tag, *arguments, **named)


def _save_checkpoint(own, engine, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
    swapper = _stage3_methods.tiered(engine.optimizer)
    named = {"client_state": client_state or {}, "exclude_frozen_parameters": exclude_frozen_parameters}
    if swapper is None or swapper.snapshots is None:
        return own(engine, save_dir, tag, save_latest=save_latest, **named)
    _checkpoints.check_snapshots(engine)
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    tiered = swapper.tiered
    tiered.finish()
    changed = tiered.changed or tiered.committed_step != engine.global_steps
    # All ranks commit, or none does.
    if any(_ranks.gathered(changed, tiered.place.world, tiered.place.group)):
        commit(engine)
    # Before DeepSpeed replaces the first file of the tag: the files of two saves must not load together.
    swapper.snapshots.clear(os.path.join(save_dir, tag, _checkpoints.FOLDER))
    # `latest` follows once the snapshot is finished.
    saved = own(engine, save_dir, tag, save_latest=False, **named)
    if save_latest:
        swapper.snapshots.name(save_dir, tag)
    return saved


def _save_zero_checkpoint(own, engine, save_path, tag):
    swapper = _stage3_methods.tiered(engine.optimizer)
    if swapper is None or swapper.snapshots is None:
        return own(engine, save_path, tag)
    swapper.snapshots.begin(os.path.join(save_path, str(tag), _checkpoints.FOLDER))
    swapper.snapshots.saving = True
    try:
        own(engine, save_path, tag)
    finally:
        swapper.snapshots.saving = False


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
        restore(engine, swapper)

    tiered.whole(back)


#: The replacement of each method of DeepSpeedEngine. Its first argument is DeepSpeed's own method, its second one the engine.
_METHODS = {
    "__init__": _init,
    "destroy": _destroy,
    "_do_sanity_check": _do_sanity_check,
    "step": _step,
    "_configure_zero_optimizer": _configure_zero_optimizer,
    "load_checkpoint": _load_checkpoint,
    "_load_checkpoint": _load_files,
    "_load_zero_checkpoint": _load_zero_checkpoint,
    "save_checkpoint": _save_checkpoint,
    "_save_zero_checkpoint": _save_zero_checkpoint,
}
#: Those that are False with states on a tier, which are saved and loaded like those in host memory, not like DeepSpeed's swap files.
_OF_SWAP_FILES = ("zero_nvme_offload_optimizer", "zero_has_nvme_offload")


def overrides(engine_type):
    """Methods for DeepSpeedEngine, by name."""
    found = {name: _around(getattr(engine_type, name), method) for name, method in _METHODS.items()}
    of_swap_files = (name for name in _OF_SWAP_FILES if hasattr(engine_type, name))
    return {**found, **{name: _unless_tiered(getattr(engine_type, name)) for name in of_swap_files}}


def _around(own, method):
    # Frameworks ask the signature of save_checkpoint for its arguments.
    @functools.wraps(own)
    def replaced(self, *arguments, **named):
        return method(own, self, *arguments, **named)

    return replaced


def _unless_tiered(own):
    return lambda self: False if _stage3_methods.tiered(self.optimizer) else own(self)
