"""The expected contents of a tier: per extent the generations that a read may find, per commit those that
an open may find."""

import dataclasses

from .episode import Defect

NEVER = 0


@dataclasses.dataclass
class Commit:
    """A commit: its step, its payload, and for every extent its streams and its possible generations."""

    step: int
    payload: bytes
    extents: dict

    def record(self):
        return {
            "step": self.step,
            "payload": self.payload.hex(),
            "extents": {name: [ident, sizes, sorted(found)] for name, (ident, sizes, found) in self.extents.items()},
        }

    @staticmethod
    def of_record(record):
        return Commit(
            record["step"],
            bytes.fromhex(record["payload"]),
            {name: (ident, list(sizes), set(found)) for name, (ident, sizes, found) in record["extents"].items()},
        )


class Extent:
    """An extent of the open tier. `seen` holds the generations that reads may find."""

    def __init__(self, name, ident, sizes, number, seen=(NEVER,)):
        self.name, self.ident, self.sizes, self.number, self.seen = name, ident, list(sizes), number, set(seen)
        self.removed = self.failed = False
        self.writing = None
        self.reading, self.finished = {}, []

    def finish(self):
        """The put in flight has finished, and its ticket has not been waited for."""
        if self.writing is not None:
            self.finished.append(self.writing[0])
            self.writing = None

    def forget(self):
        """Forgets all tickets."""
        self.writing, self.reading, self.finished = None, {}, []

    @property
    def busy(self):
        return self.writing is not None or bool(self.reading)


class Oracle:
    """`committed` is the last commit that succeeded; `doubtful` holds those that began and did not return success."""

    def __init__(self):
        self.extents, self.committed, self.before, self.doubtful = {}, None, None, []
        self.generation, self.idents = 0, 0
        # Whether anything was written since the last commit; if so, it may have replaced the step before.
        self.touched = False

    def next_generation(self):
        self.generation += 1
        return self.generation

    def next_ident(self):
        self.idents += 1
        return self.idents

    def snapshot(self, step, payload):
        """The commit that a call would make now."""
        extents = {}
        for extent in self.extents.values():
            if not extent.removed:
                writing = extent.writing
                found = set(extent.seen) if writing is None else {writing[1]}
                extents[extent.name] = (extent.ident, extent.sizes, found)
        return Commit(step, payload, extents)

    def commits(self, commit):
        self.before, self.committed, self.doubtful = self.committed, commit, []
        self.touched = False
        for extent in list(self.extents.values()):
            if extent.removed:
                del self.extents[extent.name]
            else:
                extent.seen = set(commit.extents[extent.name][2])
                extent.finish()

    def rolls_back(self):
        """Reads see the last commit again; an extent that the commit lacks has no contents."""
        known = self.committed.extents if self.committed else {}
        for extent in list(self.extents.values()):
            extent.removed = False
            extent.seen = set(known[extent.name][2]) if extent.name in known else {NEVER}

    def openable(self):
        """The commits that an open may find; None means that nothing is committed."""
        return [self.committed, *self.doubtful]

    def opened(self, step, payload, chosen=None):
        """Records the result of an open; raises a Defect if that result is illegal."""
        legal = self.openable() if chosen is None else [chosen]
        for commit in legal:
            if commit is None and step is None:
                break
            if commit is not None and step == commit.step:
                if payload != commit.payload:
                    raise Defect(
                        f"the open found step {step} with another payload than was committed: {payload[:60]!r}, not {commit.payload[:60]!r}"
                    )
                break
        else:
            raise Defect(f"the open found step {step}; possible are {[commit and commit.step for commit in legal]}")
        if commit is not self.committed:
            self.before = None
        self.committed, self.doubtful = commit, []
        self.extents = {}
        for name, (ident, sizes, found) in (commit.extents if commit else {}).items():
            self.extents[name] = Extent(name, ident, sizes, None, found)
            self.idents = max(self.idents, ident)
        return commit
