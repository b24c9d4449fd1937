"""Proves that Spillway's Adagrad equals torch's and that its Lion equals the paper's. Also shows the differences of
DeepSpeed's compiled ops. In the oldest supported version, Lion does not move parameters, and Adagrad leaves weight
decay out of the numerator. The newest version has both right, and its bits agree with Spillway's."""

import itertools

import pytest
import torch
from compiled_ops import vector_width

N = 16 * 640
_ids = itertools.count(2_000_000)


def update(op, kind, arrays, grad, step, lr, weight_decay):
    if kind == "adagrad":
        return op.adagrad_update(update.id, step, lr, 1e-10, weight_decay, arrays[0], grad, arrays[1])
    return op.lion_update(update.id, step, lr, 0.9, 0.99, weight_decay, arrays[0], grad, arrays[1])


def train(op, kind, weight_decay, lr=1e-2, steps=20, n=N, dtype=torch.float32):
    """The parameters and the states after some steps of one op on fixed gradients."""
    update.id = next(_ids)
    if kind == "adagrad":
        op.create_adagrad(update.id, lr, 1e-10, weight_decay, False)
    else:
        op.create_lion(update.id, lr, 0.9, 0.99, weight_decay, False)
    source = torch.Generator().manual_seed(1)
    arrays = [torch.randn(n, generator=source).to(dtype), torch.zeros(n, dtype=dtype)]
    for step in range(1, steps + 1):
        update(op, kind, arrays, torch.randn(n, generator=source).to(dtype), step, lr, weight_decay)
    return arrays


def torch_adagrad(weight_decay, lr=1e-2, steps=20):
    source = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.randn(N, generator=source))
    optimizer = torch.optim.Adagrad([param], lr=lr, eps=1e-10, weight_decay=weight_decay)
    for _ in range(steps):
        param.grad = torch.randn(N, generator=source)
        optimizer.step()
    return param.data


def paper_lion(weight_decay, lr=1e-2, steps=20):
    """Algorithm 2 of "Symbolic Discovery of Optimization Algorithms", in double precision."""
    source = torch.Generator().manual_seed(1)
    param, momentum = torch.randn(N, generator=source).double(), torch.zeros(N).double()
    for _ in range(steps):
        grad = torch.randn(N, generator=source).double()
        param -= lr * (torch.sign(0.9 * momentum + 0.1 * grad) + weight_decay * param)
        momentum = 0.99 * momentum + 0.01 * grad
    return param


def disagreeing(found, expected, tolerance=1e-4):
    return ((found.double() - expected.double()).abs() > tolerance).float().mean().item()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adagrad_is_torchs(served, weight_decay):
    param, _ = train(served("cpu_adagrad"), "adagrad", weight_decay)
    torch.testing.assert_close(param, torch_adagrad(weight_decay), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_is_the_papers(served, weight_decay):
    param, _ = train(served("cpu_lion"), "lion", weight_decay)
    torch.testing.assert_close(param.double(), paper_lion(weight_decay), rtol=1e-5, atol=1e-5)


def test_lion_moves_no_parameter_whose_update_is_zero(served):
    op, param = served("cpu_lion"), torch.ones(64)
    op.create_lion(0, 0.1, 0.9, 0.99, 0.0, False)
    op.lion_update(0, 1, 0.1, 0.9, 0.99, 0.0, param, torch.zeros(64), torch.zeros(64))
    assert (param == 1).all()


def test_the_oldest_compiled_lion_does_not_train(compiled_oldest):
    if vector_width() == "SCALAR":
        pytest.skip("the defect is in DeepSpeed's AVX body, which this processor does not run")
    start = train(compiled_oldest("cpu_lion"), "lion", 0.0, steps=0)[0]
    param, _ = train(compiled_oldest("cpu_lion"), "lion", 0.0)
    assert disagreeing(paper_lion(0.0), start) > 0.8
    assert torch.equal(param, start), "the compiled op moved a parameter: the defect is gone"


def test_the_oldest_compiled_adagrad_decays_nothing_in_the_numerator(compiled_oldest):
    param, _ = train(compiled_oldest("cpu_adagrad"), "adagrad", 0.1)
    assert disagreeing(param, torch_adagrad(0.1)) > 0.5
    undecayed, _ = train(compiled_oldest("cpu_adagrad"), "adagrad", 0.0)
    assert disagreeing(undecayed, torch_adagrad(0.0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_newest_compiled_adagrad_has_the_same_bits(served, compiled, weight_decay, dtype):
    if vector_width() != "AVX512":
        pytest.skip(f"DeepSpeed compiles its {vector_width()} body here")
    ours, theirs = [train(op, "adagrad", weight_decay, dtype=dtype) for op in (served("cpu_adagrad"), compiled("cpu_adagrad"))]
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_newest_compiled_lion_has_the_same_bits_without_weight_decay(served, compiled, dtype):
    if vector_width() != "AVX512":
        pytest.skip(f"DeepSpeed compiles its {vector_width()} body here")
    ours, theirs = [train(op, "lion", 0.0, dtype=dtype) for op in (served("cpu_lion"), compiled("cpu_lion"))]
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_the_newest_compiled_lion_agrees_with_weight_decay_within_float_tolerance(served, compiled):
    ours, theirs = [train(op, "lion", 0.1) for op in (served("cpu_lion"), compiled("cpu_lion"))]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[1], theirs[1])
