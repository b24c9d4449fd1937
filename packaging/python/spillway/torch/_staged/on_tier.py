"""Chunks on a tier: one extent for each, and extents of parameters, which only commits write.

A commit has the states, the parameters, and what the class has changed in its options and attributes. So a run that is killed begins at its
last commit with all of these.

Invariants:
- A chunk with another form gets a new extent. The extent of the last commit stays until the next one.
- After a failed transfer every step is refused until rollback() or load_state_dict()."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from ..._commit import Commit
from ..._snapshot import Exported, Snapshot
from ..._tier_options import number as whole_number
from ..._tier_options import payload_of
from ...errors import InvalidArgumentError, OutOfOrderError, SpillwayError, UnsupportedError
from ...tier import Tier
from ...tiered import Found, Prepared, Record, Tiered
from .._layout import described
from .._tensors import lasting
from .._tier_states import TierOptions, check_order, check_parameters
from . import words
from .buffers import Buffers
from .chunk import Chunk
from .home import Home
from .weights import Trained, Weights

_Result = TypeVar("_Result")
#: Takes over the chunks of a commit, and what the class had changed in its options and attributes.
Take = Callable[[list[Chunk], dict[str, Any]], None]
#: Returns the chunks, and what the class has changed in its options and attributes.
Present = Callable[[], tuple[list[Chunk], dict[str, Any]]]
#: How the names of extents of chunks begin.
_CHUNK = "chunk-"
#: Fields of TierOptions that states of any class have no use for.
_REFUSED = ("begin_from", "part_elements", "ratio", "speeds")


class Extents:
    """The extents of a tier as the update that a Tiered commits.

    Args:
        tier: The tier."""

    _user = ""

    def __init__(self, tier: Tier):
        self._tier = tier

    def _commit(self, step: int, payload: bytes, status: list[int]) -> None:
        """Commits, and appends the status of the call to `status`."""
        ended = self._tier._puts_end()
        self._tier._recorded(status, "spw_tier_commit", step, payload, len(payload))
        ended()

    def _begin_commit(self, step: int, payload: bytes, commit: Commit) -> Commit:
        """Begins a commit that continues beside steps."""
        commit._succeeded = self._tier._puts_end()
        return commit._begin(self._tier, self._tier, "spw_tier_commit_begin", step, payload)

    def _check_exported(self, found: Exported, directory: str, facts: Any) -> None:
        """Raises CorruptError if a snapshot lacks extents of its commit."""
        found.check_extents(directory, _extents_of(facts))

    def rollback(self) -> None:
        """Restores the extents of the last commit."""
        self._tier.rollback()

    def close(self) -> None:
        """Closes nothing: extents belong to their tier."""


def _extents_of(facts: dict[str, Any]) -> list[str]:
    """The names of the extents of a commit."""
    return [name for name, *_ in [*facts["weights"], *facts["chunks"]] if name is not None]


class Kept:
    """The extent of a chunk, and its transfer.

    Attributes:
        name, number: Those of the extent; None: the chunk has no bytes.
        coming: The buffer that a get fills, and its ticket.
        leaving: The ticket of a put."""

    def __init__(self, name: str | None, number: int):
        self.name, self.number = name, number
        self.coming: tuple[torch.Tensor, int] | None = None
        self.leaving: int | None = None


class OnTier(Home):
    """Chunks on a tier.

    Args:
        given: The `tier` argument.
        kind: The name of the class whose states these are.
        trained: Returns the present parameters.
        bound: Bytes of a chunk.

    Attributes:
        tiered: The open tier.
        count: Number of steps.

    Raises:
        InvalidArgumentError: The tier holds states of other parameters, or of another class."""

    def __init__(self, given: Any, kind: str, trained: Callable[[], Trained], bound: int):
        options = TierOptions.of(given)
        for field in _REFUSED:
            if getattr(options, field) is not None:
                raise UnsupportedError(f"Staged: {field} of TierOptions is for the optimizers of spillway.torch; leave it out")
        self.count, self._kind, self._bound = 0, kind, bound
        self._trained = trained
        self._weights, self._buffers = Weights(), Buffers(lambda: self.tiered.tier)
        self._asked = [path.directory and os.fspath(path.directory) for path in options.paths]
        self._serial, self._failed = 0, False
        self.tiered = Tiered(
            "Staged",
            "staged",
            options.place(),
            "pass another job to TierOptions, and load a checkpoint",
            "the tier holds states that no Staged has committed; pass other paths or another job",
            self._opened,
        )
        self.directory = options.state_dicts or self.tiered.directory

    def _opened(self, tier: Tier, committed: Record | None) -> Extents:
        if committed is not None:
            self._check(committed.facts, "the tier")
        return Extents(tier)

    def _check(self, facts: dict[str, Any], where: str) -> None:
        if facts["class"] != self._kind:
            raise InvalidArgumentError(
                f"Staged: {where} was committed with states of {facts['class']}, and the class is {self._kind}; pass that class, "
                "or another job for this one"
            )
        params, names, given = self._trained()
        check_parameters(facts, params, names)
        check_order(facts, given, names, where)

    def facts(self) -> dict[str, Any]:
        """As of the base."""
        return {"tier": self._asked, **({"closed": True} if self.tiered.closed else {})}

    # What the flow asks for.

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), a step, once all processes have made theirs."""

        def counted() -> _Result:
            self.check()
            found = self.watched(work)
            self.count += 1
            return found

        return self.tiered.step(counted, lambda: self.count)

    def check(self) -> None:
        """Raises an error if the states are not those of one step, or another process has other ones."""
        self.tiered.check()
        if self._failed:
            raise OutOfOrderError(
                "Staged: a transfer of the tier failed, so states and parameters may be of two steps; call rollback(), which returns to "
                "the last commit, or load_state_dict()"
            )

    def whole(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(), which replaces all states. If it does not end, other calls are refused until another one has."""
        self.tiered.check(also_mixed=True)
        found = self.tiered.whole(lambda: self.watched(work))
        self._failed = False
        return found

    def watched(self, work: Callable[[], _Result]) -> _Result:
        """Returns work(). If a transfer fails in it, or an interrupt ends it, steps are refused until states are replaced."""
        try:
            return work()
        except BaseException as error:
            # A refusal leaves whole states, and so does an error of the class. Any other may come between two of them.
            refused = isinstance(error, (InvalidArgumentError, UnsupportedError)) or error is self.of_class
            self._failed = self._failed or not refused
            raise
        finally:
            self.of_class = None

    def begin(self, chunk: Chunk) -> None:
        """Starts to read a chunk."""
        kept: Kept = chunk.kept
        if kept.name is None or kept.coming is not None:
            return
        self._end_put(kept)
        buffer = self._buffer(chunk)
        try:
            kept.coming = buffer, self.tiered.tier.get(kept.number, [buffer[: chunk.size]])
        except BaseException:
            self._buffers.give(buffer)
            raise

    def memory(self, chunk: Chunk) -> torch.Tensor:
        """The buffer with the states of a chunk."""
        kept: Kept = chunk.kept
        if kept.coming is None:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._arrived(kept)

    def blank(self, chunk: Chunk) -> torch.Tensor:
        """A buffer for the states of a new chunk."""
        return self._buffer(chunk) if chunk.size else torch.empty(0, dtype=torch.uint8, device="cpu")

    def keep(self, chunk: Chunk, memory: torch.Tensor) -> None:
        """Starts to write a chunk."""
        self.tiered.changes()
        if chunk.kept is None:
            name = None
            if chunk.size:
                self._serial += 1
                # A name has one size: a snapshot of another time may have one of this number.
                name = f"{_CHUNK}{self._serial:08}-{chunk.size}"
            chunk.kept = Kept(name, -1 if name is None else self.tiered.tier.define(name, [chunk.size]))
        if chunk.size:
            ticket = chunk.kept.leaving = self.tiered.tier.put(chunk.kept.number, [memory[: chunk.size]])
            self._buffers.leave(ticket, memory)

    def release(self, memory: torch.Tensor) -> None:
        """The buffer is free."""
        if len(memory):
            self._buffers.give(memory)

    def drop(self, chunk: Chunk) -> None:
        """Removes the extent of a chunk."""
        kept, chunk.kept = chunk.kept, None
        if kept is not None and kept.name is not None:
            self._end_get(kept)
            self._end_put(kept)
            self.tiered.changes()
            self.tiered.tier.remove(kept.number)

    def clear(self, chunks: list[Chunk]) -> None:
        """Removes the extents of all chunks."""
        self.rest(chunks)
        super().clear(chunks)
        self.tiered.changes()
        self._keep_only([extent.name for extent in self.tiered.tier.extents() if not extent.name.startswith(_CHUNK)])

    def _keep_only(self, names: Iterable[str]) -> None:
        """Removes all other extents."""
        known = {*names}
        for extent in self.tiered.tier.extents():
            if extent.name not in known:
                self.tiered.tier.remove(extent.number)

    def host_bytes(self, chunks: list[Chunk]) -> int:
        """Bytes of all buffers."""
        return self._buffers.bytes

    def _buffer(self, chunk: Chunk) -> torch.Tensor:
        return self._buffers.take(chunk.size, next(iter(chunk.entries)))

    def _end_put(self, kept: Kept) -> None:
        if kept.leaving is not None:
            self._buffers.end_until(kept.leaving)
        kept.leaving = None

    def _end_get(self, kept: Kept) -> None:
        if kept.coming is not None:
            self._buffers.give(self._arrived(kept))

    def _arrived(self, kept: Kept) -> torch.Tensor:
        """The buffer of a get that was begun, once it has ended."""
        assert kept.coming is not None
        buffer, ticket = kept.coming
        try:
            self.tiered.tier.wait(ticket)
        except Exception:
            self._buffers.lose(buffer)
            kept.coming = None
            raise
        kept.coming = None
        return buffer

    def _end_all(self, chunks: Sequence[Chunk]) -> None:
        """Ends all transfers of these chunks."""
        for chunk in chunks:
            self._end_get(chunk.kept)
        self._buffers.end_all()

    def rest(self, chunks: Sequence[Chunk]) -> None:
        """Ends all transfers of these chunks, without their errors."""
        for chunk in chunks:
            if chunk.kept is not None:
                with suppress(SpillwayError):
                    self._end_get(chunk.kept)
                chunk.kept.coming = chunk.kept.leaving = None
        self._buffers.forget()
        with suppress(SpillwayError):
            # Those that an interrupt has left.
            self.tiered.tier._transfer(())

    # Commits.

    @lasting
    def commit(self, present: Present, step: int | None, payload: bytes, wait: bool) -> Commit | None:
        """Makes states and parameters durable. An error in one process is an error in all.

        Args:
            present: Returns the chunks, and what the class has changed in its options and attributes.
            step, payload, wait: As for Staged.commit."""

        def prepared() -> Prepared:
            self.check()
            chunks, learned = self.watched(present)
            self.watched(lambda: self._end_all(chunks))
            facts = self._facts(chunks, learned)
            self.watched(lambda: self._weights.write(self.tiered.tier, self._trained(), facts["weights"]))
            return Prepared(whole_number(self.count if step is None else step, "step"), self.count, facts, payload_of(payload))

        return self.tiered.commit(prepared, wait)

    def _facts(self, chunks: Sequence[Chunk], learned: dict[str, Any]) -> dict[str, Any]:
        trained = self._trained()
        params, _, given = trained
        numbers = {param: number for number, param in enumerate(params)}
        for entry in (entry for chunk in chunks for entry in chunk.entries.values()):
            if entry.param not in numbers:
                raise InvalidArgumentError(
                    f"Staged.commit: {entry.name} has a state and is in no group; add it to one, or delete optimizer.state[parameter]; "
                    "nothing was committed"
                )
        return {
            "class": self._kind,
            "parameters": [*map(described, params)],
            "names": given,
            "stateless": [],
            "count": self.count,
            "serial": self._serial,
            "chunks": [[chunk.kept.name, chunk.size, words.written(chunk, numbers)] for chunk in chunks],
            "weights": Weights.divided(trained, (param for chunk in chunks for param in chunk.entries), self._bound),
            "learned": learned,
        }

    @lasting
    def resumed(self, committed: Record) -> tuple[list[Chunk], dict[str, Any]]:
        """Gives the parameters their values of a commit. Returns its chunks, and what the class had changed in its options and
        attributes."""
        facts, tier = committed.facts, self.tiered.tier
        self._keep_only(_extents_of(facts))
        self._weights.read(tier, self._trained(), facts["weights"])
        params, names, _ = self._trained()
        found = []
        for name, size, entries in facts["chunks"]:
            chunk = words.read(entries, size, params, names)
            chunk.kept = Kept(name, -1 if name is None else tier.define(name, [size]))
            found.append(chunk)
        self.count, self._serial = facts["count"], max(self._serial, facts["serial"])
        return found, facts["learned"]

    def resume(self, take: Take) -> None:
        """Begins with what was committed, in all processes."""
        committed = self.tiered.committed
        if committed is not None:
            self.tiered.place.together(lambda: self.whole(lambda: take(*self.resumed(committed))))

    def rollback(self, chunks: Sequence[Chunk], take: Take) -> None:
        """Returns to the last commit."""
        self.tiered.finish()
        self.tiered.check(also_mixed=True)
        committed = self.tiered.committed
        if committed is None:
            raise InvalidArgumentError("Staged.rollback: nothing was committed to the tier; construct the optimizer again")
        self._check(committed.facts, "the last commit")

        def back() -> None:
            self.rest(chunks)
            self.tiered.rollback()
            take(*self.resumed(committed))

        self.whole(back)

    def snapshot(self, directory: Any, bytes_per_second: int, keep: int | None) -> Snapshot:
        """Starts to write the last commit to a directory."""
        return self.tiered.snapshot(directory, bytes_per_second, keep)

    def restore(self, directory: Any, chunks: Callable[[], Sequence[Chunk]], present: Present, take: Take) -> Found:
        """Returns to a snapshot.

        Args:
            directory: As it was given to snapshot().
            chunks: Returns the present chunks.
            present, take: As for commit and rollback."""
        found = self.tiered.snapshot_of(directory, lambda record: self._check(record.facts, "the snapshot"))
        # The payload of the last commit belongs to an older step.
        self.tiered.keep(found, self.count, lambda: self.commit(present, None, b"", True))

        def back() -> None:
            self.rest(chunks())
            self.tiered.take(found)
            take(*self.resumed(found.record))

        try:
            self.whole(back)
        except BaseException:
            # After an error the states are those of the last commit.
            if self.tiered.committed is not None and not self.tiered.apart:
                self.rollback(chunks(), take)
            raise
        return found

    def close(self) -> None:
        """Closes the tier; states since the last commit are lost."""
        self.tiered.close()
        self._buffers.close()
