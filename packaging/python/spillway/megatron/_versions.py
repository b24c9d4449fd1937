"""The versions of Megatron whose HybridDeviceOptimizer Spillway serves, with the methods and attributes that it relies on.

A version between the first and the last minor series in which a test trains (ffi_tests/megatron) is served. In another version, or if a
method has other parameters, nothing is patched, and active() reports the reason."""

from __future__ import annotations

import importlib
import logging

from .. import _compat

# The versions with which the tests train. From 0.17 on they need Python 3.12.
TRIED = ("0.12.3", "0.14.0", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
_FIRST, _LAST = (0, 12), (0, 19)

# Parameters after `self` of each method that is replaced or called.
_METHODS = {
    "__init__": "params offload_fraction cpu_optimizer_cls gpu_optimizer_cls param_update_in_fp32 pin_cpu_grads pin_cpu_params "
    "overlap_cpu_optimizer_d2h_h2d kwargs",
    "_init_sub_optimizers": "",
    "_set_sub_optimizer_grads": "",
    "_register_param_copy_back_gpu_hook": "",
    "step": "closure",
    "_get_sub_optimizer_param_groups": "offload_fraction",
    "_sync_hdo_param_groups_to_sub_optimizers": "",
    "_sync_hdo_state_to_sub_optimizers": "",
    "_sync_sub_optimizers_state_to_hdo": "",
    "_update_fp32_params_by_new_state": "",
    "build_cpu_optimizer_list": "cpu_optimizer_cls cpu_param_groups",
}
# Attributes that `_init_sub_optimizers` sets or calls.
_ATTRIBUTES = {
    "cpu_optimizers",
    "gpu_optimizer",
    "cpu_copys_map_gpu_param",
    "param_to_fp32_param",
    "_d2h_stream",
    "_h2d_stream",
    "_cpu_optimizer_map_data_event",
    "build_cpu_optimizer_list",
    "_register_param_copy_back_gpu_hook",
}

# What is left to Megatron in this process, with the reason.
_left: dict[str, str] = {}
_log = logging.getLogger("spillway.megatron")


def serves(hybrid):
    """True if Spillway serves this class; otherwise active() reports the reason."""
    if "_spillway" in vars(hybrid):
        return True
    reason = version_lacks(_stated_version()) or _methods_lack(hybrid)
    if reason:
        leave("HybridDeviceOptimizer", reason)
    else:
        _left.pop("HybridDeviceOptimizer", None)
    return reason is None


def leave(what, reason):
    """Reports that Megatron's own code does something; logged once."""
    if _left.get(what) != reason:
        _left[what] = reason
        _log.info("left to Megatron: %s: %s", what, reason)


def left():
    """What is left to Megatron, with the reasons, for active()."""
    return dict(_left)


def _stated_version():
    return str(importlib.import_module("megatron.core.package_info").__version__)


def version_lacks(stated):
    """The reason why a version of megatron-core is not served; None if it is."""
    return _compat.version_lacks("Spillway is", "megatron-core", _FIRST, _LAST, stated)


def _methods_lack(hybrid):
    reason = _compat.methods_lack(hybrid, _METHODS, "megatron-core")
    missing = set() if reason else _ATTRIBUTES - set(hybrid._init_sub_optimizers.__code__.co_names)
    return reason or (f"_init_sub_optimizers of this megatron-core does not set {', '.join(sorted(missing))}" if missing else None)
