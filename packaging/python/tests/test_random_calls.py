"""Random orders of calls of a tier, with timeouts of zero and signal handlers that raise: memory in flight stays allocated, every error is
a typed one, a close can be repeated, and the next open finds a whole commit."""

import gc
import os
import random
import sys
import weakref

import numpy as np
import pytest
from interrupts import Ticking

import spillway

EXTENTS, BYTES = 4, 300_000
#: Another number of random orders than usual.
ROUNDS = os.environ.get("SPILLWAY_FUZZ_ROUNDS")
ERRORS = (spillway.TimedOutError, spillway.BusyError, spillway.InvalidArgumentError)


class Program:
    """Calls of a tier, and for each extent the values that the tier may have, last and committed."""

    def __init__(self, path, seed, ticking):
        self.path, self.chance, self.ticking, self.step = path, random.Random(seed), ticking, 0
        self.commits, self.tickets, self.in_flight = [{extent: {0} for extent in range(EXTENTS)}], [], []
        self.open()
        for extent in range(EXTENTS):
            self.tier.wait(self.tier.put(extent, [np.zeros(BYTES, np.uint8)]))
        self.tier.commit(0)

    def open(self):
        self.tier = spillway.Tier([self.path], job="random", durability="process", direct=False)
        for extent in range(EXTENTS):
            assert self.tier.define(f"e{extent}", [BYTES]) == extent
        self.last, self.tickets = {extent: set(values) for extent, values in self.commits[-1].items()}, []

    def call(self, work):
        """Runs work(), interrupted in one of three cases; returns whether it has returned, and its result or error."""
        done = []
        try:
            if self.chance.random() < 0.3:
                self.ticking.during(lambda: done.append(work()))
            else:
                done.append(work())
        except ERRORS as error:
            return False, error
        return bool(done), done[0] if done else None

    def put(self):
        extent, value = self.chance.randrange(EXTENTS), self.chance.randrange(1, 256)
        array = np.full(BYTES, value, np.uint8)
        returned, ticket = self.call(lambda: self.tier.put(extent, [array]))
        if returned:
            self.last[extent] = {value}
            self.tickets.append((ticket, weakref.ref(array)))
        elif ticket is None:
            self.last[extent] = self.last[extent] | {value}

    def get(self):
        extent, array = self.chance.randrange(EXTENTS), np.zeros(BYTES, np.uint8)
        returned, ticket = self.call(lambda: self.tier.get(extent, [array]))
        if returned:
            self.tickets.append((ticket, weakref.ref(array)))

    def wait(self):
        if self.tickets:
            ticket, array = self.chance.choice(self.tickets)
            timeout = self.chance.choice([0, 0, None])
            returned, error = self.call(lambda: self.tier.wait(ticket, timeout))
            if isinstance(error, spillway.TimedOutError):
                assert timeout == 0 and array() is not None, "the memory of a transfer in flight was freed"
            if returned:
                self.tickets = [entry for entry in self.tickets if entry[0] != ticket]

    def commit(self):
        self.step += 1
        returned, error = self.call(lambda: self.tier.commit(self.step))
        if returned:
            self.commits = [{extent: set(values) for extent, values in self.last.items()}]
            self.tickets = []
        elif error is None:
            # Interrupted: either commit may be the last.
            self.commits.append({extent: set(values) for extent, values in self.last.items()})

    def rollback(self):
        returned, error = self.call(self.tier.rollback)
        for extent in range(EXTENTS):
            committed = set().union(*(commit[extent] for commit in self.commits))
            if returned:
                self.last[extent] = committed
            elif error is None:
                self.last[extent] = self.last[extent] | committed

    def close(self):
        for timeout in (0, 0, None):
            returned, error = self.call(lambda: self.tier.close(timeout))
            if isinstance(error, spillway.TimedOutError):
                assert self.tier.paths(), "the tier is open after a timeout"
            if returned:
                break
        self.tier.close()
        self.check()

    def lose(self):
        self.tier = None
        gc.collect()
        self.check()

    def check(self):
        """Opens the tier, and compares its contents with the commits."""
        self.tier, before = None, self.commits
        self.open()
        found = {}
        for extent in range(EXTENTS):
            array = np.zeros(BYTES, np.uint8)
            self.tier.wait(self.tier.get(extent, [array]))
            assert (array == array[0]).all(), "an extent of two puts"
            found[extent] = int(array[0])
        assert any(all(found[extent] in commit[extent] for extent in found) for commit in before), (found, before)
        self.commits = [{extent: {value} for extent, value in found.items()}]
        self.last = {extent: {value} for extent, value in found.items()}


@pytest.mark.sampled(cases=int(ROUNDS or 4))
@pytest.mark.parametrize("seed", range(int(ROUNDS or 8)))
def test_random_orders_of_calls(tmp_path, seed, monkeypatch):
    # A signal handler may raise in a destructor. pytest's hook would keep the exception, and with its frame the object.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with Ticking() as ticking:
        program = Program(tmp_path, seed, ticking)
        calls = (
            [program.put] * 6
            + [program.get] * 3
            + [program.wait] * 4
            + [program.commit] * 2
            + [program.rollback, program.close, program.lose]
        )
        for _ in range(120):
            program.chance.choice(calls)()
        program.close()
        assert program.tier.verify() > 0
        program.tier.close()
