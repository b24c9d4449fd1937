"""Proves which parts Spillway replaces in which version of DeepSpeed. Four versions train with each part, or leave
the part to DeepSpeed and report it. A block that requests a part that Spillway does not replace raises an error. A
method with other parameters is detected."""

import fcntl
import functools
import json
import os
import pathlib
import sys

import pytest
from forked import Starter

from spillway.deepspeed import _versions

SCRIPT = pathlib.Path(__file__).parent / "feature.py"
# The parts that Spillway replaces in each version. DeepSpeed 0.14.0 needs numactl for states in host memory; its ops
# are in test_hook.py.
SERVED = {
    "0.14.0": (),
    "0.16.9": ("ops", "states"),
    "0.18.9": ("ops", "states"),
    "0.19.8": ("ops", "states", "parameters", "interleave", "superoffload"),
}


@pytest.fixture(scope="module")
def start(older_deepspeed):
    """Trains with a part in a process of its own. A process for each version has imported it before."""
    starters = []

    @functools.cache
    def starter(version):
        package = [] if version == _versions.TRIED[-1] else [str(older_deepspeed(version))]
        path = [*package, str(SCRIPT.parents[2] / "packaging" / "python")]
        starters.append(Starter(sys.executable, "feature", PYTHONPATH=os.pathsep.join(path)))
        return starters[-1]

    yield lambda version, part, folder: starter(version).run([SCRIPT, part, folder], dict(os.environ), 300)
    for one in starters:
        one.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Keeps the first result of all processes of this run of pytest, and returns it: all others must equal it."""
    folder = tmp_path_factory.getbasetemp()
    first = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "weights of the versions"

    def compared(sha256):
        with open(first, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            kept = file.read()
            if not kept:
                file.write(sha256)
            return kept or sha256

    return compared


def test_the_table_and_the_tests_name_the_same_versions():
    assert tuple(SERVED) == _versions.TRIED
    from importlib.metadata import version

    assert version("deepspeed") == _versions.TRIED[-1]


@pytest.mark.parametrize("version, part", [(version, part) for version, parts in SERVED.items() for part in parts])
def test_a_part_trains_in_the_versions_that_have_it(start, weights, version, part, tmp_path):
    done = start(version, part, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == version and part in found["served"], found
    if part == "parameters":
        return  # In this case DeepSpeed keeps the weights in files.
    assert weights(found["sha256"]) == found["sha256"], "another version or part came to other weights"


@pytest.mark.parametrize(
    "version, part, words",
    [
        ("0.14.0", "states", "optimizer states on a tier are tested with DeepSpeed 0.16.0 to 0.19.x, and this is 0.14.0"),
        ("0.18.9", "interleave", "interleaved updates are tested with DeepSpeed 0.19.5 to 0.19.x, and this is 0.18.9"),
        ("0.18.9", "parameters", "16-bit parameters on a tier are tested with DeepSpeed 0.19.0 to 0.19.x"),
    ],
)
def test_a_block_that_asks_for_what_a_version_lacks_is_an_error(start, version, part, words, tmp_path):
    done = start(version, part, tmp_path)
    assert done.returncode != 0 and words in done.stderr, done.stderr[-3000:]


def test_what_is_left_to_deepspeed_is_in_the_report(start, tmp_path):
    done = start("0.18.9", "ops", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tested with DeepSpeed 0.19.5" in json.loads(done.stdout.splitlines()[-1])["left"]["interleave"]


def test_a_method_with_other_parameters_is_left_to_deepspeed():
    def owner(**changed):
        written = {name: text.split() for name, text in _versions._METHODS["parameters"].items()}
        space = {}
        for name, parameters in {**written, **changed}.items():
            exec(f"def {name}({', '.join(['self', *parameters])}): pass", space)
        return type("Swapper", (), {name: space[name] for name in written})

    assert _versions._methods_lack("parameters", owner()) is None
    assert "takes (param, must_exist, mode)" in _versions._methods_lack("parameters", owner(get_path=["param", "must_exist", "mode"]))
    gone = owner()
    del gone.get_path
    assert "has no get_path" in _versions._methods_lack("parameters", gone)


@pytest.mark.parametrize(
    "version, fits", [("0.20.0", False), ("0.19.99", True), ("0.19.8+abc", True), ("0.13.5", False), ("", False), ("1.0", False)]
)
def test_versions_outside_of_what_was_tried_are_left_to_deepspeed(monkeypatch, version, fits):
    monkeypatch.setattr(_versions, "_stated_version", lambda: version)
    assert (_versions.version_lacks("engine", version) is None) == fits
