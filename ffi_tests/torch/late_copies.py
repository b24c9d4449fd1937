"""Random trainings with offload() on a stand-in for a device, whose copies end late, against a step without overlap.

    PYTHONPATH=packaging/python python ffi_tests/torch/late_copies.py FIRST COUNT [SECONDS]

The number of a training is the seed of everything in it: the model, what the program writes and replaces between backward and step, the
size of the buckets, the place of the verdict, the tail, whether there are second copies of weights, and whether copies pass through blocks
of page-locked memory, because a driver locks few bytes."""

from __future__ import annotations

import contextlib
import random
import traceback
import warnings

import late_streams
import pytest
import random_programs
import torch
from offload_runs import BUCKETS, Later, offloaded, same, training


def failure(seed):
    """The text of a training with other bits than those of no overlap; None if it has the same."""
    chance = random.Random(f"late {seed}")
    bucket, verdict = chance.choice(BUCKETS), chance.choice(("step", "forward"))
    tail, room = chance.choice((0, 0, 1, 3)), chance.random() < 0.7
    limits = chance.choice((None, None, (8192, 2048), (30_000,), (512, 256), (0,)))
    try:
        waits = training(seed, offloaded(bucket_bytes=bucket, overlap=False))
        with pytest.MonkeyPatch.context() as patch, _ended(_link(patch, limits, room)):
            same(training(seed, offloaded(verdict, bucket_bytes=bucket, tail=tail)), waits)
    except Exception:
        way = f"verdict {verdict}, buckets of {bucket} bytes, tail {tail}, room {room}, locks {limits}"
        return f"training {seed}: {way}\n{traceback.format_exc(limit=-3)}"
    return None


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
