"""Patches Megatron's HybridDeviceOptimizer after its module ran.

One method is replaced: `_init_sub_optimizers`, which then turns the optimizer into a subclass (see _hybrid). So an optimizer that Spillway
serves keeps its methods after uninstall(), and one that was built before install() keeps Megatron's. With SPILLWAY_MEGATRON=1 the
.pth file installs the hook in every Python process that imports Megatron."""

from __future__ import annotations

import functools
import threading

from .._import_hook import ImportHook, Patches

_HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
_OPTIMIZERS = "megatron.core.optimizer"

_lock = threading.RLock()
_patches = Patches()


def install() -> None:
    """Steps the CPU parameters of every HybridDeviceOptimizer with Spillway that is built from now on. Idempotent.

    Megatron may be imported before or later. A version of Megatron that was not tested stays as it is: see active()."""
    with _lock:
        _hook.insert()
        for _, module in _hook.imported():
            _patch(module)


def uninstall() -> None:
    """Restores Megatron's own code; existing optimizers keep using Spillway."""
    with _lock:
        _hook.remove()
        _patches.revert()


def _run(module):
    with _lock:
        _patch(module)


_hook = ImportHook(lambda name: name in (_HYBRID, _OPTIMIZERS), _run)


def _patch(module):
    from . import _versions

    hybrid = vars(module).get("HybridDeviceOptimizer")
    if hybrid is None or not _versions.serves(hybrid):
        return
    if "_spillway" not in vars(hybrid):
        _patches.set(hybrid, "_spillway", True)
        _patches.set(hybrid, "_init_sub_optimizers", _offering(hybrid._init_sub_optimizers))
    if module.__name__ == _OPTIMIZERS:
        _patch_class(module)


def _patch_class(module):
    import torch

    from ..torch import AdamW

    if vars(module).get("CPUAdam") is torch.optim.AdamW:
        _patches.set(module, "CPUAdam", AdamW)


def _offering(inner):
    """Megatron's `_init_sub_optimizers`, which serves the optimizer if Spillway can."""

    @functools.wraps(inner)
    def _init_sub_optimizers(self):
        from . import _hybrid

        if isinstance(self, _hybrid.Served) or not _hybrid.take(self):
            return inner(self)
        return self._init_sub_optimizers()

    return _init_sub_optimizers
