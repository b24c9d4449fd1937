"""Proves that threads which share an object get their own outcomes, and that none of them sees the object between two states."""

import sys
import threading

import numpy as np
import pytest

import spillway
from spillway import _kept, _ticket
from spillway._native_handle import TIMEOUT
from spillway.arena import Arena


@pytest.fixture
def many_switches():
    """Threads take turns after a microsecond of Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_beside(*works):
    """Runs each function in a thread of its own, all at once; raises the first error."""
    errors, start = [], threading.Barrier(len(works))

    def run(work):
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("other", [TIMEOUT, 0])
def test_each_wait_for_a_ticket_takes_its_own_status(monkeypatch, other):
    """A second thread waits between the end of the first one's call and its look at the status."""
    ticket, seen, statuses = _ticket.Ticket(True), [], [other, TIMEOUT]

    def record(outcome, *_):
        outcome.append(statuses.pop())
        if statuses:
            run_beside(lambda: seen.append(ticket.wait(None, 0)))

    monkeypatch.setattr(_ticket, "record", record)
    assert ticket.wait(None, 0) == TIMEOUT and seen == [other]
    assert ticket.outcome() == (0 if other == 0 else None)


def test_threads_that_wait_for_the_same_tickets_each_get_the_version_or_are_told(many_switches):
    with spillway.Tier([None], job="shared", durability="process") as tier:
        extent, array, made = tier.define("x", [4096]), np.ones(4096, np.uint8), []
        over, versions = threading.Event(), set()

        def put():
            try:
                for step in range(1, 101):
                    made.append(tier.put(extent, [array]))
                    if step % 2:
                        tier.commit(step)
                    else:
                        wait(made[-1], 10)
            finally:
                over.set()

        def wait(ticket, timeout):
            try:
                versions.add(tier.wait(ticket, timeout))
            except spillway.TimedOutError:
                assert timeout == 0
            except spillway.InvalidArgumentError as error:
                assert "was waited for already" in str(error)

        def wait_too():
            while not over.is_set():
                for ticket in made[-2:]:
                    wait(ticket, 0)

        run_beside(put, wait_too, wait_too)
        assert versions and versions <= {*range(1, 101)}
        assert tier.verify() == 1


class Entry:
    """What is added."""


def test_objects_are_listed_while_other_threads_add_more(many_switches):
    living, kept, over = _kept.Living(), [[], []], threading.Event()

    def add(entries):
        for _ in range(10000):
            entries.append(Entry())
            living.add(entries[-1])
            # This one ends at once.
            living.add(Entry())

    def add_all():
        try:
            run_beside(*(lambda entries=entries: add(entries) for entries in kept))
        finally:
            over.set()

    def listed():
        while not over.is_set():
            assert len(living.list()) <= 20002

    run_beside(add_all, listed)
    assert {*living.list()} == {*kept[0], *kept[1]}


def test_jobs_that_two_threads_lose_are_kept_once_lost():
    jobs = _kept.Submitted()
    jobs.submit("memory", lambda outcome: outcome.append(0), "job")
    before = len(_kept._stuck)
    jobs.lose(["job"])
    jobs.lose(["job"])
    assert not jobs.tokens() and _kept._stuck[before:].count(("memory", [0])) == 1


def test_an_arena_is_not_unmapped_while_a_thread_makes_a_view(monkeypatch):
    arena, closed, own = Arena.create(None, {"x": 4096}), [], Arena.region

    def close():
        with pytest.raises(spillway.BusyError, match="1 views"):
            arena.close()
        closed.append(True)

    closer = threading.Thread(target=close)

    def region(self, name):
        found = own(self, name)
        closer.start()
        while not arena._closed:
            assert closer.is_alive()
        return found

    monkeypatch.setattr(Arena, "region", region)
    memory = arena._memory("x")
    closer.join()
    assert closed and memory.raw == bytes(4096)
    monkeypatch.undo()
    del memory
    arena.close()
