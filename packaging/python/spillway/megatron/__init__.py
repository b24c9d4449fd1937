"""Megatron-LM's CPU offload, stepped by Spillway, and Megatron's optimizer states on a tier.

Set SPILLWAY_MEGATRON=1 in the environment: every process of the job is patched, without a change to its script. Or call:

    import spillway.megatron
    spillway.megatron.install()        # before the optimizer is built

Megatron's `HybridDeviceOptimizer` (`--optimizer-cpu-offload`) then steps its CPU parameters with Spillway:

- The CPU optimizer is a subclass of `spillway.torch.AdamW`, and `megatron.core.optimizer.CPUAdam` is `spillway.torch.AdamW`.
- With overlap, a CPU optimizer has parameters of about 64 MiB, where Megatron makes one optimizer for each parameter.
- Gradients go to host memory in their own dtype, and 16-bit parameters come back from a 16-bit copy that the step writes.

Checkpoints stay Megatron's own: one that Spillway wrote loads without Spillway, and the reverse. active() reports what Spillway serves,
and what it leaves to Megatron.

`OptimizerStateStore` steps the states of a `DistributedOptimizer` on a tier."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ._hook import install, uninstall

if TYPE_CHECKING:
    from ._store import OptimizerStateStore, Shard

__all__ = ["OptimizerStateStore", "Shard", "active", "install", "uninstall"]


def active() -> dict[str, Any]:
    """Reports what Spillway has done for Megatron in this process.

    Returns:
        A dict, empty if nothing is installed or Megatron was not imported. "optimizers" counts the HybridDeviceOptimizers that Spillway
        steps, "steps" and "elements" their steps, "grad_bytes" the gradients that went to host memory, and "param_bytes" the parameters
        that came back; "kernel" is the active kernel. "left_to_megatron" has the reason for each thing that Megatron's own code does."""
    served, versions = (sys.modules.get(f"{__name__}.{name}") for name in ("_hybrid", "_versions"))
    report: dict[str, Any] = {}
    if served and served.counts["optimizers"]:
        import spillway

        report = {**served.counts, "kernel": spillway.kernel_name()}
    if versions and versions.left():
        report["left_to_megatron"] = versions.left()
    return report


def __getattr__(name: str) -> Any:
    # These need torch, which an import of this package must not load.
    if name in ("OptimizerStateStore", "Shard"):
        from . import _store

        return getattr(_store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
