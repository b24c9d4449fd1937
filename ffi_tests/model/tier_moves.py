"""Moves on one tier, by one thread, each checked against the oracle."""

import gc
import os
import shutil
import time

import numpy as np

import spillway
from spillway import tier as tier_module

from . import content
from .episode import Defect
from .tier_oracle import NEVER, Extent, Oracle

INVALID, LIMIT, BUSY, NO_SPACE, TIMEOUT, NOT_FOUND = 1, 4, 5, 21, 23, 25
CORRUPT, FOREIGN, LOCKED, NO_STATE, NO_STEP = 30, 32, 33, 36, 37
BLOCKS = (4096, 8192, 65536)


class TierMoves:
    """The tier of an episode and its expected state."""

    def __init__(self, episode, oracle=None, bases=None, **options):
        self.episode, self.oracle, self.tier = episode, oracle or Oracle(), None
        draw = episode.random("tier")
        if bases is None:
            bases = [episode.path(f"path{n}") for n in range(draw.choice((1, 1, 2, 3)))]
        for base in bases:
            os.makedirs(base, exist_ok=True)
        self.bases, self.commits, self.step = bases, 0, 0
        self.options = {
            "job": "model",
            "block_bytes": draw.choice(BLOCKS),
            "backend": draw.choice(("auto", "threads")),
            "durability": draw.choice(("data", "process", "full")),
            "direct": draw.random() < 0.5,
            "queue_depth": draw.choice((0, 1, 4)),
            **options,
        }

    # Opening and closing.

    def open(self, mode="auto", at_step=None, chosen=None, may=()):
        answer = self.episode.call(
            "open", spillway.Tier, list(self.bases), mode=mode, at_step=at_step, may=may, show=(mode, at_step), **self.options
        )
        if answer.ok:
            self.tier = answer.value
            opened = self.tier.opened
            self.oracle.opened(opened.step, opened.payload, chosen)
            self.step = opened.step or 0
            for extent in self.oracle.extents.values():
                extent.number = self.call("define", extent.name, extent.sizes).value
        return answer

    def call(self, name, *arguments, **named):
        return self.episode.call(name, getattr(self.tier, name), *arguments, **named)

    def close(self, timeout=None):
        """Closes the tier; returns True if the close succeeded."""
        tier, self.tier = self.tier, None
        for extent in self.oracle.extents.values():
            extent.forget()
        return self.episode.call("close", tier.close, timeout, may=(TIMEOUT, *range(20, 28))).ok

    def abandon(self):
        """Drops the last reference without a close."""
        for extent in self.oracle.extents.values():
            extent.forget()
        last, self.tier = [self.tier], None
        self.episode.call("drop", last.clear, show=())
        gc.collect()

    # Extents.

    def pick(self, draw, free=False):
        """An extent, or None if there is none."""
        known = [extent for extent in self.oracle.extents.values() if not free or not extent.busy]
        return draw.choice(known) if known else None

    def define(self, draw):
        name = f"extent {draw.randrange(6)}"
        known = self.oracle.extents.get(name)
        if known is not None and draw.random() < 0.3:
            self.call("define", name, [size + 1 for size in known.sizes], may=(FOREIGN,))
            return
        sizes = (
            known.sizes
            if known
            else [draw.choice((1, 15, 4096, 4097, 20000, 65536, 150000, 300001)) for _ in range(draw.choice((1, 1, 2, 3)))]
        )
        number = self.call("define", name, sizes).value
        if known is None:
            self.oracle.extents[name] = Extent(name, self.oracle.next_ident(), sizes, number)
        else:
            self.episode.check(number == known.number, f"{name} has number {number}, was {known.number}")
            known.removed = False

    def remove(self, draw):
        extent = self.pick(draw)
        if extent is not None and not extent.busy and self.call("remove", extent.number).ok:
            extent.removed = True

    def put(self, draw, extent=None):
        extent = extent or self.pick(draw)
        if extent is None:
            return None
        generation = self.oracle.next_generation()
        arrays = content.streams(self.episode.seed, extent.ident, generation, extent.sizes)
        path = draw.choice((None, None, *range(len(self.bases)), len(self.bases)))
        may = (BUSY,) if extent.busy else ()
        if path == len(self.bases):
            may = (*may, INVALID)
        answer = self.call("put", extent.number, arrays, path=path, may=may, show=(extent.name, generation))
        return self._begun(answer, extent, generation)

    def put_again(self, extent):
        """After a refused put, commits are refused until the extent is put again: a known defect
        that this model tolerates."""
        generation = self.oracle.next_generation()
        arrays = content.streams(self.episode.seed, extent.ident, generation, extent.sizes)
        answer = self.call("put", extent.number, arrays, may=(BUSY,), show=(extent.name, generation, "again"))
        if answer.ok:
            self._begun(answer, extent, generation)

    def put_striped(self, draw):
        extent = self.pick(draw)
        if extent is None:
            return
        generation = self.oracle.next_generation()
        arrays = content.streams(self.episode.seed, extent.ident, generation, extent.sizes)
        count = len(self.bases) if draw.random() < 0.9 else draw.randrange(5)
        counts = [draw.choice((0, 0, 1, 2, 5, 1000, (1 << 32) - 1)) for _ in range(count)]
        answer = self.call(
            "put_striped",
            extent.number,
            arrays,
            counts,
            may=(BUSY, INVALID) if extent.busy else (INVALID,),
            show=(extent.name, generation, counts),
        )
        self._begun(answer, extent, generation)

    def _begun(self, answer, extent, generation):
        if answer.status == INVALID and "refused put" in self.episode.without:
            self.put_again(extent)
        if not answer.ok:
            return None
        self.oracle.touched = True
        if extent.writing is not None:
            raise Defect(f"two puts of {extent.name} are in flight at once")
        extent.writing = (answer.value, generation)
        return answer.value

    def get(self, draw, extent=None):
        extent = extent or self.pick(draw)
        if extent is None:
            return
        some = draw.random() < 0.2
        arrays = [None if some and draw.random() < 0.5 else np.full(size, 0xEE, np.uint8) for size in extent.sizes]
        may = (BUSY,) if extent.writing else ()
        if NEVER in extent.seen:
            may = (*may, INVALID, NO_STATE, NOT_FOUND)
        answer = self.call("get", extent.number, arrays, may=may, show=(extent.name,))
        if answer.ok:
            # A read sees the contents at its start, whatever puts follow.
            extent.reading[answer.value] = (arrays, frozenset(extent.seen))

    def wait(self, draw, timeout=..., extent=None):
        """Waits for one ticket of an extent that has any."""
        busy = [known for known in self.oracle.extents.values() if known.busy or known.finished]
        extent = extent or (draw.choice(busy) if busy else None)
        if extent is None:
            self.call("wait", draw.randrange(1 << 40, 1 << 50), 0, may=(INVALID,))
            return
        tickets = list(extent.reading) + extent.finished + ([extent.writing[0]] if extent.writing else [])
        ticket = draw.choice(tickets)
        if timeout is ...:
            timeout = draw.choice((0, 0.0001, 0.01, 60.0, None))
        may = (TIMEOUT,) if timeout is not None and timeout < 60 else ()
        if not self.call("wait", ticket, timeout, may=may, limit=60 if timeout is None else timeout).ok:
            return
        if ticket in extent.reading:
            self.judge(extent, *extent.reading.pop(ticket))
        elif ticket in extent.finished:
            extent.finished.remove(ticket)
        else:
            extent.seen = {extent.writing[1]}
            extent.writing = None

    def judge(self, extent, arrays, seen=None):
        """Raises a Defect unless the arrays hold exactly one generation that reads may see."""
        if all(array is None for array in arrays):
            return None
        seen = extent.seen if seen is None else seen
        found = content.generation_of(arrays, self.episode.seed, extent.ident, seen - {NEVER}, extent.sizes)
        if found is None:
            held = " | ".join(content.describe(array, self.episode.seed) for array in arrays if array is not None)
            raise Defect(f"a read of {extent.name} (extent {extent.ident}) found none of the generations {sorted(seen)}: {held}")
        return found

    def settle(self):
        """Waits for all operations in flight."""
        draw = self.episode.random("settle")
        for extent in list(self.oracle.extents.values()):
            while extent.busy or extent.finished:
                self.wait(draw, None, extent)

    # The whole tier.

    def commit(self, draw, may=()):
        self.step += draw.choice((1, 1, 7))
        payload = f"{self.episode.seed}/{self.commits}".encode() * draw.choice((0, 1, 3, 400))
        self.commits += 1
        commit = self.oracle.snapshot(self.step, payload)
        self.oracle.doubtful.append(commit)
        answer = self.call("commit", self.step, payload, may=may, show=(self.step,))
        if answer.ok:
            self.oracle.commits(commit)
        return answer

    def rollback(self, draw):
        if any(extent.reading for extent in self.oracle.extents.values()):
            self.settle()
        doubtful, self.oracle.doubtful = self.oracle.doubtful, []
        self.call("rollback")
        self.oracle.doubtful = doubtful
        for extent in self.oracle.extents.values():
            if extent.writing:
                self.call("wait", extent.writing[0], None, may=(INVALID,))
                extent.writing = None
        self.oracle.rolls_back()
        self.learn()

    def learn(self):
        """After a rollback extents that were never committed may be gone."""
        names = {extent.name for extent in self.call("extents").value}
        for extent in list(self.oracle.extents.values()):
            if extent.name not in names:
                self.episode.check(extent.seen == {NEVER}, f"a rollback lost {extent.name}")
                del self.oracle.extents[extent.name]

    def verify(self, draw):
        self.call("verify", may=(BUSY,) if any(extent.busy for extent in self.oracle.extents.values()) else ())

    def evacuate(self, draw):
        number = draw.randrange(len(self.bases) + 1)
        may = [INVALID] if number == len(self.bases) else []
        if any(extent.busy for extent in self.oracle.extents.values()):
            may.append(BUSY)
        others = [n for n in range(len(self.bases)) if n != number and self.health(n) == "healthy"]
        if not others:
            may += [INVALID, NO_SPACE]
        self.call("evacuate", number, may=may)
        # It has waited for puts in flight, whose values gets find then.
        self.settle()
        self.oracle.touched = True
        if number < len(self.bases):
            self.call("set_health", number, "healthy")

    def health(self, number):
        return self.tier.paths()[number].health

    def set_health(self, draw):
        number = draw.randrange(len(self.bases) + 1)
        self.call("set_health", number, draw.choice(("healthy", "draining")), may=(INVALID,) if number == len(self.bases) else ())
        for path in range(len(self.bases)):
            self.call("set_health", path, "healthy")

    def extents(self, draw):
        listed = {extent.name: extent for extent in self.call("extents").value}
        for extent in self.oracle.extents.values():
            known = listed.get(extent.name)
            self.episode.check(known is not None, f"{extent.name} is not listed")
            self.episode.check(
                known.bytes == sum(extent.sizes) and known.streams == len(extent.sizes),
                f"{extent.name} is listed with {known.bytes} bytes in {known.streams} streams",
            )
            if not extent.busy:
                self.episode.check(
                    (known.generation == 0) == (extent.seen == {NEVER}), f"{extent.name} is listed with generation {known.generation}"
                )
        extra = set(listed) - set(self.oracle.extents)
        self.episode.check(not extra, f"extents are listed that were never defined: {sorted(extra)}")

    def paths(self, draw):
        for report in self.call("paths").value:
            self.episode.check(report.health in ("healthy", "draining"), f"path {report.directory} is {report.health}")

    def export(self, draw):
        """Exports, compares the files, and sometimes imports them again."""
        target = self.episode.path(f"export{draw.randrange(1 << 30)}")
        answer = self.call("export", target, may=(BUSY, NO_STATE), show=())
        if not answer.ok:
            self.episode.check(not os.path.exists(target), "an export that failed left a directory")
            return
        commit = self.oracle.committed
        self.episode.check(answer.value == commit.step, f"the export has step {answer.value}, not {commit.step}")
        if draw.random() < 0.5:
            self.import_from(target, commit)
        shutil.rmtree(target)

    def import_from(self, target, commit):
        may = (BUSY,) if any(extent.busy for extent in self.oracle.extents.values()) else ()
        extra = set(self.oracle.extents) - set(commit.extents)
        if extra or any(extent.removed for extent in self.oracle.extents.values()):
            return
        # The import commits, together with the puts to extents that the export lacks.
        merged = self.oracle.snapshot(commit.step, commit.payload)
        merged.extents.update({name: row for name, row in commit.extents.items() if row[2] != {NEVER}})
        answer = self.call("import_from", target, may=may, show=())
        commit = merged
        if answer.ok:
            self.episode.check(answer.value == commit.step, f"the import has step {answer.value}, not {commit.step}")
            self.step = commit.step
            self.oracle.commits(commit)
        else:
            # The header documents the state of the last commit.
            for extent in self.oracle.extents.values():
                extent.finish()
            self.oracle.rolls_back()
            self.learn()

    def second(self, draw):
        """Opens the tier a second time and calls steps() while this tier is open."""
        self.episode.call("second open", spillway.Tier, list(self.bases), job="model", may=(LOCKED,), show=()).ok and _fail(
            "a second open succeeded while the first lives"
        )
        self.episode.call("steps", tier_module.steps, list(self.bases), job="model", may=(LOCKED,), show=())
        collected = self.episode.call("collect", tier_module.collect, self.bases[0], job="model", may=(LOCKED,), show=())
        self.episode.check(not collected.ok, "a live tier was collected")

    def reopen(self, draw):
        """Ends the tier in one of its ways and opens it again in one of its modes."""
        way = draw.choice(("close", "close", "close timeout", "drop"))
        if way == "drop":
            self.abandon()
        else:
            self.close(None if way == "close" else draw.choice((0, 0.001, 5.0)))
        self.open_again(draw)

    def open_again(self, draw):
        found = self.steps()
        commit = self.oracle.committed
        if draw.random() < 0.1:
            other = draw.choice(("create", "resume"))
            state = found.last is not None
            if "resume empty" in self.episode.without and not state:
                other = "create"
            # A directory whose tier has no step belongs to an earlier run: create may refuse it.
            may = (NO_STATE,) if other == "resume" else (FOREIGN,)
            refused = self.open(other, may=may)
            if other == "resume" or state:
                self.episode.check(
                    refused.ok == (state and other == "resume"),
                    f"an open with mode {other} {'succeeded' if refused.ok else 'failed'}; a committed state "
                    f"is {'there' if state else 'not there'}",
                )
            if refused.ok:
                return
        if commit is not None and found.before is not None and draw.random() < 0.3 and not self.oracle.doubtful:
            may = (NO_STEP,) if self.oracle.touched else ()
            if not self.open("resume", found.before, chosen=self.oracle.before, may=may).ok:
                self.open()
        elif commit is not None and draw.random() < 0.3 and not self.oracle.doubtful:
            self.open("auto", found.last)
        else:
            self.open()

    def steps(self):
        """Checks the steps of the closed tier. A close that timed out may hold the lock for a while."""
        for _ in range(3000):
            answer = self.episode.call("steps", tier_module.steps, list(self.bases), job="model", may=(LOCKED,), show=())
            if answer.ok:
                break
            time.sleep(0.01)
        else:
            raise Defect("30 s after the end of a tier its directory is locked")
        legal = [commit and commit.step for commit in self.oracle.openable()]
        self.episode.check(answer.value.last in legal, f"steps() reports {answer.value.last} as the last step; possible are {legal}")
        if answer.value.before is not None and not self.oracle.doubtful:
            wanted = self.oracle.before
            self.episode.check(
                wanted is not None and wanted.step == answer.value.before,
                f"steps() reports {answer.value.before} as the step before the last; the model has {wanted and wanted.step}",
            )
        return answer.value

    def read_all(self):
        """Reads and checks every extent."""
        self.settle()
        draw = self.episode.random("read all")
        for extent in list(self.oracle.extents.values()):
            if NEVER not in extent.seen:
                arrays = [np.full(size, 0xEE, np.uint8) for size in extent.sizes]
                ticket = self.call("get", extent.number, arrays, show=(extent.name,)).value
                extent.reading[ticket] = (arrays, frozenset(extent.seen))
                self.wait(draw, None, extent)


def _fail(message):
    raise Defect(message)
