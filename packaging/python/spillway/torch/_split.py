"""f32 masters that are split into a bf16 parameter and 16 low bits, in torch operations. The library's steps split in the same way.

The parameter is the master rounded to the nearest bf16, ties away from zero, and the low bits are the lower half of the master. The
parameter is one above the master's upper half if and only if the highest low bit is set."""

from __future__ import annotations

import torch


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
