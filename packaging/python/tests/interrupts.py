"""Signals whose handlers raise, for the tests of interrupted calls."""

import contextlib
import gc
import os
import random
import signal
import sys

import spillway


class Interrupt(Exception):
    """What the handler raises."""


class OwnInterrupt(spillway.OutOfOrderError):
    """What a handler raises that has called the package."""

    def __init__(self):
        super().__init__("of a signal handler")


@contextlib.contextmanager
def keyboard_interrupts():
    """SIGINT raises KeyboardInterrupt here and in the processes that start meanwhile. Background jobs of a shell ignore the signal, and so
    do the processes that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Ticking:
    """Raises Interrupt from a signal handler at random moments of during(), and at no other moment."""

    def __init__(self):
        self.count, self._on = 0, False

    def __enter__(self):
        self._before = signal.signal(signal.SIGALRM, self._ring)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _ring(self, *_):
        # The kernel may give the signal to another thread, and Python then runs this handler after the
        # timer was stopped.
        if self._on:
            self._on = False
            self.count += 1
            raise Interrupt

    def during(self, work, after=None):
        """Returns the result of work(), or None if it was interrupted. The signal comes after that number of seconds."""
        try:
            self._on = True
            signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-6, 3e-4) if after is None else after)
            try:
                return work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            return None
        finally:
            self._on = False


def interrupted(work, at, below=False, error=Interrupt):
    """Runs work(), and raises `error` when the package enters its function number `at`. True if it was raised. `below`: functions of
    subpackages count too."""
    package = os.path.dirname(spillway.__file__)
    return _interrupted(
        work, at, lambda event, folder: event == "call" and (folder == package or (below and folder.startswith(package + os.sep))), error
    )


def interrupted_anywhere(work, at):
    """As `interrupted`, at event number `at`: the begin of a function, or the end of one of C, outside of the tests. Python runs signal
    handlers there."""
    tests = os.path.dirname(__file__)
    return _interrupted(work, at, lambda event, folder: event in ("call", "c_return") and folder != tests, Interrupt)


def interrupted_in(work, at, inside):
    """As `interrupted_anywhere`, in files of the folder `inside` only."""
    return _interrupted(work, at, lambda event, folder: event in ("call", "c_return") and folder == inside, Interrupt)


def _interrupted(work, at, counts, error):
    left = at

    def profile(frame, event, _):
        nonlocal left
        if counts(event, os.path.dirname(frame.f_code.co_filename)):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise error

    # Python prints an exception in a finalizer, and continues: garbage of other tests is not freed meanwhile.
    gc.disable()
    sys.setprofile(profile)
    try:
        work()
    except error:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    assert left >= 0, f"the exception at event {at} was lost"
    return False
