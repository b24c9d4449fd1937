"""The C interface of `_c`, names of its values in Python, and the integers that each function takes."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ._c import *
from ._c import PROTOTYPES
from ._c import STRUCTURES as STRUCTURES
from ._integers import RANGES, Integer

DTYPES = {"float32": DTYPE_F32, "float16": DTYPE_F16, "bfloat16": DTYPE_BF16, "f32": DTYPE_F32, "f16": DTYPE_F16, "bf16": DTYPE_BF16}
WEIGHT_DECAY_MODES = {"decoupled": WEIGHT_DECAY_DECOUPLED, "l2": WEIGHT_DECAY_L2}
ROUNDINGS = {"nearest": ROUNDING_NEAREST, "stochastic": ROUNDING_STOCHASTIC}
LOG_LEVELS = {"off": LOG_LEVEL_OFF, "error": LOG_LEVEL_ERROR, "warn": LOG_LEVEL_WARN, "info": LOG_LEVEL_INFO, "debug": LOG_LEVEL_DEBUG}


class Checked(NamedTuple):
    """What an integer argument must be; see `_native.fitting`."""

    position: int
    name: str
    least: int
    most: int
    is_address: bool


# For each function its integer arguments, which ctypes would shorten without notice.
INTEGERS = {
    name: tuple(
        Checked(position, argument.name, *RANGES[argument.kind], argument.kind is ctypes.c_void_p)
        for position, argument in enumerate(arguments)
        if isinstance(argument, Integer)
    )
    for name, (_, arguments) in PROTOTYPES.items()
}


def sized(structure_type: Any) -> Any:
    """A zeroed structure with its struct_size set."""
    return structure_type(struct_size=ctypes.sizeof(structure_type))
