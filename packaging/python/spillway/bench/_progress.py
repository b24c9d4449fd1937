"""Says on standard error what is measured now: a spinner with the time on a terminal where rich is installed, else lines."""

import contextlib
import sys
import time

from .. import _console

_show = None
# The bar of the spinner.
_bar = None


@contextlib.contextmanager
def shown():
    """Shows the stages that begin inside."""
    global _show
    try:
        with _spinner() if sys.stderr.isatty() else _lines() as _show:
            yield
    finally:
        _show = None


def stage(text):
    """Begins a stage; the one before has ended."""
    if _show:
        _show(text)


def say(line, out):
    """Prints a line at once; the spinner is hidden meanwhile."""
    if _bar:
        _bar.stop()
    _console.write(line, out)
    if _bar:
        _bar.start()


@contextlib.contextmanager
def _spinner():
    global _bar
    try:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        with _lines() as show:
            yield show
        return
    from rich.console import Console

    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    # Rows go to standard output, which rich would redirect to the terminal of standard error.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as _bar:
        task = _bar.add_task("starting", total=None)
        yield lambda text: _bar.update(task, description=text)
    _bar = None


@contextlib.contextmanager
def _lines():
    began = time.monotonic()
    yield lambda text: print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)
