"""In which dtypes an optimizer keeps moments and master weights, and how these survive torch's load_state_dict, which casts every state to
the dtype of its parameter."""

from __future__ import annotations

from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

import torch

from .. import _abi
from ..errors import InvalidArgumentError
from . import _split
from ._rows import CODES, local

#: The state that holds the f32 master of a 16-bit parameter.
MASTER = "master_param"
#: The state that holds the low bits of a split master.
LOW = "master_low"
_STATES = {"f32": (MASTER, torch.float32), "split": (LOW, torch.int16)}


class Precision(NamedTuple):
    """The dtypes that an optimizer was constructed with."""

    moment_dtype: torch.dtype | None = None
    stochastic: bool = False
    seed: int = 0
    master: str | None = None

    @staticmethod
    def of(
        name: str, adam: bool, moment_dtype: torch.dtype | None, moment_rounding: str, rounding_seed: int, master: str | None
    ) -> Precision:
        """Checks the arguments of an optimizer's class."""
        if moment_dtype not in (None, torch.float32, torch.bfloat16):
            raise InvalidArgumentError(f"{name}: moment_dtype is {moment_dtype!r}; pass torch.bfloat16, torch.float32 or None")
        if not isinstance(moment_rounding, str) or moment_rounding not in _abi.ROUNDINGS:
            raise InvalidArgumentError(f"{name}: moment_rounding is {moment_rounding!r}; pass one of {tuple(_abi.ROUNDINGS)}")
        stochastic = moment_rounding == "stochastic"
        if stochastic and (moment_dtype is not torch.bfloat16 or not adam):
            raise InvalidArgumentError(f'{name}: moment_rounding="stochastic" is for Adam and AdamW with moment_dtype=torch.bfloat16')
        if isinstance(rounding_seed, bool) or not isinstance(rounding_seed, Integral) or not 0 <= rounding_seed < 2**64:
            raise InvalidArgumentError(f"{name}: rounding_seed is {rounding_seed!r}; pass a whole number from 0 to 2**64 - 1")
        if master not in (None, *_STATES):
            raise InvalidArgumentError(f'{name}: master is {master!r}; pass "f32", "split" or None')
        return Precision(moment_dtype, stochastic, rounding_seed, master)

    @property
    def beyond_torch(self) -> bool:
        """True if torch's own step cannot keep these dtypes."""
        return self.master is not None or self.moment_dtype is not None

    @property
    def master_state(self) -> tuple[str, torch.dtype]:
        """Name and dtype of the state that holds a master."""
        return _STATES[self.master or "f32"]

    def has_master(self, param: torch.Tensor) -> bool:
        """True if the parameter has a master weight."""
        return self.master is not None and param.dtype in (torch.bfloat16, torch.float16)

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
            dtypes |= _STATES.values()
            self._convert_master(param, state, source)
        for key, dtype in dtypes.items():
            if key in state and key in source and state[key].dtype is not dtype:
                state[key] = source[key].detach().to(dtype=dtype, device=param.device, copy=True)

    def _convert_master(self, param: torch.Tensor, state: dict[str, Any], source: dict[str, Any]) -> None:
        """Gives a state with a saved master of the other kind one of this kind."""
        if LOW in source and source[LOW].dtype is not torch.int16:
            # Another optimizer has loaded the low bits as floats.
            state.pop(LOW, None)
        if self.master == "split" and MASTER in source and state.pop(MASTER, None) is not None and LOW not in state:
            state[LOW] = torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format)
            local(state[LOW]).copy_(_split.low_of(local(source[MASTER])))

    def load(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any], keys: list[str]) -> None:
        """Repeats torch's loading of `saved` for the states of other dtypes than their parameters."""
        ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, param in zip(ids, params):
            if number in saved["state"] and param in optimizer.state:
                self.cast(param, optimizer.state[param], saved["state"][number], keys)


def master_of(precision: Precision, param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The state that holds the master of a 16-bit parameter. Where the parameter was written to since the last step, an f32 master takes
    its value."""
    if precision.master == "split":
        if LOW not in state:
            state[LOW] = torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format)
        return local(state[LOW])
    if MASTER not in state:
        master = param.detach().to(torch.float32)
        if LOW in state:
            local(master).copy_(_split.join(local(param), local(state[LOW])))
        # In this order: a signal handler may raise in between.
        state[MASTER] = master
        state.pop(LOW, None)
        return local(master)
    state.pop(LOW, None)
    master, own = local(state[MASTER]), local(param)
    if master.shape == own.shape and master.dtype is torch.float32:
        take_values(master, own)
    return master


def take_values(master: torch.Tensor, param: torch.Tensor) -> bool:
    """Gives the elements of an f32 master that do not round to the parameter its values; True if there are any. NaN rounds to NaN, of any
    bits."""
    changed = master.to(param.dtype) != param
    if changed.any():
        changed &= ~(master.isnan() & param.isnan())
    written = bool(changed.any())
    if written:
        master[changed] = param[changed].to(torch.float32)
    return written
