"""What spillway.torch's classes have beyond torch's: clipping, skipped steps, rollback; what they do when tensors are replaced between
steps; and how they refuse what cannot be stepped."""

import copy
import gc
import math
import weakref

import pytest
import torch

import spillway
from spillway import _native
from spillway import torch as own
from spillway.torch._tensors import is_served


def parameters(count=3, length=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(length, generator=generator)) for _ in range(count)]


def random_grads(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype) * scale


def values(params):
    return [param.detach().clone() for param in params]


def equal(params, others):
    return all(torch.equal(one, other) for one, other in zip(params, others, strict=True))


def states(optimizer):
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "Lion", "Signum"])
def test_clipping_equals_torchs_before_the_step(name):
    ours, theirs = parameters(), parameters()
    clipped, plain = getattr(own, name)(ours, max_norm=2.0), getattr(own, name)(theirs)
    for step in range(6):
        random_grads(ours, step, scale=0.01 if step == 3 else 1)
        random_grads(theirs, step, scale=0.01 if step == 3 else 1)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 2.0)
        clipped.step()
        plain.step()
        assert clipped.grad_norm == pytest.approx(float(norm), rel=1e-6) and not clipped.skipped
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 if name not in ("Lion", "Signum") else 4e-4)


def test_clipping_counts_parameters_that_torch_steps():
    params = [*parameters(2), torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))]
    optimizer = own.AdamW(params, max_norm=1.0)
    random_grads(params, 0)
    expected = torch.nn.utils.get_total_norm([param.grad for param in params])
    scaled = params[2].grad.clone()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(params[2].grad, scaled / (optimizer.grad_norm + 1e-6))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_with_inf_or_nan_is_skipped_or_refused(bad):
    for skip in (True, False):
        params = parameters()
        optimizer = own.AdamW([{"params": params[:1]}, {"params": params[1:]}], skip_nonfinite=skip, max_norm=None if skip else 1.0)
        random_grads(params, 0)
        optimizer.step()
        before, states_before = values(params), states(optimizer)
        random_grads(params, 1)
        params[2].grad[17] = bad
        if skip:
            optimizer.step()
            assert optimizer.skipped
        else:
            with pytest.raises(spillway.InvalidArgumentError, match=r"param_groups\[1\]\['params'\]\[1\] has Inf or NaN; nothing"):
                optimizer.step()
        assert equal(params, before) and equal(states(optimizer), states_before)
        random_grads(params, 2)
        optimizer.step()
        assert not optimizer.skipped and not equal(params, before)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "Lion", "Signum"])
def test_rollback_restores_every_bit_and_the_step_can_be_done_again(name):
    params = parameters(5, 5000)
    optimizer = getattr(own, name)(params, undo=True)
    for step in range(4):
        before, states_before = values(params), states(optimizer)
        random_grads(params, step)
        optimizer.step()
        after, states_after = values(params), states(optimizer)
        assert not equal(params, before)
        optimizer.rollback()
        assert equal(params, before) and (step == 0 or equal(states(optimizer), states_before))
        with pytest.raises(spillway.InvalidArgumentError, match="no step is recorded"):
            optimizer.rollback()
        optimizer.step()
        assert equal(params, after) and equal(states(optimizer), states_after)


def test_rollback_after_gradients_were_freed_or_written():
    params = parameters()
    optimizer = own.AdamW(params, undo=True)
    before = values(params)
    random_grads(params, 0)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    optimizer.rollback()
    assert equal(params, before)
    random_grads(params, 0)
    optimizer.step()
    after = values(params)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(spillway.InvalidArgumentError, match="a gradient was written to since the step"):
        optimizer.rollback()
    assert equal(params, after)


def test_a_step_keeps_no_gradient_alive():
    params = parameters()
    optimizer = own.AdamW(params)
    for step in range(3):
        random_grads(params, step)
        optimizer.step()
        grads = [weakref.ref(param.grad) for param in params]
        optimizer.zero_grad()
        gc.collect()
        assert all(grad() is None for grad in grads)


def test_replaced_tensors_are_stepped_and_not_the_old_ones():
    """Parameters, states and groups are replaced between steps, as frameworks do when they move or load them."""
    ours, theirs = parameters(), parameters()
    pair = own.AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)

    def moved(tensor):
        return tensor.detach().clone()

    def change(optimizer, params, step):
        inner = [optimizer.state[param] for param in params]
        if step == 1:
            params[0].data = moved(params[0])
        elif step == 2:
            inner[1]["exp_avg"] = moved(inner[1]["exp_avg"])
        elif step == 3:
            inner[1]["exp_avg_sq"].data = moved(inner[1]["exp_avg_sq"]) * 2
        elif step == 4:
            inner[2]["step"].fill_(50.0)
        elif step == 5:
            optimizer.state[params[0]] = {key: moved(value) for key, value in inner[0].items()}
        elif step == 6:
            optimizer.param_groups[0]["params"] = params[1:]
        elif step == 7:
            optimizer.add_param_group({"params": params[:1], "lr": 1e-3})
        elif step == 8:
            optimizer.param_groups = [{**group, "params": group["params"][::-1], "betas": (0.5, 0.9)} for group in optimizer.param_groups]
        elif step == 9:
            del optimizer.state[params[0]]
        elif step == 10:
            optimizer.load_state_dict(optimizer.state_dict())
        elif step == 12:
            for group in optimizer.param_groups:
                group["amsgrad"] = True
            for state in optimizer.state.values():
                state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
        elif step == 11:
            params[1].data = torch.cat([params[1].data, params[1].data])[::2]

    for step in range(15):
        for optimizer, params in zip(pair, (ours, theirs)):
            change(optimizer, params, step)
            random_grads(params, step)
            optimizer.step()
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_two_parameters_with_one_gradient():
    ours, theirs = parameters(2), parameters(2)
    for params, optimizer in ((ours, own.AdamW(ours)), (theirs, torch.optim.AdamW(theirs))):
        random_grads(params, 0)
        params[1].grad = params[0].grad
        optimizer.step()
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_another_default_device_and_dtype_change_nothing():
    params = parameters()
    optimizer = own.AdamW(params)
    with torch.device("meta"):
        random_grads_on_cpu = [torch.randn(300, device="cpu") for _ in params]
        for param, grad in zip(params, random_grads_on_cpu):
            param.grad = grad
        optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].device.type == "cpu"


def test_a_grad_scaler_works():
    ours, theirs = parameters(), parameters()
    pair = own.AdamW(ours, fused=True), torch.optim.AdamW(theirs, fused=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in pair]
    for step in range(6):
        for params, optimizer, scaler in zip((ours, theirs), pair, scalers):
            optimizer.zero_grad()
            loss = sum((param * (step + 1)).square().sum() for param in params) * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert pair[0].skipped == (step == 3)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    assert {float(state["step"]) for state in pair[0].state.values()} == {5.0}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_complex_gradients_count_in_the_norm(name):
    for dtype in (torch.complex64, torch.complex128):
        params = [torch.nn.Parameter(torch.ones(1, dtype=dtype)), *parameters(1)]
        optimizer = getattr(own, name)(params, max_norm=1.0)
        params[0].grad, params[1].grad = torch.full((1,), 3 + 4j, dtype=dtype), torch.full((300,), 0.1)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx((25 + 3) ** 0.5, rel=1e-6)
        params[0].grad = torch.full((1,), complex(0, float("inf")), dtype=dtype)
        with pytest.raises(spillway.InvalidArgumentError, match=r"params'\]\[0\] has Inf or NaN"):
            optimizer.step()


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"skip_nonfinite": True}])
def test_steps_of_tensors_without_values(options):
    """Tools that estimate memory step under FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = own.AdamW(params, **options)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones(3)
            optimizer.step()
            assert not optimizer.skipped and optimizer.state[params[0]]["exp_avg"].shape == (3,)


def test_the_norm_of_many_tensors_is_one_call_of_the_library(monkeypatch):
    calls, own_library = [], _native.library()

    class Counting:
        def __getattr__(self, name):
            return lambda *arguments: (calls.append(name), getattr(own_library, name)(*arguments))[1]

    monkeypatch.setattr(_native, "_library", Counting())
    params = parameters(50, 7)
    optimizer = own.AdamW(params, max_norm=1.0)
    random_grads(params, 0)
    optimizer.step()
    calls.clear()
    random_grads(params, 1)
    optimizer.step()
    assert calls == ["spw_grad_stats", "spw_adam_step"]


def test_the_norm_has_the_bits_of_a_sum_in_the_order_of_the_parameters():
    params = [torch.nn.Parameter(torch.randn(length)) for length in (3, 70_001, 0, 5, 200_000, 1)]
    optimizer = own.AdamW(params, max_norm=1.0)
    random_grads(params, 0)
    optimizer.step()
    total = 0.0
    for param in params:
        total += spillway.grad_stats(param.grad).sum_squares
    assert optimizer.grad_norm == math.sqrt(total)


def refused(params, optimizer, error, words):
    before, states_before = values(params), states(optimizer)
    with pytest.raises(error, match=words):
        optimizer.step()
    assert equal(params, before) and equal(states(optimizer), states_before)


def test_bad_input_names_the_parameter_and_steps_nothing():
    invalid, unsupported = spillway.InvalidArgumentError, spillway.UnsupportedError

    def prepared():
        params = parameters()
        optimizer = own.AdamW([("first", params[0]), ("second", params[1]), ("third", params[2])])
        random_grads(params, 0)
        optimizer.step()
        return params, optimizer, optimizer.state[params[1]]

    name = r"param_groups\[0\]\['params'\]\[1\] \(second\)"

    params, optimizer, state = prepared()
    state["exp_avg"] = torch.zeros(299)
    refused(params, optimizer, invalid, name + r" has shape \(300,\), its state 'exp_avg' \(299,\)")
    params, optimizer, state = prepared()
    state["exp_avg_sq"] = torch.zeros(300, dtype=torch.float64)
    refused(params, optimizer, unsupported, name + " is torch.float32, its state 'exp_avg_sq' torch.float64")
    params, optimizer, state = prepared()
    state["exp_avg"] = torch.zeros(300, device="meta")
    with pytest.raises(invalid, match=name + ": its state 'exp_avg' is not contiguous in CPU memory"):
        optimizer.step()
    params, optimizer, state = prepared()
    del state["exp_avg"]
    refused(params, optimizer, invalid, name + ": its state lacks 'exp_avg'")
    params, optimizer, _ = prepared()
    params[1].data = torch.randn(200)
    refused(params, optimizer, invalid, name + r" has shape \(200,\), its gradient \(300,\)")
    params, optimizer, _ = prepared()
    params[1].data = params[0].data[:]
    refused(params, optimizer, invalid, r"params'\]\[0\] \(first\) and .*\(second\) share memory")
    params, optimizer, state = prepared()
    state["exp_avg"] = params[2].data
    refused(params, optimizer, invalid, r"\(second\) and .*\(third\) share memory|\(third\) and .*\(second\) share memory")
    params, optimizer, _ = prepared()
    params[1].grad = params[0].data
    refused(params, optimizer, invalid, r"\(first\)|\(second\)")


def test_a_loaded_state_that_does_not_fit_is_named_and_steps_nothing():
    invalid, unsupported = spillway.InvalidArgumentError, spillway.UnsupportedError
    name = r"param_groups\[0\]\['params'\]\[1\] \(second\)"
    cases = [
        (lambda state: state.update(exp_avg=torch.zeros(299)), invalid, r" has shape \(300,\), its state 'exp_avg' \(299,\); load"),
        (lambda state: state.update(exp_avg_sq=torch.zeros(150, 2)), invalid, r" has shape \(300,\), its state 'exp_avg_sq' \(150, 2\)"),
        (lambda state: state.pop("exp_avg"), invalid, ": its state lacks 'exp_avg'; load the state of this optimizer"),
    ]
    for change, error, words in cases:
        params = parameters()
        optimizer = own.AdamW([("first", params[0]), ("second", params[1]), ("third", params[2])])
        random_grads(params, 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        change(saved["state"][1])
        optimizer.load_state_dict(saved)
        before = values(params)
        with pytest.raises(error, match=name + words):
            optimizer.step()
        assert equal(params, before)
    # torch casts a loaded state to the dtype of its parameter.
    saved["state"][1] = {key: value.double() for key, value in saved["state"][0].items()}
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[params[1]]["exp_avg"].dtype is torch.float32
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(300, dtype=torch.int32)
    refused(params, optimizer, unsupported, name + " is torch.float32, its state 'exp_avg' torch.int32; cast the state")


def test_gradients_elsewhere_and_resized_parameters_are_named():
    params = parameters()
    optimizer = own.AdamW([("first", params[0]), ("second", params[1]), ("third", params[2])])
    random_grads(params, 0)
    optimizer.step()
    name, old = r"param_groups\[0\]\['params'\]\[1\] \(second\)", params[1].data
    params[1].data = torch.randn(200)
    params[1].grad = torch.randn(200)
    refused(params, optimizer, spillway.InvalidArgumentError, name + r" has shape \(200,\), its state 'exp_avg' \(300,\); load the state")
    params[1].data, params[1].grad = old, None
    params[1].grad = torch.randn(300).to_sparse()
    refused(
        params, optimizer, spillway.UnsupportedError, name + ": AdamW does not support sparse gradients, and this one is torch.sparse_coo"
    )
    with pytest.raises(RuntimeError, match="device"):
        params[1].grad = torch.zeros(300, device="meta")
    # torch refuses to assign such a gradient; the check is there for those that get past it.
    with pytest.raises(spillway.InvalidArgumentError, match="second is on cpu, its gradient on meta; move the gradient"):
        is_served(params[1], torch.zeros(300, device="meta"), "second")


@pytest.mark.parametrize(
    "make",
    [
        lambda: own.AdamW(parameters(), max_norm=0),
        lambda: own.AdamW(parameters(), max_norm=-1.0),
        lambda: own.Lion(parameters(), lr=-1.0),
        lambda: own.Lion(parameters(), betas=(0.9, 1.0)),
        lambda: own.Signum(parameters(), lr=-1.0),
        lambda: own.Signum(parameters(), momentum=1.0),
        lambda: own.Adam(parameters(), lr=-1.0),
    ],
)
def test_arguments_out_of_range_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_undo_refuses_parameters_that_torch_steps():
    params = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(5, dtype=torch.float64))]
    optimizer = own.Adam(params, undo=True)
    random_grads(params, 0)
    before = values(params)
    with pytest.raises(spillway.UnsupportedError, match=r"params'\]\[1\] is stepped by torch, which cannot roll a step back"):
        optimizer.step()
    assert equal(params, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_for_parameters_of_32(dtype):
    params = parameters()
    for param in params:
        param.grad_dtype = dtype
    optimizer, reference = own.AdamW(params), parameters()
    expected = torch.optim.AdamW(reference)
    for step in range(4):
        random_grads(reference, step)
        for param, other in zip(params, reference):
            param.grad = other.grad.to(dtype)
            other.grad = param.grad.float()
        optimizer.step()
        expected.step()
    for one, other in zip(params, reference):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("what", ["parameter", "exp_avg", "exp_avg_sq"])
def test_a_rollback_of_tensors_that_were_written_to_is_refused(what):
    param = torch.nn.Parameter(torch.ones(1000))
    optimizer = own.AdamW([param], lr=0.1, undo=True)
    param.grad = torch.ones(1000)
    optimizer.step()
    with torch.no_grad():
        (param if what == "parameter" else optimizer.state[param][what]).mul_(7)
    with pytest.raises(spillway.InvalidArgumentError, match="a parameter or a state was written to since the step"):
        optimizer.rollback()
