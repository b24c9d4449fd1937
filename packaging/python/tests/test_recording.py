"""Proves that steps recorded from Python roll back bit for bit, by log and by shadow. A redo gives the bits of the
step that it replaces, and a step that cannot be rolled back raises an error that says so."""

import os

import numpy as np
import pytest

import spillway
from spillway import _native

N = 3001
KINDS = {"Adam": ("exp_avg", "exp_avg_sq"), "Adagrad": ("exp_avg_sq",), "Lion": ("exp_avg",), "Signum": ("exp_avg",)}


def aligned(source, scale):
    memory = np.zeros(N + 16, np.float32)
    start = (-memory.ctypes.data // 4) % 16
    memory[start : start + N] = source.standard_normal(N) * scale
    return memory[start : start + N]


def make(kind, seed=0):
    source = np.random.default_rng(seed)
    states = [np.abs(aligned(source, 0.01)) for _ in KINDS[kind]]
    return getattr(spillway, kind)(lr=1e-2), [aligned(source, 1.0), aligned(source, 0.1), *states]


def copies(arrays):
    return [array.copy() for array in arrays]


def same(arrays, others):
    return all((a.view(np.uint32) == b.view(np.uint32)).all() for a, b in zip(arrays, others))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [None, np.inf, np.nan])
def test_a_rollback_gives_every_bit_back(kind, bad):
    optimizer, arrays = make(kind)
    if bad is not None:
        arrays[1][::3] = bad
    before = copies(arrays)
    with optimizer.prepare([arrays]).record() as recording:
        stats = recording.step(return_stats=True)
        assert stats.nonfinite == (bad is not None) and optimizer.step_count == 1
        assert not same(arrays, before) and N // 2 <= recording.log_bytes <= 14 * N
        recording.rollback()
        assert same(arrays, before) and optimizer.step_count == 0
        with pytest.raises(spillway.InvalidArgumentError, match="no recorded step"):
            recording.rollback()


def test_a_forked_child_is_refused_the_object_and_may_roll_its_copy_back_in_c():
    optimizer, arrays = make("Adam")
    before = copies(arrays)
    with optimizer.prepare([arrays]).record() as recording:
        recording.step()
        after, handle = copies(arrays), recording.handle
        child = os.fork()
        if not child:
            ending = 1
            try:
                with pytest.raises(spillway.UnsupportedError, match="forked child"):
                    recording.rollback()
                status = _native.library().spw_undo_rollback(handle)
                ending = 0 if status == 0 and same(arrays, before) else 2
            finally:
                os._exit(ending)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same(arrays, after)
        recording.rollback()
        assert same(arrays, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_redo_has_the_bits_of_the_step_it_stands_for(kind):
    optimizer, arrays = make(kind)
    other, others = make(kind)
    recording = optimizer.prepare([arrays]).record()
    recording.step()
    recording.redo(grad_scale=0.25)
    other.step([others], grad_scale=0.25)
    assert same(arrays, others) and optimizer.step_count == other.step_count == 1
    recording.step()
    recording.commit(release_memory=True)
    assert recording.log_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_shadow_leaves_the_old_values_where_they_are(kind):
    optimizer, arrays = make(kind)
    other, others = make(kind)
    before, grad = copies(arrays), arrays[1]
    shadow = copies([arrays[0], *arrays[2:]])
    recording = optimizer.prepare([arrays], shadow=[shadow]).record("shadow")
    recording.step()
    recording.rollback()
    assert same(arrays, before)
    recording.step()
    recording.commit()
    other.step([others])
    assert same(arrays, before) and same(shadow, [others[0], *others[2:]]) and recording.log_bytes == 0
    # The next step uses the spans in the opposite direction.
    back = optimizer.prepare([[shadow[0], grad, *shadow[1:]]], shadow=[[arrays[0], *arrays[2:]]])
    back.record("shadow").step()
    other.step([others])
    assert same(arrays, others)


def test_the_formula_comes_near_and_refuses_inf():
    optimizer, arrays = make("Adam")
    before = copies(arrays)
    recording = optimizer.prepare([arrays]).record("arithmetic")
    recording.step()
    recording.rollback()
    assert all(np.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(arrays, before))
    arrays[1][5] = np.inf
    recording.step()
    after = copies(arrays)
    with pytest.raises(spillway.InvalidArgumentError, match="Inf or NaN"):
        recording.rollback()
    assert same(arrays, after)


def test_mistakes_name_themselves():
    optimizer, arrays = make("Adam")
    prepared = optimizer.prepare([arrays])
    with pytest.raises(spillway.InvalidArgumentError, match="delta"):
        prepared.record("exact")
    with pytest.raises(spillway.InvalidArgumentError, match="shadow_param"):
        prepared.record("shadow").step()
    with pytest.raises(spillway.InvalidArgumentError, match="1 entries for 2"):
        optimizer.prepare([arrays, make("Adam", 1)[1]], shadow=[arrays[:3]])
    with pytest.raises(spillway.InvalidArgumentError, match=r"shadow\[0\] has 1 arrays"):
        optimizer.prepare([arrays], shadow=[arrays[:1]])
    with pytest.raises(spillway.InvalidArgumentError, match=r"overlaps"):
        optimizer.prepare([arrays], shadow=[[arrays[0], *arrays[2:]]]).record("shadow").step()
