"""Runs of tiered.py, for tests that kill them or compare their reports."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import time

import pytest

HERE = pathlib.Path(__file__).parent


def attempt(starter, folder, *arguments, ranks=1, launcher=(), kill_after=None, delay=0.0, **extra):
    """One run of tiered.py, forked or started by `launcher`. Returns the exit status, the output, and the
    path of its report.

    The run is killed with SIGKILL after it reports step `kill_after` as done. The kill is delayed by `delay` times
    the shortest step so far, so that it comes before the end on a machine of any speed."""
    report, extensions = folder / "report.json", folder / "extensions"
    report.unlink(missing_ok=True)
    extensions.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
    environment.update({"OMP_NUM_THREADS": "1", "SPILLWAY_DEEPSPEED": "1", "TORCH_EXTENSIONS_DIR": str(extensions), **extra})
    command = [HERE / "tiered.py", *map(str, arguments), "--json", report]
    with open(folder / "stderr", "w+") as errors:
        if launcher:
            process = subprocess.Popen(
                [starter.python, *launcher, *command], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        else:
            process = starter.start(command, environment, errors, ranks)
        lines, said = [], []
        for line in process.stdout:
            lines.append(line)
            said.append(time.monotonic())
            # Lines of two ranks may be joined.
            if kill_after is not None and re.search(rf"step {kill_after}(?!\d)", line):
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(delay * min(after - before for before, after in itertools.pairwise(said)))
                process.kill()
                kill_after = None
        process.wait(300)
        errors.seek(0)
        return process.returncode, "".join(lines) + errors.read()[-4000:], report


def finished(starter, folder, *arguments, **how):
    """The report of a run that must succeed."""
    status, output, report = attempt(starter, folder, *arguments, **how)
    assert status == 0, output
    found = json.loads(report.read_text())
    assert not found["compiled_ops"] and not list((folder / "extensions").iterdir())
    return found
