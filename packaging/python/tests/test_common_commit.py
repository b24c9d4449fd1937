"""Proves that ranks which resume, and the tool that copies all of them, choose the same commit."""

import json
import os
import pathlib
import random
import subprocess

import numpy as np
import pytest

import spillway
from spillway import _ranks

TOOL = pathlib.Path(os.environ.get("SPILLWAY_LIBRARY", "")).parent / "spillway"
WORLD = 3


def steps_of(path, rank):
    return spillway.tier.steps([path], job="job", host="host", rank=rank, world=WORLD)


def committed(path, rank, rounds):
    """Commits rounds, each a step and a payload. Returns the bytes of the commits that can be opened, by step and tag."""
    arrays = [np.full(8, 100 * rank + number, np.uint8) for number in range(len(rounds))]
    with spillway.Tier([path], job="job", host="host", rank=rank, world=WORLD, direct=False, durability="process") as tier:
        extent = tier.define("state", [8])
        for (step, payload), array in zip(rounds, arrays):
            tier.wait(tier.put(extent, [array]))
            tier.commit(step, payload)
    found = steps_of(path, rank)
    kept = zip([(found.last, found.last_tag), (found.before, found.before_tag)], reversed(arrays))
    return {commit: array.tobytes() for commit, array in kept}


def exported(path, to):
    """The step that the tool copies, and the bytes of each rank; None if it refuses."""
    done = subprocess.run([TOOL, "tier", "export", to, path, "--all-ranks"], capture_output=True, text=True)
    if done.returncode:
        assert "no committed step in common" in done.stderr or "have different commits of step" in done.stderr, done.stderr
        return None
    step = json.loads((to / "index.json").read_text())["step"]
    return step, [(to / f"rank-{rank}.safetensors").read_bytes()[-8:] for rank in range(WORLD)]


@pytest.mark.sampled(cases=20)
@pytest.mark.skipif(not TOOL.is_file(), reason="the tool is not beside the library")
@pytest.mark.parametrize("seed", range(40))
def test_the_tool_copies_the_commit_at_which_the_ranks_would_resume(seed, tmp_path):
    chance = random.Random(seed)
    (tmp_path / "tier").mkdir()
    # Steps that grow, and steps that are committed again; rounds of all ranks, and rounds that differ.
    rounds = [(chance.randint(1, 3), b"round") for _ in range(4)]
    contents = []
    for rank in range(WORLD):
        own = [(step, payload if chance.random() < 0.9 else b"another") for step, payload in sorted(rounds)]
        own = [(step, payload + str(number).encode()) for number, (step, payload) in enumerate(own)]
        contents.append(committed(tmp_path / "tier", rank, own[: len(own) - chance.choice([0, 0, 1, 2])]))
    everyone = [[steps_of(tmp_path / "tier", rank)] for rank in range(WORLD)]
    try:
        step, [tag] = _ranks.chosen(everyone, "begin anew")
        wanted = step, [of_rank[step, tag] for of_rank in contents]
    except spillway.InvalidArgumentError:
        wanted = None
    assert exported(tmp_path / "tier", tmp_path / "copy") == wanted
