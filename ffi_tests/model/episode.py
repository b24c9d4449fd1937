"""One episode: a seed, its moves, their results, and a watchdog over every call.

A move is one public call. A result is legal if the caller listed its status; every other result is a Defect. Each
move has its own random generator, seeded with the seed and the step number. A step can thus be left out without
changing the others."""

import collections
import faulthandler
import os
import random
import sys
import threading
import time

from spillway import SpillwayError

ANY = frozenset(range(1, 100)) - {9}
#: Seconds by which a call may miss its timeout on a busy machine.
SLACK = 10.0
HANG = 86


def without():
    """The names in known.txt, or in SPILLWAY_MODEL_WITHOUT."""
    given = os.environ.get("SPILLWAY_MODEL_WITHOUT")
    if given is not None:
        return frozenset(filter(None, given.split(",")))
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "known.txt")) as lines:
        return frozenset(line.partition(":")[0].strip() for line in lines if ":" in line and not line.startswith("#"))


class Defect(Exception):
    """The library broke a documented promise."""


class Interrupt(Exception):
    """The exception that the model's own signal handlers raise."""


class Answer:
    """The value that a call returned, or the exception that it raised."""

    __slots__ = ("value", "error")

    def __init__(self, value=None, error=None):
        self.value, self.error = value, error

    @property
    def ok(self):
        return self.error is None

    @property
    def status(self):
        return 0 if self.error is None else self.error.status


class Episode:
    """`directory` belongs to this episode alone. `drop` holds the numbers of steps that are left out."""

    def __init__(self, kind, seed, moves, directory, drop=()):
        self.kind, self.seed, self.moves, self.directory, self.drop = kind, seed, moves, directory, frozenset(drop)
        self.counts, self.children = collections.Counter(), []
        # Names of known defects; moves that would trigger them are left out.
        self.without = without()
        # For tests of the model: arrays have one byte changed.
        self.spoiled = False
        # The pipe on which this process writes to its parent.
        self.out = None
        self.armed = False
        self._lock, self._running = threading.Lock(), {}
        self._trace = os.open(os.path.join(directory, "trace"), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.watch()

    def random(self, *where):
        """A random generator for one place of the episode."""
        return random.Random(f"{self.seed}/{'/'.join(map(str, where))}")

    def steps(self):
        """(number, generator) of each step that is not left out."""
        for number in range(self.moves):
            if number not in self.drop:
                self.note(f"# {number}")
                yield number, self.random(number)

    def path(self, *names):
        return os.path.join(self.directory, *names)

    def note(self, text):
        """A line of the trace, which outlives the process."""
        os.write(self._trace, (text + "\n").encode())

    def call(self, name, function, *arguments, may=(), limit=30.0, show=None, **named):
        """Makes one move. `may` lists the legal statuses besides 0; `limit` is the number of seconds
        that it may take."""
        self.note(f"{name} {arguments if show is None else show}{named or ''}")
        me, begun = threading.get_ident(), time.monotonic()
        self._running[me] = (name, begun, limit + SLACK)
        error = value = None
        try:
            self.armed = True
            value = function(*arguments, **named)
            self.armed = False
        except SpillwayError as caught:
            error = caught.with_traceback(None)
            error.__context__ = error.__cause__ = None
        except Interrupt:
            self._count(name, "interrupted")
            raise
        finally:
            self.armed = False
            took = time.monotonic() - begun
            self._running.pop(me, None)
        self._count(name, "ok" if error is None else f"{type(error).__name__} {error.status}")
        if error is not None:
            self.note(f"    -> {error.status} {error}")
            if error.status not in may:
                raise Defect(f"{name} returned the status {error.status}, which is not allowed here: {error}")
        if took > limit + SLACK:
            raise Defect(f"{name} took {took:.1f} s, at most {limit:.1f} s expected")
        return Answer(value, error)

    def check(self, holds, message):
        if not holds:
            raise Defect(message)

    def begin_process(self):
        """For a forked child: resets the counts, and replaces locks that a thread of the parent may hold."""
        self._lock = threading.Lock()
        self.counts, self.children = collections.Counter(), []

    def watch(self):
        """Starts the watchdog of this process; a child calls it again."""
        self._running.clear()
        threading.Thread(target=self._watch, daemon=True).start()

    def _count(self, name, outcome):
        with self._lock:
            self.counts[f"{name}: {outcome}"] += 1

    def _watch(self):
        while True:
            time.sleep(0.2)
            now = time.monotonic()
            for name, begun, limit in list(self._running.values()):
                if now - begun > limit + 5:
                    self.note(f"HANG {name} for {now - begun:.0f} s")
                    sys.stderr.write(f"HANG: {name} for {now - begun:.0f} s\n")
                    faulthandler.dump_traceback(all_threads=True)
                    sys.stderr.flush()
                    os._exit(HANG)
