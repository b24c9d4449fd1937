"""Proves that a tier keeps the arrays of a ticket as long as the system may use them, and no longer."""

import gc
import weakref

import numpy as np
import pytest

import spillway
import spillway.arena
from spillway import _kept, _native

BYTES = 40_000


class Answers:
    """The library, except that every wait for a ticket returns the given status."""

    def __init__(self, library, status):
        self._library, self._status = library, status

    def __getattr__(self, name):
        return getattr(self._library, name)

    def spw_tier_wait(self, *arguments):
        self._library.spw_tier_wait(*arguments)
        return self._status


@pytest.fixture
def tier(tmp_path):
    with spillway.Tier([str(tmp_path)], job="test") as tier:
        tier.wait(tier.put(tier.define("extent", [BYTES]), [np.ones(BYTES, np.uint8)]))
        yield tier


@pytest.fixture
def answer(monkeypatch):
    library = _native.library()
    return lambda status: monkeypatch.setattr(_native, "library", lambda: Answers(library, status))


def begin(tier):
    """The ticket of a get, and a weak reference to its array."""
    array = np.zeros(BYTES, np.uint8)
    return tier.get(0, [array]), weakref.ref(array)


def is_there(array):
    gc.collect()
    return array() is not None


@pytest.mark.parametrize("status, stays", [(0, False), (20, False), (30, False), (26, True), (11, True)])
def test_an_array_goes_with_its_ticket_unless_the_system_may_still_have_it(tier, answer, monkeypatch, status, stays):
    monkeypatch.setattr(_kept, "_stuck", [])
    ticket, array = begin(tier)
    assert is_there(array)
    answer(status)
    if status:
        with pytest.raises(spillway.SpillwayError) as raised:
            tier.wait(ticket)
        assert raised.value.status == status
        del raised
    else:
        tier.wait(ticket)
    assert is_there(array) == stays == bool(_kept._stuck)


def test_a_wait_that_ran_out_of_time_leaves_the_array_under_way(tier, answer):
    ticket, array = begin(tier)
    answer(23)
    with pytest.raises(spillway.TimedOutError):
        tier.wait(ticket, timeout=0)
    assert is_there(array)


@pytest.mark.parametrize("status, stays", [(0, False), (20, False), (26, True)])
def test_a_close_asks_for_the_tickets_that_nobody_waited_for(tier, answer, monkeypatch, status, stays):
    monkeypatch.setattr(_kept, "_stuck", [])
    _, array = begin(tier)
    answer(status)
    tier.close()
    tier.close()
    assert is_there(array) == stays == bool(_kept._stuck)


def test_a_close_that_times_out_leaves_an_open_tier_and_its_arrays(tier, monkeypatch):
    library, (_, array) = _native.library(), begin(tier)

    class Slow:
        def __getattr__(self, name):
            return getattr(library, name) if name != "spw_tier_wait" else lambda *arguments: 23

    monkeypatch.setattr(_native, "library", Slow)
    for _ in range(2):
        with pytest.raises(spillway.TimedOutError, match="1 puts and gets are in flight; it is still open"):
            tier.close(timeout=0)
        assert is_there(array) and tier.paths()
    monkeypatch.undo()
    tier.close(timeout=60)
    assert not is_there(array)
    with pytest.raises(spillway.InvalidArgumentError, match="this Tier is closed"):
        tier.paths()


def test_a_path_that_does_not_respond_to_a_close_leaves_a_closed_tier_that_says_so(tmp_path, monkeypatch):
    """The library closes a tier whatever the status."""
    tier, library = spillway.Tier([str(tmp_path)], job="test"), _native.library()

    class Late:
        def __getattr__(self, name):
            return getattr(library, name)

        def spw_tier_close(self, handle, timeout_ms):
            library.spw_tier_close(handle, timeout_ms)
            return 23

    monkeypatch.setattr(_native, "library", Late)
    with pytest.raises(spillway.TimedOutError, match="the tier is closed, but a path has not responded"):
        tier.close(timeout=0)
    monkeypatch.undo()
    tier.close()
    with pytest.raises(spillway.InvalidArgumentError, match="this Tier is closed"):
        tier.paths()


class WithObject:
    pass


@pytest.mark.parametrize("dtype", [object, [("a", np.float32), ("b", object)]], ids=str)
def test_arrays_of_python_objects_are_refused(tier, dtype):
    """Bytes that are read into such an array become addresses of objects, and a put stores addresses."""
    array = np.zeros(BYTES // np.dtype(dtype).itemsize, dtype)
    array[:] = np.array([WithObject()] * len(array), object) if dtype is object else (1.0, WithObject())
    for call in (lambda: tier.get(0, [array]), lambda: tier.put(0, [array])):
        with pytest.raises(spillway.InvalidArgumentError, match="addresses of Python objects"):
            call()
    with (
        spillway.arena.Arena.create(None, {"r": 4096}) as arena,
        pytest.raises(spillway.InvalidArgumentError, match="addresses of Python objects"),
    ):
        arena.read_into("r", array)


def test_a_bytearray_in_flight_cannot_be_resized(tier):
    given = bytearray(BYTES)
    ticket = tier.get(0, [given])
    with pytest.raises(BufferError):
        given.extend(bytes(10 * BYTES))
    tier.wait(ticket)
    given.extend(bytes(10))
    assert given == b"\1" * BYTES + bytes(10)


def test_a_tensor_without_memory_is_refused(tier):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(BYTES, dtype=torch.uint8)
    tensor.untyped_storage().resize_(0)
    for call in (tier.get, tier.put):
        with pytest.raises(spillway.InvalidArgumentError, match="has no memory"):
            call(0, [tensor])


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), "x", [1]])
def test_timeouts_that_are_none_are_refused_and_change_nothing(tier, timeout):
    ticket, _ = begin(tier)
    for call in (lambda: tier.wait(ticket, timeout), lambda: tier.close(timeout)):
        with pytest.raises(spillway.InvalidArgumentError, match="timeout is"):
            call()
    tier.wait(ticket)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1, 1e300, "x", None])
def test_an_io_timeout_that_is_none_is_refused(tmp_path, seconds):
    with pytest.raises(spillway.InvalidArgumentError, match="io_timeout is"):
        spillway.Tier([tmp_path], job="test", io_timeout=seconds)
