"""Which cases of a test `make test` runs: a random sample, if the test has a mark. `make test-long` runs all cases.

    @pytest.mark.sampled             cases that have each pair of values of two parameters between them
    @pytest.mark.sampled(values=1)   cases that have each value of each parameter between them
    @pytest.mark.sampled(cases=8)    this number of cases, with as many values of each parameter as fit

A run prints its seed. SPILLWAY_SEED chooses the same cases again, and SPILLWAY_TEST_LONG all."""

import collections
import itertools
import os
import random
import time

import pytest

#: All processes of a run have the same seed.
SEED = int(os.environ.setdefault("SPILLWAY_SEED", str(time.time_ns() % 1_000_000)))
LONG = bool(os.environ.get("SPILLWAY_TEST_LONG"))


def few(usual, long):
    """A number of `make test`, and that of `make test-long`."""
    return long if LONG else usual


def pytest_configure(config):
    """Each conftest.py imports this hook. The sample is drawn once."""
    if not config.pluginmanager.has_plugin("sampled"):
        config.pluginmanager.register(_Plugin(), "sampled")
        config.addinivalue_line("markers", "sampled(values=2, cases=None): `make test` runs a random sample of the cases")


class _Plugin:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Samples what other options left."""
        chosen = set(items) if LONG else _chosen(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line("all cases" if LONG else f"a sample of the cases: SPILLWAY_SEED={SEED} repeats it")


def _chosen(items):
    tests = collections.defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        tests[(item.parent.nodeid, item.originalname) if mark else item].append(item)
    chosen = set()
    for cases in tests.values():
        mark = cases[0].get_closest_marker("sampled")
        chosen.update(_sample(cases, **mark.kwargs) if mark else cases)
    return chosen


def _sample(items, values=2, cases=None):
    """Takes the case with most values that those before it lack; of equal ones, that with the rarest values; of equal ones, any."""
    source = random.Random(f"{SEED} {items[0].parent.nodeid} {items[0].originalname}")
    left, kept, seen = source.sample(items, len(items)), [], collections.Counter()
    parts = {item: _parts(item, 1 if cases else values) for item in items}

    def merit(item):
        return sum(not seen[part] for part in parts[item]), -sum(seen[part] for part in parts[item])

    while left and len(kept) < (cases or len(items)):
        best = max(left, key=merit)
        if not cases and not merit(best)[0]:
            break
        left.remove(best)
        kept.append(best)
        seen.update(parts[best])
    return kept


def _parts(item, values):
    """The values of the parameters of a case; with values=2 each pair of them."""
    parameters = sorted((name, repr(value)) for name, value in item.callspec.params.items())
    return list(itertools.combinations(parameters, min(values, len(parameters))))
