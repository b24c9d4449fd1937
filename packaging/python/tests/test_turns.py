"""Proves that processes take turns on a device with tiers and with DeepSpeed's async_io: a transfer waits for the turn of another
process, a killed process gives its turn up, and a stopped one is waited for once. Each test has a directory of turns of its own."""

import contextlib
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

# Puts for ever, so that it has its turn most of the time.
HOLDER = """
import sys, spillway
tier = spillway.Tier([sys.argv[1]], job="holder", turns=1)
array = bytearray(8 << 20)
extent = tier.define("x", [len(array)])
while True:
    tier.wait(tier.put(extent, [array]))
"""
TIER = """
import sys, spillway
tier = spillway.Tier([sys.argv[1]], job="waiter", turns=1, turn_timeout=float(sys.argv[2]))
array, found = bytearray(range(256)) * 4096, bytearray(1 << 20)
extent = tier.define("x", [len(array)])
for _ in range(3):
    tier.wait(tier.put(extent, [array]))
    tier.wait(tier.get(extent, [found]))
assert found == array
tier.destroy()
"""
# Its number of turns is in the environment. The timeout of a wait is the library's own.
ASYNC_IO = """
import sys, torch
from spillway.deepspeed._io_ops import aio_handle
data, found = torch.arange(1 << 20, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
handle = aio_handle()
for _ in range(3):
    handle.async_pwrite(data, sys.argv[1] + "/file")
    handle.wait()
    handle.async_pread(found, sys.argv[1] + "/file")
    handle.wait()
assert torch.equal(found, data)
"""
KINDS = [TIER, pytest.param(ASYNC_IO, marks=pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="async_io needs torch"))]
NAMES = ["tier", "async_io"]


class Machine:
    """Processes that share a device and a directory of turns."""

    def __init__(self, place, environment):
        self.data, self.turns, self._running = place / "data", place / "turns", []
        self.data.mkdir()
        self.turns.mkdir()
        self.environment = {**environment, "SPILLWAY_TURNS_DIR": str(self.turns), "SPILLWAY_LOG": "warn", "SPILLWAY_IO_TURNS": "1"}

    def start(self, code, timeout=600.0):
        command = [sys.executable, "-c", code, str(self.data), str(timeout)]
        process = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)
        self._running.append(process)
        return process

    def stopped_in_its_turn(self):
        """A process that has the turn and is stopped."""
        process = self.start(HOLDER)
        while True:
            assert process.poll() is None, process.stderr.read()
            os.kill(process.pid, signal.SIGSTOP)
            while _state(process.pid) not in "tT":
                time.sleep(0.001)
            if self.is_taken():
                return process
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.005)

    def is_taken(self):
        for path in self.turns.glob("spillway-turns-*/path-*/turn-0"):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        return False

    def has_waiter(self):
        return any(path.read_bytes().strip(b"\0") for path in self.turns.glob("spillway-turns-*/path-*/slot-*"))

    def end(self):
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


def _state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.fixture
def machine(tmp_path, child_environment):
    made = Machine(tmp_path, child_environment)
    yield made
    made.end()


@pytest.mark.parametrize("code", KINDS, ids=NAMES)
def test_a_transfer_waits_for_the_turn_of_another_process_and_goes_on_when_that_is_killed(machine, code):
    holder = machine.stopped_in_its_turn()
    waiter = machine.start(code)
    while not machine.has_waiter():
        assert waiter.poll() is None, waiter.stderr.read()
        time.sleep(0.005)
    assert waiter.poll() is None
    holder.kill()
    _, log = waiter.communicate(timeout=120)
    assert (waiter.returncode, log) == (0, "")


def test_a_stopped_process_is_waited_for_once(machine):
    machine.stopped_in_its_turn()
    waiter = machine.start(TIER, 0.3)
    _, log = waiter.communicate(timeout=120)
    assert waiter.returncode == 0, log
    assert log.count("no turn on the device") == 1 and "is stopped" in log, log


def test_a_process_that_never_rests_gives_its_turn_up(machine):
    holder = machine.start(HOLDER)
    while not machine.is_taken():
        assert holder.poll() is None, holder.stderr.read()
    waiter = machine.start(TIER)
    _, log = waiter.communicate(timeout=120)
    assert (waiter.returncode, log) == (0, "")
    assert holder.poll() is None


@pytest.mark.parametrize("code", KINDS, ids=NAMES)
def test_without_a_usable_directory_there_are_no_turns_and_the_log_names_it(machine, code):
    machine.environment["SPILLWAY_TURNS_DIR"] = str(machine.turns / "missing")
    done = machine.start(code)
    _, log = done.communicate(timeout=120)
    assert done.returncode == 0 and "without taking turns" in log, log
    assert str(machine.turns / "missing") in log


@pytest.mark.parametrize("code", KINDS[1:], ids=NAMES[1:])
def test_a_wrong_number_of_turns_is_refused(machine, code):
    machine.environment["SPILLWAY_IO_TURNS"] = "many"
    done = machine.start(code)
    _, log = done.communicate(timeout=120)
    assert done.returncode != 0 and '"many" is no number of processes' in log, log
