"""bf16 moments on a tier have the bits of bf16 moments in memory, with the same rounding at random; also after kills, as 8-bit ones."""

import pathlib
import random
import subprocess
import sys

import pytest
import torch
from offload_runs import same as same_training
from offload_runs import training
from test_tier_overlap import TRAININGS, tiered
from tier_runs import same, same_states, tier, train, values
from tier_worker import BF16_MOMENTS, options, random_grads, wide_parameters
from tier_worker import KINDS as MOMENTS

import spillway
from spillway import torch as own

NEAREST = {"moment_dtype": torch.bfloat16}
KINDS = pytest.mark.parametrize("kind", [NEAREST, BF16_MOMENTS], ids=["nearest", "stochastic"])


def in_memory(params, kind, **more):
    return own.AdamW(params, lr=1e-2, **{"master": "f32", **kind, **more})


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_has_the_bits_of_one_in_memory(tier, kind, overlap):
    ours, theirs = wide_parameters(), wide_parameters()
    arguments = {"max_norm": 20.0, "weight_decay": 0.1}
    pair = own.AdamW(ours, lr=1e-2, tier=tier, overlap=overlap, **kind, **arguments), in_memory(theirs, kind, **arguments)
    for step in range(6):
        for params, optimizer in zip((ours, theirs), pair):
            random_grads(params, step)
            if step == 3:
                params[2].grad = None
            optimizer.step()
        assert same(ours, theirs) and pair[0].grad_norm == pair[1].grad_norm
    saved = [optimizer.state_dict()["state"] for optimizer in pair]
    same_states(*saved)
    assert all(state[key].dtype is torch.bfloat16 for state in saved[0].values() for key in ("exp_avg", "exp_avg_sq"))
    assert pair[0]._home.tiered.swap.budget.state_bytes < 9 * sum(param.numel() for param in ours) + (1 << 18)


def of_sixteen_bits_without_bf16(seed):
    return random.Random(seed).choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)) is torch.float16


@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("seed", [seed for seed in range(TRAININGS) if not of_sixteen_bits_without_bf16(seed)])
def test_random_trainings_during_backward_have_the_bits_of_a_step_that_waits(seed):
    same_training(training(seed, tiered(seed, overlap=True, **BF16_MOMENTS)), training(seed, tiered(seed, **BF16_MOMENTS)))


@KINDS
def test_state_dicts_load_both_ways(tier, kind):
    ours, theirs = wide_parameters(), wide_parameters()
    mine, other = own.AdamW(ours, lr=1e-2, tier=tier, **kind), in_memory(theirs, kind)
    train(mine, ours, range(3))
    other.load_state_dict(mine.state_dict())
    with torch.no_grad():
        for one, two in zip(theirs, ours):
            one.copy_(two)
    for steps in (range(3, 5), range(5, 7)):
        train(mine, ours, steps)
        train(other, theirs, steps)
        assert same(ours, theirs)
        mine.load_state_dict(other.state_dict())
    # A state dict with f32 moments is rounded as in memory.
    wide = wide_parameters()
    plain = own.AdamW(wide, lr=1e-2, master="f32")
    train(plain, wide, range(2))
    for params, optimizer in ((ours, mine), (theirs, other)):
        with torch.no_grad():
            for param, value in zip(params, wide):
                param.copy_(value)
        optimizer.load_state_dict(plain.state_dict())
    same_states(mine.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("moments", ["bf16", "int8", "split"])
def test_a_killed_run_resumes_with_the_bits_of_one_without_interruption(tier, moments):
    made, kind = MOMENTS[moments]
    folder, paths = str(pathlib.Path(__file__).parent), [str(path) for path in tier.paths]
    code = f"import sys; sys.path.insert(0, {folder!r}); import tier_worker; tier_worker.main({paths!r}, 3, {moments!r})"
    whole = made()
    uninterrupted, at = in_memory(whole, kind), 0
    for lines in (5, 9, 4):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            for _ in range(lines):
                assert process.stdout.readline()
            process.kill()
        params = made()
        optimizer = own.AdamW(params, lr=1e-2, tier=tier, **kind)
        assert optimizer.resumed_step > at
        train(uninterrupted, whole, range(at, optimizer.resumed_step))
        at = optimizer.resumed_step
        assert same(params, whole)
        same_states(values(optimizer), values(uninterrupted))
        optimizer.close()


def test_a_tier_with_moments_of_another_type_is_refused_with_both_names(tier):
    for kind, other, words in (
        (BF16_MOMENTS, {}, "holds moments of bf16, and this optimizer has f32; pass moment_dtype=.bf16."),
        ({}, NEAREST, "holds moments of f32, and this optimizer has bf16"),
    ):
        place = tier._replace(job="bf16" if kind else "f32")
        params = wide_parameters()
        optimizer = own.AdamW(params, lr=1e-2, tier=place, **kind)
        train(optimizer, params, [0])
        optimizer.commit()
        optimizer.close()
        with pytest.raises(spillway.InvalidArgumentError, match=words):
            own.AdamW(wide_parameters(), tier=place, **other)
        resumed = wide_parameters()
        assert own.AdamW(resumed, tier=place, **kind).resumed_step == 1 and same(resumed, params)


def test_a_float16_parameter_is_refused(tmp_path):
    with pytest.raises(spillway.UnsupportedError, match=r"param_groups\[0\].* is float16: a step with bfloat16 moments"):
        own.AdamW([torch.nn.Parameter(torch.ones(9000, dtype=torch.float16))], tier=options(tmp_path), **NEAREST)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
