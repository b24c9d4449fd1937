"""The classes of spillway.torch as torch's own optimizer suite (test/test_optim.py, on the CPU) has its classes, for the tests of its
checks.

torch ships the inputs of that suite in `torch.testing._internal.common_optimizers`, and not its test file. Each class has an OptimizerInfo
here, made from that of torch's class. Checks that test_against_torch.py makes are left out: training with every input against torch,
arguments that are refused, schedulers by class, pickles, and exchanged checkpoints."""

import copy

import pytest
import torch
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

from spillway import torch as own

F32 = torch.float32
_FIELDS = (
    "optim_inputs_func",
    "scheduler_inputs",
    "supported_impls",
    "not_og_supported_flags",
    "supports_sparse",
    "has_capturable_arg",
    "metadata_for_sparse",
    "only_supports_sparse_grads",
    "supports_complex",
    "step_requires_closure",
    "supports_param_groups",
    "supports_multiple_devices",
    "optim_error_inputs_func",
    "supports_fused_on",
)


def _by_signs(cls, decay):
    """Lion or Signum, which torch lacks. They have no choice of implementations."""
    keywords = [
        ("default", {}),
        ("non-default lr", {"lr": 0.01}),
        ("Tensor lr", {"lr": torch.tensor(0.001)}),
        ("nonzero weight_decay", {"weight_decay": 0.9}),
        (next(iter(decay)), decay),
        ("maximize", {"weight_decay": 0.9, "maximize": True}),
    ]
    return OptimizerInfo(
        cls,
        optim_inputs_func=lambda device, dtype=None: [OptimizerInput(params=None, kwargs=kwargs, desc=desc) for desc, kwargs in keywords],
        supported_impls=(),
        not_og_supported_flags=("maximize",),
        supports_complex=False,
    )


def _info(torchs):
    return OptimizerInfo(getattr(own, torchs.optim_cls.__name__), **{name: getattr(torchs, name) for name in _FIELDS})


INFOS = [_info(info) for info in optim_db if info.optim_cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad)]
INFOS += [_by_signs(own.Lion, {"betas": (0.8, 0.88)}), _by_signs(own.Signum, {"momentum": 0.8})]
BY_NAME = {info.optim_cls.__name__: info for info in INFOS}


def inputs(info, dtype=F32, skip=("differentiable",)):
    """All inputs of torch's suite with each flag of the implementation, except capturable, which torch refuses on the CPU."""
    if not info.supported_impls:
        return info.optim_inputs_func(device="cpu")
    made = _get_optim_inputs_including_global_cliquey_kwargs("cpu", dtype, info, skip=skip)
    return [
        given
        for given in made
        if not given.kwargs.get("capturable") and not (torch.is_tensor(given.kwargs.get("lr")) and given.kwargs.get("foreach"))
    ]


def cases(dtype=F32, skip=("differentiable",), infos=INFOS):
    for info in infos:
        for number, given in enumerate(inputs(info, dtype, skip)):
            yield pytest.param(info, copy.deepcopy(given.kwargs), id=f"{info.optim_cls.__name__}-{number}-{given.desc}")


every_class = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.optim_cls.__name__)
every_input = pytest.mark.parametrize("info, kwargs", list(cases()))


def model_and_step(info, kwargs, dtype=F32):
    """A small model, an optimizer, and a closure that has gradients and returns the loss."""
    torch.manual_seed(11)
    weight, bias = (Parameter(torch.randn(shape, dtype=dtype)) for shape in ((10, 5), (10,)))
    data = torch.randn(5, dtype=dtype)
    optimizer = info.optim_cls([weight, bias], **kwargs)
    return [weight, bias], optimizer, closure_of(optimizer, weight, bias, data)


def closure_of(optimizer, weight, bias, data):
    """A closure of the suite's model, which has gradients and returns the loss."""

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(data) + bias).pow(2).sum()
        loss.backward()
        return loss

    return closure


def first_and_last_loss(optimizer, closure, schedules):
    """The losses before and after 20 steps, each followed by a step of all schedules."""
    first = float(closure())
    for _ in range(20):
        value = optimizer.step(closure)
        for schedule in schedules:
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(value)
            else:
                schedule.step()
    return first, float(closure())


def equal_trees(one, other):
    """True if nested dicts and lists have the same keys, tensors and values."""
    if torch.is_tensor(one):
        return torch.is_tensor(other) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_trees(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal_trees, one, other))
    return one == other
