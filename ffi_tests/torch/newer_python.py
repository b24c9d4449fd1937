"""Runs tests on a newer version of Python, in an environment of packaging/newer_python.sh, which installs it at the first call."""

import functools
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@functools.cache
def _installed(*words):
    return subprocess.run([ROOT / "packaging" / "newer_python.sh", *words], capture_output=True, text=True)


def newer_python(version, *packages):
    """The python of that version, with packages such as "megatron-core==0.19.2" in folders of their own. Skips the test without one."""
    done = _installed(version, *packages)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_tests(python, *words, timeout=600, **environment):
    """Runs pytest there; returns how many tests passed. A test that fails is an error."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])
