"""Proves that a window gives every use the values of the unit's home, in host memory and over the fake driver, from arrays and from a tier,
and that misuse raises typed exceptions."""

import ctypes
import multiprocessing

import numpy as np
import pytest
from fake_cuda import FakeDriver
from interrupts import Interrupt, interrupted

import spillway
from spillway import _native_handle
from spillway.window import Stored, Window

BYTES, PASSES = 4096, (0, 1, 2, 3, 3, 2, 1, 0)


def used(window, unit, expected, stream=None):
    address = window.use(unit, stream)
    found = np.frombuffer(ctypes.string_at(address, expected.nbytes), expected.dtype)
    window.release(unit, stream)
    assert (found == expected).all(), unit


def test_every_use_has_the_values_of_its_array():
    arrays = [np.full(1000 + number, number, np.float32) for number in range(4)]
    with Window(arrays, slots=2, keep=[3]) as window:
        for step in range(3):
            window.begin()
            for unit in PASSES:
                used(window, unit, arrays[unit])
            for unit, array in enumerate(arrays):
                window.changed(unit)
                array += step
        stats = window.stats()
    assert stats.peak_bytes == 4 * (1001 + 1002) and stats.uses == 24 and stats.fetches == 3 * 5
    assert stats.fetched_bytes == 3 * 4 * (1000 + 1001 + 1002 + 1003 + 1000) and stats.late == 5 + 1 + 1
    assert stats.device_bytes == 2 * 4096 + 4096


def test_every_use_on_a_device_has_the_values_of_its_array(fake_driver):
    driver = FakeDriver(fake_driver, 61)
    arrays = [spillway.pinned(BYTES // 4) for _ in range(4)]
    for unit, array in enumerate(arrays):
        array[:] = unit
    with spillway.Gpu(61) as gpu, Window(arrays, slots=2, gpu=gpu) as window:
        streams = [driver.stream(), driver.stream()]
        for step in range(3):
            window.begin()
            for number, unit in enumerate(PASSES):
                stream = streams[number % 2]
                address = window.use(unit, stream)
                driver.synchronize(stream)
                assert (np.frombuffer(ctypes.string_at(address, BYTES), np.float32) == unit + step).all()
                window.release(unit, stream)
            for unit, array in enumerate(arrays):
                window.changed(unit)
                array[:] = unit + step + 1
        with pytest.raises(spillway.InvalidArgumentError, match=r"units\[0\].host"):
            Window([np.zeros(4, np.float32)], gpu=gpu)
    assert driver.faults() == [0, 0]


def test_units_of_a_tier():
    with spillway.Tier([None], job="window") as tier:
        values = [np.full(BYTES, number, np.uint8) for number in range(3)]
        extents = [tier.define(f"layer{number}", [10, BYTES]) for number in range(3)]
        for extent, array in zip(extents[:2], values):
            tier.wait(tier.put(extent, [np.zeros(10, np.uint8), array]))
        units = [Stored(extent, 1, BYTES) for extent in extents]
        with Window(units, tier=tier) as window:
            for unit in (0, 1, 0, 1):
                used(window, unit, values[unit])
            with pytest.raises(spillway.SpillwayError):
                window.use(2)
            window.changed(0)
            values[0] += 5
            tier.wait(tier.put(extents[0], [np.zeros(10, np.uint8), values[0]]))
            used(window, 0, values[0])
        with pytest.raises(spillway.InvalidArgumentError, match=r"units\[0\].bytes: is 5, but its stream has 10 bytes"):
            Window([Stored(extents[0], 0, 5)], tier=tier)


def _in_child(window):
    for call in (lambda: window.use(0), lambda: window.release(0), lambda: window.changed(0), window.begin, window.stats):
        with pytest.raises(spillway.UnsupportedError):
            call()
    window.close()


def test_misuse():
    window = Window([np.zeros(8, np.uint8)] * 3)
    window.use(0)
    window.use(1)
    with pytest.raises(spillway.BusyError, match="unit 2 finds no slot"):
        window.use(2)
    with pytest.raises(spillway.InvalidArgumentError, match="unit: 2 is not in use"):
        window.release(2)
    for call in (window.use, window.release, window.changed):
        with pytest.raises(spillway.InvalidArgumentError):
            call(3)
    with pytest.raises(spillway.InvalidArgumentError, match=r"units\[0\] is a str"):
        Window(["weights"])
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(window,))
    child.start()
    child.join()
    assert child.exitcode == 0
    window.close()
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        window.use(0)


def test_a_use_that_a_handler_interrupts_leaves_none_and_a_release_has_ended_its_use(monkeypatch):
    """A handler raises when each function of the package begins, and after the C call."""
    own = _native_handle.record

    def late(outcome, function, *arguments):
        own(outcome, function, *arguments)
        monkeypatch.setattr(_native_handle, "record", own)
        raise Interrupt

    units = [np.full(100, number, np.uint8) for number in range(2)]
    with Window(units, slots=1) as window:
        for at in range(12):
            if at == 0:
                monkeypatch.setattr(_native_handle, "record", late)
                with pytest.raises(Interrupt):
                    window.use(0)
            elif not interrupted(lambda: window.use(0), at - 1):
                window.release(0)
            used(window, 1, units[1])
            window.use(0)
            if at == 0:
                monkeypatch.setattr(_native_handle, "record", late)
                with pytest.raises(Interrupt):
                    window.release(0)
            else:
                interrupted(lambda: window.release(0), at + 1)
            used(window, 1, units[1])


def test_other_objects_are_no_gpu_and_no_tier(tmp_path):
    array = np.zeros(4, np.float32)
    with spillway.Tier([tmp_path], job="window") as tier, Window([array]) as window:
        for wrong in (tier, window, "cuda", 0):
            with pytest.raises(spillway.InvalidArgumentError, match="Window: gpu is a .*; pass a spillway.Gpu"):
                Window([array], gpu=wrong)
        for wrong in (window, "tier"):
            with pytest.raises(spillway.InvalidArgumentError, match="Window: tier is a .*; pass a spillway.Tier"):
                Window([array], tier=wrong)
            with pytest.raises(spillway.InvalidArgumentError, match="Swap: tier is a .*; pass a spillway.Tier"):
                spillway.Swap(wrong, [4])
        for wrong in ([1], [-1], ["0"]):
            with pytest.raises(spillway.InvalidArgumentError, match="Window: keep is"):
                Window([array], keep=wrong)
        with pytest.raises(spillway.InvalidArgumentError, match=r"Window: units\[0\].extent is -1"):
            Window([Stored(-1, 0, 4)], tier=tier)
