"""spillway.torch's classes against torch's own, with the arguments that torch tests its optimizers with.

The two train the same parameters on the same gradients. Parameters that torch steps itself end with the same bits; those that Spillway
steps may differ by rounding."""

import copy
import io
import pickle

import pytest
import torch
from torch.optim import lr_scheduler
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import spillway
from spillway import torch as own
from spillway.optim import TORCH_CLASSES

CLASSES = ["Adam", "AdamW", "Adagrad"]
INFOS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in CLASSES}
STEPS = 8


def parameters(dtype=torch.float32, seed=0):
    """Parameters of several shapes: a matrix, a vector, a scalar, an empty one, one with strides, one with an odd length."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(list(shape), generator=generator, dtype=torch.float64).to(dtype)

    made = [random(10, 5), random(10), random(), random(0), random(6, 4).t(), random(4097)]
    return [torch.nn.Parameter(tensor) for tensor in made]


def random_grads(params, seed):
    """New gradients, the same for equal seeds."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = torch.randn(list(param.shape), generator=generator, dtype=torch.float64).to(param.dtype)


def tolerance(dtype):
    return {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 0)


def assert_close(ours, theirs, dtype=torch.float32):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance(dtype), atol=tolerance(dtype))


def arguments():
    """The arguments of torch's own tests of each class, with its flags for the implementation."""
    for name, info in INFOS.items():
        for index, given in enumerate(info.optim_inputs_func(device="cpu")):
            for flags in ({}, {"foreach": True}, {"fused": True}, {"foreach": False}):
                kwargs = {**given.kwargs, **flags}
                if kwargs.get("fused") and kwargs.get("differentiable"):
                    continue
                if torch.is_tensor(kwargs.get("lr")) and kwargs.get("foreach"):
                    continue
                yield pytest.param(name, kwargs, id=f"{name}-{index}-{given.desc}-{next(iter(flags), 'default')}")


@pytest.mark.sampled(values=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name, kwargs", list(arguments()))
def test_arguments_of_torchs_own_tests_train_alike(name, kwargs, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    kwargs = dict(kwargs)
    pair = getattr(own, name)(ours, **copy.deepcopy(kwargs)), getattr(torch.optim, name)(theirs, **copy.deepcopy(kwargs))
    if kwargs.get("capturable"):
        pytest.skip("torch refuses capturable on the CPU")
    for step in range(STEPS):
        random_grads(ours, step)
        random_grads(theirs, step)
        for optimizer in pair:
            optimizer.step()
    assert_close(ours, theirs, dtype)
    for one, other in zip(pair[0].state.values(), pair[1].state.values(), strict=True):
        assert list(one) == list(other)
        for key in one:
            assert one[key].dtype == other[key].dtype and one[key].shape == other[key].shape
            torch.testing.assert_close(one[key], other[key], rtol=10 * tolerance(dtype), atol=10 * tolerance(dtype))


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_that_torch_refuses_are_refused_alike(name):
    for given in INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32):
        expected = pytest.warns if issubclass(given.error_type, Warning) else pytest.raises
        with expected(given.error_type, match=given.error_regex):
            optimizer = getattr(own, name)(given.optimizer_error_input.params, **given.optimizer_error_input.kwargs)
            if given.error_on == OptimizerErrorEnum.STEP_ERROR:
                optimizer.step()


@pytest.mark.parametrize("name", CLASSES)
def test_states_load_in_both_directions(name):
    """After half of the steps the two classes exchange their states by torch.save, and continue with equal results."""
    ours, theirs = parameters(), parameters()
    pair = getattr(own, name)(ours), getattr(torch.optim, name)(theirs)
    for step in range(STEPS):
        random_grads(ours, step)
        random_grads(theirs, step)
        for optimizer in pair:
            optimizer.step()
        if step == STEPS // 2:
            saved = []
            for optimizer in pair:
                buffer = io.BytesIO()
                torch.save(optimizer.state_dict(), buffer)
                buffer.seek(0)
                saved.append(torch.load(buffer, weights_only=True))
            pair[0].load_state_dict(saved[1])
            pair[1].load_state_dict(saved[0])
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", [*CLASSES, "Lion", "Signum"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))], ids=["deepcopy", "pickle"])
def test_a_copy_steps_its_own_parameters_alike(name, way):
    params = parameters()
    optimizer = getattr(own, name)(params, max_norm=3.0)
    random_grads(params, 0)
    optimizer.step()
    other = way(optimizer)
    assert other.max_norm == 3.0
    copies = [param for group in other.param_groups for param in group["params"]]
    random_grads(params, 1)
    random_grads(copies, 1)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    other.step()
    assert all(torch.equal(one, two) for one, two in zip(params, copies))
    assert all(torch.equal(one, two) for one, two in zip(params, before))


SCHEDULERS = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, 2 * STEPS),
    lambda optimizer: lr_scheduler.LinearLR(optimizer),
    lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_and_groups_with_own_options(name, scheduler):
    pair, lists = [], []
    for module in (own, torch.optim):
        params = parameters()
        lists.append(params)
        groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.3, "unknown": "kept"}]
        pair.append(getattr(module, name)(groups, lr=1e-3))
    if name == "Adagrad" and scheduler is SCHEDULERS[2]:
        pytest.skip("OneCycleLR needs momentum or betas")
    schedules = [scheduler(optimizer) for optimizer in pair]
    for step in range(2 * STEPS):
        for params, optimizer, schedule in zip(lists, pair, schedules):
            random_grads(params, step)
            optimizer.step()
            if step < 2 * STEPS - 1:
                schedule.step()
    assert pair[0].param_groups[1]["unknown"] == "kept" and "unknown" in pair[0].state_dict()["param_groups"][1]
    assert_close(*lists)


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_that_come_and_go(name):
    """Each step leaves other parameters without a gradient, so that the step counts differ."""
    ours, theirs = parameters(), parameters()
    pair = getattr(own, name)(ours), getattr(torch.optim, name)(theirs)
    for step in range(3 * STEPS):
        for params, optimizer in zip((ours, theirs), pair):
            random_grads(params, step)
            for at, param in enumerate(params):
                if (step + at) % 3 == 0 and step % 4:
                    param.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert_close(ours, theirs)
    assert [float(state["step"]) for state in pair[0].state.values()] == [float(state["step"]) for state in pair[1].state.values()]


@pytest.mark.parametrize("name", [*CLASSES, "Lion", "Signum"])
def test_closure_hooks_and_counters(name):
    params = [torch.nn.Parameter(torch.randn(70))]
    optimizer, calls = getattr(own, name)(params), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # constructing it adds hooks to torch's own step
    versions = params[0]._version

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() > 0 and calls == ["before", "after"] and params[0]._version > versions
    assert isinstance(optimizer, getattr(torch.optim, name, torch.optim.Optimizer)) and name in repr(optimizer)


def test_backward_through_a_stepped_parameter_is_noticed():
    param = torch.nn.Parameter(torch.randn(5))
    param.grad = torch.ones(5)
    loss = param.square().sum()
    own.AdamW([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def of_the_paper(moment, grad):
    """Lion with betas of 0.9 and 0.98: the sign that is stepped, and the next moment."""
    return (0.9 * moment + 0.1 * grad).sign(), 0.98 * moment + 0.02 * grad


def of_signum(momentum, grad):
    """SGD of the sign of the momentum."""
    momentum = 0.9 * momentum + 0.1 * grad
    return momentum.sign(), momentum


BY_SIGNS = [(own.Lion, {"betas": (0.9, 0.98)}, of_the_paper), (own.Signum, {"momentum": 0.9}, of_signum)]


@pytest.mark.parametrize(("kind", "decay", "formula"), BY_SIGNS)
def test_optimizers_by_signs_equal_their_formulas(kind, decay, formula):
    params, expected = parameters(), [param.detach().double() for param in parameters()]
    moments = [torch.zeros_like(param) for param in expected]
    optimizer = kind(params, lr=1e-2, weight_decay=0.1, **decay)
    for step in range(STEPS):
        random_grads(params, step)
        optimizer.step()
        for at, param in enumerate(params):
            direction, moments[at] = formula(moments[at], param.grad.double())
            expected[at] = expected[at] * (1 - 1e-2 * 0.1) - 1e-2 * direction
    for param, value in zip(params, expected):
        torch.testing.assert_close(param.detach().double(), value, rtol=1e-5, atol=1e-5)


def test_signum_has_the_bits_of_lion_with_equal_betas():
    ours, theirs = parameters(), parameters()
    pair = own.Signum(ours, lr=1e-2, momentum=0.8, weight_decay=0.1), own.Lion(theirs, lr=1e-2, betas=(0.8, 0.8), weight_decay=0.1)
    for step in range(STEPS):
        for params, optimizer in zip((ours, theirs), pair):
            random_grads(params, step)
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
    assert all(torch.equal(pair[0].state[one]["exp_avg"], pair[1].state[two]["exp_avg"]) for one, two in zip(ours, theirs))


class PlainSignum(torch.optim.Optimizer):
    """Signum in a few operations of torch."""

    def __init__(self, params, lr, momentum, weight_decay):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": False})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                average.mul_(group["momentum"]).add_(param.grad, alpha=1 - group["momentum"])
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average.sign(), alpha=group["lr"])


def test_signum_equals_an_optimizer_of_torch_whose_states_it_exchanges():
    ours, theirs = parameters(), parameters()
    pair = [kind(params, lr=1e-2, momentum=0.9, weight_decay=0.1) for kind, params in ((own.Signum, ours), (PlainSignum, theirs))]
    for step in range(STEPS):
        for params, optimizer in zip((ours, theirs), pair):
            random_grads(params, step)
            optimizer.step()
        if step == STEPS // 2:
            saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair]
            pair[0].load_state_dict(saved[1])
            pair[1].load_state_dict(saved[0])
    assert_close(ours, theirs)
    assert_close([pair[0].state[param]["exp_avg"] for param in ours], [pair[1].state[param]["exp_avg"] for param in theirs])


def test_every_optimizer_of_the_package_has_a_class_of_torch():
    assert {*TORCH_CLASSES} <= {*own.__all__}
    assert all(issubclass(getattr(own, name), torch.optim.Optimizer) for name in TORCH_CLASSES)


def test_the_library_steps_and_torch_does_not(monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", None)
    params = [torch.nn.Parameter(torch.randn(300)) for _ in range(20)]
    optimizer, before = own.AdamW([{"params": params[:5], "lr": 1e-2}, {"params": params[5:]}]), spillway.stats()
    for step in range(3):
        random_grads(params, step)
        optimizer.step()
    after = spillway.stats()
    assert after.adam_calls - before.adam_calls == 3 and after.adam_elements - before.adam_elements == 3 * 20 * 300
