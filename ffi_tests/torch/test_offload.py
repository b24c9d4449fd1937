"""spillway.torch.offload: a step that starts during backward has the bits of one that waits, and those of AdamW with masters; whatever a
program does between backward and step."""

import concurrent.futures
import copy
import functools
import gc
import itertools
import math
import os
import pickle
import random
import signal
import time
import weakref

import pytest
import torch

import spillway.torch
from spillway.torch import AdamW, _offload_plan

#: Parameters on the CPU do not overlap unless the program asks for it.
offload = functools.partial(spillway.torch.offload, overlap=True)
#: Random trainings with the verdict in the next forward.
TRAININGS = int(os.environ.get("SPILLWAY_TRAININGS", "20"))
#: Bytes of a bucket: one per parameter, some per model, one for all.
BUCKETS = (1, 2000, 1 << 20)


class Net(torch.nn.Module):
    """Layers of which some are used twice, some in some steps only, and some are frozen."""

    def __init__(self, chance, dtype):
        super().__init__()
        width = chance.choice((8, 24, 40))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(chance.randint(2, 5)))
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.sometimes = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, 3)
        if chance.random() < 0.3:
            self.layers[0].requires_grad_(False)
        self.shared, self.width = chance.random() < 0.5, width
        self.to(dtype)

    def forward(self, x, sometimes):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        if self.shared:
            x = self.layers[-1](x)
        return self.head(self.sometimes(x) if sometimes else x)


def training(seed, make):
    """Losses, norms and final tensors of a random training. `make(params, model, **options)` makes the optimizer."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtype = chance.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    model = Net(chance, dtype)
    options = {
        "lr": 10 ** chance.uniform(-4, -1.5),
        "max_norm": chance.choice((None, 0.02, 1.0, 50.0)),
        "skip_nonfinite": chance.random() < 0.5,
    }
    params = [p for p in model.parameters() if p.requires_grad]
    if chance.random() < 0.5:
        decay = [p for p in params if p.dim() > 1]
        params = [{"params": decay, "weight_decay": 0.1}, {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = make(params, model, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step) if chance.random() < 0.5 else None
    data, seen, verdicts, awaited = torch.Generator().manual_seed(seed), [], [], []

    def heard(action):
        """The result of what gives the verdict of a step; None if it is refused."""
        awaited.clear()
        try:
            result = action()
            verdicts.append(None if optimizer.grad_norm is None else (optimizer.skipped, optimizer.grad_norm))
            return result
        except spillway.InvalidArgumentError as error:
            assert "Inf or NaN" in str(error)
            verdicts.append("refused")

    for _ in range(chance.randint(4, 9)):
        events = {name for name in EVENTS if chance.random() < 0.12}
        micro = chance.choice((1, 1, 1, 2, 3))
        for number in range(micro):
            used = chance.random() < 0.7
            x = torch.randn(5, model.width, generator=data).to(dtype)

            def loss_of(x=x, used=used, events=events):
                found = heard(lambda: model(x, used)) if awaited else None
                loss = (model(x, used) if found is None else found).float().square().mean()
                return loss * 300 if "spike" in events else loss

            outer = getattr(optimizer, "accumulating", None)
            if number < micro - 1 and outer is not None and chance.random() < 0.5:
                with outer():
                    loss_of().backward()
            else:
                loss = loss_of()
                loss.backward()
                seen.append(loss.item())
        for name in sorted(events - {"spike", "closure"}):
            EVENTS[name](model, optimizer, chance)
        if "closure" in events:

            def closure(loss_of=loss_of):
                loss = loss_of()
                loss.backward()
                return loss

            arguments = (closure,)
        else:
            arguments = ()
        if getattr(optimizer, "_next", None) is None:
            heard(lambda arguments=arguments: optimizer.step(*arguments))
        else:
            optimizer.step(*arguments)
            awaited.append(True)
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad(set_to_none=chance.random() < 0.7)
        if "weights" in events:
            if awaited:
                heard(optimizer.settle)
            # This changes no version.
            chance.choice(list(model.parameters())).data.mul_(0.9)
    if awaited:
        heard(optimizer.settle)
    state = optimizer.state_dict()["state"]
    tensors = [p.detach() for p in model.parameters()]
    tensors += [state[key][name] for key in sorted(state) for name in ("exp_avg", "exp_avg_sq", "step")]
    return (seen, verdicts), tensors


def _some(model, chance):
    return chance.choice([p for p in model.parameters() if p.grad is not None])


def _edit(model, optimizer, chance):
    _some(model, chance).grad.mul_(0.5)


def _replace(model, optimizer, chance):
    param = _some(model, chance)
    param.grad = torch.full_like(param.grad, 0.25)


def _remove(model, optimizer, chance):
    _some(model, chance).grad = None


def _inf(model, optimizer, chance):
    _some(model, chance).grad.flatten()[0] = math.inf


def _weights(model, optimizer, chance):
    with torch.no_grad():
        _some(model, chance).mul_(0.75)


def _data(model, optimizer, chance):
    param = _some(model, chance)
    param.data = param.detach() * 0.5


def _grad_data(model, optimizer, chance):
    _some(model, chance).grad.data.mul_(0.5)


def _clip(model, optimizer, chance):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _rate(model, optimizer, chance):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def _reload(model, optimizer, chance):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _look(model, optimizer, chance):
    list(optimizer.state.values())


def _load_weights(model, optimizer, chance):
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


#: What a program does between backward and step.
EVENTS = {
    "spike": None,
    "closure": None,
    "edit": _edit,
    "replace": _replace,
    "remove": _remove,
    "inf": _inf,
    "weights": _weights,
    "data": _data,
    "grad data": _grad_data,
    "clip": _clip,
    "rate": _rate,
    "reload": _reload,
    "look": _look,
    "load weights": _load_weights,
}


def offloaded(verdict="step", **more):
    return lambda params, model, **options: offload(params, torch.optim.AdamW, verdict=verdict, model=model, **options, **more)


def same(one, other):
    # As text and as bytes: NaN is not equal to itself.
    assert repr(one[0]) == repr(other[0])
    assert [bits(tensor) for tensor in one[1]] == [bits(tensor) for tensor in other[1]]


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("seed", range(40))
def test_a_step_that_starts_during_backward_has_the_bits_of_one_that_waits(seed):
    bucket = BUCKETS[seed % 3]
    same(training(seed, offloaded(bucket_bytes=bucket)), training(seed, offloaded(bucket_bytes=bucket, overlap=False)))


@pytest.mark.parametrize("seed", range(100, 100 + TRAININGS))
def test_a_verdict_in_the_next_forward_gives_the_bits_of_one_in_step(seed, monkeypatch):
    bucket = BUCKETS[seed % 3]
    waits = training(seed, offloaded(bucket_bytes=bucket, overlap=False))
    if seed % 4 == 1:
        link = Later()
        monkeypatch.setattr("spillway.torch._offload_plan.link_to", lambda param: link)
    same(training(seed, offloaded("forward", bucket_bytes=bucket, overlap=seed % 4 < 3)), waits)


class Later(_offload_plan.HostLink):
    """A link whose copies are done in their order by a thread, some time after they were started: as on a stream of a device."""

    def __init__(self):
        self._stream, self._last = concurrent.futures.ThreadPoolExecutor(1), None

    def _start(self, to, value):
        frozen = value.clone()

        def run():
            time.sleep(0.001)
            with torch.no_grad():
                to.copy_(frozen)

        self._last = self._stream.submit(run)

    def out(self, host, tensor):
        self._start(host, tensor)

    def back(self, tensor, host):
        self._start(tensor, host)
        # Later work on the device sees it.
        self._last.result()

    def fence(self):
        last = self._last

        class Fence:
            def synchronize(self):
                last.result()

        return Fence()


@pytest.mark.parametrize("seed", range(60, 72))
def test_copies_that_end_later_give_the_same_bits(seed, monkeypatch):
    waits = training(seed, offloaded(bucket_bytes=2000, overlap=False))
    link = Later()
    monkeypatch.setattr("spillway.torch._offload_plan.link_to", lambda param: link)
    same(training(seed, offloaded(bucket_bytes=2000)), waits)
    assert link._last is not None


@pytest.mark.parametrize("max_norm", [None, 0.01, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_moves_the_gradient_out_and_the_weights_in_once(dtype, max_norm, monkeypatch):
    moved = {"out": 0, "in": 0}

    class Counted(_offload_plan.HostLink):
        def out(self, host, tensor):
            moved["out"] += tensor.nbytes
            super().out(host, tensor)

        def back(self, tensor, host):
            moved["in"] += host.nbytes
            super().back(tensor, host)

    link = Counted()
    monkeypatch.setattr("spillway.torch._offload_plan.link_to", lambda param: link)
    for verdict in ("step", "forward"):
        model, optimizer, _ = run(
            lambda model, verdict=verdict: offload(model, bucket_bytes=1, max_norm=max_norm, verdict=verdict), dtype, spike=None
        )
        optimizer.settle()
        bytes_of = sum(param.nbytes for param in model.parameters())
        # The first step copies the weights too.
        assert moved == {"out": 7 * bytes_of, "in": 6 * bytes_of}
        moved.update(out=0, **{"in": 0})


def run(optimizer_of, dtype=torch.float32, steps=6, spike=3, seed=1, model=None):
    """A plain training; the model, the optimizer, and norms."""
    torch.manual_seed(seed)
    model = model or torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(dtype)
    optimizer, norms = optimizer_of(model), []
    for step in range(steps):
        loss = model(torch.randn(8, 16).to(dtype)).float().square().mean() * (100 if step == spike else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return model, optimizer, norms


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


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
    stats = optimizer._plan.lanes[0].speculation.stats()
    assert (stats.commits, stats.redos, stats.aborts) == (5, 1, 0) and stats.buckets_committed == 40


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


def test_after_clipped_steps_a_step_waits_for_the_norm():
    model, optimizer, _ = run(lambda model: offload(model, lr=1e-3, max_norm=1e-4, bucket_bytes=1), steps=8)
    stats = optimizer._plan.lanes[0].speculation.stats()
    assert stats.redos == 8 and stats.buckets_redone <= 3 * 4


def test_nothing_is_stepped_if_a_gradient_has_nan():
    model = torch.nn.Linear(8, 8)
    optimizer = offload(model, lr=1e-2, max_norm=1.0)
    for _ in range(2):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict()["state"])
    (model(torch.randn(2, 8)).sum() * math.nan).backward()
    with pytest.raises(spillway.InvalidArgumentError, match="parameter 0 has Inf or NaN; nothing was stepped"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before[0]))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[key][name], before[1][key][name]) for key in after for name in after[key])


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


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"kind": torch.optim.SGD}, spillway.UnsupportedError, "kind is"),
        ({"max_norm": -1.0}, spillway.InvalidArgumentError, "max_norm is -1.0"),
        ({"max_norm": 0}, spillway.InvalidArgumentError, "max_norm is 0"),
        ({"process_group": 3}, spillway.InvalidArgumentError, "process_group is 3"),
        ({"max_norm": True}, spillway.InvalidArgumentError, "max_norm is True"),
        ({"max_norm": "1"}, spillway.InvalidArgumentError, "max_norm is '1'"),
        ({"skip_nonfinite": "x"}, spillway.InvalidArgumentError, "skip_nonfinite is 'x'"),
        ({"bucket_bytes": 0}, spillway.InvalidArgumentError, "bucket_bytes is 0"),
        ({"verdict": "backward"}, spillway.InvalidArgumentError, "verdict is 'backward'; pass 'step' or 'forward'"),
        ({"verdict": "forward", "model": 3}, spillway.InvalidArgumentError, "model is 3; pass model="),
        ({"amsgrad": True}, spillway.UnsupportedError, "amsgrad is not served"),
        ({"betas": (2.0, 0.9)}, ValueError, "beta"),
        ({"undo": True}, TypeError, "undo"),
    ],
)
def test_arguments_that_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        offload(torch.nn.Linear(2, 2), **options)


def test_an_error_of_the_engine_is_raised_once():
    for broken in ("local_result", "finish"):
        params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
        optimizer = offload(params, lr=0.1, max_norm=1.0, bucket_bytes=1)
        backward(params)
        optimizer.step()
        before, step = values(params), getattr(spillway.Speculation, broken)
        with pytest.MonkeyPatch.context() as patch:

            def failed(self, *arguments, step=step, **options):
                step(self, *arguments, **options)
                raise spillway.SpillwayError("a bucket failed")

            patch.setattr(spillway.Speculation, broken, failed)
            with pytest.raises(spillway.SpillwayError, match="a bucket failed"):
                optimizer.step()
        assert broken == "finish" or all(map(torch.equal, values(params), before))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        assert not any(map(torch.equal, values(params), before))
        optimizer.close()


def test_weights_that_a_program_writes_after_an_interrupted_step_stay():
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizer = offload(params, lr=0.1, bucket_bytes=1)
    backward(params)
    optimizer.step()
    publish, published = _offload_plan.Slot.publish, []

    def interrupted(self):
        if len(published) == 1:
            raise KeyboardInterrupt
        published.append(publish(self))

    backward(params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_offload_plan.Slot, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with torch.no_grad():
        params[1].fill_(7.0)
    optimizer.state_dict()
    assert torch.equal(params[1], torch.full((5,), 7.0)) and torch.equal(params[0], params[2]) and params[0].lt(0.85).all()
    optimizer.zero_grad()
    params[1].sum().backward()
    optimizer.step()
    assert params[1].lt(7.0).all() and params[1].gt(6.5).all()


def test_a_closed_optimizer_has_completed_the_step_whose_verdict_was_known():
    whole = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    closed = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    for params in (whole, closed):
        optimizer = offload(params, lr=0.1, bucket_bytes=1)
        backward(params)
        if params is closed:
            with pytest.MonkeyPatch.context() as patch:

                def interrupt(_):
                    raise KeyboardInterrupt

                patch.setattr(_offload_plan.Plan, "publish", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
        else:
            optimizer.step()
        optimizer.close()
    assert all(map(torch.equal, whole, closed))


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
        other[1].load_state_dict(one[1].state_dict())
        for params, optimizer in (one, other):
            backward(params)
            optimizer.step()
        assert all(map(torch.equal, one[0], other[0]))
        states = [optimizer.state_dict()["state"] for _, optimizer in (one, other)]
        assert all(torch.equal(states[0][place]["master_param"], states[1][place]["master_param"]) for place in range(3))


@pytest.mark.parametrize("step", [math.nan, -1.0, 2.5, "3"])
def test_a_step_count_that_is_none_is_not_loaded(step):
    params = [torch.nn.Parameter(torch.ones(5))]
    optimizer = offload(params)
    backward(params)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = step
    with pytest.raises(spillway.InvalidArgumentError, match="whole number from 0 on; nothing was loaded"):
        optimizer.load_state_dict(saved)
    assert float(optimizer.state[params[0]]["step"]) == 1


def test_parameters_that_are_refused():
    for param in (torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.complex64)):
        with pytest.raises(spillway.UnsupportedError, match="float32, bfloat16 and float16"):
            offload([torch.nn.Parameter(param)])
    with pytest.raises(spillway.UnsupportedError, match="after model.to_empty"):
        offload(torch.nn.Linear(2, 2, device="meta"))
    table = torch.nn.Embedding(4, 4, sparse=True)
    optimizer = offload(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(spillway.InvalidArgumentError, match="sparse"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]


def test_no_copy_of_an_optimizer_is_made():
    optimizer = offload(torch.nn.Linear(2, 2))
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            make(optimizer)


def test_an_optimizer_that_is_dropped_leaves_no_hook_and_no_memory():
    model = torch.nn.Linear(2, 2)
    optimizer = offload(model)
    optimizer.close()
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
    other = offload(model)
    memory = [weakref.ref(slot) for slot in other._slots.values()]
    model(torch.ones(1, 2)).sum().backward()
    other.step()
    del other
    gc.collect()
    assert len(memory) == 2 and not any(slot() for slot in memory)
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("verdict", ["step", "forward"])
def test_a_step_that_a_signal_interrupts_happens_or_does_not(verdict):
    """A handler raises at a random moment of backward or step. Afterwards weights and states are those of the counted number of steps."""

    def gradients(model, step):
        torch.manual_seed(step)
        model(torch.randn(4, 32)).square().mean().backward()

    def make():
        torch.manual_seed(7)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
        return model, offload(model, lr=1e-2, max_norm=0.05, bucket_bytes=1, verdict=verdict)

    steps = 15
    model, optimizer = make()
    after = [[p.detach().clone() for p in model.parameters()]]
    begun = time.perf_counter()
    for step in range(steps):
        gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.settle()
        after.append([p.detach().clone() for p in model.parameters()])

    duration = (time.perf_counter() - begun) / steps

    class Interrupt(Exception):
        pass

    def interrupt(*_):
        raise Interrupt

    model, optimizer = make()
    chance, interrupted, done = random.Random(1), 0, 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for attempt in itertools.count():
            if done == steps:
                break
            optimizer.zero_grad()
            begun = time.perf_counter()
            try:
                try:
                    # Every second attempt is left alone, so that a slow machine gets on.
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, duration) if attempt % 2 else 0)
                    gradients(model, done)
                    optimizer.step()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                # Other work on the machine may end meanwhile.
                duration = min(duration, time.perf_counter() - begun)
            except Interrupt:
                interrupted += 1
                # torch may leave gradients off if `no_grad` ends by an exception of a handler.
                torch.set_grad_enabled(True)
            counts = {int(state["step"]) for state in optimizer.state.values()} or {0}
            assert len(counts) == 1 and counts <= {done, done + 1}, counts
            done = counts.pop()
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), after[done])), done
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 1


def waiting():
    """A model whose step waits for its next forward, its weights before the step, and those after it."""
    results = []
    for verdict in ("step", "forward"):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        before = values(model.parameters())
        optimizer = offload(model, lr=0.1, max_norm=0.1, bucket_bytes=1, verdict=verdict)
        model(torch.randn(5, 4)).square().sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            if verdict == "forward":
                # step() waits for nothing.
                patch.delattr(spillway.Speculation, "local_result")
                patch.delattr(spillway.Speculation, "wait")
            optimizer.step()
        optimizer.zero_grad()
        results.append(values(model.parameters()))
    assert all(map(torch.equal, before, results[1])) and not any(map(torch.equal, before, results[0]))
    return model, optimizer, results[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: model(torch.ones(2, 4)),
        lambda model, optimizer: model[2](torch.ones(2, 4)),
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: model.load_state_dict({}, strict=False),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: optimizer.state,
        lambda model, optimizer: optimizer.grad_norm,
        lambda model, optimizer: optimizer.skipped,
        lambda model, optimizer: optimizer.settle(),
        lambda model, optimizer: (optimizer.step(), optimizer.settle()),
        lambda model, optimizer: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
        lambda model, optimizer: optimizer.close(),
        lambda model, optimizer: model.eval()(torch.ones(2, 4)),
    ],
)
def test_whatever_uses_a_step_completes_it(use):
    model, optimizer, after = waiting()
    use(model, optimizer)
    assert all(map(torch.equal, model.parameters(), after))
    assert not any(part._forward_pre_hooks for part in model), "hooks of the parts are there while a step waits"


def test_a_step_that_waits_keeps_its_optimizer_and_a_copy_of_the_model_does_not():
    model, optimizer, after = waiting()
    kept = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    other(torch.ones(2, 4))
    assert kept() is not None and not any(map(torch.equal, model.parameters(), after))
    model(torch.ones(2, 4))
    gc.collect()
    assert kept() is None and all(map(torch.equal, model.parameters(), after)) and not model._forward_pre_hooks


def test_a_write_to_a_parameter_whose_step_waits_is_an_error():
    model, optimizer, _ = waiting()
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(spillway.InvalidArgumentError, match="parameter 0 was written to after step.*optimizer.settle"):
        model(torch.ones(2, 4))
    # Nothing was stepped, and the value of the program stays.
    assert not optimizer.state_dict()["state"][0]["step"] and not model[0].weight.any()
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    optimizer.settle()
    assert int(optimizer.state[model[0].weight]["step"]) == 1


def test_a_backward_of_a_forward_before_the_step_is_torchs_error():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = offload(model, verdict="forward")
    losses = [model(torch.randn(2, 4)).sum() for _ in range(2)]
    losses[0].backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


def test_a_refused_step_is_an_error_of_the_next_forward():
    model, optimizer, after = waiting()
    loss = model(torch.randn(5, 4)).sum()
    (loss * math.nan).backward()
    optimizer.step()
    with pytest.raises(spillway.InvalidArgumentError, match="has Inf or NaN; nothing was stepped"):
        model(torch.ones(2, 4))
    assert all(map(torch.equal, model.parameters(), after)) and {int(state["step"]) for state in optimizer.state.values()} == {1}


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_compiled_once():
    losses = []
    for verdict in ("step", "forward"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
        optimizer = offload(model, lr=0.1, max_norm=0.1, verdict=verdict)
        graphs = []

        def keep(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph

        compiled = torch.compile(model, backend=keep)
        for _ in range(12):
            loss = compiled(torch.randn(5, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert len(graphs) == 1
    assert losses[:12] == losses[12:] and losses[11] < losses[0]


def trained(*shapes, **options):
    """Parameters and their optimizer after two steps."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = offload(params, lr=0.1, **options)
    for _ in range(2):
        backward(params)
        optimizer.step()
        optimizer.zero_grad()
    return params, optimizer


def backward(params):
    sum((param * (place + 1)).sum() for place, param in enumerate(params)).backward()


def values(params):
    return [param.detach().clone() for param in params]


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


@pytest.mark.parametrize(
    "name, value", [("step", 3), ("exp_avg", torch.zeros(2)), ("exp_avg_sq", None), ("exp_avg", torch.zeros(3).double())]
)
def test_a_state_that_does_not_fit_steps_nothing(name, value):
    params, optimizer = trained(3, 4)
    own, optimizer.state[params[0]][name] = optimizer.state[params[0]][name], value
    before = values(params)
    backward(params)
    with pytest.raises(spillway.InvalidArgumentError, match=f"the state '{name}' of parameter 0 is no longer"):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(params, before))
    optimizer.state[params[0]][name] = own
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3]


@pytest.mark.parametrize(
    "damage, error",
    [
        (lambda given: given["param_groups"][0].update(amsgrad=True), spillway.UnsupportedError),
        (lambda given: given["param_groups"][0].pop("betas"), spillway.InvalidArgumentError),
        (lambda given: given["state"][1].update(exp_avg=torch.zeros(1)), spillway.InvalidArgumentError),
        (lambda given: given["state"][1].pop("exp_avg_sq"), spillway.InvalidArgumentError),
        (lambda given: given["state"][1].update(step="x"), spillway.InvalidArgumentError),
        (lambda given: given["state"][1].update(exp_avg=None), spillway.InvalidArgumentError),
    ],
)
def test_a_dict_that_does_not_fit_loads_nothing(damage, error):
    params, optimizer = trained(3, 4)
    before = optimizer.state_dict()
    given = copy.deepcopy(before)
    given["state"][0]["exp_avg"] += 1
    damage(given)
    with pytest.raises(error):
        optimizer.load_state_dict(given)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][key][name], before["state"][key][name]) for key in (0, 1) for name in before["state"][key])


def test_a_state_dict_does_not_change_during_backward():
    params, optimizer = trained(3)
    held = optimizer.state_dict()["state"][0]["exp_avg"]
    before = held.clone()
    backward(params)
    optimizer.step()
    assert torch.equal(held, before)


def test_a_write_to_a_moment_that_is_stepped_is_an_error():
    params, optimizer = trained(3)
    held = optimizer.state[params[0]]["exp_avg"]
    backward(params)
    held.mul_(2)
    with pytest.raises(spillway.InvalidArgumentError, match="moments of parameter 0 were written between backward and step"):
        optimizer.step()


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


def test_an_option_out_of_range_does_not_end_backward():
    params, optimizer = trained(3, 4)
    optimizer.param_groups[0]["lr"] = -1.0
    before = values(params)
    backward(params)
    assert all(param.grad is not None for param in params)
    with pytest.raises(spillway.InvalidArgumentError, match="lr"):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(params, before))
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(spillway.UnsupportedError, match="amsgrad"):
        optimizer.step()


def test_parameters_without_elements_and_a_closed_optimizer():
    params, optimizer = trained((0, 4), 3, ())
    assert int(optimizer.state[params[0]]["step"]) == 2
    optimizer.close()
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        optimizer.step()


@pytest.mark.parametrize("after", range(8))
def test_an_interrupted_change_of_states_is_done_again(monkeypatch, after):
    """A signal handler may raise while a step takes over the memory or the states of a parameter: here at a call of `local`."""
    use, local = _offload_plan.Slot.use, _offload_plan.local

    def interrupted_use(slot, state):
        calls = iter(range(after))

        def raises(tensor):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return local(tensor)

        monkeypatch.setattr(_offload_plan, "local", raises)
        try:
            use(slot, state)
        finally:
            monkeypatch.setattr(_offload_plan, "local", local)

    def run(interrupted):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False)
        optimizer = spillway.torch.offload(model, lr=0.1, overlap=False)

        def step():
            model.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            if interrupted:
                monkeypatch.setattr(_offload_plan.Slot, "use", interrupted_use)
                try:
                    return optimizer.step()
                except KeyboardInterrupt:
                    pass
                finally:
                    monkeypatch.setattr(_offload_plan.Slot, "use", use)
            optimizer.step()

        step()
        loaded = optimizer.state_dict()
        for state in loaded["state"].values():
            state["exp_avg"].fill_(5.0)
            state["step"].fill_(7.0)
        optimizer.load_state_dict(loaded)
        step()
        return [model.weight.detach(), *(state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step"))]

    assert all(map(torch.equal, run(False), run(True)))


def test_forwards_of_several_threads_complete_one_step():
    for _ in range(30):
        model = torch.nn.Linear(50, 50)
        optimizer = spillway.torch.offload(model, lr=0.1, max_norm=1.0, verdict="forward")
        model(torch.ones(2, 50)).sum().backward()
        optimizer.step()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(model, [torch.ones(2, 50)] * 3))
        optimizer.close()
