"""`python -m spillway.bench megatron` compares both contenders, prints a row for each case, and writes a report."""

import json
import os
import pathlib
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python"


def bench(folder, *paths):
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "spillway.bench",
        "megatron",
        "--tensors",
        "9",
        "--elements",
        "4Ki",
        "--rounds",
        "3",
        "--json",
        "report.json",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE, *paths)))}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_both_contenders_are_measured_whole_and_alone(tmp_path, megatron_core):
    done = bench(tmp_path, megatron_core())
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["bench"] == "python megatron" and report["settings"]["megatron_core"] == "0.16.1"
    cases = [(row["case"]["work"], row["case"]["part"], row["case"]["contender"]) for row in report["rows"]]
    assert cases == [
        (work, part, contender)
        for work in ("overlapped", "not overlapped")
        for part in ("whole step", "optimizers alone")
        for contender in ("spillway", "torch fused")
    ]
    assert all(row["figures"]["ms"]["median"] > 0 for row in report["rows"]) and len(done.stdout.splitlines()) == 2 + len(cases)


def test_without_megatron_the_package_is_named(tmp_path):
    done = bench(tmp_path)
    assert done.returncode == 1 and "pip install --no-deps megatron-core" in done.stderr
