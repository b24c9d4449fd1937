"""The command line of Spillway, as `spillway` and as `python -m spillway`.

spillway                   what this installation serves: library, machine, frameworks
spillway preload-path      the preload library: LD_PRELOAD=$(spillway preload-path) program
spillway library-path      libspillway.so, as this package loads it
spillway doctor ...        and all other commands: the tool in this package; `spillway --help` lists them"""

from __future__ import annotations

import os
import sys

from . import _console, _native


def main() -> None:
    _console.run(_main)


def _main() -> int:
    command = sys.argv[1] if len(sys.argv) == 2 else None
    if command == "preload-path":
        _console.write(_native.preload_path())
    elif command == "library-path":
        _console.write(_native.library_path())
    elif len(sys.argv) == 1:
        from . import _report

        return _report.main()
    else:
        _run_tool(sys.argv[1:])
    return 0


def _run_tool(arguments: list[str]) -> None:
    tool = _native.tool_path()
    try:
        os.execv(tool, ["spillway", *arguments])
    except OSError as error:
        sys.exit(f"spillway: cannot run {tool}: {error.strerror}; reinstall the spillway wheel, or build the tool: make lib")


if __name__ == "__main__":
    main()
