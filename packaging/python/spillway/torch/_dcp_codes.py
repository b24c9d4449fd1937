"""8-bit moments that a checkpoint of torch.distributed.checkpoint has as floats, and the reverse: what is read, and what becomes of it.

| the optimizer wants | the checkpoint has | read instead |
|---|---|---|
| `exp_avg_codes`, `exp_avg_scales` | `exp_avg` | float32 values, which are encoded to the nearest |
| `exp_avg`, in memory or a placeholder | `exp_avg_codes`, `exp_avg_scales` | codes and scales, which are decoded |

Parts of DTensors may begin within a block of codes: they are refused."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError
from ._codes import blocks_of, check_codes, decoded, encoded
from ._states import MOMENTS
from ._tensors import DTensor


class Conversion(NamedTuple):
    """One moment of a parameter.

    Attributes:
        moment: Its name in a state, such as "exp_avg".
        wanted: The names in the checkpoint that the optimizer asks for.
        asked: What is read instead: empty tensors by their names in the checkpoint."""

    moment: str
    wanted: tuple[str, ...]
    asked: dict[str, torch.Tensor]

    def values(self) -> dict[str, torch.Tensor]:
        """What was asked for, as the optimizer has it, by the names that it wants.

        Raises:
            InvalidArgumentError: Codes and scales are no 8-bit moment."""
        read = {name.rpartition(".")[2]: tensor for name, tensor in self.asked.items()}
        if self.moment in read:
            made = encoded(read)
        else:
            check_codes(read, self.wanted[0])
            made = decoded(read)
        return {name: made[name.rpartition(".")[2]] for name in self.wanted}


def conversions(wanted: Mapping[str, Any], saved: Container[str], device: str = "cpu") -> list[Conversion]:
    """The moments that a checkpoint with the names `saved` has in the other form. `device`: that of the tensors that are read; "meta": they
    get no memory.

    Raises:
        UnsupportedError: One is a DTensor."""
    found = []
    for name in wanted:
        parameter, _, state = name.rpartition(".")
        moment = state.removesuffix("_codes")
        if moment not in MOMENTS or name in saved:
            continue
        floats, codes, scales = (f"{parameter}.{moment}{ending}" for ending in ("", "_codes", "_scales"))
        tensor = wanted[name]
        if name == codes and floats in saved and scales in wanted:
            empty = {floats: torch.empty(_shape(name, tensor), dtype=torch.float32, device=device)}
            found.append(Conversion(moment, (codes, scales), empty))
        elif name == floats and codes in saved and scales in saved:
            shape = _shape(name, tensor)
            empty = {
                codes: torch.empty(shape, dtype=torch.uint8, device=device),
                scales: torch.empty(blocks_of(shape.numel()), dtype=torch.bfloat16, device=device),
            }
            found.append(Conversion(moment, (floats,), empty))
    return found


def _shape(name: str, tensor: torch.Tensor) -> torch.Size:
    if isinstance(tensor, DTensor):
        raise UnsupportedError(
            f"{name} is a DTensor, and the checkpoint has this moment in 8 bits or asks for it, whose blocks the parts of a DTensor may "
            "divide; load it in one process, and save it with float moments"
        )
    return tensor.shape
