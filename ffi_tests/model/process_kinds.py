"""Episodes with forked children, with threads that run during a close, and with objects that are
dropped without a close."""

import ctypes
import gc
import os
import threading
import time

import numpy as np

import spillway
from spillway import _abi

from . import content
from .engine_kinds import c
from .episode import ANY
from .processes import Child, status_number
from .tier_moves import BUSY, LOCKED, TierMoves

QUICK = 3.0


class Objects:
    """One of each object, in use."""

    def __init__(self, moves):
        episode = self.episode = moves.episode
        self.moves, self.tier = moves, moves.tier
        self.base = episode.path("swapped")
        os.makedirs(self.base, exist_ok=True)
        self.other = spillway.Tier([self.base], job="swap")
        self.swap = spillway.Swap(self.other, [5000, 7000])
        self.swap.fill([(np.ones(n, np.float32), None, None) for n in (5000, 7000)])
        self.other_arrays = [np.ones(n, np.float32) for n in (5000, 7000)]
        self.speculation = spillway.Speculation(2)
        self.adam = spillway.Adam(lr=1e-3)
        self.tensors = [tuple(np.ones(3000, np.float32) for _ in range(4)) for _ in range(2)]
        self.speculation.begin(self.adam)
        self.speculation.submit(0, [self.tensors[0]])
        self.io, self.block = ctypes.c_void_p(), ctypes.c_void_p()
        c(episode, "spw_io_open", None, ctypes.byref(self.io))
        options = _abi.sized(_abi.PinnedOptions)
        options.flags = _abi.PINNED_FLAG_NO_LOCK
        c(episode, "spw_pinned_alloc", ctypes.byref(options), 8192, ctypes.byref(self.block))
        ctypes.memset(self.block, 0x5A, 8192)
        self.pinned = ctypes.c_void_p()
        c(episode, "spw_pinned_alloc", None, 5000, ctypes.byref(self.pinned))
        ctypes.memset(self.pinned, 0x5B, 5000)

    def end(self):
        """All objects still work in the process that owns them."""
        episode = self.episode
        for address, byte, size in ((self.block, 0x5A, 8192), (self.pinned, 0x5B, 5000)):
            episode.check(ctypes.string_at(address, size) == bytes([byte]) * size, "a child changed memory of its parent")
        c(episode, "spw_pinned_free", self.block)
        c(episode, "spw_pinned_free", self.pinned)
        c(episode, "spw_io_close", self.io, 5000)
        episode.call("submit", self.speculation.submit, 1, [self.tensors[1]], show=())
        total = episode.call("local_result", self.speculation.local_result).value
        episode.call("resolve", self.speculation.resolve, total)
        episode.call("finish", self.speculation.finish)
        self.speculation.close()
        episode.call("swap commit", self.swap.commit, 1)
        array = np.zeros(5000, np.float32)
        episode.call("swap read", self.swap.read, 0, array, show=())
        episode.check((array == 1).all(), "a subgroup changed by a fork")
        episode.call("swap close", self.swap.close)
        episode.call("close", self.other.close)
        with episode.call("open", spillway.Tier, [self.base], job="swap", mode="resume").value as again:
            episode.check(again.opened.step == 1, "the swap's commit is gone")


def fork(episode):
    """Children that use inherited objects get errors or their own results in time, and do the parent no harm."""
    moves = TierMoves(episode)
    moves.open()
    first = episode.random("first")
    for _ in range(4):
        moves.define(first)
    for extent in list(moves.oracle.extents.values()):
        moves.put(first, extent)
    moves.settle()
    moves.commit(first)
    objects, stop = Objects(moves), threading.Event()
    hammers = [threading.Thread(target=_hammer, args=(moves, stop)) for _ in range(2)]
    for hammer in hammers:
        hammer.start()
    try:
        for number in range(max(2, episode.moves // 40)):
            if number not in episode.drop:
                Child(episode, _heritage, objects, number, name="a forked child").end(60)
    finally:
        stop.set()
        for hammer in hammers:
            hammer.join()
    moves.put(first)
    moves.commit(first)
    objects.end()
    moves.read_all()
    moves.close()
    Child(episode, _reads, moves, name="the next process").end(60)


def _hammer(moves, stop):
    """Keeps the locks of the tier busy, so that forks happen while they are held."""
    while not stop.is_set():
        moves.tier.paths()
        moves.tier.extents()


def _reads(child, moves):
    moves.open("resume")
    moves.read_all()
    moves.call("verify")
    moves.close()


def _heritage(child, objects, number):
    episode = objects.episode
    draw = episode.random("heir", number)
    names = [
        "define",
        "put",
        "get",
        "wait",
        "commit",
        "rollback",
        "verify",
        "evacuate",
        "extents",
        "paths",
        "set_health",
        "export",
        "swap",
        "spec",
        "pinned",
        "io",
        "own",
        "reopen",
    ]
    draw.shuffle(names)
    for name in names[: draw.randrange(3, len(names))]:
        _inherited(objects, name, number)
    for name in draw.sample(["destroy", "close", "drop", "swap close", "spec close", "io close"], 3):
        _ended(objects, name)


def _inherited(objects, name, number):
    """Uses an object of the parent once. Every result is legal except an internal error, a crash or a hang; a commit
    must have no effect."""
    episode, tier, extent = objects.episode, objects.tier, 0
    arrays = [np.zeros(size, np.uint8) for size in objects.tier._streams.get(extent, (1,))]
    table = {
        "define": (tier.define, "of a child", [5]),
        "put": (tier.put, extent, arrays),
        "get": (tier.get, extent, arrays),
        "wait": (tier.wait, 1, 0.1),
        "commit": (tier.commit, 999),
        "rollback": (tier.rollback,),
        "verify": (tier.verify,),
        "evacuate": (tier.evacuate, 0),
        "extents": (tier.extents,),
        "paths": (tier.paths,),
        "set_health": (tier.set_health, 0, "draining"),
        "export": (tier.export, episode.path(f"child{number}")),
        "swap": (objects.swap.commit, 77),
        "spec": (objects.speculation.local_result, 0.1),
    }
    if name in table:
        function, *arguments = table[name]
        answer = episode.call("child " + name, function, *arguments, may=ANY, limit=QUICK, show=())
        if name in ("commit", "put", "evacuate", "rollback", "swap"):
            episode.check(not answer.ok, f"{name} of a forked child succeeded on its parent's object")
    elif name == "pinned":
        start = ctypes.c_void_p()
        c(episode, "spw_pinned_free", objects.block, may=ANY, limit=QUICK)
        if c(episode, "spw_pinned_alloc", None, 100, ctypes.byref(start), may=ANY, limit=QUICK).ok:
            ctypes.memset(start, 1, 100)
            c(episode, "spw_pinned_free", start, may=ANY, limit=QUICK)
    elif name == "io":
        buffer, request, handle = np.zeros(10, np.uint8), _abi.sized(_abi.IoRequest), ctypes.c_uint64()
        request.path, request.buffer, request.bytes = os.devnull.encode(), buffer.ctypes.data, 10
        c(episode, "spw_io_read", objects.io, ctypes.byref(request), ctypes.byref(handle), may=ANY, limit=QUICK)
        c(episode, "spw_io_wait", objects.io, None, _abi.IO_ALL, 100, None, may=ANY, limit=QUICK)
    elif name == "reopen":
        answer = episode.call(
            "child open", spillway.Tier, list(objects.moves.bases), may=(LOCKED,), limit=QUICK, show=(), **objects.moves.options
        )
        episode.check(not answer.ok, "a forked child opened the tier that its parent has")
    else:
        _own(episode, number)


def _own(episode, number):
    """A tier and a step of the child's own work."""
    base = episode.path(f"own{number}")
    os.mkdir(base)
    with episode.call("own open", spillway.Tier, [base], job="own", limit=QUICK, show=()).value as tier:
        array = np.full(9000, 7, np.uint8)
        extent = episode.call("own define", tier.define, "own", [9000], limit=QUICK).value
        episode.call("own wait", tier.wait, episode.call("own put", tier.put, extent, [array], limit=QUICK, show=()).value, 20)
        episode.call("own commit", tier.commit, 1, limit=QUICK)
    spillway.Adam(lr=1e-3).step([tuple(np.ones(1 << 17, np.float32) for _ in range(4))])


def _ended(objects, name):
    episode = objects.episode
    if name == "destroy" and objects.tier._cell:
        episode.call("child destroy", objects.tier.destroy, may=ANY, limit=QUICK)
    elif name == "close":
        episode.call("child close", objects.tier.close, 1, may=ANY, limit=QUICK)
    elif name == "drop":
        episode.call("child drop", objects.other.__del__, may=ANY, limit=QUICK)
    elif name == "swap close":
        episode.call("child swap close", objects.swap.close, may=ANY, limit=QUICK)
    elif name == "spec close":
        episode.call("child spec close", objects.speculation.close, may=ANY, limit=QUICK)
    elif name == "io close":
        c(episode, "spw_io_close", objects.io, 500, may=ANY, limit=QUICK)


def crowd(episode):
    """Closes or destroys a tier while threads use it. The threads' calls end with an error, and the next
    open finds the commit."""
    size = 300000
    for number in range(max(2, episode.moves // 30)):
        if number in episode.drop:
            continue
        draw, base = episode.random("crowd", number), episode.path(f"crowd{number}")
        os.mkdir(base)
        tier = episode.call("open", spillway.Tier, [base], job="crowd", show=()).value
        extents = [episode.call("define", tier.define, f"extent {n}", [size]).value for n in range(3)]
        for extent in extents:
            array = content.make(episode.seed, extent, 0, 1, size)
            episode.call("wait", tier.wait, episode.call("put", tier.put, extent, [array], show=(extent,)).value)
        episode.call("commit", tier.commit, 1)
        failures, workers = [], []
        for n, extent in enumerate(extents):
            workers.append(threading.Thread(target=_uses, args=(episode, tier, extent, size, number, failures)))
        for worker in workers:
            worker.start()
        time.sleep(draw.choice((0.001, 0.01, 0.05)) * draw.random())
        destroy = draw.random() < 0.3
        episode.call("destroy" if destroy else "close", tier.destroy if destroy else tier.close, may=(BUSY, *range(20, 28)))
        for worker in workers:
            worker.join(30)
            episode.check(not worker.is_alive(), "a thread beside a close did not end within 30 s")
        if failures:
            raise failures[0]
        tier = None
        gc.collect()
        again = episode.call("open", spillway.Tier, [base], job="crowd", show=()).value
        episode.check(
            again.opened.step == (None if destroy else 1), f"after the opens of several processes the open found step {again.opened.step}"
        )
        episode.call("close", again.close)


def _uses(episode, tier, extent, size, number, failures):
    """Uses the tier until a call reports that it is closed."""
    try:
        for turn in range(100000):
            draw = episode.random("uses", number, extent, turn)
            name = draw.choice(("put", "get", "paths", "extents", "verify"))
            if name in ("put", "get"):
                arrays = [np.zeros(size, np.uint8)]
                answer = episode.call(name, getattr(tier, name), extent, arrays, may=ANY, show=(extent,))
                if answer.ok:
                    answer = episode.call("wait", tier.wait, answer.value, may=ANY)
            else:
                answer = episode.call(name, getattr(tier, name), may=ANY, show=())
            if not answer.ok and "closed" in str(answer.error):
                return
    except BaseException as error:
        failures.append(error)


def dropped(episode):
    """Objects are created and dropped many times without a close; nothing remains of them."""
    rounds, resident = max(10, min(50, episode.moves // 8)), 0
    for number in range(rounds):
        if number == rounds // 2:
            resident = status_number("VmRSS")
        draw, base = episode.random("dropped", number), episode.path("base")
        os.makedirs(base, exist_ok=True)
        tier = episode.call("open", spillway.Tier, [base], job="drop", show=()).value
        swap = episode.call("swap open", spillway.Swap, tier, [4000], show=()).value
        episode.call("swap fill", swap.fill, [(np.ones(4000, np.float32), None, None)], show=())
        extent = episode.call("define", tier.define, "other", [50000]).value
        ticket = episode.call("put", tier.put, extent, [np.ones(50000, np.uint8)], show=()).value
        if draw.random() < 0.5:
            episode.call("wait", tier.wait, ticket)
        if draw.random() < 0.5:
            episode.call("swap commit", swap.commit, number + 1)
        order = [tier, swap] if draw.random() < 0.5 else [swap, tier]
        del tier, swap
        gc.collect()
        while order:
            episode.call("drop", order.pop, show=())
            gc.collect()
    grown = status_number("VmRSS") - resident
    episode.check(grown < 8192, f"{rounds - rounds // 2} released objects left {grown} KiB")


KINDS = {"fork": fork, "crowd": crowd, "dropped": dropped}
