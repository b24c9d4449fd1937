"""torch optimizers that step CPU parameters with Spillway's kernels.

    from spillway.torch import AdamW

    optimizer = AdamW(model.parameters(), lr=1e-3)      # instead of torch.optim.AdamW
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

`AdamW`, `Adam` and `Adagrad` are subclasses of torch's classes with the same arguments, state and `state_dict`. A checkpoint of one
loads into the other. `Lion` is a `torch.optim.Optimizer`. One step of all parameters is one call of the library.

Spillway steps parameters and gradients that are contiguous in CPU memory, in float32, bfloat16 or float16, DTensors included.
Other parameters (on a GPU, float64, complex, sparse gradients) and groups with `amsgrad`, `capturable` or `differentiable` are
stepped by torch's own code. `foreach` and `fused` choose that code; they do not change Spillway's.

Keywords beyond torch, for all classes:

| keyword | meaning |
|---|---|
| `max_norm` | gradients are clipped to this global norm within the step; `grad_norm` is the norm before |
| `process_group` | with `max_norm` and `skip_nonfinite`: squares and verdict are summed over this group |
| `skip_nonfinite` | a step with Inf or NaN in a gradient is skipped; `skipped` is then True |
| `undo` | `rollback()` restores all bits of the last step |
| `moment_dtype` | `torch.bfloat16`: moments take 2 bytes per element each instead of 4 |
| `moment_rounding` | `"stochastic"`: Adam's bf16 moments are rounded at random, without bias; default `"nearest"` |
| `rounding_seed` | seed of these random bits, which depend on it, the parameter's number, the step and the element only |
| `master` | `"f32"`: 16-bit parameters have an f32 master in their state; a step writes both |
| `master` | `"split"`: bf16 parameters have an f32 master in the parameter and 16 low bits in their state |
| `tier` | Adam and AdamW: a path, a list of paths or `TierOptions`; masters and moments are kept there |
| `memory_budget` | host memory for states on a tier, in bytes |

A checkpoint keeps bf16 moments and masters. A master takes the value of its parameter where the program wrote to the parameter, except by
`param.data`, which leaves no trace."""

from ._optimizers import Adagrad, Adam, AdamW, Lion
from ._tier_states import TierOptions

__all__ = ["Adagrad", "Adam", "AdamW", "Lion", "TierOptions"]
