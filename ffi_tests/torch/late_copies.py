"""Random trainings with offload() on a stand-in for a device, whose copies end late, against a step without overlap.

    PYTHONPATH=packaging/python python ffi_tests/torch/late_copies.py FIRST COUNT [SECONDS]

The number of a training is the seed of everything in it: the model, what the program writes and replaces between backward and step, the
size of the buckets, the place of the verdict, the tail, and whether there are second copies of weights."""

from __future__ import annotations

import random
import traceback
from unittest import mock

import random_programs
import torch
from offload_runs import BUCKETS, Later, offloaded, same, training


def failure(seed):
    """The text of a training with other bits than those of no overlap; None if it has the same."""
    chance = random.Random(f"late {seed}")
    bucket, verdict = chance.choice(BUCKETS), chance.choice(("step", "forward"))
    tail, room = chance.choice((0, 0, 1, 3)), chance.random() < 0.7
    link = Later(room)
    try:
        waits = training(seed, offloaded(bucket_bytes=bucket, overlap=False))
        with mock.patch("spillway.torch._offload.slot.link_to", lambda param: link):
            same(training(seed, offloaded(verdict, bucket_bytes=bucket, tail=tail)), waits)
    except Exception:
        return f"training {seed}: verdict {verdict}, buckets of {bucket} bytes, tail {tail}, room {room}\n{traceback.format_exc(limit=-3)}"
    finally:
        link.end()
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    random_programs.main(failure)
