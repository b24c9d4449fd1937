"""tail="auto" of spillway.torch.offload: Eq. 4-5 of SuperOffload for measured times, and the search by measured exposed seconds."""

import random

import pytest
import torch
from offload_runs import BUCKETS, backward, offload, offloaded, same, training

from spillway import _tail_search
from spillway._tail_search import TailSearch, first
from spillway.torch._offload.tail import room


def exposed(buckets, step, spacing, tail, device=0.0):
    """Seconds from the end of backward until all buckets are stepped, the last `tail` of them by the device."""
    processor = 0.0
    for number in range(buckets - tail):
        processor = max(processor, spacing * (number + 1)) + step
    return max(processor - spacing * buckets, device * tail)


def test_the_rule_hides_the_steps_of_a_slow_and_of_a_fast_processor():
    # A processor that keeps up leaves the last bucket: the printed condition. One that does not leaves a queue.
    assert first(300, 1e-3, 0.5 / 300) == 1 and first(300, 2e-3, 0.5 / 300) == 51 and first(4, 1.0, 0.1) == 4
    assert exposed(300, 2e-3, 0.5 / 300, 51) < 1e-3 < 90e-3 < exposed(300, 2e-3, 0.5 / 300, 2)


class Seconds:
    def __init__(self, seconds, overlaps, backward=0.0):
        self.seconds, self.overlaps, self.backward = seconds, overlaps, backward


def test_the_search_goes_on_without_a_backward():
    search = TailSearch()
    for _ in range(20):
        search.step(Seconds(0.01 if search.tail else 0.02, True), 4, 4)
    assert search.done and search.tail > 0


@pytest.mark.sampled(cases=15)
@pytest.mark.parametrize("seed", range(50))
def test_the_search_ends_near_the_best_tail(seed):
    chance = random.Random(seed)
    buckets, spacing = chance.randint(1, 60), 0.01
    step, device = spacing * 10 ** chance.uniform(-1, 0.5), spacing * 10 ** chance.uniform(-3, -1)
    most = chance.randint(0, buckets)
    search, waits, steps = TailSearch(), True, 0
    for steps in range(100):
        if search.done:
            break
        before = search.tail
        if waits:
            search.step(Seconds(1.1 * buckets * step, False), buckets, most)
        else:
            seconds = exposed(buckets, step, spacing, search.tail, device) * chance.uniform(0.99, 1.01)
            search.step(Seconds(seconds, True, spacing * buckets), buckets, most)
        # A step with another tail does not overlap.
        waits = search.tail != before
    assert search.done and 0 <= search.tail <= most and steps < 60, steps
    costs = [exposed(buckets, step, spacing, tail, device) for tail in range(most + 1)]
    assert costs[search.tail] <= min(costs) + 2 * _tail_search._WORTH * max(spacing * buckets, min(costs))
    assert not search.tail or costs[search.tail - 1] > min(costs)


@pytest.mark.parametrize("seed", range(300, 312))
def test_trainings_whose_tail_is_searched_have_the_bits_of_one_without(seed):
    bucket = BUCKETS[seed % 3]
    waits = training(seed, offloaded(bucket_bytes=bucket, overlap=False))
    same(training(seed, offloaded(("step", "forward")[seed % 2], bucket_bytes=bucket, tail="auto")), waits)


@pytest.mark.parametrize("verdict", ["step", "forward"])
def test_a_tail_is_taken_where_it_saves_seconds(verdict, monkeypatch):
    """Stand-ins for a device whose steps take no time, and for a processor whose buckets take long."""
    seen = []

    class Search(TailSearch):
        def step(self, timed, buckets, most):
            timed.seconds = exposed(buckets, 0.03, 0.01, self.tail) if timed.overlaps else 0.03 * buckets
            timed.backward = timed.backward and 0.01 * buckets
            super().step(timed, buckets, most)
            seen.append(self.tail)

    monkeypatch.setattr("spillway._tail_search.TailSearch", Search)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(50)) for _ in range(8)])
    optimizer = offload(model, lr=0.1, bucket_bytes=1, tail="auto", verdict=verdict)
    for _ in range(30):
        # Read through the model, which completes the step before.
        backward([*model])
        optimizer.step()
        optimizer.zero_grad()
    optimizer.settle()
    stays = [slot.stays for slot in optimizer._slots.values()]
    assert optimizer._tail.search.done and optimizer.tail >= 6 and stays == [True] * optimizer.tail + [False] * (8 - optimizer.tail), seen
    assert room(optimizer._plan) == 8
