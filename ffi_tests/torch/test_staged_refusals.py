"""What spillway.torch.Staged refuses: classes whose step needs all parameters, and states that cannot be moved."""

import pytest
import torch
from staged_runs import gradients, parameters
from torch import optim

from spillway import InvalidArgumentError, UnsupportedError
from spillway.torch import Staged


class OfAll(optim.Optimizer):
    """Scales its steps by a norm over all parameters, which it keeps in an option of the group."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "norm": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["norm"] = sum(float(param.grad.norm()) for param in group["params"])
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / group["norm"])


class OfAllInAttribute(OfAll):
    @torch.no_grad()
    def step(self, closure=None):
        self.norm = sum(float(param.grad.norm()) for group in self.param_groups for param in group["params"])


class InATensor(OfAll):
    def __init__(self, params):
        super().__init__(params, lr=torch.tensor(0.1))

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["lr"].mul_(0.5)


class Flat(OfAll):
    def __init__(self, params):
        super().__init__(params)
        self.flat = self.param_groups[0]["params"][:]


class Hooked(OfAll):
    def __init__(self, params):
        super().__init__(params)
        self.register_step_post_hook(lambda *_: None)


class Global(OfAll):
    @torch.no_grad()
    def step(self, closure=None):
        self.state["global"] = {"seen": 1}


@pytest.mark.parametrize(
    "kind, message",
    [
        (OfAll, "OfAll changes the option 'norm' of a group otherwise for each part"),
        (OfAllInAttribute, "changes its attribute 'norm' otherwise for each part"),
        (InATensor, "writes to a tensor in the options of a group"),
        (Global, "keeps a state that belongs to no parameter"),
    ],
)
def test_a_step_that_shows_that_it_needs_all_parameters_is_refused(kind, message):
    params = parameters()
    optimizer = Staged(kind, params, chunk_bytes=1)
    gradients(params, 0)
    with pytest.raises(UnsupportedError, match=f"{message}.*use the class itself"):
        optimizer.step()


@pytest.mark.parametrize(
    "kind, options, error, message",
    [
        (optim.LBFGS, {}, UnsupportedError, "LBFGS joins all parameters to one vector"),
        (Flat, {}, UnsupportedError, "keeps parameters in its attribute 'flat'"),
        (Hooked, {}, UnsupportedError, "registers hooks of its own step"),
        (optim.Adam, {"differentiable": True}, UnsupportedError, "differentiable=True"),
        (optim.Adam, {"chunk_bytes": 0}, InvalidArgumentError, "chunk_bytes is 0; pass a whole number"),
        (torch.nn.Linear, {}, InvalidArgumentError, "cls is .*Linear.*pass a class of optimizers"),
        (optim.Adam([torch.ones(1)]), {}, InvalidArgumentError, "and not an object"),
    ],
)
def test_a_constructor_is_refused(kind, options, error, message):
    with pytest.raises(error, match=message):
        Staged(kind, parameters(), **options)


def test_errors_of_the_class_are_its_own():
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        Staged(optim.AdamW, parameters(), lr=-1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Staged(optim.AdamW, parameters(), moment=3)
    with pytest.raises(ValueError, match="empty parameter list"):
        Staged(optim.AdamW, [])


class Keeps(optim.Optimizer):
    """Keeps what `keep` returns as the state of a parameter."""

    def __init__(self, params, keep):
        super().__init__(params, {"lr": 0.1})
        self.keep = keep

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param] = self.keep(param)


def _halves(param):
    whole = torch.zeros(10)
    return {"whole": whole, "half": whole[:5]}


class Strange(torch.Tensor):
    """A subclass of which torch does not know the memory."""


@pytest.mark.parametrize(
    "keep, message",
    [
        (lambda param: {"own": param.detach()}, "share memory with each other, with the parameter or with its gradient"),
        (lambda param: {"grad": param.grad}, "share memory"),
        (_halves, "share memory"),
        (lambda param: {"sparse": torch.zeros(3).to_sparse()}, "sparse.*no plain memory"),
        (lambda param: {"meta": torch.zeros(3, device="meta")}, "on meta, which has no plain memory"),
        (lambda param: {"strange": torch.zeros(3).as_subclass(Strange)}, "Strange, a tensor without __tensor_flatten__"),
    ],
)
def test_a_state_that_cannot_be_moved_is_refused(keep, message):
    params = parameters()
    optimizer = Staged(Keeps, params, keep=keep)
    gradients(params, 0)
    with pytest.raises(UnsupportedError, match=rf"the state of param_groups\[0\]\['params'\]\[0\].*{message}.*use the class itself"):
        optimizer.step()


def test_a_tensor_that_is_in_a_state_twice_stays_one():
    def keep(param):
        one = torch.zeros(4)
        return {"one": one, "other": [one]}

    params = parameters()
    optimizer = Staged(Keeps, params, keep=keep)
    for step in range(2):
        gradients(params, step)
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    assert state["one"] is state["other"][0] and optimizer.memory().states == 16 * len(params)


def test_calls_of_a_tier_are_refused_without_one():
    optimizer = Staged(optim.NAdam, parameters())
    for call in (optimizer.commit, optimizer.rollback, lambda: optimizer.snapshot("x")):
        with pytest.raises(InvalidArgumentError, match="the states are in host memory; construct the optimizer with tier"):
            call()
    optimizer.close()
