"""Sets up the file systems of --filesystems, and starts owners of tiers on them."""

import itertools
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from typing import NamedTuple

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
os.environ.setdefault(
    "SPILLWAY_LIBRARY", str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "libspillway.so")
)
sys.path[:0] = [str(ROOT / "packaging" / "python"), str(HERE), str(ROOT / "ffi_tests" / "deepspeed")]

from filesystems import FILE_SYSTEMS, until
from starters import *  # noqa: F403

# No call of the tests lasts as long on a system that works.
PATIENCE = 90


def pytest_addoption(parser):
    parser.addoption("--filesystem", help="a name in filesystems.py; run.sh sets it up")


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(feature): only on file systems with this feature")


def pytest_collection_modifyitems(config, items):
    """Leaves the tests that the file system can have."""
    name = config.getoption("--filesystem")
    features = FILE_SYSTEMS[name].features if name else frozenset()
    fitting = [item for item in items if all(mark.args[0] in features for mark in item.iter_markers("needs"))]
    config.hook.pytest_deselected(items=[item for item in items if item not in fitting])
    items[:] = fitting


@pytest.fixture(scope="session")
def fs(request, tmp_path_factory):
    """The file system of the run."""
    name = request.config.getoption("--filesystem")
    if not name or "SPILLWAY_PFS" not in os.environ:
        pytest.skip("ffi_tests/pfs/run.sh sets up the file systems")
    return FILE_SYSTEMS[name](tmp_path_factory.mktemp("fs"))


class Answer(NamedTuple):
    """What an owner said about a call."""

    result: object
    status: int
    text: str
    seconds: float


class Owner:
    """A process that owns a tier; owner.py has its calls."""

    def __init__(self, settings, launcher=()):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "packaging" / "python")}
        self.process = subprocess.Popen(
            [*launcher, sys.executable, HERE / "owner.py", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def begin(self, call):
        self.process.stdin.write(f"{call}\n")
        self.process.stdin.flush()

    def next(self, seconds=PATIENCE):
        """The next line; None if the process has ended."""
        return self._lines.get(timeout=seconds)

    def end(self, seconds=PATIENCE):
        """The answer to the call that began."""
        return Answer(**self.next(seconds))

    def ask(self, call, seconds=PATIENCE):
        self.begin(call)
        return self.end(seconds)

    def must(self, call):
        """The result of a call that must succeed."""
        answer = self.ask(call)
        assert answer.status == 0, f"{call}: {answer.text}"
        return answer.result

    def send(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE)


@pytest.fixture
def owner():
    """Starts an owner of a tier: owner(path, ..., setting=value). Of several machines: elsewhere=True."""
    owners = []

    def start(*paths, elsewhere=False, **settings):
        # A process of another process namespace counts as one of another machine.
        launcher = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if elsewhere else []
        owners.append(Owner({"paths": list(map(str, paths)), "job": "pfs", "host": "host", **settings}, launcher))
        return owners[-1]

    yield start
    for each in owners:
        each.process.send_signal(signal.SIGCONT)
        each.kill()


@pytest.fixture
def places(fs):
    """A new directory of the file system, below each of its mounts."""
    name = f"tier-{next(NUMBERS)}"
    (fs.mounts[0] / name).mkdir()
    found = [mount / name for mount in fs.mounts]
    for place in found:
        until(place.is_dir, f"{place} does not appear")
    return found


NUMBERS = itertools.count()
