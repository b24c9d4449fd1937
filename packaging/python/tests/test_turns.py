"""Proves that processes take turns on a device with tiers and with DeepSpeed's async_io: a transfer waits for the turn of another
process, a killed process gives its turn up, a stopped one is waited for once, and the end of a program waits for none. Each test has a
directory of turns of its own."""

import contextlib
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time

import numpy
import pytest
from interrupts import keyboard_interrupts

import spillway

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
# Opens, uses and closes one after the other. The timeout of a wait is argv[2].
TIERS = """
import sys, spillway
for number in range(3):
    with spillway.Tier([sys.argv[1]], job="one after the other", turns=1, turn_timeout=float(sys.argv[2])) as tier:
        extent = tier.define("x", [1 << 20])
        tier.wait(tier.put(extent, [bytearray(1 << 20)]))
        tier.commit(number)
"""
ENGINES = """
import ctypes, sys
from spillway import _abi, _native
data = ctypes.create_string_buffer(1 << 20)
for number in range(3):
    io, handle = ctypes.c_void_p(), ctypes.c_uint64()
    options = _abi.sized(_abi.IoOptions)
    options.turns, options.turn_timeout_ms = 1, round(1000 * float(sys.argv[2]))
    _native.call("spw_io_open", ctypes.byref(options), ctypes.byref(io))
    request = _abi.sized(_abi.IoRequest)
    request.path, request.buffer, request.bytes = f"{sys.argv[1]}/file".encode(), ctypes.addressof(data), len(data)
    _native.call("spw_io_write", io, ctypes.byref(request), ctypes.byref(handle))
    _native.call("spw_io_wait", io, ctypes.byref(handle), 1, -1, None)
    _native.call("spw_io_close", io, -1)
"""
# They end while a transfer waits for a turn: at the end of the program, or by Ctrl-C.
ENDS = {
    "tier": """
import sys, spillway
tier = spillway.Tier([sys.argv[1]], job="ends", turns=1, turn_timeout=600)
extent = tier.define("x", [1 << 20])
tier.put(extent, [bytearray(1 << 20)])
""",
    "commit": """
import sys, spillway
tier = spillway.Tier([sys.argv[1]], job="ends", turns=1, turn_timeout=600)
extent = tier.define("x", [1 << 20])
tier.put(extent, [bytearray(b"x" * (1 << 20))])
commit = tier.commit(7, wait=False)
""",
    "update": """
import sys, numpy, spillway
tier = spillway.Tier([sys.argv[1]], job="ends", turns=1, turn_timeout=600)
swap = spillway.Swap(tier, [1 << 20] * 4, host_memory=100 << 20)
swap.begin(spillway.Adam(lr=1e-3))
""",
    "snapshot": """
import sys, spillway
tier = spillway.Tier([sys.argv[1]], job="ends", turns=1, turn_timeout=600)
snapshot = tier.snapshot(sys.argv[1] + "/snapshot")
""",
    "async_io": """
import sys, torch
from spillway.deepspeed._io_ops import aio_handle
handle = aio_handle()
handle.async_pwrite(torch.full([1 << 20], 7, dtype=torch.uint8), sys.argv[1] + "/file")
""",
}
UPDATE_IN_A_BLOCK = """
import sys, time, spillway
with spillway.Tier([sys.argv[1]], job="ends", turns=1, turn_timeout=600) as tier:
    with spillway.Swap(tier, [1 << 20] * 4) as swap, swap.begin(spillway.Adam(lr=1e-3), speculative=True):
        print(flush=True)
        time.sleep(600)
"""
# What tier, update and snapshot find.
BEFORE = """
import sys, numpy, spillway
with spillway.Tier([sys.argv[1]], job="ends") as tier:
    with spillway.Swap(tier, [1 << 20] * 4) as swap:
        swap.fill([(numpy.full(1 << 20, 3, numpy.float32), None, None)] * 4)
        swap.commit(1)
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

    def start(self, code, timeout=600.0, **streams):
        command = [sys.executable, "-c", code, str(self.data), str(timeout)]
        process = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True, **streams)
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
    with keyboard_interrupts():
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


@pytest.mark.parametrize("code", [TIERS, ENGINES], ids=["tiers", "engines"])
def test_a_stopped_process_is_waited_for_once_by_tiers_and_engines_one_after_the_other(machine, code):
    machine.stopped_in_its_turn()
    waiter = machine.start(code, 0.3)
    _, log = waiter.communicate(timeout=120)
    assert waiter.returncode == 0, log
    assert log.count("no turn on the device") == 1, log


@pytest.mark.parametrize("code", [TIERS, ENGINES], ids=["tiers", "engines"])
def test_after_a_stopped_process_moves_again_there_are_turns_again(machine, code):
    holder = machine.stopped_in_its_turn()
    # What the first two find is forgotten once the turn was free.
    code = code.replace("range(3)", "range(4)") + "    print(number, flush=True)\n    sys.stdin.readline()\n"
    waiter = machine.start(code, 0.3, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def next_one():
        waiter.stdin.write("\n")
        waiter.stdin.flush()
        return waiter.stdout.readline()

    assert waiter.stdout.readline() == "0\n" and next_one() == "1\n"
    holder.kill()
    holder.wait()
    assert next_one() == "2\n"
    machine.stopped_in_its_turn()
    assert next_one() == "3\n"
    _, log = waiter.communicate("\n", timeout=120)
    assert waiter.returncode == 0 and log.count("no turn on the device") == 2, log


@pytest.mark.sampled(cases=5)
@pytest.mark.parametrize("by", ["end", "interrupt"])
@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_program_waits_for_no_turn_and_loses_nothing(machine, name, by):
    if name == "async_io" and importlib.util.find_spec("torch") is None:
        pytest.skip("async_io needs torch")
    assert machine.start(BEFORE).wait() == 0
    machine.stopped_in_its_turn()
    wait = "print(flush=True)\n" + ("" if by == "end" else "import time\ntime.sleep(600)\n")
    program = machine.start(ENDS[name] + wait, stdout=subprocess.PIPE)
    program.stdout.readline()
    if by == "interrupt":
        program.send_signal(signal.SIGINT)
    # The turn would come after 600 s. A wait until the library's own timeout, which async_io has, would be in the log.
    _, log = program.communicate(timeout=120)
    assert program.returncode == (0 if by == "end" else -signal.SIGINT), log
    assert "no turn on the device" not in log and "Error" not in log, log
    if name == "async_io":
        assert (machine.data / "file").read_bytes() == bytes([7]) * (1 << 20)
        return
    with spillway.Tier([machine.data], job="ends") as tier:
        assert tier.opened.step == (7 if name == "commit" else 1)
        if name == "commit":
            found = bytearray(1 << 20)
            tier.wait(tier.get(tier.define("x", [len(found)]), [found]))
            assert found == b"x" * len(found)
        with spillway.Swap(tier, [1 << 20] * 4) as swap:
            param = numpy.empty(1 << 20, numpy.float32)
            swap.read(0, param)
            assert (param == 3).all()
    assert not (machine.data / "snapshot").exists()


def test_ctrl_c_in_the_block_of_an_update_ends_a_program_without_a_turn(machine):
    assert machine.start(BEFORE).wait() == 0
    machine.stopped_in_its_turn()
    program = machine.start(UPDATE_IN_A_BLOCK, stdout=subprocess.PIPE)
    program.stdout.readline()
    program.send_signal(signal.SIGINT)
    _, log = program.communicate(timeout=120)
    assert program.returncode == -signal.SIGINT and "no turn on the device" not in log, log


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
