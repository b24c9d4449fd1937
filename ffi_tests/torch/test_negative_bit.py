"""Tensors whose memory does not have their values: torch's negative bit, and zero tensors. torch steps them, and states of this kind are
refused."""

import pytest
import torch

import spillway
from spillway import torch as own
from spillway.torch import _tensors


def both(train):
    """The result of a training with torch's class and with Spillway's."""
    return train(torch.optim.AdamW), train(own.AdamW)


def test_gradients_of_real_and_imaginary_parts_go_in_torchs_direction():
    """autograd gives the imaginary part of one element a gradient with the negative bit."""

    def train(kind):
        real, imaginary = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        optimizer = kind([real, imaginary], lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            (torch.complex(real, imaginary).conj() * (2 + 1j)).abs().sum().backward()
            assert imaginary.grad.is_neg()
            optimizer.step()
        return torch.cat([real, imaginary]).detach()

    torch.testing.assert_close(*both(train))


@pytest.mark.parametrize("guards", [True, False])
@pytest.mark.parametrize("special", [lambda grad: torch._neg_view(-grad), lambda grad: torch._efficientzerotensor(grad.shape)])
def test_a_gradient_that_becomes_special_and_ordinary_again(special, guards, monkeypatch):
    if not guards:
        monkeypatch.setattr(_tensors, "TensorGuards", None)

    def train(kind):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 30)) for _ in range(3)]
        optimizer = kind(params, lr=0.1)
        for step in range(6):
            for number, param in enumerate(params):
                grad = torch.linspace(-1, 2, 30) * (step + 1)
                param.grad = special(grad) if number == 1 and step in (0, 3, 4) else grad
            optimizer.step()
        return torch.cat(params).detach()

    torch.testing.assert_close(*both(train), rtol=2e-6, atol=2e-6)


def test_clipping_with_a_zero_tensor():
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = own.AdamW(params, max_norm=1.0)
    params[0].grad, params[1].grad = torch._efficientzerotensor(4), torch.full((4,), 3.0)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(6.0)


def test_a_parameter_with_the_negative_bit():
    def train(kind):
        param = torch.nn.Parameter(torch._neg_view(torch.ones(4)))
        optimizer = kind([param], lr=0.1)
        param.grad = torch.ones(4)
        optimizer.step()
        return param.detach()

    torch.testing.assert_close(*both(train))


def test_states_with_the_negative_bit_are_refused():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = own.AdamW([param])
    param.grad = torch.ones(4)
    optimizer.step()
    before = param.detach().clone()
    optimizer.state[param]["exp_avg"] = torch._neg_view(torch.ones(4))
    with pytest.raises(spillway.InvalidArgumentError, match=r"params'\]\[0\]: its state 'exp_avg' .* negative bit"):
        optimizer.step()
    assert torch.equal(param, before)


def test_a_tier_names_the_parameter_or_gradient():
    param = torch.nn.Parameter(torch._neg_view(torch.ones(4)))
    with pytest.raises(spillway.UnsupportedError, match=r"params'\]\[0\]"):
        own.AdamW([param], tier=own.TierOptions(None))
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = own.AdamW([param], tier=own.TierOptions(None))
    param.grad = torch._neg_view(torch.ones(4))
    with pytest.raises(spillway.UnsupportedError, match=r"params'\]\[0\]: states on a tier need"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("bad", [torch._neg_view(torch.ones(4)), torch._efficientzerotensor(4)])
def test_calls_with_arrays_refuse_such_tensors(bad):
    param, first, second = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    with pytest.raises(
        spillway.InvalidArgumentError, match=r"tensors\[0\].grad has torch's negative or conjugate bit, or is a zero tensor"
    ):
        spillway.Adam(lr=0.1).step([(param, bad, first, second)])
    with pytest.raises(spillway.InvalidArgumentError, match=r"src\[0\] has torch's negative"):
        spillway.accumulate_([param], [bad])
    assert not param.any()
    with pytest.raises(spillway.InvalidArgumentError, match="values has torch's negative"):
        spillway._arrays.memory(bad, "values", False)


def test_bytes_of_conjugated_tensors_are_refused():
    with pytest.raises(spillway.InvalidArgumentError, match="values has torch's negative or conjugate bit"):
        spillway._arrays.memory(torch.ones(4, dtype=torch.complex64).conj(), "values", False)
