"""State dicts without narrow states: what an optimizer saves, as torch's classes and the default states load it."""

from __future__ import annotations

from typing import Any

import torch

from ._codes import decoded
from ._states import LOW, MASTER, MOMENTS, join
from ._tensors import local


def wide_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer of this module with float32 moments and masters, whatever the dtypes of its states are. torch's class
    loads it, and so does an optimizer with the default states: the way out of `moment_dtype` and `master="split"`.

    Moments have the values that the next step would decode. A 16-bit parameter has its float32 master as `master_param`, which torch's
    class does not use. Other states are the optimizer's own tensors, as in its `state_dict()`.

    Example:
        torch_s = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch_s.load_state_dict(spillway.torch.wide_state_dict(optimizer))"""
    saved = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    of = dict(zip(numbers, params))
    return {**saved, "state": {number: _wide(state, of[number]) if number in of else state for number, state in saved["state"].items()}}


def _wide(state: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    wide = dict(decoded(state))
    for name in MOMENTS:
        if isinstance(moment := wide.get(name), torch.Tensor) and moment.is_floating_point():
            wide[name] = moment.float()
    if (low := wide.pop(LOW, None)) is not None:
        master = param.detach().to(local(low).device, torch.float32, copy=True)
        local(master).copy_(join(local(param).detach().to(local(low).device), local(low)))
        wide[MASTER] = master
    return wide
