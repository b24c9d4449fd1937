"""A step over states on a tier that starts during backward has the bits of one that waits, whatever a program does in between."""

import functools
import gc
import os

import pytest
import torch
from interrupts import OwnInterrupt, interrupted
from offload_runs import bits, same, training
from test_interrupted import interrupted_at

import spillway
from spillway import torch as own
from spillway.torch import _tier_step

#: Random trainings.
TRAININGS = 100
#: Elements of a subgroup: many per parameter, some per model, one for all.
PARTS = (50, 700, 1 << 20)


def tiered(seed, **more):
    options = own.TierOptions([None, None] if seed % 2 else None, part_elements=PARTS[seed % 3], pin_memory=False)
    budget = None if seed % 5 else 2 << 20
    return lambda params, model, **given: own.AdamW(params, tier=options, host_memory=budget, **given, **more)


@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("seed", range(TRAININGS))
def test_random_trainings_have_the_bits_of_a_step_that_waits(seed):
    same(training(seed, tiered(seed, overlap=True)), training(seed, tiered(seed)))


class Counted:
    """Counts what a Beside does."""

    def __init__(self, monkeypatch):
        self.during, self.verdicts = [], []
        prepare, verdict = _tier_step.Beside.prepare, spillway.swap.SwapUpdate.verdict

        def prepared(this, rows):
            self.during.append(len(this.submitted))
            prepare(this, rows)

        def given(this, name, *arguments):
            self.verdicts.append(name)
            verdict(this, name, *arguments)

        monkeypatch.setattr(_tier_step.Beside, "prepare", prepared)
        monkeypatch.setattr(spillway.swap.SwapUpdate, "verdict", given)


def test_subgroups_are_submitted_during_backward_and_repeated_if_clipped(monkeypatch):
    counted = Counted(monkeypatch)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    options = own.TierOptions(None, part_elements=3000, pin_memory=False)
    optimizer = own.AdamW(model.parameters(), lr=1e-3, max_norm=1.0, tier=options, overlap=True)
    for step in range(7):
        (model(torch.randn(4, 64)).square().mean() * (1e4 if step in (3, 5) else 1e-2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counted.during == [6] * 7
    assert counted.verdicts == ["commit"] * 3 + ["redo", "commit", "redo", "commit"]
    optimizer.close()


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    ).to(dtype)


def backward(model, step, factor=1.0):
    torch.manual_seed(100 + step)
    (model(torch.randn(5, 16).to(next(model.parameters()).dtype)).float().square().mean() * factor).backward()


def options(directory=None, **more):
    return own.TierOptions(directory, **{"part_elements": 150, "pin_memory": False, "durability": "process", **more})


def values(optimizer, params):
    state = optimizer.state_dict()["state"]
    return [bits(param.detach()) for param in params] + [
        bits(state[key][name]) for key in sorted(state) for name in ("exp_avg", "exp_avg_sq", "step")
    ]


def run(steps, dtype=torch.float32, each=lambda step, optimizer, model: None, factors=(), **given):
    """Weights, states and norms of a plain training."""
    model, norms = net(dtype), []
    optimizer = own.AdamW(model.parameters(), lr=1e-2, **given)
    for step in range(steps):
        backward(model, step, 300.0 if step in factors else 1.0)
        each(step, optimizer, model)
        optimizer.step()
        optimizer.zero_grad()
        norms.append((optimizer.grad_norm, optimizer.skipped))
    found = values(optimizer, list(model.parameters()))
    optimizer.close()
    return found, norms


@pytest.mark.parametrize("max_norm", [None, 0.01, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_states_without_overlap(dtype, max_norm):
    given = {"max_norm": max_norm, "factors": (3,)}
    memory = run(7, dtype, master="f32", **given)
    assert run(7, dtype, tier=options(), overlap=True, **given) == memory == run(7, dtype, tier=options(), **given)


def test_a_large_parameter_and_groups_of_both_signs():
    def train(**given):
        torch.manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(5000)), torch.nn.Parameter(torch.randn(60)), torch.nn.Parameter(torch.randn(7))]
        groups = [{"params": params[:2], "maximize": True}, {"params": params[2:], "lr": 0.1}]
        optimizer = own.AdamW(groups, lr=1e-2, max_norm=1.0, **given)
        for step in range(6):
            factor = 1e-3 if step % 3 else 10.0
            sum((param * param).sum() * factor for param in params).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = values(optimizer, params)
        optimizer.close()
        return found

    assert train(tier=options(part_elements=700), overlap=True) == train(master="f32")


def looks(call):
    return lambda step, optimizer, model: call(optimizer) if step in (2, 3) else None


@pytest.mark.parametrize(
    "call",
    [
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda optimizer: optimizer.master(optimizer.param_groups[0]["params"][0]),
        lambda optimizer: optimizer.commit(),
    ],
    ids=("state_dict", "load", "master", "commit"),
)
def test_states_are_those_before_the_step_until_step(call, tmp_path):
    seen = []

    def each(step, optimizer, model):
        call(optimizer)
        seen.append(values(optimizer, list(model.parameters())) if step == 3 else None)

    one = run(5, tier=options(tmp_path), overlap=True, each=each)
    assert one == run(5, master="f32") and seen[3] == run(3, master="f32")[0]


def test_a_snapshot_during_backward_has_the_last_commit(tmp_path):
    def each(step, optimizer, model):
        if step == 2:
            with optimizer.snapshot(tmp_path / "snapshot") as snapshot:
                assert snapshot.wait() == 2
        if step == 1:
            # Between backward and step().
            optimizer.commit(2)

    (tmp_path / "tier").mkdir()
    (tmp_path / "copy").mkdir()
    assert run(5, tier=options(tmp_path / "tier"), overlap=True, each=each) == run(5, master="f32")
    with spillway.Tier([tmp_path / "copy"], job="copy") as copy:
        assert copy.import_from(tmp_path / "snapshot") == 2


def test_a_rollback_between_backward_and_step(tmp_path):
    model = net()
    params = list(model.parameters())
    optimizer = own.AdamW(params, lr=1e-2, tier=options(tmp_path), overlap=True)
    for step in range(6):
        backward(model, step)
        if step == 4:
            optimizer.rollback()
            assert values(optimizer, params) == run(3, master="f32")[0]
            optimizer.zero_grad()
            break
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.commit()
    for step in (3, 4):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert values(optimizer, params) == run(5, master="f32")[0]
    optimizer.commit()
    backward(model, 5)
    optimizer.close()
    again = own.AdamW(net().parameters(), lr=1e-2, tier=options(tmp_path), overlap=True)
    assert again.resumed_step == 5 and values(again, again.param_groups[0]["params"]) == run(5, master="f32")[0]
    again.close()


def test_accumulation_is_learned_and_a_longer_one_is_correct(monkeypatch):
    counted = Counted(monkeypatch)

    def train(**given):
        model = net()
        optimizer = own.AdamW(model.parameters(), lr=1e-2, **given)
        for step, micro in enumerate((3, 3, 3, 4, 4, 4, 1, 1)):
            for number in range(micro):
                backward(model, 10 * step + number)
            optimizer.step()
            optimizer.zero_grad()
        found = values(optimizer, list(model.parameters()))
        optimizer.close()
        return found

    assert train(master="f32") == train(tier=options(), overlap=True)
    assert [bool(during) for during in counted.during] == [False, True, True, False, True, True, False, True]


def test_edited_gradients_are_stepped_and_after_two_of_them_subgroups_wait(monkeypatch):
    counted = Counted(monkeypatch)

    def each(step, optimizer, model):
        if step < 4:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    assert run(8, tier=options(), overlap=True, each=each) == run(8, master="f32", each=each)
    assert [bool(during) for during in counted.during] == [True, True, False, False, False, True, True, True]


def test_what_is_left_of_a_step_waits_after_a_use_of_the_states_in_backward(monkeypatch):
    counted = Counted(monkeypatch)

    def train(**given):
        model = net()
        optimizer = own.AdamW(model.parameters(), lr=1e-2, **given)

        def used(_):
            if step == 2:
                optimizer.master(model[0].weight)

        model[2].weight.register_hook(used)
        for step in range(4):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found = values(optimizer, list(model.parameters()))
        optimizer.close()
        return found

    assert train(tier=options(), overlap=True) == train(master="f32")
    assert [bool(during) for during in counted.during] == [True, True, False, True]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_torchs_gradient_scaler(fused, unscaled):
    def train(**given):
        model, scales = net(), []
        optimizer = own.AdamW(model.parameters(), lr=1e-2, max_norm=1.0, fused=fused, **given)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        for step in range(9):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 16)).square().mean()
            scaler.scale(loss * (float("inf") if step == 5 else 1)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append((scaler.get_scale(), optimizer.skipped, optimizer.grad_norm))
        found = values(optimizer, list(model.parameters()))
        optimizer.close()
        return found, scales

    assert train(tier=options(), overlap=True) == train(master="f32")


def test_a_refused_step_can_be_repeated_and_a_skipped_one_leaves_all():
    def each(step, optimizer, model):
        param = optimizer.param_groups[0]["params"][0]
        if step == 2:
            optimizer.param_groups[0]["amsgrad"] = True
            with pytest.raises(spillway.UnsupportedError):
                optimizer.step()
            optimizer.param_groups[0]["amsgrad"] = False
        if step == 3:
            param.grad[0, 0] = float("nan")
            with pytest.raises(spillway.InvalidArgumentError, match="Inf or NaN"):
                optimizer.step()
            optimizer.skip_nonfinite = True
            optimizer.step()
            assert optimizer.skipped
            optimizer.skip_nonfinite = False
            param.grad[0, 0] = 0.0

    one = run(6, tier=options(), overlap=True, max_norm=1.0, each=each)
    assert one == run(6, master="f32", max_norm=1.0, each=each)


def test_options_out_of_range_are_refused_by_step_with_the_words_of_a_step_that_waits():
    def refused(**given):
        model = net()
        optimizer = own.AdamW(model.parameters(), lr=1e-2, **given)
        for step in range(2):
            backward(model, step)
            if step:
                optimizer.param_groups[0]["eps"] = -1.0
                with pytest.raises(spillway.InvalidArgumentError) as raised:
                    optimizer.step()
                optimizer.param_groups[0]["eps"] = 1e-8
            optimizer.step()
            optimizer.zero_grad()
        found = values(optimizer, list(model.parameters()))
        optimizer.close()
        return found, str(raised.value)

    assert refused(tier=options(), overlap=True) == refused(tier=options())


def test_parameters_and_gradients_that_share_memory_are_refused_with_the_words_of_a_step_that_waits():
    def refused(**given):
        model, found = net(), []
        params = list(model.parameters())
        optimizer = own.AdamW(model.parameters(), lr=1e-2, **given)
        own_data, own_grad = params[2].data, None
        for change in ("parameter", "gradient", "own gradient"):
            backward(model, 0)
            before = [param.detach().clone() for param in params]
            if change == "parameter":
                params[2].data = params[0].data
                before[2] = before[0]
            else:
                own_grad = params[2].grad
                params[2].grad = params[0 if change == "gradient" else 2].detach()
            with pytest.raises(spillway.InvalidArgumentError, match=r"share memory of parameters, states or gradients") as raised:
                optimizer.step()
            found.append(str(raised.value))
            assert all(torch.equal(param, old) for param, old in zip(params, before))
            params[2].data, params[2].grad = own_data, own_grad
            optimizer.zero_grad()
        backward(model, 1)
        optimizer.step()
        found += values(optimizer, params)
        optimizer.close()
        return found

    found = refused(tier=options(), overlap=True)
    assert found == refused(tier=options())
    assert found[0].startswith("param_groups[0]['params'][0] and param_groups[0]['params'][2] share")


def test_arguments_that_are_refused():
    params = list(net().parameters())
    for given, words in (
        ({"overlap": True}, "pass tier, or use spillway.torch.offload"),
        ({"overlap": 1, "tier": options()}, "overlap is 1; pass True or False"),
    ):
        with pytest.raises(spillway.InvalidArgumentError, match=words):
            own.AdamW(params, **given)


@functools.cache
def without_overlap(steps):
    return run(steps, tier=options(), max_norm=0.1)[0]


@pytest.mark.parametrize("done", [0, 2])
def test_a_signal_at_any_line_leaves_a_whole_step_or_none(done):
    """The backward, whose hooks submit, and the step are interrupted. Training then goes on with the bits of an undisturbed run."""
    line, counts = 0, set()
    while True:
        model = net()
        params = list(model.parameters())
        optimizer = own.AdamW(params, lr=1e-2, max_norm=0.1, tier=options(part_elements=300), overlap=True)
        for step in range(done):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()

        def whole(model=model, optimizer=optimizer):
            backward(model, done)
            optimizer.step()

        hit = interrupted_at(line, whole)
        state = optimizer.state_dict()["state"]
        steps = {int(of["step"]) for of in state.values()}
        assert len(steps) == 1, "some parameters were stepped"
        now = steps.pop()
        counts.add(now)
        assert values(optimizer, params) == without_overlap(now), line
        for step in range(now, done + 2):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        assert values(optimizer, params) == without_overlap(done + 2), line
        optimizer.close()
        if not hit:
            break
        line += 1 + line // 40
    assert counts == {done, done + 1} and line > 300


def test_an_error_of_the_package_in_a_signal_handler_ends_backward_and_step():
    """A signal handler raises an error of the package at the begin of each of its functions. No error is lost, and training continues with
    the same bits."""
    # The objects of earlier tests end here: an error that is raised in a finaliser is lost.
    gc.collect()
    model, at, steps, raised = net(), 0, 0, True
    params = list(model.parameters())
    optimizer = own.AdamW(params, lr=1e-2, max_norm=0.1, tier=options(part_elements=300), overlap=True)

    def whole():
        backward(model, steps)
        optimizer.step()

    while raised:
        optimizer.zero_grad()
        raised = interrupted(whole, at, below=True, error=OwnInterrupt)
        found = {int(of["step"]) for of in optimizer.state_dict()["state"].values()} or {0}
        assert found <= {steps, steps + 1}, at
        steps = found.pop()
        at += 1 + at // 40
    assert at > 200
    assert values(optimizer, params) == without_overlap(steps)
    optimizer.close()
