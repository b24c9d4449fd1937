"""Says on standard error what is measured now: a spinner with the time on a terminal where rich is installed, else lines."""

import contextlib
import sys
import time

_show = None


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


@contextlib.contextmanager
def _spinner():
    try:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        with _lines() as show:
            yield show
        return
    from rich.console import Console
    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda text: progress.update(task, description=text)


@contextlib.contextmanager
def _lines():
    began = time.monotonic()
    yield lambda text: print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)
