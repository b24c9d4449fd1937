"""What libraries do to an optimizer: they make a class that inherits from the optimizer's and delegates to it, replace its `step`, ask
whether it unscales gradients, copy and pickle it."""

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist

import spillway
from spillway import torch as own


class Delegates:
    """A wrapper as in Lightning's LightningOptimizer and Fabric's _FabricOptimizer."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type(f"Wrapped{type(optimizer).__name__}", (type(self), type(optimizer)), {})

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Copies(Delegates):
    """A wrapper as in older versions of Lightning, which copies the attributes of the optimizer."""

    def __init__(self, optimizer):
        self.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name not in ("state_dict", "step")}
        super().__init__(optimizer)


class Inherits(Delegates):
    """A wrapper without a step of its own."""

    step = None

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (type(optimizer),), {"__getattr__": Delegates.__getattr__})


def parameter(length=3):
    param = torch.nn.Parameter(torch.ones(length))
    param.grad = torch.ones(length)
    return param


@pytest.mark.parametrize("wrapper", [Delegates, Copies, Inherits])
def test_a_keyword_that_is_set_on_a_wrapper_is_that_of_the_optimizer(wrapper):
    param = parameter()
    optimizer = own.AdamW([param], lr=0.5)
    wrapped = wrapper(optimizer)
    wrapped.max_norm = 0.25
    assert optimizer.max_norm == wrapped.max_norm == 0.25
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(3**0.5)
    assert "max_norm: 0.25" in repr(wrapped)


@pytest.mark.parametrize("wrapper", [Delegates, Inherits])
def test_a_wrapper_shows_what_the_last_step_was(wrapper):
    param = parameter()
    optimizer = wrapper(own.AdamW([param], max_norm=1.0, skip_nonfinite=True, undo=True))
    assert optimizer.grad_norm is None and not optimizer.skipped and optimizer.max_norm == 1.0 and optimizer.resumed_step is None
    param.grad = torch.full((3,), float("nan"))
    optimizer.step()
    assert optimizer.skipped and optimizer._optimizer.skipped
    param.grad = torch.ones(3)
    optimizer.step()
    assert not optimizer.skipped and optimizer.grad_norm == pytest.approx(3**0.5) == optimizer._optimizer.grad_norm


def one_dict(optimizer):
    other = type(optimizer).__new__(type(optimizer))
    other.__dict__ = optimizer.__dict__
    return other


def copied_dict(optimizer):
    other = type(optimizer).__new__(type(optimizer))
    other.__dict__ = dict(optimizer.__dict__)
    return other


def alternating(cls, way, order, dtype, **options):
    """The parameters after steps of an optimizer "a", of its copy "b", and of the copy after the optimizer was deleted, "d"."""
    source = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(300, generator=source).to(dtype)) for _ in range(3)]
    first = cls(params, lr=1e-2, **options)
    second = way(first)
    for number, who in enumerate(order):
        if who == "d":
            first = None
            gc.collect()
        for param in params:
            param.grad = torch.randn(300, generator=torch.Generator().manual_seed(number)).to(dtype)
        (first if who == "a" else second).step()
    return params


@pytest.mark.parametrize("options", [{}, {"master": "f32"}, {"master": "split"}, {"undo": True}], ids=str)
@pytest.mark.parametrize("way", [one_dict, copied_dict, copy.copy])
def test_two_objects_with_one_state_step_as_one_optimizer_or_refuse(way, options):
    dtype = torch.bfloat16 if "master" in options else torch.float32
    wanted = alternating(own.AdamW, lambda optimizer: optimizer, "aaaaaa", dtype, **options)
    for order in ("ababab", "aabbab", "bbbaaa", "aadbbb", "dbbbbb"):
        if way is copy.copy and options == {"master": "split"}:
            with pytest.raises(TypeError, match="has no shallow copy, .*; use copy.deepcopy"):
                alternating(own.AdamW, way, order, dtype, **options)
        elif way is copied_dict and "d" in order:
            with pytest.raises(
                spillway.InvalidArgumentError, match="a copy of the attributes of an optimizer that was deleted; keep the optimizer"
            ):
                alternating(own.AdamW, way, order, dtype, **options)
        else:
            assert all(map(torch.equal, alternating(own.AdamW, way, order, dtype, **options), wanted)), order


@pytest.mark.parametrize("wrapper", [Delegates, Copies, Inherits])
def test_a_wrapper_rolls_back_and_saves_as_the_optimizer_does(wrapper):
    param = parameter()
    inner = own.AdamW([param], undo=True)
    optimizer, before = wrapper(inner), param.detach().clone()
    assert isinstance(optimizer, own.AdamW) and isinstance(optimizer, torch.optim.AdamW)
    for _ in range(3):
        optimizer.step()
        optimizer.rollback()
        assert torch.equal(param, before)
        with pytest.raises(spillway.InvalidArgumentError, match="no step is recorded"):
            optimizer.rollback()
        with pytest.raises(spillway.InvalidArgumentError, match="no step is recorded"):
            inner.rollback()
    optimizer.step()
    after, saved = param.detach().clone(), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        param.copy_(after)
    assert [float(state["step"]) for state in inner.state.values()] == [1]
    optimizer.add_param_group({"params": [parameter()]})
    optimizer.step()
    assert len(inner.param_groups) == 2 and [float(state["step"]) for state in inner.state.values()] == [2, 1]


@pytest.mark.parametrize("wrapper", [Delegates, Copies, Inherits])
def test_a_wrapper_of_an_optimizer_with_masters_and_a_tier(wrapper, tmp_path):
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = wrapper(own.AdamW([param], lr=1e-4, tier=tmp_path))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.master(param)[0].item() == pytest.approx(1 - 1e-4, abs=1e-5)
    optimizer.commit(payload=b"here")
    optimizer.step()
    optimizer.rollback()
    assert float(optimizer.state[param]["step"]) == 1
    optimizer.close()
    optimizer = wrapper(own.AdamW([param], lr=1e-4, tier=tmp_path))
    assert optimizer.payload == b"here" and optimizer.resumed_step == 1
    optimizer.close()


@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_it_unscales_gradients_where_torchs_class_does(name, fused):
    for module in (torch.optim, own):
        optimizer = getattr(module, name)([parameter()], **({} if fused is None else {"fused": fused}))
        assert getattr(optimizer, "_step_supports_amp_scaling", False) is bool(fused)
        assert getattr(copy.deepcopy(optimizer), "_step_supports_amp_scaling", False) in (False, bool(fused))
    assert not hasattr(own.Lion([parameter()]), "_step_supports_amp_scaling")


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_unscales_and_steps_as_with_torchs_class(fused):
    results = []
    for cls in (torch.optim.AdamW, own.AdamW):
        param = parameter()
        optimizer, scaler, calls = cls([param], lr=0.1, fused=fused), torch.amp.GradScaler("cpu", init_scale=8.0), []
        step = optimizer.step
        optimizer.step = lambda *args, step=step, calls=calls, **options: (calls.append(1), step(*args, **options))[1]
        seen = []
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((len(calls), param.grad.tolist() if not fused else None))
        results.append((seen, [round(value, 5) for value in param.tolist()], float(optimizer.state[param]["step"])))
    assert results[0] == results[1]


def test_accelerate_sees_a_step_that_a_scaler_skips():
    import accelerate

    accelerate.Accelerator(cpu=True)
    for cls in (torch.optim.AdamW, own.AdamW):
        param = parameter()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = accelerate.optimizer.AcceleratedOptimizer(cls([param], lr=0.1), scaler=scaler)
        skipped = []
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
        assert skipped == [False, True, False]
        assert float(optimizer.state_dict()["state"][0]["step"]) == 2


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_copy_has_the_process_group_and_a_pickle_names_it(one_process):
    param = parameter()
    optimizer = own.AdamW([param], max_norm=1.0, process_group=dist.group.WORLD)
    optimizer.step()
    for way in (copy.deepcopy, copy.copy):
        other = way(optimizer)
        assert other.process_group is dist.group.WORLD and other.max_norm == 1.0
        other.param_groups[0]["params"][0].grad = torch.ones(3)
        other.step()
    with pytest.raises(TypeError, match="process_group"):
        pickle.dumps(optimizer)
    optimizer.process_group = None
    assert pickle.loads(pickle.dumps(optimizer)).process_group is None


def test_zero_redundancy_optimizer_steps_with_the_class(one_process):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results = []
    for cls in (torch.optim.AdamW, own.AdamW):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, length)) for length in (3, 50)]
        optimizer = ZeroRedundancyOptimizer(params, cls, lr=0.1)
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        optimizer.consolidate_state_dict()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        results.append(params)
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
