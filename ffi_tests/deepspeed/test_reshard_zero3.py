"""Proves that a ZeRO-3 run with states on a tier continues with another number of ranks and other sub-groups. Masters, moments, weights
and counts are those of the last commit, from the tiers of all ranks or from a snapshot."""

import os
import pathlib
import shutil

import pytest


@pytest.fixture
def run(starter, tmp_path):
    """Runs a phase of reshard.py."""

    def run(phase, source, ranks):
        environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
        environment.update({"OMP_NUM_THREADS": "1", "SPILLWAY_DEEPSPEED": "1", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")})
        worker = pathlib.Path(__file__).with_name("reshard.py")
        return starter.run([worker, phase, tmp_path, source], environment, 600, ranks)

    return run


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3)])
def test_a_run_goes_on_with_another_number_of_ranks(run, before, after, tmp_path):
    done = run("first", "", before)
    assert done.stdout.count("first holds\n") == before, done
    for source in ("first", "snapshot"):
        done = run("next", source, after)
        assert done.stdout.count("next holds\n") == after, done
    shutil.move(tmp_path / "tier" / "first" / "node-1", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "tier" / "after-first")
    done = run("next", "first", after)
    assert done.returncode != 0 and "rank-1" in done.stderr, done
