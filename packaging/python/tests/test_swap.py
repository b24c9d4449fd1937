"""Proves that a tier keeps committed data and no other, and that errors name damaged data and the process that holds
the tier. An update with states on the tier gives the bits of a step over arrays in memory. This holds for every
step, commit, rollback and reopening."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import spillway
from spillway import swap as swap_module
from spillway import tier as tier_module

SIZES = (5000, 0, 70_001, 333, 20_000, 20_000)
FREE = {"huge_pages": False, "pin_memory": False}


ENCODING = ("split_master", "moment_dtype")


@pytest.fixture
def folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [tmp_path / "a", tmp_path / "b"]


def open_tier(folders, job="test", **settings):
    return spillway.Tier([str(folder) for folder in folders], job=job, block_bytes=16 << 10, **settings)


def open_swap(tier, buffers=3, sizes=SIZES, **settings):
    split, encoding = settings.get("split_master", False), {key: settings[key] for key in ENCODING if key in settings}
    plan = swap_module.plan_budget(sizes, host_memory=1 << 40, paths=1, **encoding)
    host_bytes = buffers * plan.buffer_bytes + (3 * plan.master_bytes if split else 0)
    return spillway.Swap(tier, sizes, host_memory=host_bytes, **FREE, **settings)


def gradients(step):
    return [np.random.default_rng([step, n]).standard_normal(size).astype(np.float16) for n, size in enumerate(SIZES)]


def first():
    return [np.random.default_rng(n).standard_normal(size).astype(np.float32) for n, size in enumerate(SIZES)]


def in_memory(steps, change=None):
    """States and published weights after a number of steps over arrays; `change(states)` runs after the second step."""
    adam, states = spillway.Adam(lr=1e-2, weight_decay=0.1), [[p, np.zeros_like(p), np.zeros_like(p)] for p in first()]
    copies = [np.zeros(size, np.float16) for size in SIZES]
    for step in range(1, steps + 1):
        adam.step([(p, g, m, v, c) for (p, m, v), g, c in zip(states, gradients(step), copies)], grad_scale=0.5)
        if step == 2 and change:
            change(states)
    return states, copies


def everything(swap, weights=None):
    states = [[np.empty(size, np.float32) for _ in range(3)] for size in SIZES]
    for subgroup, parts in enumerate(states):
        swap.read(subgroup, *parts, weights=weights and weights[subgroup], uint16_dtype="bf16")
    return states


def same(states, others):
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for x, y in zip(states, others) for a, b in zip(x, y))


def step(swap, adam, number, copies=None):
    return swap.step(adam, list(zip(gradients(number), copies or [None] * len(SIZES))), grad_scale=0.5, return_stats=True)


@pytest.mark.parametrize("buffers", [3, 5, 100])
def test_the_update_has_the_bits_of_a_step_in_memory(folders, buffers):
    with open_tier(folders) as tier, open_swap(tier, buffers, ratio=[3, 1]) as swap:
        swap.fill([(p, None, None) for p in first()])
        adam, copies = spillway.Adam(lr=1e-2, weight_decay=0.1), [np.zeros(size, np.float16) for size in SIZES]
        seen = [step(swap, adam, number, copies) for number in range(1, 6)]
        states, expected = in_memory(5)
        assert same(everything(swap), states) and same([copies], [expected])
        norm = sum((g.astype(np.float32) * np.float32(0.5)).astype(np.float64).dot(g * 0.5) for g in gradients(5))
        assert not seen[-1].nonfinite and seen[-1].sum_squares == pytest.approx(norm, rel=1e-6)
        stats, budget = swap.stats(), swap.budget
        assert stats.rounds == 6 and stats.hits >= 4 * budget.cached and budget.buffers == min(buffers, len(SIZES))


@pytest.mark.parametrize("buffers", [3, 100])
def test_commits_beside_steps_hold_the_states_of_their_call(folders, buffers):
    with open_tier(folders) as tier, open_swap(tier, buffers) as swap:
        swap.fill([(p, None, None) for p in first()])
        adam, commits = spillway.Adam(lr=1e-2, weight_decay=0.1), []
        for number in range(1, 8):
            step(swap, adam, number)
            commits.append(swap.commit(number, wait=False))
        swap.rollback()
        [commit.wait() for commit in commits]
        assert same(everything(swap), in_memory(7)[0])
        step(swap, adam, 8)
        swap.commit(8, b"eight", wait=False)
        step(swap, adam, 9)
    with open_tier(folders) as tier, open_swap(tier, buffers) as swap:
        assert tier.opened[:2] == (8, b"eight") and same(everything(swap), in_memory(8)[0])


def test_other_extents_and_evacuations_beside_a_commit_of_an_update(folders):
    """What a program puts beside an update counts for the commit that follows the put, while subgroups in memory are still written."""
    with open_tier(folders) as tier, open_swap(tier, 100) as swap:
        swap.fill([(p, None, None) for p in first()])
        adam, own = spillway.Adam(lr=1e-2, weight_decay=0.1), tier.define("epoch", [5])
        for number in range(1, 6):
            step(swap, adam, number)
            tier.wait(tier.put(own, [bytearray(b"%05d" % number)]))
            commit = swap.commit(number, wait=False)
            tier.wait(tier.put(own, [bytearray(b"later")]))
            tier.evacuate(number % 2)
            tier.set_health(number % 2, "healthy")
            commit.wait()
            swap.rollback()
            found = bytearray(5)
            tier.wait(tier.get(own, [found]))
            assert found == b"%05d" % number and same(everything(swap), in_memory(number)[0])


def test_a_path_is_evacuated_while_an_update_that_has_finished_still_writes(folders):
    with open_tier(folders) as tier, open_swap(tier, 3) as swap:
        swap.fill([(p, None, None) for p in first()])
        swap.commit(0)
        adam = spillway.Adam(lr=1e-2, weight_decay=0.1)
        for number in range(1, 21):
            with swap.begin(adam, grad_scale=0.5) as update:
                for subgroup, grad in enumerate(gradients(number)):
                    update.submit(subgroup, grad)
            # No wait for the writes.
            tier.evacuate(number % 2)
            assert tier.paths()[number % 2].blocks == 0
            tier.set_health(number % 2, "healthy")
            if number % 3 == 0:
                swap.commit(number, wait=number % 2 == 0)
        assert same(everything(swap), in_memory(20)[0])
        swap.commit(20)
    with open_tier(folders) as tier, open_swap(tier, 3) as swap:
        assert tier.opened.step == 20 and same(everything(swap), in_memory(20)[0]) and tier.verify() > 0


@pytest.mark.parametrize("beside", [False, True])
def test_a_trace_has_the_work_of_the_last_update_with_its_bytes_on_each_path(folders, beside):
    with open_tier(folders) as tier, open_swap(tier, 3) as swap:
        swap.fill([(p, None, None) for p in first()])
        adam = spillway.Adam(lr=1e-2)
        for number in (1, 2):
            if beside:
                with swap.begin(adam) as update:
                    [update.submit(subgroup, grad) for subgroup, grad in enumerate(gradients(number))]
                    update.finish()
            else:
                step(swap, adam, number)
            before = [(path.read_bytes, path.written_bytes) for path in tier.paths()]
        events = json.loads(swap.trace())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        rows = {row: sorted((e for e in spans if e["tid"] == row), key=lambda e: e["ts"]) for row in {e["tid"] for e in spans}}
        steps = sorted(e["args"]["subgroup"] for e in spans if e["name"].startswith("step"))
        fetched = sorted(e["args"]["subgroup"] for e in spans if e["name"].startswith("fetch"))
        assert steps == list(range(len(SIZES))) and len(fetched) >= len(SIZES) - 3
        # A buffer does one work at a time.
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for row in rows.values() for a, b in zip(row, row[1:]))
        bytes_of = [sum(e["args"].get(f"bytes on path {path}", 0) for e in spans if e["name"].startswith("fetch")) for path in (0, 1)]
        assert sum(bytes_of) >= sum(12 * SIZES[subgroup] for subgroup in fetched) and all(
            before[path][0] >= bytes_of[path] for path in (0, 1)
        )
        ends = {e["name"]: e["args"]["value"] for e in sorted((e for e in events if e["ph"] == "C"), key=lambda e: e["ts"])}
        assert ends and not any(ends.values())


@pytest.mark.parametrize("buffers", [3, 5, 100])
def test_parts_that_are_written_between_steps_count(folders, buffers):
    def change(states):
        states[2][0][:] = 1.5
        states[4][1][:] = 0.25
        states[5][2][:] = 2.0
        states[5][0][:] = -1.0

    with open_tier(folders) as tier, open_swap(tier, buffers) as swap:
        swap.fill([(p, None, None) for p in first()])
        adam = spillway.Adam(lr=1e-2, weight_decay=0.1)
        step(swap, adam, 1)
        step(swap, adam, 2)
        swap.commit(2)
        for subgroup, part, value in ((2, "param", 1.5), (4, "exp_avg", 0.25), (5, "exp_avg_sq", 2.0), (5, "param", -1.0)):
            swap.write(subgroup, **{part: np.full(SIZES[subgroup], value, np.float32)})
        step(swap, adam, 3)
        assert same(everything(swap), in_memory(3, change)[0])
        swap.rollback()
        adam.step_count = 2
        step(swap, adam, 3)
        assert same(everything(swap), in_memory(3)[0])


@pytest.mark.parametrize("buffers", [3, 5, 100])
def test_a_step_beside_the_caller_has_the_bits_of_the_blocking_form(folders, buffers):
    """For random orders of arrival and every verdict: states, copies, statistics and the step count of the optimizer."""
    chance = np.random.default_rng(buffers)
    (folders[0] / "other").mkdir()
    with open_tier(folders) as tier, open_tier([folders[0] / "other"]) as other:
        with open_swap(tier, buffers) as swap, open_swap(other, buffers) as blocking:
            for one in (swap, blocking):
                one.fill([(p, None, None) for p in first()])
            adam, patient = spillway.Adam(lr=1e-2, weight_decay=0.1), spillway.Adam(lr=1e-2, weight_decay=0.1)
            copies, expected = [[rounded(p) for p in first()] for _ in range(2)]
            for number in range(1, 13):
                verdict = ("commit", "redo", "skip", None)[chance.integers(4)]
                grads = gradients(number)
                with swap.begin(adam, grad_scale=0.5, speculative=verdict is not None, return_stats=True) as update:
                    for subgroup in chance.permutation(len(SIZES)):
                        update.submit(subgroup, grads[subgroup], copies[subgroup], uint16_dtype="bf16")
                    if verdict:
                        update.verdict(verdict, 0.125)
                    if number % 2:
                        published = []
                        for subgroup in update.published():
                            published.append((subgroup, copies[subgroup].copy()))
                        assert sorted(subgroup for subgroup, _ in published) == ([] if verdict == "skip" else list(range(len(SIZES))))
                    stats = update.finish()
                    if number % 2:
                        # What was there when the subgroup was named is final.
                        assert all(np.array_equal(copy, copies[subgroup]) for subgroup, copy in published)
                if verdict != "skip":
                    scale = 0.125 if verdict == "redo" else 0.5
                    tensors = list(zip(grads, expected))
                    assert stats == blocking.step(patient, tensors, grad_scale=scale, return_stats=True, uint16_dtype="bf16")
                assert same([copies], [expected]) and adam.step_count == patient.step_count
                if number % 4 == 0:
                    swap.commit(number)
                    assert same(everything(swap), everything(blocking))
            assert same(everything(swap), everything(blocking))


def test_a_step_beside_the_caller_is_skipped_or_abandoned_by_an_exception(folders):
    with open_tier(folders) as tier, open_swap(tier) as swap:
        swap.fill([(p, None, None) for p in first()])
        swap.commit(0)
        adam, grads = spillway.Adam(lr=1e-2), gradients(1)
        for speculative in (True, False):
            with pytest.raises(ZeroDivisionError), swap.begin(adam, speculative=speculative) as update:
                update.submit(2, grads[2])
                with pytest.raises(spillway.errors.OutOfOrderError, match="subgroup 2 was submitted already"):
                    update.submit(2, grads[2])
                with pytest.raises(spillway.errors.OutOfOrderError, match="subgroup 0 was not submitted"):
                    update.finish()
                with pytest.raises(spillway.errors.OutOfOrderError, match="is open already"):
                    swap.commit(1)
                raise ZeroDivisionError
            assert adam.step_count == 0 and same(everything(swap), in_memory(0)[0]) and not swap._held
        update = swap.begin(adam)
        with pytest.raises(spillway.TimedOutError, match="no further subgroup is stepped yet"):
            next(update.published(timeout=0.01))
        with pytest.raises(spillway.errors.OutOfOrderError, match="verdict already"):
            update.verdict("skip")
        with pytest.raises(spillway.InvalidArgumentError, match="verdict is 'keep'"):
            update.verdict("keep")


def rounded(floats):
    """The bf16 weights of float32 masters, as their bits."""
    bits = floats.view(np.uint32)
    return (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("buffers", [3, 5, 100])
def test_a_step_before_its_verdict_is_taken_back_and_made_again_clipped(folders, buffers, split):
    """Speculation on a tier: step, then check the norm. If the norm is too large, roll back and step again; if a
    gradient is infinite, only roll back. States and weights equal those of a run that waits for the norm."""
    clip, verdicts = 1000.0, {"kept": 0, "clipped": 0, "skipped": 0}
    chance = np.random.default_rng(buffers)
    waiting, patient = [[p, np.zeros_like(p), np.zeros_like(p)] for p in first()], spillway.Adam(lr=1e-2)
    expected = [rounded(p) for p in first()]
    with open_tier(folders) as tier, open_swap(tier, buffers, split_master=split) as swap:
        swap.fill([(p, None, None) for p in first()])
        swap.commit(0)
        hasty, published = spillway.Adam(lr=1e-2), [copy.copy() for copy in expected]
        for number in range(1, 13):
            scale = np.float16([1, 1, 8][chance.integers(3)])
            grads = [grad * scale for grad in gradients(number)]
            if number % 5 == 0:
                grads[4][777] = np.inf
            norm = np.sqrt(sum(np.square(grad.astype(np.float64)).sum() for grad in grads))

            def attempt(factor):
                new = [np.empty_like(copy) for copy in published]
                seen = swap.step(
                    hasty,
                    list(zip(grads, new, published)) if split else list(zip(grads, new)),
                    grad_scale=factor,
                    return_stats=True,
                    uint16_dtype="bf16",
                )
                return new, seen

            new, seen = attempt(1.0)
            if seen.nonfinite or norm > clip:
                swap.rollback()
                hasty.step_count -= 1
            verdict = "skipped" if seen.nonfinite else "clipped" if norm > clip else "kept"
            verdicts[verdict] += 1
            assert seen.nonfinite == (not np.isfinite(norm)) and (seen.nonfinite or seen.sum_squares == pytest.approx(norm**2))
            factor = float(np.float32(clip / norm)) if verdict == "clipped" else 1.0
            if verdict != "skipped":
                published = attempt(factor)[0] if verdict == "clipped" else new
                swap.commit(number)
                patient.step([(p, g, m, v, c) for (p, m, v), g, c in zip(waiting, grads, expected)], grad_scale=factor, uint16_dtype="bf16")
            assert same([published], [expected])
            assert same(everything(swap, published if split else None), waiting)
        assert verdicts["skipped"] == 2 and verdicts["clipped"] > 1 and verdicts["kept"] > 1
        stored = [extent.name.endswith("-split") for extent in tier.extents() if extent.generation]
        assert all(stored) == any(stored) == split


def test_memory_may_come_from_a_node(folders):
    paths = [spillway.TierPath(None, node=0), str(folders[0])]
    with spillway.Tier(paths, job="node") as tier, open_swap(tier, 4, node=0) as swap:
        swap.fill([(p, None, None) for p in first()])
        step(swap, spillway.Adam(lr=1e-2, weight_decay=0.1), 1)
        assert same(everything(swap), in_memory(1)[0])
        swap.commit(1)


def test_a_process_that_is_killed_is_taken_up_at_its_last_commit(folders, child_environment):
    code = (
        f"import sys, os, signal; sys.path[:0] = {[os.path.dirname(__file__)]!r}\n"
        "import test_swap as t, spillway\n"
        f"tier = t.open_tier({[str(folder) for folder in folders]!r})\n"
        "swap = t.open_swap(tier, 4); swap.fill([(p, None, None) for p in t.first()])\n"
        "adam = spillway.Adam(lr=1e-2, weight_decay=0.1)\n"
        "for number in range(1, 5):\n"
        "    t.step(swap, adam, number)\n"
        "    number == 3 and swap.commit(3, b'lr 0.01')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=child_environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    with open_tier(folders, mode="resume") as tier:
        assert tier.opened == (3, b"lr 0.01", 0, 0)
        with open_swap(tier) as swap:
            adam = spillway.Adam(lr=1e-2, weight_decay=0.1)
            adam.step_count = 3
            for number in range(4, 6):
                step(swap, adam, number)
            assert same(everything(swap), in_memory(5)[0])
    with pytest.raises(spillway.TierError, match="resume it, or remove it"):
        open_tier(folders, mode="create")
    assert all(tier_module.collect(folder, job="test") for folder in folders)
    assert not tier_module.collect(folders[0], job="test")
    with pytest.raises(spillway.NoStateError, match="test"):
        open_tier(folders, mode="resume")


@pytest.mark.parametrize("buffers", [3, 100])
def test_a_commit_is_given_up_for_the_one_before_and_made_again_with_the_same_bits(folders, buffers):
    with open_tier(folders) as tier, open_swap(tier, buffers) as swap:
        swap.fill([(p, None, None) for p in first()])
        adam = spillway.Adam(lr=1e-2, weight_decay=0.1)
        for number in range(1, 4):
            step(swap, adam, number)
            swap.commit(number, b"step %d" % number)
    where = {"job": "test"}
    assert tier_module.steps(folders, **where)[:4] == (3, 2, False, True)
    with pytest.raises(spillway.NoStepError, match="step 1: available steps: .3, 2."):
        open_tier(folders, at_step=1)
    with open_tier(folders, at_step=2) as tier, open_swap(tier, buffers) as swap:
        assert tier.opened.step == 2 and tier.opened.payload == b"step 2"
        adam.step_count = 2
        for number in range(3, 5):
            step(swap, adam, number)
        assert same(everything(swap), in_memory(4)[0])
    # No commit followed, and step 3 no longer exists.
    assert tier_module.steps(folders, **where)[:4] == (2, None, False, True)


def test_extents_by_name(folders, tmp_path):
    tier = open_tier([*folders])
    old, new = np.arange(50_000, dtype=np.int64), bytearray(b"x" * 1000)
    extent = tier.define("a", [old.nbytes, 1000])
    assert tier.wait(tier.put(extent, [old, new], path=1)) == 1
    tier.commit(7)
    tier.wait(tier.put_striped(extent, [old + 1, new], [20, 5]))
    found = np.zeros_like(old)
    tier.wait(tier.get(extent, [found, None]))
    assert np.array_equal(found, old + 1)
    tier.rollback()
    tier.wait(tier.get(extent, [found, None]))
    assert np.array_equal(found, old) and tier.verify() > 20
    assert [(e.name, e.streams, e.committed) for e in tier.extents()] == [("a", 2, True)]
    assert [path.blocks > 0 for path in tier.paths()] == [False, True] and tier.paths()[1].written_bytes > old.nbytes
    tier.evacuate(1)
    assert [path.health for path in tier.paths()] == ["healthy", "draining"]
    tier.commit(8)
    assert tier.export(tmp_path / "plain") == 8
    with pytest.raises(spillway.TierLockedError, match="live process"):
        open_tier(folders)
    tier.remove(extent)
    tier.commit(9)
    assert not tier.extents() and tier.import_from(tmp_path / "plain") == 8 and len(tier.extents()) == 1
    tier.destroy()
    assert not any(file.is_file() and file.stat().st_size for folder in folders for file in folder.rglob("*"))


@pytest.mark.parametrize("speculative", [False, True])
def test_only_the_update_commits_and_rolls_back_what_it_changed(folders, speculative):
    with open_tier(folders) as tier:
        with open_swap(tier) as swap:
            swap.fill([(p, None, None) for p in first()])
            with pytest.raises(spillway.BusyError, match="roll back that update first"):
                tier.commit(7)
            swap.commit(0)
            before = everything(swap)
            with swap.begin(spillway.Adam(lr=1e-2), speculative=speculative) as update:
                for call in (lambda: tier.commit(7), tier.rollback):
                    with pytest.raises(spillway.OutOfOrderError, match="roll the update back"):
                        call()
                for subgroup, gradient in enumerate(gradients(1)):
                    update.submit(subgroup, gradient)
                if speculative:
                    update.verdict("skip")
        for call in (lambda: tier.commit(7), lambda: open_swap(tier)):
            with pytest.raises(spillway.BusyError, match="roll the tier back first"):
                call()
        tier.rollback()
        with open_swap(tier) as swap:
            assert same(everything(swap), before)


def test_an_update_that_a_rollback_or_a_close_ended_touches_no_later_one():
    gradient = np.ones(4, np.float32)
    with spillway.Tier([None], job="stale") as tier:
        with spillway.Swap(tier, [4], host_memory=1 << 24, **FREE) as swap:
            swap.fill([(np.ones(4, np.float32), None, None)])
            swap.commit(0)
            one, other = spillway.Adam(lr=0.1), spillway.Adam(lr=0.5)
            stale = swap.begin(one)
            swap.rollback()
            with swap.begin(other) as update:
                for call in (lambda: stale.submit(0, gradient), stale.finish, lambda: stale.verdict("commit")):
                    with pytest.raises(spillway.OutOfOrderError, match="has ended"):
                        call()
                update.submit(0, gradient)
            assert (one.step_count, other.step_count) == (0, 1)
            with pytest.raises(KeyError), swap.begin(one, speculative=True):
                swap.rollback()
                raise KeyError
            with pytest.raises(KeyError), swap.begin(one):
                swap.close()
                raise KeyError
        with pytest.raises(spillway.InvalidArgumentError, match="without NUL"):
            tier.snapshot("cut\0off")
        with pytest.raises(spillway.InvalidArgumentError, match="without NUL"):
            tier.export("cut\0off")


def test_a_snapshot_is_of_one_commit_and_leaves_nothing_if_it_is_closed_early(folders, tmp_path):
    with open_tier(folders) as tier:
        extent = tier.define("a", [100_000, 50_000])

        def commit(step):
            tier.wait(tier.put(extent, [bytearray([step]) * 100_000, bytearray([step]) * 50_000]))
            tier.commit(step)

        with pytest.raises(spillway.NoStateError):
            tier.snapshot(tmp_path / "early")
        commit(1)
        slow = tier.snapshot(tmp_path / "slow", bytes_per_second=1)
        fast = tier.snapshot(tmp_path / "fast")
        commit(2)
        assert fast.wait() == 1 and fast.progress() == (1, 150_000, 150_000, True)
        assert (tmp_path / "fast" / "extent-00000.stream-1.bin").read_bytes() == b"\1" * 50_000
        with pytest.raises(spillway.TimedOutError):
            slow.wait(0.01)
        assert slow.progress() == (1, 0, 150_000, False)
        slow.close()
        with pytest.raises(spillway.InvalidArgumentError, match="this Snapshot is closed"):
            slow.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "fast"]
        with pytest.raises(spillway.IoError):
            tier.snapshot(tmp_path / "fast")
        with pytest.raises(spillway.InvalidArgumentError, match="bytes_per_second"):
            tier.snapshot(tmp_path / "negative", bytes_per_second=-1)
        lost = tier.snapshot(tmp_path / "lost", bytes_per_second=1)
    with pytest.raises(spillway.TierLockedError):
        open_tier(folders)
    del lost
    open_tier(folders).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "fast"]


def test_damage_is_named(folders):
    with open_tier(folders[:1]) as tier:
        extent = tier.define("weights", [1 << 16])
        tier.wait(tier.put(extent, [np.full(1 << 16, 7, np.uint8)]))
        tier.commit(1)
        data = max(folders[0].rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
        content = bytearray(data.read_bytes())
        at = content.index(b"\x07" * 4096)
        with open(data, "r+b") as file:
            file.seek(at + 100)
            file.write(b"\x08")
        with pytest.raises(spillway.CorruptError, match="weights"):
            tier.wait(tier.get(extent, [np.empty(1 << 16, np.uint8)]))


def test_mistakes_name_themselves(folders):
    with open_tier(folders) as tier, open_swap(tier) as swap:
        floats = [np.zeros(size, np.float32) for size in SIZES]
        wrong = {
            "mode": lambda: open_tier(folders, mode="new"),
            "job": lambda: spillway.Tier(folders, job=7),
            "one of .* for 2 paths|1 numbers for 2 paths": lambda: open_swap(tier, ratio=[1]),
            "is unknown to this object": lambda: tier.put(99, [floats[0]]),
            "2 arrays for": lambda: tier.put(tier.define("x", [8]), [floats[0], floats[1]]),
            "has 20000 bytes, stream 0 of extent 6 has 8": lambda: tier.put(tier.define("x", [8]), [floats[0]]),
            "exp_avg has 5000 elements, subgroup 2 has 70001": lambda: swap.read(2, exp_avg=floats[0]),
            "param of subgroup 0 is not float32": lambda: swap.write(0, np.zeros(5000, np.float16)),
            "subgroup is 6; pass an integer from 0 to 5": lambda: swap.read(6),
            "5 entries for 6": lambda: swap.step(spillway.Adam(), [(f, None) for f in floats[1:]]),
            "weight has dtype int32": lambda: swap.step(spillway.Adam(), [(f, f.astype(np.int32)) for f in floats]),
            "Lion": lambda: swap.step(spillway.Lion(), [(f, None) for f in floats]),
            "weights of subgroup 0 are not bfloat16": lambda: swap.read(0, floats[0], weights=floats[0].astype(np.float16)),
            "tensors.0..2. has dtype int32": lambda: swap.step(spillway.Adam(), [(f, None, f.astype(np.int32)) for f in floats]),
            "turns is -1": lambda: open_tier(folders, turns=-1),
            "turn_timeout is .* integer from 0 to 4294967295": lambda: open_tier(folders, turns=1, turn_timeout=5e6),
            "node is 0.5": lambda: open_swap(tier, node=0.5),
            "NUMA node, but the path is not in memory": lambda: spillway.Tier([spillway.TierPath(folders[0], node=0)], job="node"),
            "3 buffers of": lambda: spillway.Swap(tier, SIZES, host_memory=4096),
        }
        for words, mistake in wrong.items():
            with pytest.raises(spillway.InvalidArgumentError, match=words):
                mistake()
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        tier.commit(1)


def test_each_subgroup_may_have_an_adam_of_its_own(folders):
    """Other options and step counts for each subgroup; the bits are those of as many Adams over arrays."""
    rates = [1e-2 * (n + 1) for n in range(len(SIZES))]
    mine, theirs = ([spillway.Adam(lr=rate, weight_decay=0.1 * (n % 2)) for n, rate in enumerate(rates)] for _ in range(2))
    mine[3].step_count = theirs[3].step_count = 7
    states = [[p, np.zeros_like(p), np.zeros_like(p)] for p in first()]
    with open_tier(folders) as tier, open_swap(tier) as swap:
        swap.fill([(p.copy(), None, None) for p in first()])
        for number in range(1, 4):
            step(swap, mine, number)
            for adam, (p, m, v), g in zip(theirs, states, gradients(number)):
                adam.step([(p, g, m, v)], grad_scale=0.5)
        assert same(everything(swap), states)
        assert [adam.step_count for adam in mine] == [adam.step_count for adam in theirs]
        shared = spillway.Adam()
        step(swap, [shared] * len(SIZES), 1)
        assert shared.step_count == 1, "an Adam that several subgroups share has done one step"
        for wrong in (mine[:2], [], [None] * len(SIZES), None, 3):
            with pytest.raises(spillway.InvalidArgumentError, match="Swap.step: optimizer"):
                step(swap, wrong, 1)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("split", [False, True])
def test_8_bit_moments_have_the_same_values_with_every_budget_and_after_a_new_open(folders, rounding, split):
    torch = pytest.importorskip("torch")
    params, zeros = [torch.from_numpy(p) for p in first()], [torch.zeros(size) for size in SIZES]
    found = []
    for run, buffers in enumerate((3, 4, 20)):
        weights = [param.to(torch.bfloat16) for param in params]
        adam = spillway.Adam(lr=1e-2, rounding=rounding, rounding_seed=3)
        with open_tier(folders, job=f"job{run}") as tier, open_swap(tier, buffers, moment_dtype="int8", split_master=split) as swap:
            swap.fill(list(zip(params, zeros, zeros)))
            for number in range(1, 4):
                swap.step(adam, list(zip([torch.from_numpy(grad).to(torch.bfloat16) for grad in gradients(number)], weights)))
            swap.commit(3)
            stored, bytes_each = sum(extent.bytes for extent in tier.extents()), 4.125 if split else 6.125
            assert bytes_each * sum(SIZES) <= stored <= bytes_each * sum(SIZES) + 400 * len(SIZES)
        with open_tier(folders, job=f"job{run}") as tier, open_swap(tier, buffers, moment_dtype="int8", split_master=split) as swap:
            found.append(everything(swap, weights if split else None))
    assert same(found[0], found[1]) and same(found[0], found[2])
    with open_tier(folders, job="job0") as tier, pytest.raises(spillway.InvalidArgumentError, match="stored with 8-bit moments"):
        open_swap(tier, 4, split_master=split)


def test_a_range_of_8_bit_moments_is_not_exported(folders, tmp_path):
    param = np.linspace(-1, 1, 1000, dtype=np.float32)
    with open_tier(folders) as tier, spillway.Swap(tier, [1000], moment_dtype="int8", **FREE) as swap:
        swap.fill([(param, None, None)])
        swap.step(spillway.Adam(), [(param, None)])
        swap.commit(1)
        with pytest.raises(spillway.InvalidArgumentError, match="exp_avg_codes.*one scale for 32 elements"):
            tier.export_tensors(tmp_path / "part", names=["subgroup-*"], elements=(0, 32)).wait()
        tier.export_tensors(tmp_path / "whole", names=["subgroup-*"]).wait()
    header = (tmp_path / "whole").read_bytes()[:2000].decode("latin1")
    assert '"subgroup-000000-codes.exp_avg_codes":{"dtype":"U8","shape":[1064]' in header.replace(" ", "")


def test_a_kind_of_moments_that_is_not_known_is_refused(folders):
    with open_tier(folders) as tier, pytest.raises(spillway.InvalidArgumentError, match="moment_dtype is 'fp8'; pass \"f32\""):
        open_swap(tier, 4, moment_dtype="fp8")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("split", [False, True])
def test_bf16_moments_have_the_bits_of_bf16_moments_in_memory(folders, rounding, split):
    torch = pytest.importorskip("torch")
    bf16, options = torch.bfloat16, {"lr": 1e-2, "rounding": rounding, "rounding_seed": 3}
    params, zeros = [torch.from_numpy(p) for p in first()], [torch.zeros(size) for size in SIZES]
    moments = [[torch.zeros(size, dtype=bf16) for size in SIZES] for _ in range(2)]
    plain, adam, weights = spillway.Adam(**options), spillway.Adam(**options), [param.to(bf16) for param in params]
    with open_tier(folders) as tier, open_swap(tier, 4, moment_dtype="bf16", split_master=split) as swap:
        swap.fill(list(zip(params, zeros, zeros)))
        for number in range(1, 4):
            grads = [torch.from_numpy(grad).to(bf16) for grad in gradients(number)]
            plain.step(list(zip(params, grads, *moments)))
            swap.step(adam, list(zip(grads, weights)))
            assert all(torch.equal(weight, param.to(bf16)) for weight, param in zip(weights, params))
        found = everything(swap, weights if split else None)
        expected = [[param.numpy(), *(moment[number].float().numpy() for moment in moments)] for number, param in enumerate(params)]
        assert same(found, expected)
        swap.commit(3)
        stored = sum(extent.bytes for extent in tier.extents())
        assert (6 if split else 8) * sum(SIZES) <= stored <= (6 if split else 8) * sum(SIZES) + 400 * len(SIZES)
        with pytest.raises(spillway.InvalidArgumentError, match="exp_avg of subgroup 1 is not float32"):
            swap.write(1, exp_avg=moments[0][1])
    with open_tier(folders) as tier, pytest.raises(spillway.InvalidArgumentError, match="ask for f32 moments, .* stored with bf16 moments"):
        open_swap(tier, 4, split_master=split)
