"""Proves that io_failures.md is correct: every case runs with Spillway's async_io and with DeepSpeed's compiled
op as the control, each in a process of its own. In no case may Spillway lose data without an exception, hang,
or end the process.

SPILLWAY_BLESS=1 writes the observed results into the table. Here a preloaded library makes every N-th request of the
thread backend fail. src/io/tests/faults.rs does the same inside the engine, with every kind of fault."""

import collections
import json
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
TABLE = HERE / "io_failures.md"
START = 300
# The text that the message of Spillway's exception must contain.
WORDS = {
    "file_shorter_than_asked": "reading 65536 bytes at offset 0 of file: the file ends at byte 32768",
    "file_truncated_during_the_read": "reading 67108864 bytes at offset 0 of file: the file ends at byte 1048576",
    "read_only_file": r"opening file: Permission denied \(errno 13\)",
    "missing_directory": r"opening no/file: No such file or directory \(errno 2\)",
    "full_disk": r"ing 16777216 bytes at offset 0 of file: No space left on device \(errno 28\)",
    "file_size_limit": r"ing 8388608 bytes at offset 0 of file: File too large \(errno 27\)",
}
# NotFoundError is an IoError, and a FileNotFoundError.
RAISED = collections.defaultdict(lambda: "IoError", missing_directory="NotFoundError")
SECONDS = collections.defaultdict(lambda: 60, handles_come_and_go_while_other_threads_run=400)
CONTROL_SECONDS = collections.defaultdict(lambda: 30, handles_come_and_go_while_other_threads_run=100)


def rows():
    """{case: (Spillway's cell, DeepSpeed's cell)} of the table."""
    cells = re.findall(r"^\| ([\w, -]+) \| ([^|]+) \| ([^|]+) \|$", TABLE.read_text(), re.M)
    return {title: (ours.strip(), theirs.strip()) for title, ours, theirs in cells if title != "case"}


def title_of(case):
    return case.replace("_", " ").replace("io uring", "io_uring")


def names():
    return re.findall(r"^@case\ndef (\w+)", (HERE / "io_cases.py").read_text(), re.M)


class Server:
    """io_cases.py with one op."""

    def __init__(self, op, fault):
        package = HERE.parents[1] / "packaging" / "python"
        # The tests have sampled.py.
        environment = {**os.environ, "LD_PRELOAD": str(fault), "PYTHONPATH": f"{package}:{package / 'tests'}"}
        self._process = subprocess.Popen(
            [sys.executable, HERE / "io_cases.py", op], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answer(START)

    def run(self, case, directory, seconds):
        directory.mkdir(exist_ok=True)
        directory.chmod(0o777)
        line = json.dumps({"case": case, "directory": str(directory), "seconds": seconds})
        print(line, file=self._process.stdin, flush=True)
        seen = json.loads(self._answer(seconds + 60))
        seen["output"] = (directory / "output").read_text()[-2000:]
        return verdict(seen), seen

    def _answer(self, seconds):
        assert select.select([self._process.stdout], [], [], seconds)[0], "the server does not answer"
        return self._process.stdout.readline()

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)


def verdict(seen):
    if "hung" in seen:
        return "hangs"
    if "status" in seen:
        return "ends the process"
    if "raised" in seen:
        return "raises"
    if seen["said"] == -1:
        return "returns -1"
    return "works" if seen["intact"] else "silent loss"


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        pytest.skip("no C compiler for the faults")
    library = tmp_path_factory.mktemp("fault") / "libfault.so"
    subprocess.run(
        [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, HERE / "io_fault.c", "-ldl"], check=True
    )
    return library


@pytest.fixture(scope="module")
def ours(fault):
    server = Server("spillway", fault)
    yield server
    server.close()


@pytest.fixture(scope="module")
def theirs(fault, compiled):
    compiled("async_io")
    server = Server("deepspeed", fault)
    yield server
    server.close()


@pytest.fixture
def place(tmp_path):
    """A folder for a case; for full_disk a file system of 8 MiB."""
    mounted = []

    def make(case, op):
        folder = tmp_path / op
        folder.mkdir()
        if case == "full_disk":
            if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]).returncode:
                pytest.skip("a small file system needs root and mount")
            mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", names())
def test_spillway(ours, place, name):
    seen, detail = ours.run(name, place(name, "ours"), SECONDS[name])
    assert seen in ("works", "raises"), detail
    bless(name, 0, seen)
    assert seen == rows()[title_of(name)][0], detail
    if seen == "raises":
        assert detail["raised"] == RAISED[name] and re.search(WORDS[name], detail["message"]), detail


@pytest.mark.parametrize("name", names())
def test_the_control(theirs, place, name):
    seen, detail = theirs.run(name, place(name, "theirs"), CONTROL_SECONDS[name])
    bless(name, 1, seen)
    assert seen in rows()[title_of(name)][1].split(" or "), detail


def test_the_table_has_a_row_for_every_case():
    assert list(rows()) == [*map(title_of, names()), "ZeRO-3 with files on a device with 4 KiB sectors"]


def bless(name, column, seen):
    if not os.environ.get("SPILLWAY_BLESS"):
        return
    found = rows()
    cells = list(found.get(title_of(name), ("?", "?")))
    if seen not in cells[column].split(" or "):
        cells[column] = seen
    found[title_of(name)] = cells
    head = TABLE.read_text().split("|---|---|---|\n")[0] + "|---|---|---|\n"
    order = [*map(title_of, names()), *found]
    TABLE.write_text(head + "".join(f"| {title} | {' | '.join(found[title])} |\n" for title in sorted(found, key=order.index)))
