"""Proves that a process that is killed at any moment of its steps, commits and snapshots leaves a tier at a committed step, and that
every snapshot whose directory has its name is complete and of one step."""

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

import spillway
from spillway import _snapshot

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


def killed(program, base, environment):
    """Runs a program on a tier several times, and kills it at random moments. Yields after each kill, when the tier is whole."""
    here = {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{pathlib.Path(__file__).parent}"}
    chance, last = random.Random(4), 0
    for _ in range(8):
        worker = subprocess.Popen([sys.executable, "-c", program, base], stdout=subprocess.PIPE, env=here, text=True)
        assert worker.stdout.readline() == "open\n"
        # The sleep only chooses the moment of the kill.
        with worker:
            try:
                worker.wait(chance.random() * 0.6)
            except subprocess.TimeoutExpired:
                worker.kill()
        with open_tier(base) as tier:
            step = tier.opened.step or last
            assert step >= last and (step == 0 or holds(tier, step))
            last = step
        yield
    assert last > 0


def test_kills_leave_one_step_and_whole_snapshots(tmp_path, child_environment):
    for name in ("one", "two", "copy"):
        (tmp_path / name).mkdir()
    complete = 0
    for _ in killed(WORKER, tmp_path, child_environment):
        for snapshot in tmp_path.glob("step-*"):
            if snapshot.suffix != ".partial":
                step = json.loads((snapshot / "manifest.json").read_text())["step"]
                assert snapshot.name == f"step-{step}"
                with spillway.Tier([tmp_path / "copy"], job=f"copy{step}") as copy:
                    assert copy.import_from(snapshot) == step and holds(copy, step)
                    copy.destroy()
                complete += 1
            shutil.rmtree(snapshot)
    assert complete > 0


def test_an_interrupted_removal_does_not_stand_in_the_way_of_the_next(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    own, calls = os.unlink, []

    def interrupted(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(*arguments, **keywords)

    with open_tier(tmp_path) as tier:
        tier.wait(tier.put(tier.define("extent0", SIZES), contents(1, 0)))
        tier.commit(1)
        for _ in range(3):
            tier.snapshot(tmp_path / "snapshot").wait()
            if not calls:
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(os, "unlink", interrupted)
                    _snapshot.remove(str(tmp_path / "snapshot"))
            else:
                _snapshot.remove(str(tmp_path / "snapshot"))
            assert not (tmp_path / "snapshot").exists()
    assert len(list(tmp_path.glob("snapshot.*.partial"))) == 1


def read_tensors(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {name: (entry["dtype"], np.frombuffer(body[slice(*entry["data_offsets"])], np.uint8)) for name, entry in header.items()}


def test_tensors_are_exported_by_name_and_range_and_imported_by_name(tmp_path):
    for name in ("one", "two", "copy"):
        (tmp_path / name).mkdir()
    with open_tier(tmp_path) as tier:
        for number in range(3):
            tier.wait(tier.put(tier.define(f"extent{number}", SIZES), contents(4, number)))
        floats = np.arange(5000, dtype=np.float32)
        tier.wait(tier.put(tier.define("subgroup-000000", [20000] * 3), [floats, floats + 1, floats + 2]))
        with pytest.raises(spillway.NoStateError):
            tier.export_tensors(tmp_path / "nothing")
        tier.commit(4)
        with tier.export_tensors(tmp_path / "some", names=["*1", "subgroup-*"], elements=(100, 4000)) as export:
            tier.wait(tier.put(tier.define("extent1", SIZES), contents(5, 1)))
            assert export.wait() == 4 and export.progress().written == export.progress().bytes == 2 * 3900 + 3 * 4 * 3900
        found = read_tensors(tmp_path / "some")
        assert sorted(found) == ["extent1.0", "extent1.1", *(f"subgroup-000000.{name}" for name in ("exp_avg", "exp_avg_sq", "param"))]
        assert all(np.array_equal(found[f"extent1.{n}"][1], contents(4, 1)[n][100:4000]) for n in range(2))
        dtype, param = found["subgroup-000000.param"]
        assert dtype == "F32" and np.array_equal(param.view(np.float32), floats[100:4000])
        with tier.export_tensors(tmp_path / "all", bytes_per_second=50_000_000) as export:
            export.wait()
        with tier.export_tensors(tmp_path / "one extent", names=["extent0"]) as export:
            export.wait()
        for arguments, words in (
            ({"names": ["extent7"]}, "no extent"),
            ({"names": "extent1"}, "pass a list of patterns"),
            ({"names": []}, "pass a list of patterns"),
            ({"elements": (5, 5)}, "elements"),
            ({"dtype": "F7"}, "dtype"),
        ):
            with pytest.raises(spillway.InvalidArgumentError, match=words):
                tier.export_tensors(tmp_path / "wrong", **arguments)
        with pytest.raises(spillway.IoError):
            tier.export_tensors(tmp_path / "all")
        with tier.export_tensors(tmp_path / "slow", bytes_per_second=1000):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "copy", "one", "one extent", "some", "two"]
    with spillway.Tier([tmp_path / "copy"], job="other") as copy:
        copy.commit(1)
        assert copy.import_from(tmp_path / "all", names=["extent[", "extent2"]) == 1
        assert [extent.name for extent in copy.extents()] == ["extent2"]
        with pytest.raises(spillway.InvalidArgumentError, match="no extent"):
            copy.import_from(tmp_path / "all", names=["extent9"])
        assert copy.import_from(tmp_path / "one extent") == 1, "a part of the state keeps the step"
        assert copy.import_from(tmp_path / "all") == 4 and holds(copy, 4)


def test_a_snapshot_that_a_later_one_has_removed_still_tells_its_step(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with open_tier(tmp_path) as tier:
        snapshots = []
        for step in (1, 2):
            tier.wait(tier.put(tier.define("extent0", SIZES), contents(step, 0)))
            tier.commit(step)
            snapshots.append(tier.snapshot(tmp_path / f"step-{step}", keep=1))
            while not snapshots[-1].progress().ended:
                pass
        assert [snapshot.wait() for snapshot in reversed(snapshots)] == [2, 1]
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]
