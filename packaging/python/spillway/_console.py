"""Standard output of the commands of this package. Output that cannot be written ends the command with status 1 and one line on standard
error, or without a line where the reader of a pipe has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO


def run(command: Callable[[], int | None]) -> NoReturn:
    """Runs the main function of a command, and ends the process with its status."""
    try:
        status = command()
    except SystemExit:
        # argparse ends the process after it has printed its help.
        write("", end="")
        raise
    except KeyboardInterrupt:
        # As a program that a signal has ended; also during the imports of a command.
        sys.exit(128 + signal.SIGINT)
    write("", end="")
    sys.exit(status)


def write(text: str, out: TextIO | None = None, end: str = "\n") -> None:
    """Prints a text at once; None: to standard output."""
    out = sys.stdout if out is None else out
    # Python has no standard output if its descriptor was closed before it began.
    if out is None:
        return
    try:
        print(text, file=out, end=end, flush=True)
    except OSError as error:
        # What is left in the buffer is written again when the file is closed.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, out.fileno())
            os.close(null)
        if not isinstance(error, BrokenPipeError):
            print(f"spillway: cannot write to standard output: {error.strerror}; the output is not complete", file=sys.stderr)
        sys.exit(1)
