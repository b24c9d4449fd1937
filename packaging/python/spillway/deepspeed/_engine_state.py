"""State that a commit stores in addition to the optimizer states, so that a resumed run is bit-identical to an
uninterrupted one: the engine's counters, options of the parameter groups and the learning rate schedule, the loss
scale, random number generators, model buffers, and the caller's data. Trainable weights are not included, since the
master weights are on the tier. The caller loads frozen weights."""

import random
import sys

from ..errors import InvalidArgumentError
from . import _stage3, _stage3_methods

_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


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
        "groups": groups(engine),
        "configured": swapper.configured,
        "loss_scaler": dict(vars(engine.optimizer.loss_scaler)),
        "random": _random_state(),
        "grad_scaler": scaler.state_dict() if (scaler := _stage3.grad_scaler(engine.optimizer)) is not None else None,
        "lr_scheduler": engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None,
        "buffers": {name: buffer.detach().cpu() for name, buffer in _buffers(engine.module)},
        "client_state": client_state(engine),
    }


def restore(engine, swapper):
    """Restores the states of the last commit, and the run's further state."""
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


def groups(engine):
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
