"""A step of narrow states is rolled back to every bit, by AdamW and by offload(), which may then start it during backward."""

import ctypes
import random

import pytest
import torch
from offload_runs import same as same_training
from offload_runs import training

from spillway import torch as own

BF16 = torch.bfloat16
KINDS = {
    "codes": {"moment_dtype": "int8", "master": "f32"},
    "codes to the nearest": {"moment_dtype": "int8", "moment_rounding": "nearest", "master": "f32"},
    "split codes": {"moment_dtype": "int8", "master": "split"},
    "split": {"master": "split"},
    "split bf16": {"master": "split", "moment_dtype": "bf16", "moment_rounding": "stochastic"},
}
EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
SIZES = (1, 33, 5000, 70_001)


def params():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size).to(BF16)) for size in SIZES]


def gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(BF16)


def values(params, optimizer):
    """All bits of parameters and states."""
    found = [param.detach().clone() for param in params]
    for param in params:
        found += [value.clone() for _, value in sorted(optimizer.state[param].items())]
    return found


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@EACH
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_rollback_has_the_bits_of_the_step_before(kind, max_norm):
    ours, theirs = params(), params()
    mine = own.AdamW(ours, lr=1e-2, undo=True, max_norm=max_norm, **kind)
    plain = own.AdamW(theirs, lr=1e-2, max_norm=max_norm, **kind)
    for step in range(4):
        gradients(ours, step)
        gradients(theirs, step)
        mine.step()
        plain.step()
        before = values(ours, mine)
        gradients(ours, 100 + step)
        mine.step()
        assert not same(values(ours, mine), before)
        mine.rollback()
        assert same(values(ours, mine), before)
    assert same(values(ours, mine), values(theirs, plain))


@EACH
def test_a_rollback_of_the_first_step_leads_to_zero_moments(kind):
    ours = params()
    optimizer = own.AdamW(ours, lr=1e-2, undo=True, **kind)
    before = [param.detach().clone() for param in ours]
    gradients(ours, 0)
    optimizer.step()
    optimizer.rollback()
    assert all(map(torch.equal, ours, before))
    for param in ours:
        assert not any(value.to(torch.float32).any() for name, value in optimizer.state[param].items() if name.startswith("exp_avg"))


def early(seed, overlap, kind):
    """A function that makes an optimizer of small buckets for a random training."""

    def make(params, model, **options):
        return own.offload(params, torch.optim.AdamW, model=model, overlap=overlap, bucket_bytes=1 << (10 + seed % 4), **kind, **options)

    return make


def without_float16(seed):
    return random.Random(seed).choice((torch.float32, torch.float32, BF16, torch.float16)) is not torch.float16


@pytest.mark.sampled(cases=15)
@pytest.mark.parametrize(
    "kind", [{"moment_dtype": "int8"}, KINDS["split codes"], KINDS["split bf16"]], ids=["codes", "split codes", "split bf16"]
)
@pytest.mark.parametrize("seed", [*filter(without_float16, range(24))])
def test_random_trainings_with_early_steps_have_the_bits_of_steps_that_wait(seed, kind):
    same_training(training(seed, early(seed, True, kind)), training(seed, early(seed, False, kind)))


@EACH
def test_early_steps_take_place_where_they_were_asked_for(kind):
    for overlap, memory, expected in ((True, None, True), (None, None, False), (True, 1_060_000, False), (True, 1 << 30, True)):
        ours = params()
        optimizer = own.offload(ours, torch.optim.AdamW, lr=1e-2, max_norm=1e9, overlap=overlap, host_memory=memory, **kind)
        for step in range(3):
            gradients(ours, step)
            sum((param * 1.0).float().sum() for param in ours).backward()
            optimizer.step()
        stepped = sum(engine.speculation.stats().buckets_speculated for engine in optimizer._plan.engines)
        assert (stepped > 0) is expected, (overlap, memory)
        optimizer.close()


def test_the_log_has_the_size_of_the_states():
    for kind in KINDS.values():
        recording = own.AdamW([param := torch.nn.Parameter(torch.randn(1 << 16).to(BF16))], lr=1e-3, undo=True, **kind)
        param.grad = torch.randn_like(param)
        recording.step()
        home, used = recording._home, ctypes.c_uint64()
        home._last._call("spw_undo_get_log_bytes", ctypes.byref(used))
        assert 6 << 16 < used.value <= home.precision.log_bytes * (1 << 16) + 100
