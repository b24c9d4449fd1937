"""Commits beside puts and updates: what they hold, their outcome, and kills among them."""

import gc
import os
import random

import pytest
from interrupts import Ticking
from test_snapshot import SIZES, contents, holds, killed, open_tier

import spillway

#: Steps are put while the commit of the step before is in flight.
WORKER = """
import itertools, sys
from test_commit import put
from test_snapshot import open_tier
tier = open_tier(sys.argv[1])
print("open", flush=True)
for step in itertools.count((tier.opened.step or 0) + 1):
    put(tier, step)
    if step > 1 and "commit" in vars():
        commit.wait()
    commit = tier.commit(step, wait=False)
"""


def put(tier, step):
    for number in range(3):
        tier.wait(tier.put(tier.define(f"extent{number}", SIZES), contents(step, number)))


@pytest.fixture
def base(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_commit_holds_what_was_there_at_its_call(base):
    with open_tier(base) as tier:
        put(tier, 1)
        commit = tier.commit(1, b"first", wait=False)
        put(tier, 2)
        commit.wait()
        commit.wait(0)
        assert commit.ended and commit.succeeded and holds(tier, 2)
        tier.rollback()
        assert holds(tier, 1)
        tickets = [tier.put(tier.define(f"extent{number}", SIZES), contents(3, number)) for number in range(3)]
        with tier.commit(3, wait=False):
            pass
        put(tier, 4)
        del tickets
    with open_tier(base) as tier:
        assert tier.opened.step == 3 and holds(tier, 3)
        put(tier, 5)
        # The close waits for it.
        last = tier.commit(5, wait=False)
    with open_tier(base) as tier:
        assert last.succeeded and tier.opened.step == 5 and holds(tier, 5)


def test_what_a_commit_excludes_waits_for_it(base):
    with open_tier(base) as tier:
        for step in range(1, 20, 2):
            put(tier, step)
            commit = tier.commit(step, wait=False)
            put(tier, step + 1)
            if step % 3:
                tier.commit(step + 1)
            else:
                tier.rollback()
            commit.wait()
            assert holds(tier, step + 1 if step % 3 else step)


def test_a_commit_that_fails_says_so_once_it_is_asked_for(base):
    with open_tier(base) as tier:
        put(tier, 1)
        tier.commit(1)
        put(tier, 2)
        # The files of one path lose their names.
        data = next((base / "one").rglob("data"))
        data.rename(base / "moved")
        commit = tier.commit(2, wait=False)
        with pytest.raises(spillway.TierError, match="data"):
            commit.wait()
        assert commit.ended and not commit.succeeded
        with pytest.raises(spillway.TierError):
            commit.wait()
        commit.close()
        with pytest.raises(spillway.TierError), tier.commit(2, wait=False):
            pass
        assert holds(tier, 2)
        tier.commit(2)
        assert holds(tier, 2)


def test_an_error_of_the_begin_is_told_at_once(base):
    with spillway.Tier([spillway.TierPath(base / "one", limit_bytes=1 << 20)], job="small") as tier:
        extent = tier.define("a", [1000])
        tier.wait(tier.put(extent, [bytearray(1000)]))
        with pytest.raises(spillway.InvalidArgumentError, match="payload"):
            tier.commit(1, bytes(2 << 20), wait=False)
        with pytest.raises(spillway.SpillwayError):
            tier.wait(tier.put(tier.define("b", [4 << 20]), [bytearray(4 << 20)]))
        with pytest.raises(spillway.SpillwayError):
            tier.commit(1, wait=False)
        tier.rollback()
        tier.wait(tier.put(extent, [bytearray(1000)]))
        tier.commit(1, wait=False).wait()


def test_calls_after_the_close_and_in_a_forked_child(base):
    tier = open_tier(base)
    put(tier, 1)
    commit = tier.commit(1, wait=False)
    child = os.fork()
    if child == 0:
        try:
            commit.wait()
        except spillway.UnsupportedError:
            commit.close()
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    commit.close()
    commit.close()
    commit.wait()
    tier.close()
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        tier.commit(2, wait=False)


def test_kills_among_commits_leave_one_step(base, child_environment):
    for _ in killed(WORKER, base, child_environment):
        pass


def test_signals_during_commits_lose_no_outcome(base):
    """A handler raises at random moments of the begin and the wait. Whatever it interrupts, the tier opens at a whole step."""

    committed = 0
    with Ticking() as ticking, open_tier(base) as tier:
        for step in range(1, 60):
            put(tier, step)

            def commit(step=step):
                nonlocal committed
                tier.commit(step, wait=False).wait()
                committed = step

            ticking.during(commit, after=random.Random(step).random() * 0.003 + 1e-6)
        gc.collect()
    with open_tier(base) as tier:
        assert tier.opened.step >= committed and holds(tier, tier.opened.step)


def test_definitions_after_the_call_are_no_part_of_a_commit(base):
    with open_tier(base) as tier:
        put(tier, 1)
        tier.remove(tier.define("extent2", SIZES))
        commit = tier.commit(1, wait=False)
        tier.define("later", [7])
        # The removal is part of the commit that is in flight, so another size is possible after it.
        tier.define("extent2", [5])
        commit.wait()
    with open_tier(base) as tier:
        assert sorted(extent.name for extent in tier.extents()) == ["extent0", "extent1"]


def test_a_destroy_waits_for_a_commit(base):
    tier = open_tier(base)
    put(tier, 1)
    commit = tier.commit(1, wait=False)
    tier.destroy()
    assert commit.succeeded and not any(path.is_file() for path in base.rglob("*"))
