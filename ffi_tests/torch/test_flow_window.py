"""Proves that a Flow of torch and a window of the library follow one rule: the same uses fetch the same units, at the same time."""

import random

import pytest
import torch

from spillway.torch._offload.flow import Flow
from spillway.window import Window

UNITS = 5


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_the_same_uses_fetch_the_same_units_at_the_same_time(slots, keep):
    chance = random.Random(slots)
    # Unit n has 4 << n bytes, so the bytes of a call tell which units it has fetched.
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1 << number, bias=False) for number in range(UNITS)))
    flow = Flow(model, "cpu", slots=slots, keep_bytes=4 * keep)
    arrays = [unit.weights[0].on_host.detach() for unit in flow.units]
    with Window(arrays, slots=slots, keep=range(keep)) as window:
        for step in range(40):
            flow._begin()
            window.begin()
            orders = [*range(UNITS), *reversed(range(UNITS))], chance.choices(range(UNITS), k=12)
            for unit in orders[step % 3 == 2]:
                before = flow.fetched_bytes, flow.late, window.stats()
                flow._use(flow.units[unit])
                window.use(unit)
                window.release(unit)
                found = window.stats()
                fetched = found.fetched_bytes - before[2].fetched_bytes, found.late - before[2].late
                assert fetched == (flow.fetched_bytes - before[0], flow.late - before[1]), (step, unit)
            # A backward ends: no flowing unit stays on the device. Kept ones change now and then.
            for number, unit in enumerate(flow.units):
                if not unit.kept:
                    flow._free(unit)
                    window.changed(number)
                elif step % 2:
                    unit.weights[0].steps += 1
                    window.changed(number)
        assert (found.peak_bytes, found.fetched_bytes) == (flow.peak_bytes, flow.fetched_bytes) and found.late
