"""Proves that a close waits for the calls of other threads, refuses new ones, and respects its timeout. A forked
child neither waits for its parent's threads nor changes its parent's objects."""

import contextlib
import ctypes
import gc
import itertools
import os
import signal
import threading
import time
import warnings
import weakref

import numpy as np
import pytest

import spillway
from spillway import _abi, _native, _ranks
from spillway.stage import Stage, settle

BYTES = 256 << 10
ROUNDS = 25


@pytest.mark.parametrize("end", ["close", "destroy"])
def test_a_tier_closes_beside_threads_that_use_it(tmp_path, end):
    for _ in range(ROUNDS):
        tier = spillway.Tier([tmp_path], job="test", direct=False)
        extents, strange, started = [tier.define(f"e{n}", [BYTES]) for n in range(4)], [], threading.Barrier(5)

        def use(extent):
            array = np.ones(BYTES, np.uint8)
            started.wait()
            try:
                while True:
                    tier.wait(tier.put(extent, [array]))
                    tier.wait(tier.get(extent, [array]))
                    tier.paths(), tier.extents(), tier.define(f"e{extent}", [BYTES])
            except spillway.InvalidArgumentError as error:
                if "this Tier is closed" not in str(error) and "unknown, or was waited for already" not in str(error):
                    strange.append(error)
            except Exception as error:
                strange.append(error)

        threads = [threading.Thread(target=use, args=(extent,)) for extent in extents]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.005)
        getattr(tier, end)()
        for thread in threads:
            thread.join(60)
        assert not strange and not any(thread.is_alive() for thread in threads)
        with pytest.raises(spillway.InvalidArgumentError, match="this Tier is closed"):
            tier.commit(1)
        tier.close()


class Slow:
    """The library, with one function that returns only when the test allows it."""

    def __init__(self, library, name):
        self._library, self._name, self.entered, self.go = library, name, threading.Event(), threading.Event()

    def __getattr__(self, name):
        own = getattr(self._library, name)
        if name != self._name:
            return own

        def slow(*arguments):
            self.entered.set()
            assert self.go.wait(60)
            return own(*arguments)

        return slow


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """A tier with a thread inside a call, and the function that ends this call."""
    tier = spillway.Tier([tmp_path], job="test")
    slow = Slow(_native.library(), "spw_tier_rollback")
    monkeypatch.setattr(_native, "library", lambda: slow)
    thread = threading.Thread(target=tier.rollback)
    thread.start()
    assert slow.entered.wait(60)

    def let_out():
        slow.go.set()
        thread.join(60)

    yield tier, let_out
    let_out()
    tier.close()


def test_a_close_that_runs_out_of_time_leaves_the_tier_open(inside):
    tier, let_out = inside
    with pytest.raises(spillway.TimedOutError, match="1 calls of other threads"):
        tier.close(timeout=0.05)
    assert tier.paths()
    closer = threading.Thread(target=tier.close)
    closer.start()
    while not tier._closed:
        time.sleep(0.001)
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        tier.paths()
    assert closer.is_alive()
    let_out()
    closer.join(60)
    assert not closer.is_alive()


def test_a_child_leaves_its_parents_tier_alone(inside):
    tier, let_out = inside
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            for call in (tier.paths, tier.destroy, lambda: tier.commit(1), tier.rollback):
                try:
                    call()
                except spillway.UnsupportedError as error:
                    assert "forked child" in str(error), error
                else:
                    os._exit(2)
            tier.close()
            tier.close(timeout=0)
            tier.__del__()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    let_out()
    extent = tier.define("e", [BYTES])
    tier.wait(tier.put(extent, [np.ones(BYTES, np.uint8)]))
    tier.commit(1)
    assert tier.verify() > 0


def test_a_close_from_inside_a_call_is_refused(tmp_path, monkeypatch):
    with spillway.Tier([tmp_path], job="test") as tier:
        own, raised = _native.library().spw_tier_rollback, []

        class Library:
            def __getattr__(self, name):
                return getattr(library, name)

            def spw_tier_rollback(self, handle):
                with pytest.raises(spillway.BusyError, match="from inside one of its own calls") as found:
                    tier.close()
                raised.append(found.value)
                return own(handle)

        library = _native.library()
        monkeypatch.setattr(_native, "library", lambda: fake)
        fake = Library()
        tier.rollback()
        assert raised and tier.paths()


def test_other_objects_close_beside_threads_too(tmp_path):
    for _ in range(ROUNDS):
        with spillway.Tier([tmp_path], job="test") as tier:
            swap, speculation, strange = spillway.Swap(tier, [5000], huge_pages=False, pin_memory=False), spillway.Speculation(1), []
            recording = spillway.Adam().prepare([tuple(np.zeros((4, 64), np.float32))]).record()

            def use(call):
                try:
                    while True:
                        call()
                except spillway.InvalidArgumentError as error:
                    if "is closed" not in str(error):
                        strange.append(error)

            threads = [
                threading.Thread(target=use, args=(call,))
                for call in (lambda: swap.stats(), speculation.stats, lambda: recording.log_bytes)
            ]
            for thread in threads:
                thread.start()
            time.sleep(0.002)
            for held in (swap, speculation, recording):
                held.close()
            for thread in threads:
                thread.join(60)
            assert not strange and not any(thread.is_alive() for thread in threads)


def test_puts_are_over_with_a_commit_and_their_tickets_do_not_pile_up(tmp_path):
    import gc
    import weakref

    with spillway.Tier([tmp_path], job="test") as tier:
        extents = [tier.define(f"e{n}", [4096]) for n in range(50)]
        seen = []
        for step in range(1, 4):
            tickets = []
            for extent in extents:
                array = np.full(4096, step, np.uint8)
                seen.append(weakref.ref(array))
                tickets.append(tier.put(extent, [array]))
            del array
            tier.commit(step)
            gc.collect()
            assert not any(array() is not None for array in seen) and not tier._in_flight
            assert tier.wait(tickets[0]) > 0, "the outcome is there for who asks"
        for number in range(1500):
            tier.put(tier.define(f"more{number}", [4096]), [np.full(4096, 1, np.uint8)])
        assert len(tier._in_flight) < 600, "those that are over are let go"
        tier.commit(9)
        assert tier.verify() >= 1500
    assert len(tier._ended) <= 4096


def test_waits_beside_commits_get_their_outcomes(tmp_path):
    """A commit collects the results of the puts before it; a concurrent wait for such a put is no error."""
    with spillway.Tier([str(tmp_path)], job="beside", durability="process") as tier:
        array, over, errors = np.ones(5000, np.uint8), threading.Event(), []
        extents = [tier.define(f"extent-{n}", [5000]) for n in range(3)]

        def put_and_wait(extent):
            try:
                while not over.is_set():
                    try:
                        ticket = tier.put(extent, [array])
                    except spillway.BusyError:
                        continue
                    assert tier.wait(ticket) > 0
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=put_and_wait, args=(extent,)) for extent in extents]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 3
        for step in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(1)):
            with contextlib.suppress(spillway.BusyError):
                tier.commit(step)
        over.set()
        for thread in threads:
            thread.join()
        assert not errors, errors


def test_an_object_whose_call_failed_is_closed_with_its_last_reference(tmp_path):
    """Without the garbage collector: an error keeps none of the objects in its traceback alive once it is handled."""

    def refused(tier):
        extent, array, errors = tier.define("x", [4096]), np.zeros(4096, np.uint8), 0
        for call in (lambda: tier.define("", [4]), lambda: tier.wait(12345), lambda: tier.put(99, [array])):
            try:
                call()
            except spillway.SpillwayError:
                errors += 1
        tier.put(extent, [array])
        # The listing ends with an error inside.
        assert errors == 3 and len(tier.paths()) == 1

    gc.disable()
    try:
        tier = spillway.Tier([tmp_path], job="test", direct=False)
        refused(tier)
        left = weakref.ref(tier)
        with contextlib.suppress(spillway.TimedOutError):
            tier.close(0)
        del tier
        assert left() is None
        spillway.tier.steps([tmp_path], job="test")
    finally:
        gc.enable()


class Program:
    """Something that a caller of this package holds, in a frame of the traceback."""


def _settle_without_a_job():
    held = Stage([tuple(np.ones(10, np.float32) for _ in range(4))], spillway.Adam())
    settle([held])


def _settle_with_a_reduce_that_raises():
    held = Stage([tuple(np.ones(10, np.float32) for _ in range(4))], spillway.Adam())
    held.submit(1)
    settle([held], reduce=lambda stats: 1 / 0)


def _rank_that_fails():
    def work():
        raise ValueError("no")

    _ranks.together(2, work)


def _step_whose_callback_raises():
    with spillway.Tier([None], job="test") as tier, spillway.Swap(tier, [64], huge_pages=False, pin_memory=False) as swap:
        swap.fill([(np.ones(64, np.float32), None, None)])
        table = swap.table([(np.ones(64, np.float32), None)])
        _native.call("spw_ds_adam_create", 78, 0.9, 0.999, 1)
        call = _abi.DsAdamCall(ctypes.sizeof(_abi.DsAdamCall), 1, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0)
        swap.ds_step(78, [call], table, lambda subgroup, address: 1 / 0)


@pytest.mark.parametrize("fails", [_settle_without_a_job, _settle_with_a_reduce_that_raises, _rank_that_fails, _step_whose_callback_raises])
def test_an_error_that_was_kept_before_it_was_raised_keeps_nothing_alive(fails, monkeypatch):
    """Without the garbage collector: no frame of the traceback refers to the error."""
    monkeypatch.setattr(_ranks, "gathered", lambda value, world, group: [value, value])
    left = []

    def calls():
        held = Program()
        left.append(weakref.ref(held))
        fails()

    gc.disable()
    try:
        with contextlib.suppress(spillway.SpillwayError, ValueError, ZeroDivisionError):
            calls()
        assert len(left) == 1 and left[0]() is None
    finally:
        gc.enable()
