"""States on a tier have the bits of states in memory; the memory budget; what is freed."""

import gc
import weakref

import pytest
import torch
from tier_runs import same, same_states, tier, train
from tier_worker import parameters, random_grads

import spillway
from spillway import _pinned
from spillway import torch as own


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("AdamW", {}),
        ("Adam", {"weight_decay": 0.1}),
        ("AdamW", {"max_norm": 1.0}),
        ("AdamW", {"skip_nonfinite": True}),
        ("AdamW", {"maximize": True, "betas": (0.8, 0.9)}),
    ],
    ids=str,
)
def test_a_run_has_the_bits_of_one_in_memory(tier, name, arguments):
    ours, theirs = parameters(), parameters()
    pair = []
    for params, beyond in ((ours, {"tier": tier}), (theirs, {"master": "f32"})):
        groups = [{"params": params[:3], "lr": 3e-3}, {"params": params[3:], "weight_decay": 0.2}]
        pair.append(getattr(own, name)(groups, lr=1e-2, **arguments, **beyond))
    for step in range(8):
        for params, optimizer in zip((ours, theirs), pair):
            random_grads(params, step)
            if step == 3:
                params[2].grad = None
            if step == 5 and arguments.get("skip_nonfinite"):
                params[6].grad[8] = float("inf")
            optimizer.step()
        assert same(ours, theirs) and pair[0].grad_norm == pair[1].grad_norm and pair[0].skipped == pair[1].skipped
    same_states(pair[0].state_dict()["state"], pair[1].state_dict()["state"])


def test_a_scaler_hooks_closures_and_schedulers(tier):
    ours, theirs = parameters(), parameters()
    # A GradScaler unscales no float16 gradients itself.
    pair = own.AdamW(ours, lr=1e-2, tier=tier, fused=True), own.AdamW(theirs, lr=1e-2, master="f32", fused=True)
    calls = []
    for params, optimizer in zip((ours, theirs), pair):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        handle = optimizer.register_step_post_hook(lambda *_: calls.append("step"))
        for step in range(4):
            scaler.scale(sum(param.float().square().sum() for param in params)).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
        handle.remove()
        versions = [param._version for param in params]
        random_grads(params, 9)
        assert optimizer.step(lambda: 17) == 17
        assert all(param._version > version for param, version in zip(params, versions))
    assert calls == ["step"] * 8 and same(ours, theirs)


def test_the_program_may_write_to_parameters(tier):
    ours, theirs = parameters(), parameters()
    pair = own.AdamW(ours, lr=1e-2, tier=tier), own.AdamW(theirs, lr=1e-2, master="f32")
    for step in range(5):
        for params, optimizer in zip((ours, theirs), pair):
            random_grads(params, step)
            if step == 3:
                with torch.no_grad():
                    params[2][1000:9000].fill_(0.25)
                    params[6].mul_(0.5)
            optimizer.step()
    assert same(ours, theirs)


def test_the_host_memory_holds(tmp_path):
    params = [torch.nn.Parameter(torch.randn(300_000)) for _ in range(3)]
    optimizer = own.AdamW(params, tier=own.TierOptions(tmp_path, pin_memory=False), host_memory=4 << 20)
    budget = optimizer._home.tiered.swap.budget
    assert budget.host_bytes <= 4 << 20 < budget.state_bytes and budget.cached < len(optimizer._home.on_tier.layout.elements)
    train(optimizer, params, range(2))
    assert optimizer._home.tiered.swap.stats().fetched > 0
    optimizer.commit()
    optimizer.close()
    with pytest.raises(spillway.InvalidArgumentError, match="host_memory|bytes"):
        own.AdamW(params, tier=tmp_path, host_memory=1000)
    assert own.AdamW(params, tier=own.TierOptions(tmp_path, pin_memory=False), host_memory=8 << 20).resumed_step == 2


def test_the_memory_is_told_by_kind(tmp_path):
    params = [torch.nn.Parameter(torch.randn(1000, 40).to(torch.bfloat16)) for _ in range(3)]
    in_memory = own.AdamW(params, master="f32", moment_dtype="bf16")
    assert in_memory.memory() == ({"moments": 0, "masters": 0}, {"moments": 0, "masters": 0})
    train(in_memory, params, range(1))
    assert in_memory.memory().host == {"moments": 4 * 120_000, "masters": 4 * 120_000}
    strided = [torch.nn.Parameter(torch.randn(40, 1000).t()), *params]
    on_tier = own.AdamW(strided, tier=own.TierOptions(tmp_path, pin_memory=False))
    buffers = on_tier._home.tiered.swap.budget.host_bytes
    assert on_tier.memory() == ({"buffers": buffers, "copies": 0}, {})
    train(on_tier, strided, range(1))
    # The gradient is contiguous, and the new weights have other strides.
    assert on_tier.memory().host == {"buffers": buffers, "copies": 4 * 40_000}
    on_tier.close()


def test_auto_caches_what_half_of_the_memory_left_for_this_rank_holds(tmp_path, monkeypatch):
    params = [torch.nn.Parameter(torch.randn(300_000)) for _ in range(3)]
    where = own.TierOptions(tmp_path, pin_memory=False, part_elements=20_000)
    monkeypatch.setattr(_pinned, "unused_bytes", lambda: 16 << 20)
    optimizer = own.AdamW(params, tier=where, host_memory="auto")
    assert 4 << 20 < optimizer._home.tiered.swap.budget.host_bytes <= 8 << 20
    optimizer.close()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    optimizer = own.AdamW(params, tier=where._replace(job="other"), host_memory="auto")
    assert 1 << 20 < optimizer._home.tiered.swap.budget.host_bytes <= 2 << 20
    optimizer.close()


def test_a_tier_in_memory_and_a_disk_without_room(tmp_path):
    params = [torch.nn.Parameter(torch.zeros(100_000))]
    optimizer = own.AdamW(params, tier=own.TierOptions([None], part_elements=9000, pin_memory=False))
    train(optimizer, params, range(2))
    assert torch.equal(optimizer.state_dict()["state"][0]["step"], torch.tensor(2.0))
    optimizer.close()
    full = own.TierOptions([spillway.TierPath(tmp_path, limit_bytes=1 << 20)], part_elements=9000, pin_memory=False)
    message = "the states of the optimizer need 1.2 MB .*no path has room: .* has 1048576 bytes free;.*limit_bytes"
    with pytest.raises(spillway.SpillwayError, match=message):
        own.AdamW(params, tier=full, host_memory=1 << 20)


def test_garbage_collection_frees_the_lock_and_the_memory(tier):
    for _ in range(3):
        params = parameters()
        optimizer = own.AdamW(params, lr=1e-2, tier=tier)
        train(optimizer, params, [0])
        handles = weakref.ref(optimizer._home.tiered.swap)
        del optimizer
        gc.collect()
        assert handles() is None
    own.AdamW(parameters(), tier=tier).close()


def test_the_progress_of_a_fill_a_resume_and_a_load_is_told(tmp_path):
    told = []
    options = own.TierOptions(tmp_path, part_elements=1000, pin_memory=False, progress=lambda *moved: told.append(moved))
    ours = parameters()
    optimizer = own.AdamW(ours, lr=1e-2, tier=options)
    elements = optimizer._home.on_tier.layout.elements
    assert len(elements) > 2 and told == [(12 * sum(elements[: n + 1]), 12 * sum(elements)) for n in range(len(elements))]
    random_grads(ours, 0)
    optimizer.step()
    optimizer.commit()
    for use in (lambda: optimizer.load_state_dict(optimizer.state_dict()), optimizer.rollback):
        told.clear()
        use()
        assert told[-1] == (12 * sum(elements),) * 2 and len(told) == len(elements)
    optimizer.close()
    told.clear()
    own.AdamW(parameters(), lr=1e-2, tier=options).close()
    assert told[-1] == (12 * sum(elements),) * 2


def test_an_exception_of_the_progress_ends_a_fill_and_the_next_run_begins_anew(tmp_path):
    def stop(done, total):
        raise RuntimeError("enough")

    options = own.TierOptions(tmp_path, part_elements=1000, pin_memory=False, progress=stop)
    with pytest.raises(RuntimeError, match="enough"):
        own.AdamW(parameters(), lr=1e-2, tier=options)
    optimizer = own.AdamW(parameters(), lr=1e-2, tier=options._replace(progress=None))
    assert optimizer.resumed_step is None
    optimizer.close()
