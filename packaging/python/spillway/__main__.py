"""The command line of Spillway, as `spillway` and as `python -m spillway`.

spillway                   what this installation serves: library, machine, frameworks
spillway preload-path      the preload library: LD_PRELOAD=$(spillway preload-path) program
spillway library-path      libspillway.so, as this package loads it
spillway doctor JOB        what of a job it serves: a script, a DeepSpeed configuration, or --torch; see `spillway._doctor`
spillway watch DIR|PID     shows live what a running job does: steps, exposed seconds, paths, commits, memory
spillway metrics DIR|PID   the same once, in Prometheus' text format
spillway doctor ...        and all other commands: the tool in this package; `spillway --help` lists them

The report trains nothing and imports no framework: their versions are read from their packages."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import resource
import sys

from . import _abi, _console, _native
from ._import_hook import unheard
from .optim import TORCH_CLASSES

_URING = _abi.IO_BACKEND_URING


def main() -> None:
    _console.run(_main)


def _main() -> int:
    command = sys.argv[1] if len(sys.argv) == 2 else None
    if command == "preload-path":
        _console.write(_native.preload_path())
    elif command == "library-path":
        _console.write(_native.library_path())
    elif len(sys.argv) == 1:
        return _report()
    else:
        return _run_command(sys.argv[1], sys.argv[2:])
    return 0


def _run_command(command: str, arguments: list[str]) -> int:
    """Runs a command of this package, or else one of the tool, which takes the place of this process."""
    # Here: the other commands must be fast.
    if command == "doctor":
        from ._doctor import command as doctor

        if doctor.concerns_a_job(arguments):
            return doctor.run(arguments)
    elif command in ("watch", "metrics"):
        from ._live import command as live

        return live.watch(arguments) if command == "watch" else live.metrics(arguments)
    _run_tool([command, *arguments])
    return 0


def _run_tool(arguments: list[str]) -> None:
    tool = _native.tool_path()
    try:
        os.execv(tool, ["spillway", *arguments])
    except OSError as error:
        sys.exit(f"spillway: cannot run {tool}: {error.strerror}; reinstall the spillway wheel, or build the tool: make lib")


def _report() -> int:
    """Prints the report; returns the exit status."""
    from .errors import LibraryNotFoundError

    try:
        _console.write("\n".join(lines()))
    except LibraryNotFoundError as error:
        print(f"spillway: {error}", file=sys.stderr)
        return 1
    return 0


def lines() -> list[str]:
    """The report. Raises LibraryNotFoundError if the library cannot be loaded."""
    import spillway

    found = [
        f"spillway {spillway.__version__}, libspillway {spillway.library_version()} from {spillway.library_path()}",
        _row("kernel", spillway.kernel_name()),
        _row("threads", str(spillway.num_threads())),
        _row("memlock", _memlock()),
        _row("io_uring", _io_uring()),
    ]
    for name, describe in (("deepspeed", _deepspeed), ("torch", _torch), ("megatron-core", _megatron)):
        version = _version(name)
        found += ["", f"{name} {version}" if version else f"{name}: not installed"]
        if version:
            found += [_row(part, reason) for part, reason in describe(version)]
    return [*found, "", "More tests of this machine: spillway doctor"]


def _row(name: str, text: str) -> str:
    return f"  {name:<22} {text}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memlock() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "no limit" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB (ulimit -l)"


def _io_uring() -> str:
    options, engine = _abi.sized(_abi.IoOptions), ctypes.c_void_p()
    options.backend = _URING
    try:
        _native.call("spw_io_open", ctypes.byref(options), ctypes.byref(engine))
    except Exception as error:
        return f"no: {error}; threads do the I/O"
    _native.call("spw_io_close", engine, 1000)
    return "yes"


def _variable(name: str) -> tuple[str, str]:
    value = os.environ.get(name)
    if value in ("1", "require"):
        if reason := unheard(name):
            return name, f"{value}, but {reason}"
        return name, f"{value}: processes that inherit it are served"
    found = f"{value!r}, which has no effect" if value else "not set"
    return name, f"{found}: set it to 1, or call install() before the engine or optimizer is built"


def _deepspeed(version: str) -> list[tuple[str, str]]:
    from .deepspeed import _hook, _versions

    rows = [(op, _answer(_versions.ops_lack(version))) for op in _hook.OPS]
    rows += [(_SHORT[part], _answer(_versions.version_lacks(part, version))) for part in _versions.PARTS]
    return [*rows, _variable("SPILLWAY_DEEPSPEED")]


_SHORT = {
    "engine": "engine.destroy()",
    "states": "ZeRO-3 states, tier",
    "parameters": "ZeRO-3 weights, tier",
    "interleave": "interleave",
    "superoffload": "SuperOffload",
}


def _torch(version: str) -> list[tuple[str, str]]:
    text = "yes, on the CPU: from spillway.torch import "
    offload = ("offload", "yes, with parameters on a GPU or the CPU: from spillway.torch import offload")
    return [offload, *((name, f"{text}{name}") for name in TORCH_CLASSES)]


def _megatron(version: str) -> list[tuple[str, str]]:
    from .megatron import _versions

    return [("HybridDeviceOptimizer", _answer(_versions.version_lacks(version))), _variable("SPILLWAY_MEGATRON")]


def _answer(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"


if __name__ == "__main__":
    main()
