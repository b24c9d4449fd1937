"""A signal whose handler raises at a random moment, for the tests of interrupted calls."""

import os
import random
import signal
import sys

import spillway


class Interrupt(Exception):
    """What the handler raises."""


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


def interrupted_anywhere(work, at):
    """Runs work(), and raises Interrupt at event number `at`: the begin of a function, or the end of one of C, outside of the tests. Python
    runs signal handlers there. True if it was raised."""
    left, tests = at, os.path.dirname(__file__)

    def profile(frame, event, _):
        nonlocal left
        if event not in ("call", "c_return") or os.path.dirname(frame.f_code.co_filename) == tests:
            return
        left -= 1
        if left < 0:
            sys.setprofile(None)
            raise Interrupt

    sys.setprofile(profile)
    try:
        work()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return left < 0


def interrupted(work, at, below=False):
    """Runs work(), and raises Interrupt when the package enters its function number `at`. True if it was raised. `below`: functions of
    subpackages count too."""
    left, package = at, os.path.dirname(spillway.__file__)

    def trace(frame, event, _):
        nonlocal left
        folder = os.path.dirname(frame.f_code.co_filename)
        if event == "call" and (folder == package or (below and folder.startswith(package + os.sep))):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interrupt

    sys.settrace(trace)
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    assert left >= 0, f"the exception in function {at} was lost"
    return False
