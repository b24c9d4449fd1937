"""Proves that a process that is killed at any moment of its steps, commits and snapshots leaves a tier at a committed step, and that
every snapshot whose directory has its name is complete and of one step."""

import json
import pathlib
import random
import shutil
import subprocess
import sys

import numpy as np

import spillway

SIZES = (60_000, 30_000)
WORKER = """
import itertools, sys
from test_snapshot import contents, open_tier
base = sys.argv[1]
tier = open_tier(base)
extents = [tier.define(f"extent{n}", [60_000, 30_000]) for n in range(3)]
print("open", flush=True)
for step in itertools.count((tier.opened.step or 0) + 1):
    for n, extent in enumerate(extents):
        tier.wait(tier.put(extent, contents(step, n)))
    tier.commit(step)
    if step % 2:
        snapshot = tier.snapshot(f"{base}/step-{step}", bytes_per_second=(0, 2_000_000, 20_000_000)[step % 3])
        if step % 4 == 1:
            snapshot.wait()
"""


def contents(step, extent):
    return [np.full(size, (step * (7 + 4 * n) + extent) % 251, np.uint8) for n, size in enumerate(SIZES)]


def open_tier(base, **settings):
    return spillway.Tier([f"{base}/one", f"{base}/two"], job="killed", block_bytes=16 << 10, **settings)


def holds(tier, step):
    found = [np.empty(size, np.uint8) for size in SIZES]
    for number in range(3):
        tier.wait(tier.get(tier.define(f"extent{number}", SIZES), found))
        assert all(map(np.array_equal, found, contents(step, number))), (step, number)
    return True


def test_kills_leave_one_step_and_whole_snapshots(tmp_path, child_environment):
    for name in ("one", "two", "copy"):
        (tmp_path / name).mkdir()
    here = {**child_environment, "PYTHONPATH": f"{child_environment['PYTHONPATH']}:{pathlib.Path(__file__).parent}"}
    chance, last, complete = random.Random(4), 0, 0
    for _ in range(8):
        worker = subprocess.Popen([sys.executable, "-c", WORKER, tmp_path], stdout=subprocess.PIPE, env=here, text=True)
        assert worker.stdout.readline() == "open\n"
        # The sleep only chooses the moment of the kill.
        with worker:
            try:
                worker.wait(chance.random() * 0.6)
            except subprocess.TimeoutExpired:
                worker.kill()
        with open_tier(tmp_path) as tier:
            step = tier.opened.step or last
            assert step >= last and (step == 0 or holds(tier, step))
            last = step
        for snapshot in tmp_path.glob("step-*"):
            if snapshot.suffix != ".partial":
                step = json.loads((snapshot / "manifest.json").read_text())["step"]
                assert snapshot.name == f"step-{step}"
                with spillway.Tier([tmp_path / "copy"], job=f"copy{step}") as copy:
                    assert copy.import_from(snapshot) == step and holds(copy, step)
                    copy.destroy()
                complete += 1
            shutil.rmtree(snapshot)
    assert last > 0 and complete > 0
