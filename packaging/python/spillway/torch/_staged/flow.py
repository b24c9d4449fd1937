"""The order of fetches, steps and flushes of chunks.

While one chunk is stepped, the one before leaves the device and the next one comes. The device holds the states of two chunks at most: the
next one is fetched after the copies of the one before have ended, which is the only wait of the host for the device.

A step that the class does not end leaves the states of its chunk as they were before, in host memory. Chunks before it are stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..._timeline import span
from .._tensors import lasting
from .chunk import Chunk, Entry, divided
from .home import Home
from .lane import Lane, lane_of

#: Steps parameters of these states by the class, and returns their states.
Step = Callable[[list[torch.Tensor], dict[torch.Tensor, Any]], dict[Any, Any]]


class Job:
    """The step of a chunk.

    Args:
        chunk: The chunk.
        params: Those of its parameters that are stepped.

    Attributes:
        memory: The host memory of its states, from its fetch on.
        tensors: The tensors on the device.
        event: The end of the fetch, and later of the flush.
        made: The chunks that replace it, with their host memory; none if its states keep their form."""

    def __init__(self, chunk: Chunk, params: list[torch.Tensor]):
        self.chunk, self.params = chunk, params
        self.memory: Any = None
        self.tensors: list[torch.Tensor] = []
        self.event: Any = None
        self.made: list[tuple[Chunk, torch.Tensor]] = []
        self.bytes = 0

    @property
    def lane(self) -> Lane:
        """The lane of its device."""
        return lane_of(self.chunk.device)


class Flow:
    """The chunks of an optimizer.

    Args:
        home: Where they are.
        bound: Bytes of a chunk.
        name_of: The name of a parameter in messages.

    Attributes:
        chunks: Those, in the order of their parameters.
        most: Most bytes of states that the device had at once."""

    def __init__(self, home: Home, bound: int, name_of: Callable[[torch.Tensor], str]):
        self.home, self.bound, self._name_of = home, bound, name_of
        self.chunks: list[Chunk] = []
        self.most = self._present = 0

    def chunk_of(self) -> dict[torch.Tensor, Chunk]:
        """The chunk of each parameter."""
        return {param: chunk for chunk in self.chunks for param in chunk.entries}

    def run(self, params: Iterable[torch.Tensor], step: Step) -> None:
        """Steps the parameters: first those that have a chunk, then those that the class has never stepped."""
        chosen = dict.fromkeys(params)
        jobs = [Job(chunk, own) for chunk in self.chunks if (own := [param for param in chunk.entries if param in chosen])]
        for job in jobs:
            for param in job.params:
                del chosen[param]
        self._run(jobs, step)
        if chosen:
            self.place(self._first(chosen, step))

    def _run(self, jobs: list[Job], step: Step) -> None:
        leaving: Job | None = None
        coming: Job | None = None
        present: Job | None = None
        try:
            for number, job in enumerate(jobs):
                if coming is None:
                    self._fetch(job)
                present, coming = job, None
                following = jobs[number + 1] if number + 1 < len(jobs) else None
                if following is not None:
                    self.home.begin(following.chunk)
                job.lane.arrive(job.event)
                with span("staged.chunk", number):
                    self._step(job, step)
                done, leaving, present = leaving, job, None
                if done is not None:
                    self._end(done)
                if following is not None:
                    if job.event is None:
                        leaving = None
                        self._end(job)
                    coming = following
                    self._fetch(following)
        except BaseException:
            for abandoned in (present, coming):
                if abandoned is not None and abandoned.memory is not None:
                    abandoned.lane.synchronize()
                    self._leave(abandoned)
                    self.home.release(abandoned.memory)
            raise
        finally:
            if leaving is not None:
                self._end(leaving)

    @lasting
    def _fetch(self, job: Job) -> None:
        """Starts the copies of a chunk's states to the device."""
        self.home.begin(job.chunk)
        job.memory = self.home.memory(job.chunk)
        hosts = [view for param in job.params for view in job.chunk.views(job.memory, param)]
        leaves = [leaf for param in job.params for leaf in job.chunk.entries[param].leaves]
        job.tensors, job.event = job.lane.fetch(leaves, hosts)
        self._enter(job, job.tensors)

    def _step(self, job: Job, step: Step) -> None:
        tensors = iter(job.tensors)
        states = {}
        for param in job.params:
            entry = job.chunk.entries[param]
            own = [next(tensors) for _ in entry.leaves]
            if entry.stated:
                states[param] = entry.state(own)
        self._flush(job, step(job.params, states))

    @lasting
    def _flush(self, job: Job, states: dict[Any, Any]) -> None:
        """Starts the copies of the states after a step to host memory."""
        entries = [Entry.of(param, job.chunk.entries[param].name, states) for param in job.params]
        tensors = [tensor for entry in entries for tensor in entry.tensors]
        addresses = {tensor.data_ptr() for tensor in tensors}
        # The class has put others in their place. The rest stays until the copies to the host have ended.
        job.lane.replaced([tensor for tensor in job.tensors if tensor.data_ptr() not in addresses])
        self._leave(job)
        job.tensors = tensors
        self._enter(job, job.tensors)
        if all(map(job.chunk.fits, entries)):
            for entry in entries:
                job.chunk.take(entry)
            hosts = [view for param in job.params for view in job.chunk.views(job.memory, param)]
            job.event = job.lane.flush(hosts, job.tensors)
            return
        now = {entry.param: entry for entry in entries}
        whole = []
        for param, entry in job.chunk.entries.items():
            if param in now:
                now[param].check_apart()
            whole.append(now.get(param) or entry._replace(tensors=job.chunk.views(job.memory, param)))
        job.made, job.event = self._made(whole)

    def _made(self, entries: Iterable[Entry]) -> tuple[list[tuple[Chunk, torch.Tensor]], Any]:
        """New chunks of states, and the end of the copies to their host memory."""
        made, event = [], None
        for group in divided(entries, self.bound):
            chunk = Chunk(entry._replace(tensors=()) for entry in group)
            memory = self.home.blank(chunk)
            hosts = [view for entry in group for view in chunk.views(memory, entry.param)]
            event = lane_of(chunk.device).flush(hosts, [tensor for entry in group for tensor in entry.tensors])
            made.append((chunk, memory))
        return made, event

    def _end(self, job: Job) -> None:
        """Waits for the copies of a flush, and gives the states to the home."""
        if job.event is not None:
            job.lane.wait(job.event)
        self._leave(job)
        if not job.made:
            self.home.keep(job.chunk, job.memory)
            return
        place = self.chunks.index(job.chunk)
        for chunk, memory in job.made:
            self.home.keep(chunk, memory)
        self.chunks[place : place + 1] = [chunk for chunk, _ in job.made]
        self.home.release(job.memory)
        self.home.drop(job.chunk)

    def _first(self, params: Iterable[torch.Tensor], step: Step) -> Iterator[Entry]:
        """The states of parameters that the class has never stepped: the sizes of their states are not known, so it steps them one by
        one."""
        for param in params:
            states = step([param], {})
            entry = lasting(Entry.of)(param, self._name_of(param), states)
            entry.check_apart()
            yield entry

    def place(self, entries: Iterable[Entry]) -> None:
        """Makes chunks of states that are on the device. An error while the entries are made leaves out the entry alone."""
        waiting: list[Entry] = []
        weight = size = 0
        try:
            for entry in entries:
                self.most = max(self.most, size + entry.size)
                if waiting and (weight + entry.weight > self.bound or not entry.is_beside(waiting[0])):
                    full, waiting, weight, size = waiting, [], 0, 0
                    self._keep(full)
                waiting.append(entry)
                weight, size = weight + entry.weight, size + entry.size
        finally:
            self._keep(waiting)

    @lasting
    def _keep(self, entries: Sequence[Entry]) -> None:
        made, event = self._made(entries)
        if event is not None:
            lane_of(made[-1][0].device).wait(event)
        for chunk, memory in made:
            self.home.keep(chunk, memory)
            self.chunks.append(chunk)

    def read(self, chunk: Chunk, work: Callable[[dict[torch.Tensor, list[torch.Tensor]]], None]) -> None:
        """Calls work() with the tensors of a chunk's states in host memory."""
        self.home.begin(chunk)
        memory = self.home.memory(chunk)
        try:
            work({param: chunk.views(memory, param) for param in chunk.entries})
        finally:
            self.home.release(memory)

    def forget(self, param: torch.Tensor, chunk: Chunk) -> None:
        """Forgets the state of a parameter."""
        chunk.forget(param)
        if not chunk.entries:
            self.chunks.remove(chunk)
            self.home.drop(chunk)

    def _enter(self, job: Job, tensors: Sequence[torch.Tensor]) -> None:
        job.bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._present += job.bytes
        self.most = max(self.most, self._present)

    def _leave(self, job: Job) -> None:
        self._present -= job.bytes
        job.bytes, job.tensors = 0, []
