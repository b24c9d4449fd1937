"""In which dtypes an optimizer keeps moments and master weights, and how these survive torch's load_state_dict, which casts every state to
the dtype of its parameter."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch

from .. import _abi
from ..errors import InvalidArgumentError
from ._rows import CODES, local

#: The state that holds the f32 master of a 16-bit parameter.
MASTER = "master_param"


class Precision(NamedTuple):
    """The dtypes that an optimizer was constructed with."""

    moment_dtype: torch.dtype | None = None
    stochastic: bool = False
    seed: int = 0
    masters: bool = False

    @staticmethod
    def of(name: str, adam: bool, moment_dtype: torch.dtype | None, moment_rounding: str, rounding_seed: int, master: str | None) -> Precision:
        """Checks the arguments of an optimizer's class."""
        if moment_dtype not in (None, torch.float32, torch.bfloat16):
            raise InvalidArgumentError(f"{name}: moment_dtype is {moment_dtype!r}; pass torch.bfloat16, torch.float32 or None")
        if moment_rounding not in _abi.ROUNDINGS:
            raise InvalidArgumentError(f"{name}: moment_rounding is {moment_rounding!r}; pass one of {tuple(_abi.ROUNDINGS)}")
        stochastic = moment_rounding == "stochastic"
        if stochastic and (moment_dtype is not torch.bfloat16 or not adam):
            raise InvalidArgumentError(f"{name}: moment_rounding=\"stochastic\" is for Adam and AdamW with moment_dtype=torch.bfloat16")
        if not 0 <= rounding_seed < 2**64:
            raise InvalidArgumentError(f"{name}: rounding_seed is {rounding_seed!r}; pass a number from 0 to 2**64 - 1")
        if master not in (None, "f32"):
            raise InvalidArgumentError(f"{name}: master is {master!r}; pass \"f32\" or None")
        return Precision(moment_dtype, stochastic, rounding_seed, master is not None)

    @property
    def beyond_torch(self) -> bool:
        """True if torch's own step cannot keep these dtypes."""
        return self.masters or self.moment_dtype is not None

    def has_master(self, param: torch.Tensor) -> bool:
        """True if the parameter has a master weight."""
        return self.masters and param.dtype in (torch.bfloat16, torch.float16)

    def of_moments(self, param: torch.Tensor) -> torch.dtype:
        """Dtype of the moments of a parameter."""
        return self.moment_dtype or (torch.float32 if self.has_master(param) else param.dtype)

    def cast(self, param: torch.Tensor, state: dict[str, Any], source: dict[str, Any], keys: list[str]) -> None:
        """Gives the states of a parameter their dtypes, with the values of `source`."""
        # Parameters that Spillway never steps keep torch's dtypes.
        if not (param.is_cpu and param.dtype in CODES):
            return
        dtypes = dict.fromkeys(keys, self.of_moments(param)) if self.beyond_torch else {}
        if self.has_master(param):
            dtypes[MASTER] = torch.float32
        for key, dtype in dtypes.items():
            if key in state and state[key].dtype is not dtype:
                state[key] = source[key].detach().to(dtype=dtype, device=param.device, copy=True)

    def load(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any], keys: list[str]) -> None:
        """Repeats torch's loading of `saved` for the states of other dtypes than their parameters."""
        ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, param in zip(ids, params):
            if number in saved["state"] and param in optimizer.state:
                self.cast(param, optimizer.state[param], saved["state"][number], keys)


def master_of(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The master of a 16-bit parameter. Where the parameter was written to since the last step, the master takes its value."""
    master = state.get(MASTER)
    if master is None:
        master = state[MASTER] = param.detach().to(torch.float32)
        return local(master)
    master, own = local(master), local(param)
    if master.shape == own.shape and master.dtype is torch.float32:
        changed = master.to(own.dtype) != own
        if changed.any():
            master[changed] = own[changed].to(torch.float32)
    return master
