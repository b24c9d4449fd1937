"""spillway.torch.offload: the order of a step. One that starts during backward has the bits of one that waits, and those of AdamW with
masters; whatever a program does between backward and step."""

import copy
import math

import pytest
import torch
from offload_runs import BUCKETS, Later, backward, equal, offload, offloaded, run, same, trained, training, values

import spillway.torch
from spillway import UnsupportedError
from spillway.torch import AdamW
from spillway.torch._copies import HostLink


def test_many_groups_share_one_thread_and_have_the_bits_of_one_group():
    """Those that maximize have a second one."""
    pieces = [torch.nn.Parameter(torch.full((3,), float(number + 1))) for number in range(40)]
    groups = [{"params": [param], "lr": 0.01, "maximize": number % 7 == 0} for number, param in enumerate(pieces)]
    optimizer = offload(groups, max_norm=1.0)
    alone = [torch.nn.Parameter(param.detach().clone()) for param in pieces]
    others = [offload(alone[at::7], lr=0.01, max_norm=1e9, maximize=at == 0, overlap=False) for at in range(7)]
    for _ in range(3):
        for param, other in zip(pieces, alone):
            # The norm is below 1: nothing is clipped.
            param.grad = torch.full((3,), 0.01 * param.numel())
            other.grad = param.grad.clone()
        optimizer.step()
        for other in others:
            other.step()
    assert all(map(torch.equal, pieces, alone)) and len(optimizer._plan.lanes) == 40
    assert len(optimizer._plan.engines) == 2


@pytest.mark.sampled(cases=10)
@pytest.mark.parametrize("seed", range(40))
def test_a_step_that_starts_during_backward_has_the_bits_of_one_that_waits(seed):
    bucket = BUCKETS[seed % 3]
    same(training(seed, offloaded(bucket_bytes=bucket)), training(seed, offloaded(bucket_bytes=bucket, overlap=False)))


@pytest.mark.parametrize("seed", range(60, 72))
def test_copies_that_end_later_give_the_same_bits(seed, monkeypatch):
    waits = training(seed, offloaded(bucket_bytes=2000, overlap=False))
    link = Later()
    monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    same(training(seed, offloaded(bucket_bytes=2000)), waits)
    assert link._last is not None


@pytest.mark.parametrize("max_norm", [None, 0.01, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_moves_the_gradient_out_and_the_weights_in_once(dtype, max_norm, monkeypatch):
    moved = {"out": 0, "in": 0}

    class Counted(HostLink):
        def out_all(self, hosts, tensors):
            moved["out"] += sum(tensor.nbytes for tensor in tensors)
            super().out_all(hosts, tensors)

        def back_all(self, tensors, hosts):
            moved["in"] += sum(host.nbytes for host in hosts)
            super().back_all(tensors, hosts)

    link = Counted()
    monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    for verdict in ("step", "forward"):
        model, optimizer, _ = run(
            lambda model, verdict=verdict: offload(model, bucket_bytes=1, max_norm=max_norm, verdict=verdict), dtype, spike=None
        )
        optimizer.settle()
        bytes_of = sum(param.nbytes for param in model.parameters())
        # The first step copies the weights too.
        assert moved == {"out": 7 * bytes_of, "in": 6 * bytes_of}
        moved.update(out=0, **{"in": 0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_bits_are_those_of_adamw_with_masters(dtype, max_norm):
    master = None if dtype is torch.float32 else "f32"
    one, optimizer, norms = run(lambda model: offload(model, AdamW, lr=1e-2, max_norm=max_norm, bucket_bytes=1 << 20), dtype)
    other, plain, others = run(lambda model: AdamW(model.parameters(), lr=1e-2, max_norm=max_norm, master=master), dtype)
    assert equal(one, other)
    assert norms == pytest.approx(others) if max_norm else norms == [None] * 6
    for param, of in zip(one.parameters(), other.parameters()):
        assert all(torch.equal(optimizer.state[param][name], plain.state[of][name]) for name in ("exp_avg", "exp_avg_sq", "step"))


def test_buckets_step_during_backward_and_a_clipped_step_is_repeated():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = offload(model, lr=1e-3, max_norm=1.0, bucket_bytes=1)
    counts = []
    for step in range(6):
        (model(torch.randn(4, 64)).square().mean() * (1e4 if step == 4 else 1e-2)).backward()
        plan = optimizer._plan
        counts.append(0 if plan is None else sum(bucket.submitted for bucket in plan.buckets))
        optimizer.step()
        optimizer.zero_grad()
    assert counts == [0, 8, 8, 8, 8, 8]
    stats = optimizer._plan.engines[0].speculation.stats()
    assert (stats.commits, stats.redos, stats.aborts) == (5, 1, 0) and stats.buckets_committed == 40


@pytest.mark.parametrize("verdict", ["step", "forward"])
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_step_count_that_the_program_sets_is_that_of_one_parameter_alone(exchanged, verdict):
    def counts(**options):
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        optimizer = offload(model, lr=1e-2, **options)
        for step in range(4):
            if step == 2:
                state = optimizer.state[model.bias]
                if exchanged:
                    state["step"] = torch.tensor(100.0)
                else:
                    state["step"].fill_(100.0)
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        optimizer.settle()
        return [float(optimizer.state[param]["step"]) for param in model.parameters()], [*map(torch.Tensor.tolist, model.parameters())]

    found, waits = counts(overlap=True, verdict=verdict), counts(overlap=False)
    assert found == waits and found[0] == [4.0, 102.0]


def test_a_parameter_that_is_given_twice_is_refused():
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(UnsupportedError, match="a group has a parameter twice"):
        offload([param, param], lr=1e-2)


def test_parameters_on_the_cpu_do_not_overlap_by_default():
    for overlap, buckets in ((None, 0), (True, 2)):
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = spillway.torch.offload(params, overlap=overlap, bucket_bytes=1)
        for _ in range(2):
            optimizer.zero_grad()
            backward(params)
            submitted = 0 if optimizer._plan is None else sum(bucket.submitted for bucket in optimizer._plan.buckets)
            optimizer.step()
        assert submitted == buckets


def test_the_buckets_that_backward_completes_last_are_small():
    params = [torch.nn.Parameter(torch.ones(256)) for _ in range(100)]
    optimizer = offload(params, bucket_bytes=16 << 10)
    backward(params)
    optimizer.step()
    [lane] = optimizer._plan.lanes
    # In the order of backward; the first one has what is left.
    assert [len(bucket.slots) for bucket in lane.buckets] == [5, 16, 16, 16, 16, 16, 8, 4, 2, 1]
    assert [slot.param for bucket in lane.buckets for slot in bucket.slots][::-1] == params


def test_after_two_clipped_steps_buckets_are_only_measured_before_the_verdict():
    """The unclipped step that follows shows that early steps would have been kept."""
    torch.manual_seed(0)
    model, counts = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), [0]
    optimizer = offload(model, lr=1e-3, max_norm=1.0, bucket_bytes=1)
    for step in range(8):
        (model(torch.randn(4, 64)).square().mean() * (1e4 if step < 4 else 1e-2)).backward()
        assert optimizer._plan is None or all(bucket.submitted for bucket in optimizer._plan.buckets)
        optimizer.step()
        optimizer.zero_grad()
        stats = optimizer._plan.engines[0].speculation.stats()
        counts.append(stats.buckets_speculated)
    stepped_early = [after - before for before, after in zip(counts, counts[1:])]
    assert all(stepped_early[:2]) and stepped_early[2:] == [0, 0, 0, 4, 4, 4] and stats.redos == 4


@pytest.mark.parametrize("unscaled", [False, True])
def test_torchs_gradient_scaler(unscaled):
    def train(overlap):
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 16)
        optimizer, scaler = (
            offload(model, lr=1e-2, max_norm=1.0, overlap=overlap),
            torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2),
        )
        scales, skipped = [], []
        for step in range(8):
            loss = model(torch.randn(4, 16)).square().mean()
            scaler.scale(loss * (math.inf if step == 5 else 1)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            skipped.append(optimizer.skipped)
        return model, scales, skipped

    (one, scales, skipped), (other, scales2, skipped2) = train(True), train(False)
    assert equal(one, other) and scales == scales2 and skipped == skipped2 and skipped[5] and not skipped[4]


def test_state_dicts_go_both_ways_with_torchs_adamw():
    plain = torch.optim.AdamW(torch.nn.Linear(8, 8).parameters(), lr=1e-2)
    for param in plain.param_groups[0]["params"]:
        param.grad = torch.randn_like(param)
    plain.step()
    model = torch.nn.Linear(8, 8)
    optimizer = offload(model, torch.optim.AdamW, lr=1e-3)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for param, of in zip(model.parameters(), plain.param_groups[0]["params"]):
        assert all(torch.equal(optimizer.state[param][name], plain.state[of][name]) for name in ("exp_avg", "exp_avg_sq", "step"))
    # States that the loaded dict does not have go.
    optimizer.load_state_dict({**plain.state_dict(), "state": {}})
    assert not optimizer.state_dict()["state"]
    optimizer.load_state_dict(plain.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_goes_on_from_its_state_dicts(dtype):
    whole, *_ = run(lambda model: offload(model, lr=1e-2), dtype, steps=8, spike=None)
    torch.manual_seed(1)
    model, optimizer, _ = run(lambda model: offload(model, lr=1e-2), dtype, steps=4, spike=None)
    random_state = torch.get_rng_state()
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    resumed = copy.deepcopy(model)
    other = offload(resumed, lr=1e-2)
    resumed.load_state_dict(weights)
    other.load_state_dict(states)
    torch.set_rng_state(random_state)
    for _ in range(4):
        resumed(torch.randn(8, 16).to(dtype)).float().square().mean().backward()
        other.step()
        other.zero_grad()
    assert equal(whole, resumed)


def test_a_parameter_that_is_added_later_is_stepped():
    model, more = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(4))
    optimizer = offload(model, lr=1e-2)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [more], "lr": 1.0})
        (model(torch.randn(2, 4)) * more).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert int(optimizer.state[more]["step"]) == 2 and not torch.equal(more, torch.ones(4))


def test_a_limit_that_changes_between_backward_and_step_is_that_of_the_step():
    results = []
    for first in (None, 100.0, 0.01):
        params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
        optimizer = offload(params, lr=0.1, bucket_bytes=1, max_norm=first, skip_nonfinite=True)
        for _ in range(3):
            backward(params)
            optimizer.max_norm = 0.01
            optimizer.step()
            optimizer.zero_grad()
            optimizer.max_norm = first
        results.append(values(params))
    assert all(map(torch.equal, results[0], results[2])) and all(map(torch.equal, results[1], results[2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_go_from_one_optimizer_of_this_library_to_the_other(dtype):
    def make(kind):
        params = [torch.nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(3)]
        return params, offload(params, lr=0.01) if kind == "offload" else AdamW(params, lr=0.01, master="f32")

    for first, second in (("offload", "class"), ("class", "offload")):
        one, other = make(first), make(second)
        for _ in range(3):
            backward(one[0])
            one[1].step()
            one[1].zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(*(pair[0] for pair in (other, one)), strict=True):
                mine.copy_(theirs)
        # As in torch, the tensors of a state dict are the optimizer's own.
        other[1].load_state_dict(copy.deepcopy(one[1].state_dict()))
        for params, optimizer in (one, other):
            backward(params)
            optimizer.step()
        assert all(map(torch.equal, one[0], other[0]))
        states = [optimizer.state_dict()["state"] for _, optimizer in (one, other)]
        assert all(torch.equal(states[0][place]["master_param"], states[1][place]["master_param"]) for place in range(3))


def test_states_that_the_program_clears_or_replaces_are_those_of_the_next_step():
    params, optimizer = trained(3, 4)
    optimizer.state.clear()
    backward(params)
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [1, 1]
    fresh = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), 7.0), "exp_avg_sq": torch.zeros(3)}
    optimizer.zero_grad()
    backward(params)
    optimizer.state[params[0]] = fresh
    optimizer.step()
    assert fresh["step"] == 2 and torch.allclose(fresh["exp_avg"], torch.full((3,), 7 * 0.9 + 0.1))


def test_a_state_dict_changes_in_step_and_not_during_backward():
    params, optimizer = trained(3)
    held = optimizer.state_dict()["state"][0]
    before = copy.deepcopy(held)
    backward(params)
    assert all(torch.equal(held[name], value) for name, value in before.items())
    optimizer.step()
    assert held["step"] == before["step"] + 1 and not torch.equal(held["exp_avg"], before["exp_avg"])


def test_what_is_written_to_a_state_dict_is_the_state():
    """As in torch, where a checkpoint may be loaded in place."""
    params, optimizer = trained(3)
    optimizer.state_dict()["state"][0]["exp_avg"].fill_(7)
    optimizer.zero_grad()
    params[0].grad = torch.zeros(3)
    optimizer.step()
    assert torch.allclose(optimizer.state[params[0]]["exp_avg"], torch.full((3,), 7 * 0.9))


def test_groups_and_parameters_may_change_between_steps():
    params, optimizer = trained(3, 4)
    optimizer.param_groups[0]["params"] = params[:1]
    optimizer.add_param_group({"params": params[1:], "lr": 0.0})
    optimizer.param_groups.reverse()
    before = values(params)
    backward(params)
    optimizer.step()
    assert not torch.equal(params[0], before[0]) and torch.equal(params[1], before[1])
    other = torch.nn.Parameter(torch.ones(5))
    optimizer.param_groups[1]["params"] = [other]
    optimizer.zero_grad()
    (other.sum() + params[0].sum()).backward()
    before = values([params[0]])
    optimizer.step()
    assert torch.equal(params[0], before[0]) and not torch.equal(other, torch.ones(5)) and not params[0]._post_accumulate_grad_hooks


@pytest.mark.parametrize("first, then", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_model_that_is_converted_later_has_the_masters_of_its_dtype(first, then):
    model, optimizer, _ = run(lambda model: offload(model, lr=1e-5), first, steps=3)
    model.to(then)
    for _ in range(3):
        model(torch.randn(8, 16).to(then)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for param in model.parameters():
        assert param.dtype is then and ("master_param" in optimizer.state[param]) == (then is not torch.float32)
    values_of = [param.float() if then is torch.float32 else optimizer.state[param]["master_param"] for param in model.parameters()]
    assert any(not torch.equal(value, value.bfloat16().float()) for value in values_of)


@pytest.mark.parametrize("tail", [0, 1])
@pytest.mark.parametrize("verdict", ["step", "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_are_views_of_one_tensor_are_stepped_as_others(dtype, verdict, tail):
    """Such views share a version, which grows by a write to any of them."""
    results = []
    for shared in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 5)).to(dtype)
        whole = torch.cat([param.detach().flatten() for param in model.parameters()])
        first = 0
        for module, name in [(module, name) for module in model for name in ("weight", "bias")]:
            param = getattr(module, name)
            part = whole[first : first + param.numel()].view_as(param)
            first += param.numel()
            setattr(module, name, torch.nn.Parameter(part if shared else part.clone()))
        optimizer = offload(model, lr=1e-2, max_norm=0.5, bucket_bytes=1, verdict=verdict, tail=tail, model=model)
        for number in range(4):
            optimizer.zero_grad()
            (model(torch.full((3, 5), number + 1.0, dtype=dtype)).square().sum() * 10 ** (number - 2)).backward()
            optimizer.step()
        optimizer.settle()
        results.append(values(model.parameters()))
    assert all(map(torch.equal, *results))


def test_a_compiled_function_may_call_step():
    def trained(make, compiles):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = make(model)
        step = torch.compile(lambda: optimizer.step(), backend="eager") if compiles else optimizer.step
        for _ in range(4):
            model(torch.ones(2, 8)).square().mean().backward()
            step()
            optimizer.zero_grad()
        return model.weight.detach().clone()

    def offload(model):
        return spillway.torch.offload(model, torch.optim.AdamW, lr=1e-2, overlap=True)

    assert torch.equal(trained(offload, True), trained(offload, False))


@pytest.mark.parametrize("written", [False, True])
def test_backward_compares_nothing_that_is_on_a_device(written, monkeypatch):
    """To read a comparison, the host waits for the device. step() does so, and finds weights that were written by `.data`."""

    class Device(HostLink):
        is_apart = True

    link, compared = Device(), []
    monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    for module in (spillway.torch._offload.bucket, spillway._written):
        plain = module.Comparison
        monkeypatch.setattr(module, "Comparison", lambda *sums, plain=plain: compared.append(True) or plain(*sums))

    def trained(make):
        params = [torch.nn.Parameter(torch.ones(40)) for _ in range(3)]
        optimizer = make(params)
        for step in range(4):
            if written and step == 3:
                params[1].data.mul_(3.0)
            before = len(compared)
            backward(params)
            assert len(compared) == before
            optimizer.step()
            optimizer.zero_grad()
        return values(params)

    seen = trained(lambda params: offload(params, lr=0.1, bucket_bytes=1, overlap=True))
    assert compared
    assert all(torch.allclose(one, other) for one, other in zip(seen, trained(lambda params: torch.optim.AdamW(params, lr=0.1))))
