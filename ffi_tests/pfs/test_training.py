"""ZeRO-3 with a path of its optimizer states on another file system, killed and resumed: the bits of states in host memory."""

import json

import pytest
from tiered_runs import attempt, finished

STEPS = ("--steps", "12", "--progress")


@pytest.mark.needs("trains")
def test_a_killed_run_goes_on_with_the_bits_of_states_in_host_memory(places, starter, tmp_path):
    local, block = tmp_path / "local", json.dumps({"resume": True, "ratio": [1, 1]})
    local.mkdir()
    whole = finished(starter, tmp_path, *STEPS)
    # The machine resumes on its other mount.
    for place, step in zip((places[0], places[-1]), (3, 7)):
        status, output, _ = attempt(starter, tmp_path, "--paths", local, place, "--block", block, *STEPS, kill_after=step, delay=0.5)
        assert status == -9, output
    last = finished(starter, tmp_path, "--paths", local, places[0], "--block", block, *STEPS)
    assert (last["sha256"], last["published"]) == (whole["sha256"], whole["published"])
    assert last["began_at"] >= 7 and last["losses"] == whole["losses"][last["began_at"] :]
    assert all(path["blocks"] for path in last["active"]["tier"][0]["paths"])
