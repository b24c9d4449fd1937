"""Proves that `python -m spillway` says what an installation serves, without training and without importing a framework. It names
the library, the machine, and for each installed framework the parts that are served or the reason why not."""

import io
import json
import os
import subprocess
import sys

import pytest

import spillway
from spillway import __main__ as report
from spillway import _log


def run(environment, *arguments, **extra):
    return subprocess.run([sys.executable, *arguments], env={**environment, **extra}, capture_output=True, text=True)


# What a process of the same environment finds. The process of the tests may have other packages in sys.path, and another kernel.
FACTS = """
import importlib.metadata, json, spillway
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({"library": f"libspillway {spillway.library_version()} from {spillway.library_path()}", "kernel": spillway.kernel_name(),
                  "versions": {name: version(name) for name in ("deepspeed", "torch", "megatron-core")}}))
"""


def test_the_report_names_library_machine_and_frameworks(child_environment):
    facts, done = run(child_environment, "-c", FACTS), run(child_environment, "-m", "spillway")
    assert (facts.returncode, done.returncode) == (0, 0), facts.stderr + done.stderr
    facts = json.loads(facts.stdout)
    assert facts["library"] in done.stdout
    for name in ("kernel", "threads", "memlock", "io_uring"):
        assert f"\n  {name} " in done.stdout
    assert f"  kernel                 {facts['kernel']}\n" in done.stdout
    if facts["versions"]["torch"]:
        assert "  offload                yes, with parameters on a GPU or the CPU" in done.stdout
    for framework, version in facts["versions"].items():
        assert (f"\n{framework} {version}\n" if version else f"{framework}: not installed") in done.stdout


COMMANDS = [["spillway"], ["spillway", "library-path"], ["spillway", "preload-path"], ["spillway.bench", "--help"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_output_that_cannot_be_written_is_one_line_and_a_status(child_environment, command):
    # Without a buffer argparse sees that its help cannot be written, and ignores it.
    environment = {name: value for name, value in child_environment.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", *command], env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "spillway: cannot write to standard output: No space left on device; the output is not complete\n",
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", *command], env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_no_framework_is_imported(child_environment):
    code = (
        "from spillway.__main__ import lines; import sys; lines(); "
        "print([name for name in ('torch', 'deepspeed', 'megatron') if name in sys.modules])"
    )
    assert run(child_environment, "-c", code).stdout == "[]\n"


def test_what_is_not_served_has_its_reason(monkeypatch):
    versions = {"deepspeed": "0.18.9", "torch": "2.13.0", "megatron-core": "0.99.0"}
    monkeypatch.setattr(report, "_version", versions.get)
    text = "\n".join(report.lines())
    assert "\ndeepspeed 0.18.9\n  cpu_adam               yes\n" in text
    assert "interleave             no: interleaved updates are tested with DeepSpeed 0.19.5 to 0.19.x, and this is 0.18.9" in text
    assert "HybridDeviceOptimizer  no: " in text and "from spillway.torch import AdamW" in text
    versions["deepspeed"] = "0.13.1"
    assert "cpu_adam               no: the ops are tested from DeepSpeed 0.14.0" in "\n".join(report.lines())


def test_a_variable_without_the_pth_file_is_reported(monkeypatch):
    monkeypatch.setattr(report, "_version", {"deepspeed": "0.19.8"}.get)
    monkeypatch.delenv("SPILLWAY_DEEPSPEED", raising=False)
    assert "SPILLWAY_DEEPSPEED     not set: set it to 1, or call install()" in "\n".join(report.lines())
    monkeypatch.setenv("SPILLWAY_DEEPSPEED", "1")
    monkeypatch.delitem(sys.modules, "_spillway_hook", raising=False)
    assert "this Python runs no spillway.pth" in "\n".join(report.lines())
    monkeypatch.setitem(sys.modules, "_spillway_hook", sys)
    assert "1: processes that inherit it are served" in "\n".join(report.lines())


def test_the_counters_say_that_the_variable_has_no_effect_without_the_pth_file(repository, child_environment):
    code = (
        "import spillway.deepspeed as own\nprint(own.active().get('not_installed'))\nown.install()\nprint('not_installed' in own.active())"
    )

    def said(**further):
        environment = {**child_environment, "PYTHONPATH": str(repository / "packaging" / "python"), **further}
        return subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True).stdout.splitlines()

    told, afterwards = said(SPILLWAY_DEEPSPEED="1")
    assert "runs no spillway.pth" in told and "call install()" in told and afterwards == "False"
    assert said(SPILLWAY_DEEPSPEED="0") == ["None", "False"]


def test_a_library_that_is_missing_is_an_error(child_environment):
    done = run(child_environment, "-m", "spillway", SPILLWAY_LIBRARY="/nowhere/libspillway.so")
    assert (done.returncode, done.stdout) == (1, "") and "cannot load /nowhere/libspillway.so" in done.stderr


LOGGED = """
import spillway
from spillway import _log
if FUNCTION:
    spillway.set_log(lambda level, message: print(level, message, flush=True), LEVEL)
for _ in range(3):
    _log.first_served("deepspeed", "cpu_adam")
_log.first_served("deepspeed", "async_io")
"""


STEPPED = """
import spillway.torch, torch, sys
lines = []
spillway.set_log(lambda level, message: lines.append(message) if " served by " in message else None, "info")
param = torch.nn.Parameter(torch.ones(8))
param.grad = torch.ones(8)
class Own(spillway.torch.AdamW):
    pass
for cls in (spillway.torch.AdamW, spillway.torch.Lion, spillway.torch.AdamW, Own):
    optimizer = cls([param])
    optimizer.param_groups[0]["lr"] = -1.0
    try:
        optimizer.step()
    except spillway.InvalidArgumentError:
        lines.append("refused")
    optimizer.param_groups[0]["lr"] = 1e-3
    for _ in range(3):
        optimizer.step()
    lines.append("stepped")
spillway.torch.AdamW([param], tier=spillway.torch.TierOptions(None, durability="process")).step()
spillway.set_log(None)
print("\\n".join(lines))
"""


def test_the_first_step_of_each_class_of_torch_logs_a_line(child_environment):
    pytest.importorskip("torch")
    done = run(child_environment, "-c", STEPPED)
    by = f"served by libspillway {spillway.library_version()}, kernel {spillway.kernel_name()}"
    assert done.stdout.splitlines() == [
        "refused",
        f"torch: AdamW {by}",
        "stepped",
        "refused",
        f"torch: Lion {by}",
        "stepped",
        "refused",
        "stepped",
        "refused",
        f"torch: Own {by}",
        "stepped",
    ], done.stderr


def test_the_first_served_call_of_each_op_logs_a_line(child_environment):
    def logged(function, level="info", **extra):
        text = LOGGED.replace("FUNCTION", repr(function)).replace("LEVEL", repr(level))
        done = run({name: value for name, value in child_environment.items() if name != "SPILLWAY_LOG"}, "-c", text, **extra)
        assert done.returncode == 0, done.stderr
        # The library logs lines of its own.
        return ["\n".join(line for line in text.splitlines() if " served by " in line) for text in (done.stdout, done.stderr)]

    ops = [
        f"deepspeed: {op} served by libspillway {spillway.library_version()}, kernel {spillway.kernel_name()}"
        for op in ("cpu_adam", "async_io")
    ]
    assert logged(False, SPILLWAY_LOG="info")[1].splitlines() == [f"spillway: {op}" for op in ops]
    assert logged(False)[1] == logged(False, SPILLWAY_LOG="warn")[1] == ""
    assert logged(True)[0].splitlines() == [f"info {op}" for op in ops] and logged(True, SPILLWAY_LOG="info")[1] == ""
    assert logged(True, "warn")[0] == ""


def test_a_log_line_that_fails_ends_no_call(monkeypatch):
    """What is logged has been done already: an exception would look like a call that failed."""
    seen = []
    monkeypatch.setattr(_log, "_said", set())
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    spillway.set_log(lambda level, message: 1 / 0, "info")
    try:
        _log.first_served("deepspeed", "cpu_adam")
    finally:
        spillway.set_log(None)
    assert {one.exc_type for one in seen} == {ZeroDivisionError}
    monkeypatch.setenv("SPILLWAY_LOG", "info")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    _log.first_served("deepspeed", "async_io")
    monkeypatch.undo()
