"""What a commit keeps beside the states, so that a killed run goes on with the bits of one that was not: the engine's
counts, learning rates and their schedule, the loss scale, the generators of random numbers, buffers of the model, and
whatever the caller adds. Weights are not among them, since the master weights are on the tier; nor are frozen ones,
which are the caller's to load."""

import contextlib
import random
import sys

from ..errors import InvalidArgument
from . import _lifetime, _payload, _stage3, _tier_config, _versions


_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def overrides(engine_type):
    """Methods for DeepSpeedEngine, by name."""
    own_init, own_optimizer, own_step = engine_type.__init__, engine_type._configure_zero_optimizer, engine_type.step
    own_destroy = engine_type.destroy
    own_load, own_load_checkpoint = engine_type._load_zero_checkpoint, engine_type.load_checkpoint

    def init(self, *arguments, **named):
        with _lifetime.making() as opened:
            own_init(self, *arguments, **named)
            swapper = _stage3.tiered(self.optimizer)
            if swapper is not None and swapper.resumed:
                _restore(self, swapper)
            _lifetime.keep(self, opened)

    def destroy(self, *arguments, **named):
        try:
            own_destroy(self, *arguments, **named)
        finally:
            _lifetime.end(self)

    def configure_zero_optimizer(self, *arguments, **named):
        _refuse_what_is_left(self)
        with _tier_config.configuring(self):
            return own_optimizer(self, *arguments, **named)

    def step(self, *arguments, **named):
        before = self.global_steps
        own_step(self, *arguments, **named)
        swapper = _stage3.tiered(self.optimizer)
        if swapper is not None and swapper.settings.resume and self.global_steps != before:
            interval = swapper.settings.commit_interval
            if interval and self.global_steps % interval == 0:
                commit(self)

    def load_checkpoint(self, *arguments, **named):
        found = own_load_checkpoint(self, *arguments, **named)
        swapper = _stage3.tiered(self.optimizer)
        # Before the run comes to a step that was committed once before; unless commits are left to the caller.
        if swapper is not None and swapper.settings.resume and swapper.settings.commit_interval:
            if found[0] and swapper.committed != self.global_steps:
                commit(self)
        return found

    def load_zero_checkpoint(self, *arguments, **named):
        with _by_pages() if _stage3.tiered(self.optimizer) else contextlib.nullcontext():
            return own_load(self, *arguments, **named)

    found = {"__init__": init, "destroy": destroy, "_configure_zero_optimizer": configure_zero_optimizer, "step": step,
             "load_checkpoint": load_checkpoint, "_load_zero_checkpoint": load_zero_checkpoint}
    # States on a tier are saved and loaded as those in host memory are, not as DeepSpeed's files.
    for name in ("zero_nvme_offload_optimizer", "zero_has_nvme_offload"):
        if hasattr(engine_type, name):
            found[name] = _unless_tiered(getattr(engine_type, name))
    return found


def _refuse_what_is_left(engine):
    """A block that asks for what this version of DeepSpeed does not have would be ignored without a word."""
    given = getattr(engine._config, "_param_dict", {})
    block, zero = given.get("spillway"), given.get("zero_optimization")
    if not isinstance(block, dict) or block.get("enabled") is False:
        return
    asked = ["interleave"] if block.get("interleave") is not None else []
    if set(block) - {"interleave"} and isinstance(zero, dict) and zero.get("stage") == 3:
        for part, offload in (("states", zero.get("offload_optimizer")), ("parameters", zero.get("offload_param"))):
            if isinstance(offload, dict) and offload.get("device") == "nvme":
                asked.append(part)
    for part in asked:
        reason = _versions.lacking(part)
        if reason:
            raise InvalidArgument(f"spillway: {reason}; use one of those, or take the block out of the configuration")


def _by_pages():
    """Has torch map checkpoints instead of reading them whole: there may be more state than memory."""
    try:
        from torch.utils.serialization import config
        return config.patch({"load.mmap": True})
    except (ImportError, AttributeError):
        return contextlib.nullcontext()


def _unless_tiered(own):
    return lambda self: False if _stage3.tiered(self.optimizer) else own(self)


def commit(engine):
    """Makes the states on the tier, and what goes with them, durable as the engine's global step. Gradients are not among
    them, so that it goes between two steps only; and several ranks can commit a step once only, for of two commits at one
    step nobody could say which a rank holds."""
    swapper = _swapper(engine)
    if engine.micro_steps % engine.gradient_accumulation_steps():
        raise InvalidArgument("a commit between two micro-batches of a step would lose the gradients of the first")
    if swapper.committed == engine.global_steps and swapper.world > 1:
        raise InvalidArgument(f'step {engine.global_steps} is committed already; "commit_interval": 0 leaves commits to you')
    swapper.commit(engine.global_steps, _payload.store(swapper.tier, _record(engine, swapper)))


def client_state(engine):
    """A dictionary of the caller's own that every commit keeps, such as the position in the data; after a run was taken
    up again, what the commit kept. It holds data: see _payload."""
    swapper = _swapper(engine)
    if not hasattr(swapper, "client_state"):
        swapper.client_state = {}
    return swapper.client_state


def resumed_step(engine):
    """The global step at which a run was taken up again; None if it began."""
    return _swapper(engine).tier.opened.step


def _swapper(engine):
    swapper = _stage3.tiered(engine.optimizer)
    if swapper is None:
        raise InvalidArgument("the engine's optimizer states are not on a tier")
    return swapper


def _record(engine, swapper):
    groups = [{name: value for name, value in group.items() if name != "params"} for group in engine.optimizer.param_groups]
    return {"counts": {name: getattr(engine, name) for name in _COUNTS}, "elements": swapper.elements,
            "steps": swapper.steps, "adam_state": swapper.adam_state(), "groups": groups,
            "loss_scaler": dict(vars(engine.optimizer.loss_scaler)), "random": _random_state(),
            "lr_scheduler": engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None,
            "buffers": {name: buffer.detach().cpu() for name, buffer in _buffers(engine.module)},
            "client_state": client_state(engine)}


def _restore(engine, swapper):
    record = _payload.load(swapper.tier, swapper.tier.opened.payload)
    if record["elements"] != swapper.elements:
        raise InvalidArgument(f"the tier holds sub-groups of {record['elements']} elements, this run has {swapper.elements}")
    for name, count in record["counts"].items():
        setattr(engine, name, count)
    for group, before in zip(engine.optimizer.param_groups, record["groups"]):
        group.update(before)
    if engine.lr_scheduler is not None and record["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(record["lr_scheduler"])
    swapper.set_steps(record["steps"])
    swapper.set_adam_state(record["adam_state"])
    vars(engine.optimizer.loss_scaler).update(record["loss_scaler"])
    for name, buffer in _buffers(engine.module):
        buffer.copy_(record["buffers"][name])
    persistent = engine.optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
    swapper.client_state = record["client_state"]
    _set_random_state(record["random"])


def _buffers(module):
    """What a checkpoint of the model keeps beside its parameters."""
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
