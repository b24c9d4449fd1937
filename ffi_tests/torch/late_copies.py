"""Random trainings with offload() on a stand-in for a device, whose copies end late, against a step without overlap. A handler interrupts
every third of them, in forwards, backwards and steps, which the program then repeats.

    PYTHONPATH=packaging/python:packaging/python/tests python ffi_tests/torch/late_copies.py FIRST COUNT [SECONDS]

The number of a training is the seed of everything in it: the model, what the program writes and replaces between backward and step, the
size of the buckets, the place of the verdict, the tail, whether there are second copies of weights, whether copies pass through blocks of
page-locked memory, because a driver locks few bytes, and the interrupts."""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
import warnings

import late_streams
import pytest
import random_programs
import torch
from interrupts import Interrupt, interrupted
from offload_runs import BUCKETS, Later, Net, offloaded, same, training


def failure(seed):
    """The text of a training with other bits than those of no overlap; None if it has the same."""
    chance = random.Random(f"late {seed}")
    bucket, verdict = chance.choice(BUCKETS), chance.choice(("step", "forward"))
    tail, room = chance.choice((0, 0, 1, 3)), chance.random() < 0.7
    limits = chance.choice((None, None, (8192, 2048), (30_000,), (512, 256), (0,)))
    try:
        if seed % 3:
            plain = late = training
        else:
            plain, late = _uninterrupted, _interrupted
        waits = plain(seed, offloaded(bucket_bytes=bucket, overlap=False))
        with pytest.MonkeyPatch.context() as patch, _ended(_link(patch, limits, room)):
            same(late(seed, offloaded(verdict, bucket_bytes=bucket, tail=tail)), waits)
    except Exception:
        way = f"verdict {verdict}, buckets of {bucket} bytes, tail {tail}, room {room}, locks {limits}"
        return f"training {seed}: {way}\n{traceback.format_exc(limit=-3)}"
    return None


def _uninterrupted(seed, make):
    def run(work, at):
        work()
        return False

    return _trained(seed, make, run)


def _interrupted(seed, make):
    def run(work, at):
        ignored = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "unraisablehook", ignored.append)
            try:
                return interrupted(work, at, below=True)
            except AssertionError:
                # Python ignores what is raised in a destructor, and only that: the call has ended.
                assert [one.exc_type for one in ignored] == [Interrupt]
                return False

    return _trained(seed, make, run)


def _trained(seed, make, run):
    """Losses and final tensors of a training. `run(work, at)` calls work(), and returns True if a handler has ended the call."""
    chance = random.Random(f"interrupts {seed}")
    torch.manual_seed(seed)
    model = Net(chance, chance.choice((torch.float32, torch.bfloat16)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trained, model, lr=1e-2, max_norm=chance.choice((None, 0.02, 50.0)))
    losses, x = [], torch.randn(5, model.width).to(model.scale.dtype)
    for number in range(6):
        where, at = chance.choice((None, "forward", "backward", "step")), int(10 ** chance.uniform(0, 3.5))

        def forward():
            return model(x, True).float().square().mean()

        if where == "forward":
            run(forward, at)
        loss = forward()
        if where == "backward":
            run(loss.backward, at)
            optimizer.zero_grad()
            loss = forward()
        loss.backward()
        losses.append(loss.item())
        if where != "step":
            optimizer.step()
        elif run(optimizer.step, at):
            optimizer.settle()
            # A step that was interrupted before its verdict has not happened.
            if number == int(optimizer.state.get(model.scale, {}).get("step", 0)):
                optimizer.step()
        optimizer.zero_grad()
    optimizer.settle()
    state = optimizer.state_dict()["state"]
    moments = [state[key][name] for key in sorted(state) for name in ("exp_avg", "exp_avg_sq", "step")]
    return losses, [p.detach() for p in model.parameters()] + moments


def _link(patch, limits, room):
    """The link of all parameters."""
    if limits is None:
        link = Later(room)
        patch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
        return link
    late_streams.make_small(patch)
    link, _ = late_streams.link(patch, *limits)
    patch.setattr(link, "has_room", lambda size: room)
    return link


@contextlib.contextmanager
def _ended(link):
    """A block after which the thread of a link has ended."""
    try:
        yield
    finally:
        if isinstance(link, Later):
            link.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "spillway: the system locks no more memory")
    random_programs.main(failure)
