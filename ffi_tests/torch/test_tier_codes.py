"""8-bit moments on a tier have the bits of 8-bit moments in memory, rounded to the nearest code and at random."""

import pytest
import torch
from offload_runs import same as same_training
from offload_runs import training
from test_tier_overlap import TRAININGS, tiered
from tier_runs import same, same_states, tier, train, values
from tier_worker import CODED_MOMENTS, parameters, random_grads

import spillway
from spillway import torch as own

NEAREST = {"moment_dtype": "int8", "moment_rounding": "nearest"}
KINDS = pytest.mark.parametrize("kind", [NEAREST, CODED_MOMENTS], ids=["nearest", "stochastic"])


def in_memory(params, kind, **more):
    return own.AdamW(params, lr=1e-2, master="f32", **kind, **more)


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_has_the_bits_of_one_in_memory(tier, kind, overlap):
    ours, theirs = parameters(), parameters()
    arguments = {"max_norm": 20.0, "weight_decay": 0.1}
    pair = own.AdamW(ours, lr=1e-2, tier=tier, overlap=overlap, **kind, **arguments), in_memory(theirs, kind, **arguments)
    for step in range(6):
        for params, optimizer in zip((ours, theirs), pair):
            random_grads(params, step)
            if step == 3:
                params[2].grad = None
            optimizer.step()
        assert same(ours, theirs) and pair[0].grad_norm == pair[1].grad_norm
    same_states(*map(values, pair))
    elements = sum(param.numel() for param in ours)
    assert 6 * elements < pair[0]._home.tiered.swap.budget.state_bytes < 6.2 * elements + (1 << 18)


@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("seed", range(TRAININGS))
def test_random_trainings_during_backward_have_the_bits_of_a_step_that_waits(seed):
    same_training(training(seed, tiered(seed, overlap=True, **CODED_MOMENTS)), training(seed, tiered(seed, **CODED_MOMENTS)))


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [CODED_MOMENTS, {"moment_dtype": "bf16", "moment_rounding": "stochastic"}], ids=["codes", "bf16"])
def test_a_norm_of_several_processes_serves_parameters_of_several_parts(tier, group, kind, overlap):
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, 20_000))] for _ in range(2))
    arguments = {"max_norm": 20.0, "process_group": group, **kind}
    pair = own.AdamW(ours, lr=1e-2, tier=tier, overlap=overlap, **arguments), own.AdamW(theirs, lr=1e-2, **arguments)
    for params, optimizer in zip((ours, theirs), pair):
        train(optimizer, params, range(3))
    assert same(ours, theirs) and pair[0].grad_norm == pair[1].grad_norm


@KINDS
@pytest.mark.parametrize("part_elements", [33, 7000, 1 << 20])
def test_every_size_of_parts_has_the_same_bits(tier, kind, part_elements):
    sizes = (1, 31, 32, 33, 64, 1000)
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in sizes] for _ in range(2))
    pair = own.AdamW(ours, lr=1e-2, tier=tier._replace(part_elements=part_elements), **kind), in_memory(theirs, kind)
    for params, optimizer in zip((ours, theirs), pair):
        train(optimizer, params, range(4))
    assert same(ours, theirs)
    same_states(*map(values, pair))


def test_state_dicts_load_both_ways(tier):
    ours, theirs = parameters(), parameters()
    mine, other = own.AdamW(ours, lr=1e-2, tier=tier, **NEAREST), in_memory(theirs, NEAREST)
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
    same_states(values(mine), values(other))


def test_a_rollback_has_the_bits_of_the_commit(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier, **CODED_MOMENTS)
    train(optimizer, params, range(2))
    optimizer.commit()
    kept, states = [param.detach().clone() for param in params], values(optimizer)
    train(optimizer, params, range(2, 4))
    assert not same(params, kept)
    optimizer.rollback()
    assert same(params, kept)
    same_states(values(optimizer), states)


def test_a_new_job_begins_from_the_values_of_another(tier, tmp_path):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier, **NEAREST)
    train(optimizer, params, range(3))
    optimizer.commit()
    states = values(optimizer)
    optimizer.close()
    others = [str(path / tier.job) for path in tier.paths]
    resumed = parameters()
    optimizer = own.AdamW(resumed, lr=1e-2, tier=tier._replace(job="other", begin_from=others, part_elements=6400), **NEAREST)
    assert same(resumed, params)
    found, empty = values(optimizer), 3
    # The commit of another run has no step count for a parameter without elements.
    found[empty]["step"] = states[empty]["step"]
    same_states(found, states)


def test_a_tier_with_moments_of_another_type_is_refused_with_both_names(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier, **NEAREST)
    train(optimizer, params, [0])
    optimizer.commit()
    optimizer.close()
    for other, words in (
        ({}, "holds moments of int8, and this optimizer has f32"),
        ({"moment_dtype": "bf16"}, "holds moments of int8, and this optimizer has bf16"),
    ):
        ours = [param for param in parameters() if not other or param.dtype is not torch.float16]
        with pytest.raises(spillway.InvalidArgumentError, match=words if len(ours) == len(params) else "the tier"):
            own.AdamW(ours, tier=tier, **other)
    assert own.AdamW(parameters(), tier=tier, **NEAREST).resumed_step == 1
