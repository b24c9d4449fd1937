"""Tiers on real file systems: two mounts, killed owners, servers that stop or end, lost locks, no room."""

import contextlib
import os
import random
import signal
import time

import pytest
from filesystems import send

from spillway import Tier, TierFencedError, TierLockedError

LOCKED, FENCED = TierLockedError.status, TierFencedError.status
# SPW_ERR_NO_SPACE and SPW_ERR_DEADLINE.
NO_SPACE, DEADLINE = 21, 26
# Seconds. A sync of a server that works beside other tests has taken four.
TIMEOUT = 15


@contextlib.contextmanager
def stopped(fs):
    """The servers do not run."""
    pids = fs.servers()
    assert pids
    send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pids, signal.SIGCONT)


def whole(owner, step, content=None):
    """The owner finds this step, and all of its content, which is that of a put with the same number."""
    assert owner.must("open") == step
    assert owner.must("read") == [content or step] * 3 and owner.must("verify") > 0


@pytest.mark.needs("basic")
def test_what_is_committed_is_read_on_every_mount(places, owner):
    first = owner(places[0], durability="full")
    assert first.must("open") is None
    for step in (1, 2):
        first.must(f"step {step}")
    assert first.must("read") == [2, 2, 2]
    first.must("put 3")
    first.must("close")
    last = owner(places[-1])
    whole(last, 2)
    last.must("step 3")
    last.must("close")
    whole(owner(places[0]), 3)


@pytest.mark.needs("shared")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this machine", "another machine"])
def test_a_second_owner_is_refused_on_either_mount(fs, places, owner, elsewhere):
    first = owner(places[0])
    first.must("open")
    first.must("step 1")
    for place in places:
        answer = owner(place, elsewhere=elsewhere).ask("open")
        assert answer.status == LOCKED and "process" in answer.text, answer
    first.must("step 2")
    first.must("close")
    time.sleep(fs.stale)
    whole(owner(places[1], elsewhere=elsewhere), 2)


@pytest.mark.needs("shared")
def test_of_owners_that_open_at_once_one_wins(places, owner):
    owners = [owner(place) for place in places * 2]
    for each in owners:
        each.begin("open")
    answers = [each.end() for each in owners]
    assert sorted(answer.status for answer in answers) == [0, LOCKED, LOCKED, LOCKED], answers
    (winner,) = (each for each, answer in zip(owners, answers) if answer.status == 0)
    winner.must("step 1")


@pytest.mark.needs("basic")
def test_a_killed_owner_is_followed_on_the_other_mount_with_its_last_commit(places, owner):
    chance, step = random.Random(0), 0
    for turn in range(4):
        each = owner(places[turn % len(places)])
        found = each.must("open")
        assert step == 0 or found in (step, step + 1)
        if found:
            assert each.must("read") == [found] * 3 and each.must("verify") > 0
        each.begin(f"run {(found or 0) + 1}")
        for _ in range(chance.randint(1, 4)):
            step = each.next()["committed"]
        each.process.kill()
        # It may have said more steps before it ended.
        while said := each.next():
            step = said["committed"]
        each.process.wait()
    each = owner(places[-1])
    found = each.must("open")
    assert found in (step, step + 1) and each.must("read") == [found] * 3


# Calls on a tier without puts since its commit, on one with such puts, and on one with such puts on a path of this machine.
CALLS = {"clean": ["put 3", "read", "close 2", "destroy"], "dirty": ["commit 3", "close 2"], "local": ["commit 3"]}
PUTS = {"clean": [], "dirty": ["put 2 0"], "local": ["store 2 1"]}


@pytest.mark.needs("servers")
def test_no_call_waits_for_servers_that_stopped(fs, places, owner, tmp_path):
    def of(state, call, **settings):
        (tmp_path / f"{state} {call}").mkdir(exist_ok=True)
        paths = [places[0], tmp_path / f"{state} {call}"][: 1 + (state == "local")]
        return owner(*paths, job=f"{state}-{call.split()[0]}", **settings)

    cases = {(state, call): of(state, call, io_timeout=TIMEOUT) for state, calls in CALLS.items() for call in calls}
    for each in cases.values():
        each.begin("open")
    for (state, _), each in cases.items():
        assert each.end().status == 0
        for call in ["store 1 0", "commit 1"]:
            each.must(call)
    with stopped(fs):
        for (state, _), each in cases.items():
            for call in PUTS[state]:
                each.begin(call)
        for (state, _), each in cases.items():
            for _ in PUTS[state]:
                each.end()
        for (_, call), each in cases.items():
            each.begin(call)
        # They are answered, although the servers stay stopped until then.
        answers = {case: each.end() for case, each in cases.items()}
    for each in cases.values():
        each.kill()
    # A client may answer some calls from its cache.
    wanted = {("local", "commit 3"): {0}, ("dirty", "commit 3"): {DEADLINE}, ("clean", "destroy"): {DEADLINE}}
    for case, answer in answers.items():
        assert answer.status in wanted.get(case, {0, DEADLINE}), (case, answer)
    whole(of("dirty", "commit 3"), 1)
    whole(of("local", "commit 3"), 3, content=2)


@pytest.mark.needs("servers")
def test_a_run_goes_on_on_its_other_path_and_comes_back(fs, places, owner, tmp_path):
    first = owner(places[0], tmp_path, io_timeout=TIMEOUT)
    first.must("open")
    first.must("store 1 0")
    first.must("commit 1")
    with stopped(fs):
        # What was on the stopped path only cannot be read now, but written anew.
        assert first.ask("read").status == DEADLINE
        first.must("put 2 1")
        first.must("commit 2")
        assert first.must("read") == [2, 2, 2] and first.must("health")[0] == "failed"
    first.must("step 3")
    first.kill()
    whole(owner(places[-1], tmp_path), 3)


@pytest.mark.needs("redundant")
def test_a_lost_server_of_a_replicated_volume_loses_nothing(fs, places, owner):
    first = owner(places[0])
    first.must("open")
    first.must("step 1")
    first.begin("run 2")
    step = first.next()["committed"]
    fs.lose_a_server()
    for _ in range(3):
        step = first.next()["committed"]
    first.process.kill()
    while said := first.next():
        step = said["committed"]
    last = owner(places[1])
    found = last.must("open")
    assert found in (step, step + 1) and last.must("read") == [found] * 3
    last.must(f"step {found + 1}")


@pytest.mark.needs("forgets")
def test_an_owner_whose_lock_was_lost_and_taken_is_fenced(fs, places, owner):
    """The owners stop, the servers forget their locks, and owners of another machine take the tiers over."""
    calls = ["commit", "step"]
    firsts = [owner(places[0], job=call) for call in calls]
    for call, first in zip(calls, firsts):
        first.must("open")
        first.must("step 1")
        if call == "commit":
            first.must("store 2")
        first.send(signal.SIGSTOP)
    fs.forget_locks()
    seconds = [owner(places[1], job=call, elsewhere=True) for call in calls]
    for second in seconds:
        second.begin("open")
    for call, first, second in zip(calls, firsts, seconds):
        # The lease ends when nobody renews it.
        assert second.end().result == 1
        second.must("step 50")
        first.send(signal.SIGCONT)
        assert [first.ask(f"{each} 9").status for each in (call, "commit", "store", "commit")] == [FENCED] * 4
        second.must("step 51")
        second.must("close")
        time.sleep(fs.stale)
        whole(owner(places[1], job=call), 51)


@pytest.mark.needs("full")
def test_a_full_path_keeps_what_is_committed_and_its_tier_opens(fs, owner, tmp_path):
    place, filler = fs.small / "tier", fs.room / "filler"
    place.mkdir()
    first = owner(place)
    first.must("open")
    first.must("step 1")
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    statuses = [NO_SPACE, NO_SPACE]
    while statuses[-1] == NO_SPACE and len(statuses) < 9:
        # Room that the tier had allocated before may serve a few puts.
        statuses.append(first.ask("store 2").status)
        first.ask("rollback")
    assert NO_SPACE in statuses[2:], statuses
    first.must("close")
    whole(owner(place), 1)


@pytest.mark.needs("reflinks")
def test_snapshots_beside_a_path_take_no_space_and_keep_their_content(places):
    """Streams with whole and partial pages; the tier is written again while three snapshots are kept."""
    streams = [(40 << 20) + 3, 8 << 20, 100]
    block = 1 << 20

    def content(step):
        return [bytearray(random.Random(step * 10 + n).randbytes(size)) for n, size in enumerate(streams)]

    def free():
        os.sync()
        found = os.statvfs(places[0])
        return found.f_bfree * found.f_frsize

    for name in ("path", "copy"):
        (places[0] / name).mkdir()
    with Tier([places[0] / "path"], job="shares", block_bytes=block) as tier:
        extent = tier.define("state", streams)
        taken = []
        for step in (1, 2, 3):
            tier.wait(tier.put(extent, content(step)))
            tier.commit(step)
            before = free()
            with tier.snapshot(places[0] / f"snapshot-{step}") as snapshot:
                assert snapshot.wait() == step
                assert snapshot.progress().written == sum(streams)
            taken.append(before - free())
        assert all(bytes < 8 << 20 for bytes in taken), taken
    for step in (1, 2, 3):
        with Tier([places[0] / "copy"], job=f"copy-{step}") as copy:
            assert copy.import_from(places[0] / f"snapshot-{step}") == step
            found = [bytearray(size) for size in streams]
            copy.wait(copy.get(copy.define("state", streams), found))
            assert found == content(step)
            copy.destroy()
