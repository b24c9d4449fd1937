"""A resume is exact, or an error: each way in which programs save and load an optimizer, from each class into each other one. After it the
run has the bits of one that was not disturbed, or, into a class with other bits, those of one that called load_state_dict()."""

import copy
import itertools
import re

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from dcp_worker import new_model, tiered, train
from tier_runs import same, same_states
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from spillway import torch as own
from spillway.torch import dcp

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
MAKERS = {
    "torch": lambda model, _: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "memory": lambda model, _: own.AdamW(model.parameters(), lr=1e-2, master="f32"),
    "split": lambda model, _: own.AdamW(model.parameters(), lr=1e-2, master="split"),
    "offload": lambda model, _: own.offload(model, lr=1e-2),
    "offload split": lambda model, _: own.offload(model, lr=1e-2, master="split"),
    "tier": tiered,
}
#: Classes whose steps have the same bits, from states with the same bits.
EQUAL = [{"memory", "offload", "tier"}, {"split", "offload split"}]
#: With others, low bits are as those of "split".
LIKE_SPLIT = {"split", "offload", "offload split"}
LOST = "was written to in a state dict, which has copies of the states on the tier"


class Run:
    """A model and its optimizer."""

    folders = itertools.count()

    def __init__(self, kind, dtype, folder):
        self.kind, self.model = kind, new_model(dtype)
        self.optimizer = MAKERS[kind](self.model, folder / f"tier-{next(self.folders)}")

    def train(self, *steps):
        train(self.model, self.optimizer, steps)
        return self

    def states(self):
        return copy.deepcopy(self.optimizer.state_dict()["state"])

    def close(self):
        if self.kind == "tier":
            self.optimizer.close()


def saved_as(**options):
    def save(run, file):
        torch.save({"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}, file, **options)

    return save


def loaded_as(first, **options):
    """`first`: what the program loads first."""

    def load(run, file):
        found = torch.load(file, **options)
        loads = {"model": run.model.load_state_dict, "optim": run.optimizer.load_state_dict}
        for name in sorted(loads, key=lambda name: name != first):
            loads[name](found[name])

    return load


def state_of(run, options=None, states=get_optimizer_state_dict):
    flat = states(run.model, run.optimizer, options=options)
    found = flat if options is FLAT else {"optim": flat}
    return {"model": get_model_state_dict(run.model, options=None if options is FLAT else options), **found}


def by_helpers(options=None, states=get_optimizer_state_dict, module=checkpoint, helps=True):
    """A checkpoint of DCP; without `helps` the program does not pass what was loaded to set_optimizer_state_dict()."""

    def save(run, folder):
        module.save(state_of(run, options, states), folder) if module is dcp else checkpoint.save(
            state_of(run, options, states), checkpoint_id=folder
        )

    def load(run, folder):
        found = state_of(run, options, states)
        module.load(found, folder) if module is dcp else checkpoint.load(found, checkpoint_id=folder)
        if not helps:
            return
        set_model_state_dict(run.model, found.pop("model"), options=None if options is FLAT else options)
        set_optimizer_state_dict(run.model, run.optimizer, found if options is FLAT else found["optim"], options=options)

    return save, load


def of_itself(passes):
    """DCP with the optimizer's own state dict, which is passed to load_state_dict() or not."""

    def save(run, folder):
        checkpoint.save({"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}, checkpoint_id=folder)

    def load(run, folder):
        found = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
        checkpoint.load(found, checkpoint_id=folder)
        if passes:
            run.optimizer.load_state_dict(found["optim"])

    return save, load


WAYS = {
    "torch.save": (saved_as(), loaded_as("model", weights_only=True)),
    "torch.save, optimizer first": (saved_as(), loaded_as("optim", weights_only=True)),
    "torch.save, mapped": (saved_as(), loaded_as("model", mmap=True)),
    "torch.save, old format": (saved_as(_use_new_zipfile_serialization=False), loaded_as("model")),
    "torch's dcp": by_helpers(),
    "torch's dcp, flat": by_helpers(FLAT),
    "torch's dcp, whole": by_helpers(WHOLE),
    "torch's dcp, in place": by_helpers(helps=False),
    "torch's dcp, flat, in place": by_helpers(FLAT, helps=False),
    "torch's dcp, own dict": of_itself(True),
    "torch's dcp, own dict, in place": of_itself(False),
    "own dcp": by_helpers(states=dcp.states, module=dcp),
    "own dcp, flat": by_helpers(FLAT, states=dcp.states, module=dcp),
    "own dcp, in place": by_helpers(states=dcp.states, module=dcp, helps=False),
}


def error_of(way, source, target, dtype):
    """The error that a resume ends in; None if it is exact."""
    masters = {"torch": None, "split": "master_low", "offload split": "master_low"}
    has, needs = (masters.get(kind, "master_param") if dtype is torch.bfloat16 else None for kind in (source, target))
    if "dcp" in way and needs not in (None, has):
        if not way.startswith("own"):
            return f"Missing key in checkpoint state_dict: .*{needs}"
        if has is not None:
            return "the masters are of the other kind"
    if target == "tier" and "in place" in way:
        return "placeholder|" + LOST
    if needs == "master_param" and has == "master_low" and target != "memory":
        return "has a split master"
    return None


def torchs(states):
    """torch's class keeps masters that it does not use."""
    return {number: {key: state[key] for key in ("step", "exp_avg", "exp_avg_sq")} for number, state in states.items()}


def cases():
    """Ways, classes, the dtype of the model's second layer, and whether the optimizer that loads is a new one."""
    for way, (source, target) in itertools.product(WAYS, itertools.product(MAKERS, MAKERS)):
        if "offload split" in (source, target) and not {source, target} <= LIKE_SPLIT:
            continue
        # What the files have is that of another way.
        if source == target or not any(kind in way for kind in ("mapped", "format", "own dict")):
            yield way, source, target, torch.bfloat16, False
        # An optimizer without states has nothing to load into, but torch's helpers make some.
        if source == target and not any(kind in way for kind in ("in place", "own dict")):
            yield way, source, target, torch.bfloat16, True
        if source != target and "torch" in (source, target) and "flat" not in way and "split" not in (source, target):
            yield way, source, target, torch.float32, False


@pytest.mark.sampled(cases=220)
@pytest.mark.parametrize("way, source, target, dtype, new", cases())
def test_a_resume_is_exact_or_an_error(way, source, target, dtype, new, tmp_path):
    save, load = WAYS[way]
    one = Run(source, dtype, tmp_path).train(0, 1, 2)
    save(one, tmp_path / "saved")
    weights, states = copy.deepcopy(one.model.state_dict()), one.states()
    other = Run(target, dtype, tmp_path)
    if not new:
        other.train(7)
    error = error_of(way, source, target, dtype)
    try:
        load(other, tmp_path / "saved")
        other.train(3, 4)
    except (Exception, checkpoint.CheckpointException) as found:
        assert error is not None and re.search(error, str(found)), found
        return
    finally:
        one.train(3, 4)
    assert error is None
    if source == target or any({source, target} <= kinds for kinds in EQUAL):
        wanted = one
    else:
        wanted = Run(target, dtype, tmp_path)
        wanted.model.load_state_dict(weights)
        wanted.optimizer.load_state_dict({**one.optimizer.state_dict(), "state": states})
        wanted.train(3, 4)
    assert same(other.model.parameters(), wanted.model.parameters())
    same_states(*(run.states() if target != "torch" else torchs(run.states()) for run in (other, wanted)))
    for run in {one, other, wanted}:
        run.close()
