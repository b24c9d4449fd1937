"""Proves that no memory in flight is freed if a signal handler raises between any two bytecodes. Memory
that the tier, the speculation engine or an I/O handle has accepted is kept until the operation ends, and
close() leaves nothing behind."""

import ctypes
import gc
import os
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from interrupts import Interrupt, Ticking, interrupted, interrupted_anywhere

import spillway
from spillway import _abi, _native, _native_handle, optim

BYTES = 64 << 10
ROUNDS = 1500


@pytest.fixture
def fast_collections():
    """Collections leave out all objects that exist before the test. Those of all modules take half a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def after_the_call(monkeypatch):
    """after_the_call() interrupts the next C call whose status is stored, after C has returned."""
    own = _native_handle.record

    def patch():
        def interrupted(outcome, function, *arguments):
            own(outcome, function, *arguments)
            monkeypatch.setattr(_native_handle, "record", own)
            assert outcome == [0]
            raise Interrupt

        monkeypatch.setattr(_native_handle, "record", interrupted)

    return patch


def test_memory_of_puts_and_gets_outlives_interrupts(tmp_path):
    chance = random.Random(5)
    held = {}
    with Ticking() as ticking:
        tier = spillway.Tier([tmp_path], job="test", direct=False)
        extents = [tier.define(f"e{n}", [BYTES]) for n in range(8)]
        for extent in extents:
            tier.wait(tier.put(extent, [np.zeros(BYTES, np.uint8)]))
        tier.commit(1)
        for number in range(ROUNDS):
            array = np.full(BYTES, number % 251, np.uint8)
            seen = weakref.ref(array)
            extent = chance.choice(extents)
            try:
                ticket = ticking.during(lambda: tier.put(extent, [array]) if number % 2 else tier.get(extent, [array]))
            except spillway.BusyError:
                ticket = None
            del array
            # Every operation in the table keeps its memory, also if an interrupt lost the ticket before
            # the caller received it.
            for entry in list(tier._in_flight):
                if entry.number.value and entry.outcome() is None:
                    memory, _ = tier._in_flight[entry]
                    assert all(array is not None for array in memory) and len(memory) == 1
            if ticket is not None:
                held[ticket] = seen
            while len(held) > 4:
                ticket, array = held.popitem()
                assert array() is not None, "let go in flight"
                try:
                    ticking.during(lambda: tier.wait(ticket))
                except spillway.SpillwayError:
                    assert ticket not in tier._by_number
            if number % 100 == 99:
                for entry in [entry for entry in tier._in_flight if entry.number.value]:
                    try:
                        tier.wait(entry.number.value)
                    except spillway.SpillwayError:
                        pass
                held.clear()
                tier.commit(number)
    assert ticking.count > 50
    tier.close()
    gc.collect()
    assert not tier._in_flight and not tier._by_number and not tier._inside
    with spillway.Tier([tmp_path], job="test", mode="resume") as tier:
        assert tier.verify() >= len(extents)


def test_an_interrupt_after_c_accepted_keeps_the_memory_until_a_commit(tmp_path, after_the_call):
    with spillway.Tier([tmp_path], job="test") as tier:
        extent = tier.define("e", [BYTES])
        after_the_call()
        array = np.ones(BYTES, np.uint8)
        seen = weakref.ref(array)
        with pytest.raises(Interrupt):
            tier.put(extent, [array])
        del array
        gc.collect()
        assert seen() is not None
        tier.commit(1)
        gc.collect()
        assert seen() is None, "a put before a commit is over with it"


@pytest.mark.parametrize("lost", ["put", "get"])
@pytest.mark.parametrize("then", ["put", "get", "verify", "import"])
def test_an_extent_is_usable_after_an_interrupt_has_lost_a_ticket(lost, then, tmp_path, after_the_call):
    """The lost put or get has ended before the next one begins: the extent is not busy, and no array changes later."""
    with spillway.Tier([tmp_path], job="test") as tier:
        extent, other = tier.define("e", [BYTES]), tier.define("f", [BYTES])
        for number in (extent, other):
            tier.wait(tier.put(number, [np.ones(BYTES, np.uint8)]))
        tier.commit(1)
        tier.export(tmp_path / "exported")
        for on in (extent, other):
            lent = np.full(BYTES, 7, np.uint8)
            after_the_call()
            with pytest.raises(Interrupt):
                tier.put(extent, [lent]) if lost == "put" else tier.get(extent, [lent])
            [entry] = tier._in_flight
            if then == "verify":
                assert tier.verify() == 2
            elif then == "import":
                assert tier.import_from(tmp_path / "exported") == 1
            else:
                array = np.full(BYTES, 9, np.uint8)
                ticket = tier.put(on, [array]) if then == "put" else tier.get(on, [array])
                assert entry.outcome() == 0
                tier.wait(ticket)
            assert not tier._in_flight and not tier._by_number and not tier._unclaimed
        tier.commit(2)


def test_a_ticket_that_one_thread_has_lost_is_waited_for_by_another(tmp_path, after_the_call):
    with spillway.Tier([tmp_path], job="test") as tier:
        extent = tier.define("e", [BYTES])

        def lose():
            after_the_call()
            with pytest.raises(Interrupt):
                tier.put(extent, [np.full(BYTES, 7, np.uint8)])

        # It has not ended when this thread puts: threads that run at the same time have different numbers.
        with ThreadPoolExecutor(1) as other:
            other.submit(lose).result()
            tier.wait(tier.put(extent, [np.full(BYTES, 9, np.uint8)]))
        assert not tier._in_flight and not tier._by_number and not tier._unclaimed
        found = np.zeros(BYTES, np.uint8)
        tier.wait(tier.get(extent, [found]))
        assert (found == 9).all()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_handler_that_puts_inside_of_a_get_leaves_the_get_its_outcome(damaged, tmp_path, monkeypatch):
    with spillway.Tier([tmp_path], job="test", direct=False, block_bytes=4096) as tier:
        extent, other = tier.define("e", [BYTES]), tier.define("f", [BYTES])
        tier.wait(tier.put(extent, [np.full(BYTES, 7, np.uint8)]))
        if damaged:
            [data] = tmp_path.rglob("data")
            data.write_bytes(data.read_bytes().replace(b"\7" * 512, b"\6" * 512))
        own, begun, found = _native_handle.record, [], np.zeros(BYTES, np.uint8)

        def handled(outcome, function, *arguments):
            own(outcome, function, *arguments)
            monkeypatch.setattr(_native_handle, "record", own)
            begun.append(tier.put(other, [np.ones(BYTES, np.uint8)]))

        monkeypatch.setattr(_native_handle, "record", handled)
        ticket = tier.get(extent, [found])
        if damaged:
            with pytest.raises(spillway.CorruptError):
                tier.wait(ticket)
        else:
            tier.wait(ticket)
            assert (found == 7).all()
        tier.wait(*begun)
        tier.wait(tier.put(extent, [found]))
        assert not tier._in_flight and not tier._by_number and not tier._unclaimed


@pytest.mark.parametrize("refused", [False, True])
def test_wherever_a_put_is_interrupted_the_next_one_succeeds_and_nothing_is_kept(refused, tmp_path):
    """A handler raises at the begin and at the end of each function. A refused put finds its extent busy."""
    with spillway.Tier([tmp_path], job="test", direct=False) as tier:
        extent = tier.define("e", [BYTES])
        array = np.ones(BYTES, np.uint8)
        for at in range(1000):
            first = tier.put(extent, [array]) if refused else None
            tickets = []
            try:
                more = interrupted_anywhere(lambda: tickets.append(tier.put(extent, [array])), at)  # noqa: B023
            except spillway.BusyError:
                more = False
            tickets += [first] if refused else []
            for ticket in tickets:
                tier.wait(ticket)
            tier.wait(tier.put(extent, [array]))
            assert not tier._unclaimed and not tier._in_flight, at
            if not more:
                break
        assert 20 < at < 999


def test_an_interrupted_submit_keeps_what_the_engine_took(after_the_call):
    with spillway.Speculation(1) as speculation:
        speculation.begin(spillway.Adam())
        after_the_call()
        arrays = [np.ones(100_000, np.float32) for _ in range(4)]
        seen = weakref.ref(arrays[0])
        with pytest.raises(Interrupt):
            speculation.submit(0, [tuple(arrays)])
        del arrays
        gc.collect()
        assert seen() is not None
        speculation.resolve(speculation.local_result())
        speculation.finish()
        gc.collect()
        assert seen() is None


def test_speculation_under_interrupts_ends_with_nothing_held():
    with Ticking() as ticking, spillway.Speculation(2) as speculation:
        for number in range(300):
            speculation.begin(spillway.Adam())
            for bucket in range(2):
                arrays = [np.ones(20_000, np.float32) for _ in range(4)]
                seen = weakref.ref(arrays[0])
                ticking.during(lambda: speculation.submit(bucket, [tuple(arrays)]))  # noqa: F821
                del arrays
                if speculation.bucket_state(bucket) != "missing":
                    assert seen() is not None, "let go before the verdict"
            speculation.abort()
            assert not speculation._held
    assert ticking.count > 20


def test_an_interrupt_in_the_callback_of_a_step_is_no_success(tmp_path, monkeypatch):
    library = _native.library()
    own = library.spw_swap_ds_adam_step

    def skips(handle, optimizer, rows, address, count, callback, user):
        # ctypes does this when a handler raises before the callback's first line: no code ran, and
        # the callback returned 0.
        return own(handle, optimizer, rows, address, count, _abi.SWAP_STEPPED_FN(lambda *_: 0), user)

    with spillway.Tier([tmp_path], job="test") as tier:
        with spillway.Swap(tier, [64, 64], huge_pages=False, pin_memory=False) as swap:
            swap.fill([(np.ones(64, np.float32), None, None)] * 2)
            table = swap.table([(np.ones(64, np.float32), None)] * 2)
            _native.check(library.spw_ds_adam_create(77, 0.9, 0.999, 1))
            size = ctypes.sizeof(_abi.DsAdamCall)
            calls = [_abi.DsAdamCall(size, 1, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0)] * 2
            monkeypatch.setattr(library, "spw_swap_ds_adam_step", skips)
            with pytest.raises(spillway.InternalError, match=r"subgroups \[0, 1\]"):
                swap.ds_step(77, calls, table, lambda subgroup, address: None)


def test_open_and_close_under_interrupts_leave_no_lock(tmp_path, fast_collections):
    with Ticking() as ticking:
        for _ in range(60):
            tier = ticking.during(lambda: spillway.Tier([tmp_path], job="test"))
            if tier is not None:
                ticking.during(tier.close)
                tier.close()
            del tier
            gc.collect()
    spillway.Tier([tmp_path], job="test").close()
    assert ticking.count > 10


@pytest.mark.parametrize("calls", [0, 3])
def test_a_call_and_its_outcome_are_one_step(calls, monkeypatch):
    outcome = []
    monkeypatch.setattr(_native, "library", lambda: os.path)
    _native_handle.record(outcome, "join", *["a"] * (calls + 1))
    assert outcome == [os.path.join(*["a"] * (calls + 1))]


def arrays_of_a_tensor():
    return [np.ones(100, np.float32) for _ in range(4)]


def test_a_step_is_done_and_counted_if_a_handler_raises_after_the_call(monkeypatch):
    """The next step then has the number that bias correction needs."""
    seen, wanted = arrays_of_a_tensor(), arrays_of_a_tensor()
    ours, theirs = spillway.Adam(), spillway.Adam()
    prepared = ours.prepare([seen])

    def interrupted(function, arguments):
        yield function(*arguments[0])
        raise Interrupt

    for way in (lambda: ours.step([seen]), prepared.step, prepared.record().step):
        with monkeypatch.context() as patch, pytest.raises(Interrupt):
            patch.setattr(optim, "starmap", interrupted)
            way()
        theirs.step([wanted])
        assert ours.step_count == theirs.step_count
    ours.step([seen])
    theirs.step([wanted])
    assert all((one == other).all() for one, other in zip(seen, wanted)) and ours.step_count == 4


def test_a_rollback_is_done_and_counted_if_a_handler_raises_after_the_call(after_the_call):
    arrays, adam = arrays_of_a_tensor(), spillway.Adam()
    with adam.prepare([arrays]).record() as record:
        before = [array.copy() for array in arrays]
        record.step()
        after_the_call()
        with pytest.raises(Interrupt):
            record.rollback()
        assert adam.step_count == 0 and all((one == other).all() for one, other in zip(arrays, before))


def test_an_interleaved_step_is_begun_and_counted_if_a_handler_raises_after_the_call(after_the_call):
    param, grad, exp_avg, exp_avg_sq = arrays_of_a_tensor()
    adam = spillway.Adam()
    with spillway.Interleave([spillway.Subgroup(param, exp_avg, exp_avg_sq, grad)]) as update:
        update.grad_ready(0)
        after_the_call()
        with pytest.raises(Interrupt):
            update.begin(adam)
        update.finish()
        assert adam.step_count == 1 and (param != 1).all()


@pytest.mark.parametrize("wait", ["finish", "local_result", "wait"])
def test_a_handler_that_raises_ends_a_wait_that_nothing_else_would_end(wait):
    event = os.eventfd(0)
    with spillway.Speculation(1) as speculation:
        speculation.begin(spillway.Adam())
        speculation.submit(0, [tuple(arrays_of_a_tensor())], event_fd=event)
        with Ticking() as ticking:
            ticking.during(lambda: speculation.wait(0) if wait == "wait" else getattr(speculation, wait)(), after=0.05)
        assert ticking.count == 1
        speculation.abort()
    os.close(event)


def test_a_kept_round_is_counted_if_a_handler_raises_after_the_call(after_the_call):
    arrays, adam = arrays_of_a_tensor(), spillway.Adam()
    with spillway.Speculation(1) as speculation:
        speculation.begin(adam)
        speculation.submit(0, [tuple(arrays)])
        stats = speculation.local_result()
        after_the_call()
        with pytest.raises(Interrupt):
            speculation.resolve(stats)
        speculation.finish()
        assert adam.step_count == 1 and (arrays[0] != 1).all()


def test_steps_under_interrupts_are_counted_if_they_were_done():
    """Each step adds 1 to a sum; a step that is not counted would leave the sum ahead of the count."""
    grad, total = np.ones(300, np.float32), np.zeros(300, np.float32)
    adagrad = spillway.Adagrad()
    prepared = adagrad.prepare([(np.zeros(300, np.float32), grad, total)])
    with Ticking() as ticking:
        for _ in range(ROUNDS):
            ticking.during(lambda: [prepared.step() for _ in range(20)])
            assert adagrad.step_count == total[0]
    assert ticking.count > 50


def test_a_round_is_counted_if_and_only_if_it_was_kept_wherever_a_handler_raises():
    at, more = 0, True
    while more:
        arrays, adam = arrays_of_a_tensor(), spillway.Adam()
        with spillway.Speculation(1) as speculation:
            speculation.begin(adam)
            speculation.submit(0, [tuple(arrays)])
            stats = speculation.local_result()
            more = interrupted(lambda: speculation.resolve(stats), at)  # noqa: B023
            counted = adam.step_count
            try:
                speculation.resolve(stats)
                assert counted == 0, at
            except spillway.OutOfOrderError:
                assert counted == 1, at
            speculation.finish()
        at += 1
    assert at > 5


def test_a_step_beside_backward_is_counted_if_it_has_ended_wherever_a_handler_raises(tmp_path):
    with spillway.Tier([tmp_path], job="signals") as tier, spillway.Swap(tier, [10]) as swap:
        swap.fill([(np.zeros(10, np.float32), None, None)])
        adam, at, more = spillway.Adam(), 0, True
        while more:
            update = swap.begin(adam)
            update.submit(0, np.ones(10, np.float32))
            more = interrupted(update.finish, at)
            counted = adam.step_count
            try:
                update.finish()
                assert counted == at, at
            except spillway.OutOfOrderError:
                assert counted == at + 1, at
            at += 1
            assert adam.step_count == at
        # What an interrupted call has not let go, the next one has.
        assert at > 5 and not list(swap._held)


# An interrupted destructor raises where nobody catches.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_pinned_memory_of_an_interrupted_call_is_freed():
    stats = _abi.sized(_abi.PinnedStats)

    def live():
        gc.collect()
        _native.call("spw_pinned_get_stats", ctypes.byref(stats))
        return stats.allocations

    before = live()
    with Ticking() as ticking:
        for _ in range(ROUNDS):
            ticking.during(lambda: [spillway.pinned(1000) for _ in range(20)])
    # A later call closes what an interrupted destructor has left.
    spillway.pinned(1000)
    assert ticking.count > 50 and live() == before
