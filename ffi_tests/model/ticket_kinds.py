"""Episodes with tickets without a wait, and with a close that times out."""

import gc
import signal
import time
import weakref

import numpy as np

import spillway

from . import content
from .processes import Child, status_number
from .tier_kinds import take_counts
from .tier_moves import BUSY, LOCKED, TierMoves
from .tier_oracle import Extent


def unwaited(episode):
    """Tickets without a wait: a commit releases the arrays that it has written, and a dropped read is
    released in the end."""
    moves = TierMoves(episode)
    moves.open()
    sizes = [3 << 20]
    extents = [Extent(f"extent {n}", moves.oracle.next_ident(), sizes, moves.call("define", f"extent {n}", sizes).value) for n in range(3)]
    alive, before = [], status_number("VmRSS")
    for number in range(min(24, max(6, episode.moves // 10))):
        for extent in extents:
            generation = moves.oracle.next_generation()
            arrays = content.streams(episode.seed, extent.ident, generation, sizes)
            alive.append(weakref.ref(arrays[0]))
            moves.call("put", extent.number, arrays, show=(extent.name, generation))
            extent.seen = {generation}
            del arrays
        moves.call("commit", number + 1)
        gc.collect()
    kept = sum(reference() is not None for reference in alive)
    episode.check(
        kept <= 2 * len(extents),
        f"{kept} of {len(alive)} arrays are still held after the commits that wrote them, {status_number('VmRSS') - before} KiB",
    )
    for extent in extents:
        array = np.zeros(sizes[0], np.uint8)
        moves.call("get", extent.number, [array], show=(extent.name,))
        end = time.monotonic() + 30
        del array
        while True:
            arrays = content.streams(episode.seed, extent.ident, 900000, sizes)
            answer = moves.call("put", extent.number, arrays, may=(BUSY,), show=(extent.name,))
            if answer.ok or time.monotonic() > end:
                break
            moves.call("commit", 1000, may=(BUSY,))
            time.sleep(0.05)
        episode.check(answer.ok, "30 s and some commits after a get whose ticket was lost its extent still raises BusyError")
        moves.call("wait", answer.value)
    moves.close()


def closing(episode):
    """A close that may time out happens with writes in flight, and then the process is stopped. The commits of the next
    owner stay complete when the old process continues, and closes the tier if it is still open."""
    moves = TierMoves(episode, io_timeout=20.0)
    draw = episode.random("closing")
    sizes = [draw.choice((4, 16, 48)) << 20]
    for number in range(max(1, episode.moves // 100)):
        old = Child(episode, _leaver, moves, number, sizes, name="the process that closes")
        old.expect("closed", 60)
        old.kill(signal.SIGSTOP)
        heir = Child(episode, _heir, moves, number, sizes, name="the next owner")
        heir.wait_readable(2)
        old.kill(signal.SIGCONT)
        heir.end(90)
        old.kill(signal.SIGTERM)
        old.end(30, allowed=(signal.SIGTERM,))
        Child(episode, _auditor, moves, number, sizes, name="the auditor").end(60)


def _leaver(child, moves, number, sizes):
    episode, draw = moves.episode, moves.episode.random("leaver", number)
    tier = episode.call("open", spillway.Tier, list(moves.bases), show=(), **moves.options).value
    extents = [episode.call("define", tier.define, f"extent {n}", sizes).value for n in range(3)]
    for n, extent in enumerate(extents):
        arrays = content.streams(episode.seed, n, 1000 + number, sizes)
        episode.call("put", tier.put, extent, arrays, show=(n,))
    timeout = draw.choice((0, 0, 0.001))
    answer = episode.call("close", tier.close, timeout, may=(23, 26), limit=10)
    child.send(word="closed", counts=take_counts(episode))
    if not answer.ok:
        # A tier whose close timed out is still open.
        episode.call("close", tier.close, limit=60)
    time.sleep(60)


def _heir(child, moves, number, sizes):
    episode = moves.episode
    end = time.monotonic() + 40
    while True:
        answer = episode.call("open", spillway.Tier, list(moves.bases), may=(LOCKED,), show=(), **moves.options)
        if answer.ok:
            break
        episode.check(time.monotonic() < end, "40 s after the close the tier is still locked")
        time.sleep(0.005)
    tier = answer.value
    for n in range(3):
        extent = episode.call("define", tier.define, f"extent {n}", sizes).value
        arrays = content.streams(episode.seed, n, 1 + number, sizes)
        episode.call("put", tier.put, extent, arrays, show=(n,))
    episode.call("commit", tier.commit, number + 1)
    child.send(word="committed")
    time.sleep(1)
    _audit(episode, tier, number, sizes)
    episode.call("close", tier.close)


def _auditor(child, moves, number, sizes):
    tier = moves.episode.call("open", spillway.Tier, list(moves.bases), show=(), **moves.options).value
    _audit(moves.episode, tier, number, sizes)
    moves.episode.call("close", tier.close)


def _audit(episode, tier, number, sizes):
    for n in range(3):
        array = np.zeros(sizes[0], np.uint8)
        extent = episode.call("define", tier.define, f"extent {n}", sizes).value
        episode.call("wait", tier.wait, episode.call("get", tier.get, extent, [array], show=(n,)).value)
        expected = content.make(episode.seed, n, 0, 1 + number, sizes[0])
        episode.check(np.array_equal(array, expected), f"extent {n} holds {content.describe(array, episode.seed)}")
    episode.call("verify", tier.verify)


KINDS = {"unwaited": unwaited, "closing": closing}
