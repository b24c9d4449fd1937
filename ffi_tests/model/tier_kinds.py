"""Episodes on one tier: with one thread, with several, with kills, and with competing opens."""

import os
import signal
import threading
import time

import numpy as np

import spillway

from . import content
from .processes import Child
from .tier_moves import BUSY, LOCKED, TierMoves
from .tier_oracle import NEVER, Commit, Extent

WEIGHTS = {
    "define": 6,
    "remove": 2,
    "put": 24,
    "put_striped": 8,
    "get": 20,
    "wait": 30,
    "commit": 8,
    "rollback": 3,
    "verify": 2,
    "evacuate": 2,
    "set_health": 2,
    "extents": 3,
    "paths": 2,
    "export": 1,
    "second": 1,
    "reopen": 2,
}


def one_move(moves, draw, weights=None):
    weights = weights or WEIGHTS
    name = draw.choices(list(weights), list(weights.values()))[0]
    getattr(moves, name)(draw)


def single(episode):
    """All moves, by one thread."""
    moves = TierMoves(episode)
    moves.open()
    moves.define(episode.random("first"))
    for _, draw in episode.steps():
        one_move(moves, draw)
    finish(moves)


def finish(moves):
    """The end of an episode: reads and checks everything, closes, opens and reads again."""
    moves.read_all()
    moves.call("verify")
    moves.close()
    moves.open()
    moves.read_all()
    moves.close()


def threads(episode):
    """Several threads, each with its own extents, while another thread commits, verifies and reads."""
    moves = TierMoves(episode)
    moves.open()
    oracle, ends, stop = moves.oracle, [], threading.Event()
    workers = []
    for number in range(3):
        mine = []
        for n in range(2):
            name, sizes = f"thread {number} extent {n}", [episode.random(number, n).choice((5000, 70000, 200001))]
            mine.append(Extent(name, oracle.next_ident(), sizes, moves.call("define", name, sizes).value))
        workers.append(threading.Thread(target=_guarded, args=(ends, _worker, moves, number, mine, stop)))
        for extent in mine:
            oracle.extents[extent.name] = extent
    for worker in workers:
        worker.start()
    committed = _guarded(ends, _committer, moves, stop)
    stop.set()
    for worker in workers:
        worker.join(60)
        episode.check(not worker.is_alive(), "a thread did not end within 60 s")
    if ends:
        raise ends[0]
    moves.settle()
    step, extents = committed
    oracle.doubtful, oracle.committed = [], step and Commit(step[0], step[1], extents)
    moves.call("verify")
    moves.close()
    moves.open()
    moves.read_all()
    moves.close()


def _guarded(ends, body, *arguments):
    try:
        return body(*arguments)
    except BaseException as error:
        ends.append(error)
        arguments[-1].set()
        return None, {}


def _worker(moves, number, mine, stop):
    episode = moves.episode
    while not stop.is_set():
        draw = episode.random("thread", number, len(mine), moves.oracle.next_generation())
        extent = draw.choice(mine)
        if draw.random() < 0.5:
            generation = moves.oracle.next_generation()
            arrays = content.streams(episode.seed, extent.ident, generation, extent.sizes)
            extent.begun = generation
            answer = moves.call("put", extent.number, arrays, may=(BUSY,), show=(extent.name, generation))
            if answer.ok:
                moves.call("wait", answer.value, draw.choice((None, 20.0)))
                extent.seen = {generation}
        elif NEVER not in extent.seen:
            arrays = [np.full(size, 0xEE, np.uint8) for size in extent.sizes]
            answer = moves.call("get", extent.number, arrays, may=(BUSY,), show=(extent.name,))
            if answer.ok:
                moves.call("wait", answer.value, None)
                moves.judge(extent, arrays)


def _committer(moves, stop):
    """Commits with the lowest and highest generation that each extent can have: the earlier one, and the
    one that was begun."""
    episode, oracle, last, extents = moves.episode, moves.oracle, None, {}
    for number, draw in episode.steps():
        if stop.is_set():
            break
        what = draw.choice(("commit", "commit", "verify", "extents", "paths", "export"))
        if what == "commit":
            lowest = {extent.name: min(extent.seen) for extent in oracle.extents.values()}
            payload = str(number).encode()
            if moves.call("commit", number + 1, payload, may=(BUSY,), show=(number + 1,)).ok:
                last = (number + 1, payload)
                extents = {}
                for extent in oracle.extents.values():
                    highest = max(getattr(extent, "begun", NEVER), lowest[extent.name])
                    extents[extent.name] = (extent.ident, extent.sizes, set(range(lowest[extent.name], highest + 1)))
        elif what == "export":
            target = episode.path(f"export{number}")
            moves.call("export", target, may=(BUSY, 36), show=())
        else:
            moves.call(what, may=(BUSY,) if what == "verify" else ())
        time.sleep(draw.random() * 0.002)
    return last, extents


def kill(episode):
    """A worker is killed at any moment; the next open, in any legal mode, finds a legal and complete commit."""
    moves = TierMoves(episode, durability=episode.random("durability").choice(("data", "process")))
    for number in range(max(2, episode.moves // 60)):
        if number in episode.drop:
            continue
        draw = episode.random("round", number)
        child = Child(episode, _victim, moves, number, name="the worker")
        _follow(child, moves.oracle, draw)
        moves.open_again(draw)
        moves.read_all()
        moves.verify(draw)
        if draw.random() < 0.3:
            child = Child(episode, _refused, moves, name="the second opener")
            child.end(30)
        moves.close(draw.choice((None, 10.0)))


def _victim(child, moves, number):
    """Moves until it is killed, and announces each commit before and after it. Reads and puts are those
    of a single thread."""
    moves.open()
    moves.episode.drop = frozenset()
    child.send(word="opened", step=moves.tier.opened.step)
    weights = {**WEIGHTS, "commit": 16, "reopen": 0, "second": 0, "export": 0, "rollback": 1}
    oracle, commit = moves.oracle, moves.oracle.commits

    def commits(record):
        commit(record)
        child.send(word="committed", counts=take_counts(moves.episode))

    oracle.commits, snapshot = commits, oracle.snapshot

    def begins(step, payload):
        record = snapshot(step, payload)
        child.send(word="commits", record=record.record(), generation=oracle.generation, idents=oracle.idents)
        return record

    oracle.snapshot = begins
    for turn in range(100000):
        one_move(moves, moves.episode.random("victim", number, turn), weights)


def take_counts(episode):
    counts = dict(episode.counts)
    episode.counts.clear()
    return counts


def _follow(child, oracle, draw):
    """Lets the worker run for a while, kills it, and collects its messages."""
    end = time.monotonic() + draw.choice((0.0, 0.02, 0.1, 0.3)) * draw.random()
    first = child.expect("opened")
    oracle.opened(first["step"], oracle.committed.payload if oracle.committed else b"")
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.01))
    child.kill()
    oracle.touched = True
    for message in child.end(30, allowed=(signal.SIGKILL,)):
        if message["word"] == "commits":
            record = Commit.of_record(message["record"])
            oracle.generation, oracle.idents = message["generation"] + 1000, message["idents"]
            oracle.doubtful = [record]
        elif message["word"] == "committed":
            oracle.before, oracle.committed, oracle.doubtful = oracle.committed, oracle.doubtful[0], []


def _refused(child, moves):
    bases, options = moves.bases, moves.options
    answer = moves.episode.call("second process opens", spillway.Tier, list(bases), may=(LOCKED,), show=(), **options)
    moves.episode.check(not answer.ok, "a second process opened the tier while the first lives")


def race(episode):
    """Several processes compete for one tier; one at a time owns it, and each finds the state that
    the one before left."""
    moves = TierMoves(episode)
    moves.open()
    moves.close()
    shared = np.memmap(episode.path("owner"), np.int64, "w+", shape=(2,))
    children = [Child(episode, _racer, moves, number, name=f"racer {number}") for number in range(2)]
    for child in children:
        child.end(60)
    del shared


def _racer(child, moves, number):
    episode, shared = moves.episode, np.memmap(moves.episode.path("owner"), np.int64, "r+", shape=(2,))
    for turn in range(max(3, episode.moves // 30)):
        draw = episode.random("racer", number, turn)
        end = time.monotonic() + 20
        while True:
            answer = episode.call("open", spillway.Tier, list(moves.bases), may=(LOCKED,), show=(), **moves.options)
            if answer.ok or time.monotonic() > end:
                break
            time.sleep(0.001)
        episode.check(answer.ok, "a tier stayed locked for 20 s")
        tier = answer.value
        episode.check(shared[0] == 0, f"process {os.getpid()} opened the tier while {shared[0]} has it")
        shared[0] = os.getpid()
        size, last = 50000, int(shared[1])
        extent = episode.call("define", tier.define, "one", [size]).value
        episode.check((tier.opened.step or 0) == last, f"the open found step {tier.opened.step}; {last} was committed last")
        array = np.zeros(size, np.uint8)
        if last:
            episode.call("wait", tier.wait, episode.call("get", tier.get, extent, [array], show=()).value)
            expected = content.make(episode.seed, 1, 0, last, size)
            episode.check(np.array_equal(array, expected), f"step {last} holds {content.describe(array, episode.seed)}")
        new = content.make(episode.seed, 1, 0, last + 1, size)
        ticket = episode.call("put", tier.put, extent, [new], show=()).value
        if draw.random() < 0.5:
            episode.call("wait", tier.wait, ticket)
        episode.call("commit", tier.commit, last + 1)
        shared[1], shared[0] = last + 1, 0
        answer = None
        episode.call("close", tier.close)
        del tier


KINDS = {"tier": single, "threads": threads, "kill": kill, "race": race}
