"""The states of a parameter: their names, first values and dtypes, and the f32 masters of 16-bit parameters.

torch's load_state_dict casts every state to the dtype of its parameter. `Precision.load` restores the dtypes of this optimizer.

A split master is the parameter and 16 low bits, in torch operations here; the library's steps split in the same way. The parameter is the
master rounded to the nearest bf16, ties away from zero, and the low bits are the lower half of the master. The parameter is one above the
master's upper half if and only if the highest low bit is set."""

from __future__ import annotations

from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

import torch

from .. import _abi
from .._groups import Rule
from ..errors import InvalidArgumentError
from ._codes import coded_rule, decoded, encoded, is_scales, new_scales
from ._tensors import CODES, check_has_memory, local

#: The moments of Adam.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: The rules of torch.optim.Adam and AdamW.
ADAM = Rule("adam", _abi.AdamOptions, {key: key for key in MOMENTS}, ("lr", "eps", "weight_decay", "betas"), decoupled=False)
ADAMW = ADAM._replace(decoupled=True)
#: What the dtypes of moments are also called. torch.uint8: 8-bit codes with scales, see _codes.py.
MOMENT_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
#: The state that holds the f32 master of a 16-bit parameter.
MASTER = "master_param"
#: The state that holds the low bits of a split master.
LOW = "master_low"
_MASTERS = {"f32": (MASTER, torch.float32), "split": (LOW, torch.int16)}


def kind_of(name: str) -> str:
    """What a state is in a report of memory, by its name."""
    return "masters" if name in (MASTER, LOW) else "moments"


#: Most bytes of the log of a step that has an inverse, for an element.
LOG_BYTES = 13


class Precision(NamedTuple):
    """The dtypes that an optimizer was constructed with."""

    moment_dtype: torch.dtype | None = None
    stochastic: bool = False
    seed: int = 0
    master: str | None = None

    @staticmethod
    def of(
        name: str, adam: bool, moment_dtype: torch.dtype | str | None, moment_rounding: str | None, rounding_seed: int, master: str | None
    ) -> Precision:
        """Checks the arguments of an optimizer's class."""
        told, moment_dtype = moment_dtype, MOMENT_DTYPES.get(moment_dtype) if isinstance(moment_dtype, str) else moment_dtype
        if moment_dtype not in (None, *MOMENT_DTYPES.values()) or (told is not None and moment_dtype is None):
            raise InvalidArgumentError(
                f'{name}: moment_dtype is {told!r}; pass "int8", "bf16", "f32", torch.bfloat16, torch.float32 or None'
            )
        coded = moment_dtype is torch.uint8
        if coded and not adam:
            raise InvalidArgumentError(f'{name}: moment_dtype="int8" is for Adam and AdamW; pass "bf16" or "f32"')
        if moment_rounding is not None and (not isinstance(moment_rounding, str) or moment_rounding not in _abi.ROUNDINGS):
            raise InvalidArgumentError(f"{name}: moment_rounding is {moment_rounding!r}; pass one of {tuple(_abi.ROUNDINGS)}, or None")
        # To the nearest, an 8-bit second moment stands still until a square is 30 times as large.
        stochastic = coded if moment_rounding is None else moment_rounding == "stochastic"
        if stochastic and (moment_dtype not in (torch.bfloat16, torch.uint8) or not adam):
            raise InvalidArgumentError(f'{name}: moment_rounding="stochastic" is for Adam and AdamW with moment_dtype="bf16" or "int8"')
        if isinstance(rounding_seed, bool) or not isinstance(rounding_seed, Integral) or not 0 <= rounding_seed < 2**64:
            raise InvalidArgumentError(f"{name}: rounding_seed is {rounding_seed!r}; pass a whole number from 0 to 2**64 - 1")
        if master not in (None, *_MASTERS):
            raise InvalidArgumentError(f'{name}: master is {master!r}; pass "f32", "split" or None')
        return Precision(moment_dtype, stochastic, rounding_seed, master)

    def seed_of(self, number: int, part: int) -> int:
        """The seed of a parameter with this number, of which the process has this part: parts have random bits of their own, and replicas
        of a part the same."""
        return (self.seed + (part << 32) + number) % 2**64

    @property
    def coded(self) -> bool:
        """True if moments are 8-bit codes with scales."""
        return self.moment_dtype is torch.uint8

    @property
    def rounding(self) -> str | None:
        """How moments are rounded; None: as without the keyword."""
        return None if self.stochastic is self.coded else "stochastic" if self.stochastic else "nearest"

    @property
    def log_bytes(self) -> float:
        """Most bytes of the log of a recorded step, for an element. That of split masters and 8-bit moments holds the old values."""
        if not self.keeps_values:
            return LOG_BYTES
        # Sums and headers take less than a hundredth of a byte.
        return 4.01 + (2.13 if self.coded else 4 if self.moment_dtype is torch.bfloat16 else 8)

    @property
    def keeps_values(self) -> bool:
        """True if the log of a recorded step holds the old values, and not what the inverse of the step misses."""
        return self.coded or self.master == "split"

    @property
    def is_plain(self) -> bool:
        """True if every step has floats and one set of options: no codes, no split masters, no rounding at random."""
        return not (self.keeps_values or self.stochastic)

    def rule_of(self, rule: Rule) -> Rule:
        """A rule with the states of these dtypes."""
        return coded_rule(rule) if self.coded else rule

    @property
    def beyond_torch(self) -> bool:
        """True if torch's own step cannot keep these dtypes."""
        return self.master is not None or self.moment_dtype is not None

    @property
    def master_state(self) -> tuple[str, torch.dtype]:
        """Name and dtype of the state that holds a master."""
        return _MASTERS[self.master or "f32"]

    def has_master(self, param: torch.Tensor) -> bool:
        """True if the parameter has a master weight."""
        return self.master is not None and param.dtype in (torch.bfloat16, torch.float16)

    def of_moments(self, param: torch.Tensor) -> torch.dtype:
        """Dtype of the moments of a parameter."""
        return self.moment_dtype or (torch.float32 if self.has_master(param) else param.dtype)

    def new_state(self, rule: Rule, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """The first states of a parameter, as torch's class creates them."""
        # A step count as torch's optimizers create it.
        dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
        state: dict[str, Any] = {"step": torch.zeros((), dtype=dtype, device="cpu")} if rule.counted else {}
        for key in rule.keys:
            if self.coded and is_scales(key):
                state[key] = new_scales(param)
                continue
            state[key] = torch.zeros_like(param, dtype=self.of_moments(param), memory_format=torch.preserve_format)
            if rule.start:
                state[key].fill_(group[rule.start])
        return state

    def cast(self, param: torch.Tensor, state: dict[str, Any], source: dict[str, Any], keys: list[str]) -> None:
        """Gives the states of a parameter their dtypes, with the values of `source`."""
        # Parameters that Spillway never steps keep torch's dtypes.
        if not (param.is_cpu and param.dtype in CODES):
            return
        source = self._converted(param, state, source)
        dtypes = dict.fromkeys(keys, self.of_moments(param)) if self.beyond_torch else {}
        dtypes |= {key: torch.bfloat16 for key in keys if is_scales(key)}
        if self.has_master(param):
            dtypes |= _MASTERS.values()
            self._convert_master(param, state, source)
        for key, dtype in dtypes.items():
            if key in state and key in source and state[key].dtype is not dtype:
                state[key] = source[key].detach().to(dtype=dtype, device=param.device, copy=True)

    def _converted(self, param: torch.Tensor, state: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
        """`source` with moments of the kind of this optimizer, which `state` then has too in place of those of the other kind."""
        found = (encoded if self.coded else decoded)(source)
        if found is not source:
            for key in source.keys() - found.keys():
                state.pop(key, None)
            state.update({key: found[key] for key in found.keys() - source.keys()})
        return found

    def _convert_master(self, param: torch.Tensor, state: dict[str, Any], source: dict[str, Any]) -> None:
        """Gives a state with a saved master of the other kind one of this kind."""
        if LOW in source and source[LOW].dtype is not torch.int16:
            # Another optimizer has loaded the low bits as floats.
            state.pop(LOW, None)
        if self.master == "split" and MASTER in source and state.pop(MASTER, None) is not None and LOW not in state:
            state[LOW] = torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format)
            local(state[LOW]).copy_(low_of(local(source[MASTER])))

    def load(self, groups: list[dict[str, Any]], states: Any, saved: dict[str, Any], keys: list[str]) -> None:
        """Repeats torch's loading of `saved` for the states of other dtypes than their parameters."""
        ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
        params = chain.from_iterable(group["params"] for group in groups)
        for number, param in zip(ids, params):
            if number in saved["state"] and param in states:
                self.cast(param, states[param], saved["state"][number], keys)


def is_count(step: Any) -> bool:
    """True for a step count: a number, or a tensor with one number."""
    try:
        count = -1.0 if isinstance(step, (str, bytes)) else float(step)
    except (TypeError, ValueError, RuntimeError):
        return False
    return 0 <= count < 2**63 and count % 1 == 0


def check_not_split(state: dict[str, Any], name: str) -> None:
    """Raises an error for a saved state with the low bits of a master, which are of no use without the weights of their time."""
    if LOW in state:
        raise InvalidArgumentError(
            f"the state of {name} has a split master ({LOW!r}); load it with master='split', and pass spillway.torch.wide_state_dict of "
            "that optimizer; nothing was loaded"
        )


def check_steps(loaded: dict[str, Any], counted: bool) -> None:
    """Checks the step counts of a state dict before it is loaded. `counted`: states of the optimizer have one."""
    for number, state in loaded.get("state", {}).items():
        if not counted or not isinstance(state, dict) or not state:
            continue
        step = state.get("step")
        if not (isinstance(step, torch.Tensor) and step.is_meta) and not is_count(step):
            raise InvalidArgumentError(
                f"load_state_dict: state[{number!r}]['step'] is {step!r}; pass the number of steps that the state has had, "
                "a whole number from 0 on; nothing was loaded"
            )


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
            local(master).copy_(join(local(param), local(state[LOW])))
        # In this order: a signal handler may raise in between.
        state[MASTER] = master
        state.pop(LOW, None)
        return local(master)
    state.pop(LOW, None)
    master, own = local(state[MASTER]), local(param)
    if master.shape == own.shape and master.dtype is torch.float32:
        take_values(master, own)
    return master


def check_masters(state: dict[str, Any], name: str) -> None:
    """Raises an error if the memory of a master, or of low bits, was freed."""
    for key in (LOW, MASTER):
        if isinstance(state.get(key), torch.Tensor):
            check_has_memory(local(state[key]), f"the state {key!r} of {name}")


def version_of_low(state: dict[str, Any]) -> int:
    """The version of the low bits in a state; -1 if it has none."""
    return local(state[LOW])._version if LOW in state else -1


def take_values(master: torch.Tensor, param: torch.Tensor) -> bool:
    """Gives the elements of an f32 master that do not round to the parameter its values; True if there are any. NaN rounds to NaN, of any
    bits. A step with `take_copy` of the library takes the same elements."""
    changed = _written(master, param)
    written = bool(changed.any())
    if written:
        # By `data`, because a version tells that the program has written to the master.
        master.data[changed] = param[changed].to(torch.float32)
    return written


def with_values(master: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The f32 master that `take_values` would make; the master itself if that is the same."""
    changed = _written(master, param)
    return torch.where(changed, param.to(torch.float32), master) if bool(changed.any()) else master


def _written(master: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The elements of an f32 master of which the parameter is not the rounding."""
    if param.dtype is torch.bfloat16:
        # Either neighbour of a tie.
        apart = master.view(torch.int32) - (param.view(torch.int16).to(torch.int32) << 16)
        changed = (apart > 0x8000) | (apart < -0x8000)
    else:
        words = {2: torch.int16, 4: torch.int32}[param.element_size()]
        changed = master.to(param.dtype).view(words) != param.view(words)
    if changed.any():
        changed &= ~(master.isnan() & param.isnan())
    return changed


def join(param: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The f32 master of a bf16 parameter and its int16 low bits."""
    # The conversion extends the sign: a set highest bit subtracts one from the upper half. A zero has no such master.
    bits = low.to(torch.int32)
    bits = torch.where((param == 0) & (bits < 0), bits & 0xFFFF, bits)
    return bits.add_(param.detach().view(torch.int16).to(torch.int32) << 16).view(torch.float32)


def low_of(master: torch.Tensor) -> torch.Tensor:
    """The low bits of an f32 master whose parameter is rounded to even. The master of a tie that was rounded towards zero moves by one
    unit of float32."""
    bits = master.detach().to(torch.float32).contiguous().view(torch.int32)
    low = bits.to(torch.int16)
    ties = (low == -0x8000) & ((bits >> 16) & 1 == 0)
    low[ties] = 0x7FFF
    low[master.isnan()] = 0
    return low
