"""Episodes with signals whose handlers raise, and with stopped processes."""

import gc
import signal
import time

import numpy as np

from . import content
from .episode import Interrupt
from .processes import Child
from .tier_moves import BUSY, INVALID, LOCKED, TierMoves
from .tier_oracle import NEVER, Extent


class Signalled(TierMoves):
    """Moves that a signal may interrupt at any point, by an exception from its handler. The interrupted call is then
    in doubt: its data is old or new, and complete. Freed memory is allocated again and watched."""

    def __init__(self, episode):
        super().__init__(episode)
        self.watched = []

    def interrupted(self, name, extent=None, generation=None):
        """Allocates memory that the interrupted call may have freed, and marks it."""
        gc.collect()
        for size in extent.sizes if extent else ():
            self.watched.append(np.full(size, 0x77, np.uint8))
        del self.watched[:-6]
        if extent is not None and generation is not None:
            extent.seen |= {generation}
        if extent is not None:
            extent.lost = True

    def look(self):
        for array in self.watched:
            self.episode.check(
                (array == 0x77).all(),
                f"the library wrote to memory that was released after a signal: {content.describe(array, self.episode.seed)}",
            )

    def define_large(self, draw):
        name, sizes = f"extent {len(self.oracle.extents)}", [draw.choice((70000, 300000, 1 << 20))]
        number = self.finally_call("define", name, sizes).value
        self.oracle.extents[name] = Extent(name, self.oracle.next_ident(), sizes, number)
        return self.oracle.extents[name]

    def put_and_wait(self, draw):
        extent = self.pick(draw)
        if extent is None or getattr(extent, "lost", False) and len(self.oracle.extents) < 40:
            extent = self.define_large(draw)
        generation = self.oracle.next_generation()
        arrays = content.streams(self.episode.seed, extent.ident, generation, extent.sizes)
        lost = (BUSY,) if getattr(extent, "lost", False) else ()
        answer = self.unless_interrupted("put", extent.number, arrays, may=lost, show=(extent.name, generation))
        if answer is None:
            del arrays
            return self.interrupted("put", extent, generation)
        if not answer.ok:
            return None
        del arrays
        extent.writing = (answer.value, generation)
        extent.seen |= {generation}
        return self._wait_out(extent, answer.value, generation)

    def _wait_out(self, extent, ticket, generation):
        may = ()
        while (answer := self.unless_interrupted("wait", ticket, None, may=may)) is None:
            may = (INVALID,)
            self.interrupted("wait", extent)
        extent.writing = None
        if answer.ok and generation is not None:
            extent.seen = {generation}
        return answer

    def get_and_wait(self, draw):
        extent = self.pick(draw)
        if extent is None or NEVER in extent.seen:
            return
        arrays = [np.full(size, 0xEE, np.uint8) for size in extent.sizes]
        lost = (BUSY,) if getattr(extent, "lost", False) else ()
        answer = self.unless_interrupted("get", extent.number, arrays, may=lost, show=(extent.name,))
        if answer is None:
            del arrays
            self.interrupted("get", extent)
            return
        if answer.ok and self._wait_out(extent, answer.value, None).ok:
            self.judge(extent, arrays)

    def unless_interrupted(self, name, *arguments, **named):
        """The Answer of a call, or None if a signal interrupted it: then no traceback refers to
        its arguments any more."""
        try:
            return self.call(name, *arguments, **named)
        except Interrupt:
            return None

    def finally_call(self, name, *arguments, **named):
        """A call that is repeated if a signal interrupts it."""
        while True:
            try:
                return self.call(name, *arguments, **named)
            except Interrupt:
                named.pop("may", None)

    def commit_again(self, draw):
        self.step += 1
        payload = str(self.step).encode()
        record = self.oracle.snapshot(self.step, payload)
        self.oracle.doubtful.append(record)
        self.finally_call("commit", self.step, payload)
        self.oracle.commits(record)

    def reopen_again(self, draw):
        quiet = self.episode
        try:
            self.call("close", timeout=20.0)
        except Interrupt:
            self.call_quietly("close", self.tier.close, 20.0)
        self.tier = None
        end = time.monotonic() + 30
        may = (LOCKED,)
        while True:
            try:
                answer = self.open(may=may)
            except Interrupt:
                gc.collect()
                continue
            if answer.ok:
                break
            quiet.check(time.monotonic() < end, "after a close or an open that a signal ended, the tier is still locked")
            gc.collect()
            time.sleep(0.01)
        for extent in self.oracle.extents.values():
            extent.lost = False

    def call_quietly(self, name, function, *arguments):
        """A call that no signal interrupts."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        return self.episode.call(name, function, *arguments, may=(INVALID, *range(20, 28)))


def signals(episode):
    """Signal handlers that raise at random points around every call."""
    moves = Signalled(episode)
    moves.open()
    first = episode.random("first")
    while len(moves.oracle.extents) < 4:
        moves.define_large(first)

    def handler(*_):
        if episode.armed:
            episode.armed = False
            raise Interrupt

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        for number, draw in episode.steps():
            rare = 0 if "interrupted open" in episode.without else 1
            name = draw.choices(("put_and_wait", "get_and_wait", "commit_again", "reopen_again"), (12, 12, 3, rare))[0]
            signal.setitimer(signal.ITIMER_REAL, draw.choice((0.00002, 0.0001, 0.0003, 0.001)) * (0.2 + draw.random()))
            try:
                getattr(moves, name)(draw)
            except Interrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            moves.look()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    time.sleep(0.05)
    moves.look()
    moves.commit_again(first)
    moves.finally_call("verify", may=(BUSY,))
    moves.call("close", timeout=20.0)
    moves.open()
    moves.read_all()
    moves.close()


def stopped(episode):
    """A process that was stopped for longer than the I/O timeout continues with healthy paths."""
    moves = TierMoves(episode, io_timeout=4.0)
    child = Child(episode, _works, moves, name="the stopped process")
    child.expect("working")
    draw = episode.random("stops")
    for _ in range(2):
        time.sleep(0.1 + 0.3 * draw.random())
        child.kill(signal.SIGSTOP)
        time.sleep(5.0)
        child.kill(signal.SIGCONT)
    child.end(60)


def _works(child, moves):
    moves.open()
    episode, size, end = moves.episode, 48 << 20, time.monotonic() + 8.0
    extents = [moves.call("define", f"extent {n}", [size]).value for n in range(2)]
    arrays = [content.make(episode.seed, extent, 0, 1, size) for extent in extents]
    child.send(word="working")
    while time.monotonic() < end:
        tickets = [moves.call("put", extent, [array], show=(extent,)).value for extent, array in zip(extents, arrays)]
        for ticket in tickets:
            moves.call("wait", ticket, show=())
        moves.paths(None)
    moves.call("commit", 1)
    for extent, array in zip(extents, arrays):
        found = np.zeros(size, np.uint8)
        moves.call("wait", moves.call("get", extent, [found], show=()).value)
        episode.check(np.array_equal(found, array), f"extent {extent} holds {content.describe(found, episode.seed)}")
    moves.close()


KINDS = {"signals": signals, "stopped": stopped}
