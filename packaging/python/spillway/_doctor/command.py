"""The command `python -m spillway doctor JOB`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import _console
from ..deepspeed import job as deepspeed_job
from ..errors import InvalidArgumentError, LibraryNotFoundError
from . import files, machine, savings, script
from .findings import Findings

SERVED, NOT_SERVED, USAGE = 0, 1, 2
#: What the tool says at the end of an error of usage, in lines of its own.
_SEE_HELP = "\n\nFor more information, try '--help'."
#: Options of the tool's doctor that take a value.
_TAKES_VALUE = ("--dir",)


def concerns_a_job(arguments: Sequence[str]) -> bool:
    """True if the arguments of `doctor` name a job; else they are those of the tool, which tests this machine."""
    words = iter(arguments)
    for word in words:
        if word in _TAKES_VALUE:
            next(words, None)
        elif not word.startswith("-") or word == "--torch":
            return True
    return False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _refuse(f"{message}; python -m spillway doctor --torch --help lists the options")


def _refuse(message: str) -> NoReturn:
    print(f"spillway: doctor: {_printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(USAGE)


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        "python -m spillway doctor", description="Says what of a job Spillway serves. The job is read, never run.", allow_abbrev=False
    )
    parser.add_argument("job", nargs="?", help="a training script (*.py), a DeepSpeed configuration, or a model's config.json")
    parser.add_argument("--torch", action="store_true", help="any job with an optimizer of torch")
    parser.add_argument("--parameters", metavar="7B", help="the number of parameters of the model, for what it saves")
    parser.add_argument("--ranks", type=int, help="GPUs that train, one rank each")
    parser.add_argument("--gpu-memory", metavar="80GB", help="memory of a GPU")
    parser.add_argument("--host-memory", metavar="512GB", help="host memory of the machine")
    parser.add_argument(
        "--path", action="append", dest="paths", metavar="DIR:READ:WRITE:CAPACITY", help="a path of the tier, GB/s and size"
    )
    found = parser.parse_args(given)
    if (found.job is None) is not found.torch:
        parser.error("name a script, a configuration or --torch" if found.job is None else "a job and --torch exclude each other")
    return found


def run(given: Sequence[str]) -> int:
    """Prints what was found, and returns the exit status."""
    asked = _arguments(given)
    try:
        found, model = _found(asked)
        if asked.parameters is not None:
            model = {"parameters": asked.parameters}
        options = {name: value for name in ("ranks", "gpu_memory", "host_memory", "paths") if (value := getattr(asked, name)) is not None}
        saves, host_bytes = ["how much: add --parameters 7B, or the number of your model"], 0
        if model is None and options:
            savings.check(options)
        if model is not None:
            saves, plan = savings.planned(found, {**model, **options})
            if plan is not None:
                host_bytes = max((row["host_bytes"] for row in plan["strategies"] if row["strategy"] == found.strategy), default=0)
            if plan is not None and found.frameworks == ("torch",) and not found.in_use:
                found.lines = ["import spillway.torch", *savings.calls(found, plan)]
        found.obstacles += machine.obstacles(found.directories, found.frameworks, host_bytes)
    except InvalidArgumentError as error:
        _refuse(str(error).replace(_SEE_HELP, "; spillway plan --help lists the values").removeprefix("plan_model: error: "))
    except LibraryNotFoundError as error:
        print(f"spillway: {error}", file=sys.stderr)
        return NOT_SERVED
    _console.write("\n".join(_lines(asked.job, found, saves)))
    return SERVED if found.is_served else NOT_SERVED


def _found(asked: argparse.Namespace) -> tuple[Findings, dict[str, Any] | None]:
    """The findings about a job, and its model as the planner takes it, if the job describes one."""
    version = machine.version("deepspeed")
    if asked.torch:
        return script.of_torch(), None
    if asked.job.endswith(".py"):
        return script.findings(asked.job, version), None
    given = files.configuration(asked.job)
    if isinstance(given, dict) and "hidden_size" in given and not deepspeed_job.is_deepspeeds(given):
        return script.of_torch(), {"model": asked.job}
    found = deepspeed_job.findings(given, version)
    return found, None


def _lines(job: str | None, found: Findings, saves: Sequence[str]) -> list[str]:
    """The report."""
    lines = [f"{found.what}{f': {job}' if job else ''}", "", "served"]
    lines += [f"  {'yes' if part.reason is None else 'no':<4} {part.name:<22} {part.where}{_because(part.reason)}" for part in found.parts]
    if not found.parts:
        lines.append(
            "  no   nothing that Spillway replaces was found: optimizers of torch, DeepSpeed's CPU ops, offload to the CPU or NVMe"
        )
    lines += ["", "saves", *(f"  {line}" for line in saves), "", "stands against it"]
    for obstacle in found.obstacles:
        lines += [f"  {'refused: ' if obstacle.refuses else ''}{obstacle.text}", f"    to do: {obstacle.cure}"]
    if not found.obstacles:
        lines.append("  nothing was found")
    if found.lines:
        lines += ["", "add", *(f"  {line}" for line in found.lines)]
    return [_printable(line) for line in lines]


def _printable(text: str) -> str:
    """A text without what a terminal could take for a command, and without bytes that are no text."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _because(reason: str | None) -> str:
    return "" if reason is None else f": {reason}"
