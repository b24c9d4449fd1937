"""Random programs with spillway.torch.Staged against the same programs with the class itself.

    PYTHONPATH=packaging/python python ffi_tests/torch/staged_programs.py FIRST COUNT [SECONDS]

The number of a program is the seed of everything in it: the class, the parameters and groups, the size of the chunks, whether copies end
late or states are on a tier, and what the program does between steps."""

from __future__ import annotations

import copy
import random
import tempfile
import traceback
from unittest import mock

import random_programs
import torch
from staged_runs import LateLane, Soap, options, same
from torch import optim

from spillway.torch import Staged
from spillway.torch._staged.lane import lane_of

CLASSES = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1}),
    (optim.NAdam, {}),
    (optim.AdamW, {"fused": True}),
    (optim.Adam, {"amsgrad": True, "foreach": True}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Adadelta, {}),
    (Soap, {}),
]


def program(seed, make):
    """What the parameters, state dicts and losses are in the course of a program. `make(kind, groups, given)` makes the optimizer."""
    chance = random.Random(seed)
    kind, given = chance.choice(CLASSES)
    generator = torch.Generator().manual_seed(seed)
    dtype = chance.choice((torch.float32, torch.float32, torch.bfloat16)) if kind is not Soap else torch.float32
    shapes = [tuple(chance.randint(1, 12) for _ in range(chance.choice((1, 2, 2, 3)))) for _ in range(chance.randint(2, 9))]
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    cut, later = chance.randint(1, len(params)), chance.randint(0, len(params) // 2)
    first = params[: len(params) - later] or params
    groups = [{"params": first[:cut]}, {"params": first[cut:], "lr": 0.02}] if first[cut:] else [{"params": first}]
    added = [param for param in params if not any(param is own for group in groups for own in group["params"])]
    optimizer = make(kind, groups, given)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.95) if chance.random() < 0.5 else None
    seen, saved = [], None

    for _ in range(chance.randint(6, 16)):
        event = chance.choice(
            ("add", "lr", "delete", "clear", "save", "load", "freeze", "write", "clip", "closure", "none", "none", "none")
        )
        for param in params:
            grad = torch.randn(param.shape, generator=generator).to(dtype)
            param.grad = grad if param.requires_grad and chance.random() < 0.8 else None
        some = chance.choice(params)
        if event == "add" and added:
            optimizer.add_param_group({"params": added, "lr": 0.03})
            added = []
            schedule = None
        elif event == "lr":
            chance.choice(optimizer.param_groups)["lr"] = chance.choice((0.01, 0.05))
        elif event == "delete" and some in optimizer.state:
            del optimizer.state[some]
        elif event == "clear" and chance.random() < 0.3:
            optimizer.state.clear()
        elif event == "save":
            saved = copy.deepcopy(optimizer.state_dict())
            seen.append(saved)
        elif event == "load" and saved is not None and len(saved["param_groups"]) == len(optimizer.param_groups):
            optimizer.load_state_dict(copy.deepcopy(saved))
        elif event == "freeze":
            some.requires_grad_(not some.requires_grad)
        elif event == "write":
            some.data.mul_(0.9)
        elif event == "clip":
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        loss = (lambda: params[0].detach().float().sum()) if event == "closure" else None
        seen.append(optimizer.step(loss))
        if schedule is not None:
            schedule.step()
        seen.append([param.detach().clone() for param in params])
    seen.append(copy.deepcopy(optimizer.state_dict()))
    return seen


def failure(seed):
    """The text of a program with other bits than those of the class; None if it has the same."""
    chance = random.Random(f"staged {seed}")
    bound, way = chance.choice((1, 700, 3000, 1 << 20)), chance.choice(("memory", "late", "late", "tier"))
    lane = LateLane()
    try:
        wanted = program(seed, lambda kind, groups, given: kind(groups, **given))
        with tempfile.TemporaryDirectory() as directory, mock.patch("spillway.torch._staged.flow.lane_of") as patched:
            patched.side_effect = (lambda device: lane) if way == "late" else lane_of
            made = []

            def make(kind, groups, given):
                made.append(Staged(kind, groups, chunk_bytes=bound, tier=options(directory) if way == "tier" else None, **given))
                return made[0]

            found = program(seed, make)
            made[0].close()
        if not same(found, wanted):
            at = next(place for place, (one, other) in enumerate(zip(found, wanted, strict=True)) if not same(one, other))
            return f"program {seed}: chunks of {bound} bytes, {way}: other bits at place {at}"
    except Exception:
        return f"program {seed}: chunks of {bound} bytes, {way}\n{traceback.format_exc(limit=-4)}"
    finally:
        lane.end()
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    random_programs.main(failure)
