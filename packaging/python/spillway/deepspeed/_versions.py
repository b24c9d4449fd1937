"""Table of the parts of DeepSpeed that Spillway replaces, with the supported versions and the expected methods.

A part is replaced in versions between the first and the last minor series in which a test trains with it
(ffi_tests/deepspeed/test_versions.py). In another version, or if a method has other parameters, the part is left to
DeepSpeed: active() reports the reason, and a `spillway` block that needs the part is an error."""

from __future__ import annotations

import importlib

from .. import _compat
from . import _installed

# The versions with which the tests train.
TRIED = ("0.14.0", "0.16.9", "0.18.9", "0.19.8")
# The last minor series that was tested.
_LAST = (0, 19)
# For each part the first tested version that has the methods it replaces.
_FIRST = {"engine": (0, 14, 0), "states": (0, 16, 0), "parameters": (0, 19, 0), "interleave": (0, 19, 5), "superoffload": (0, 19, 0)}
PARTS = tuple(_FIRST)
_NAMES = {
    "engine": "engines that close what they opened",
    "states": "optimizer states on a tier",
    "parameters": "16-bit parameters on a tier",
    "interleave": "interleaved updates",
    "superoffload": "SuperOffload on Spillway's speculation",
}

_LOAD = "load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only custom_load_fn"
# Parameters after `self` of each method that is replaced or called. _SOME lists those that exist only in some versions.
_METHODS = {
    "engine": {
        "_configure_zero_optimizer": "optimizer",
        "destroy": "",
        "step": "lr_kwargs",
        "_do_sanity_check": "",
        "load_checkpoint": _LOAD,
        "_load_checkpoint": _LOAD,
        "_load_zero_checkpoint": "load_dir tag load_optimizer_states",
        "_get_zero_ckpt_name": "checkpoints_path tag",
        "save_checkpoint": "save_dir tag client_state save_latest exclude_frozen_parameters",
        "_save_zero_checkpoint": "save_path tag",
    },
    "states": {
        "_configure_tensor_swapping": "offload_optimizer_config aio_config",
        "initialize_optimizer_states": "",
        "_prepare_sub_group": "sub_group_id timer_names",
        "unscale_and_clip_grads": "sub_group_id total_norm",
        "_optimizer_step": "sub_group_id",
        "_reassign_or_swap_out_partitioned_parameters": "sub_group_id",
        "_release_sub_group": "sub_group_id timer_names",
        "_rigid_state_dict": "",
        "_rigid_load_state_dict": "state_dict load_optimizer_states",
        "_restore_from_bit16_weights": "",
        "reset_swap_buffers": "",
        "partition_grads": "params_to_release grad_partitions",
        "set_fp32_grad_for_param": "value param",
        "set_local_grad_for_param": "value param",
        "_set_fp32_optimizer_param_groups": "",
    },
    "parameters": {"_configure_aio": "ds_config", "get_path": "param must_exist", "synchronize_reads": "", "synchronize_writes": ""},
    "interleave": {
        "initialize_optimizer_states": "",
        "step": "closure",
        "_overflow_clean_up": "prev_scale",
        "unscale_and_clip_grads": "sub_group_id total_norm",
        "_get_fp32_grad_state_partition": "param release_swap_buffers",
        "get_fp32_grad_partitions": "",
        "update_fp32_grad_for_param_vectorized": "update_func param_list",
        "_optimizer_step": "sub_group_id",
        "_unflatten_partitioned_parameters": "sub_group_id",
        "_reassign_or_swap_out_partitioned_parameters": "sub_group_id",
        "_offload_grad_partition_at_boundary": "param grad_buffer offload_fp32_gradients offload_fp32_offsets",
    },
    "superoffload": {
        "partition_grads": "params_to_release grad_partitions",
        "_get_param_partition_rank": "param",
        "_step_with_clipping": "scaled_global_grad_norm timer_names",
        "_step_without_clipping": "scaled_global_grad_norm timer_names",
        "_wait_for_async_operations": "timeout_seconds",
        "_handle_overflow_rollback": "",
        "_loss_scale_update_and_overflow_cleanup": "",
        "_post_step": "timer_names",
        "clear_backward_seen_flag": "",
    },
}
_SOME = {
    "states": {
        "get_fp32_grad_partitions": "",
        "update_fp32_grad_for_param_vectorized": "update_func param_list",
        "_offload_grad_partition_at_boundary": "param grad_buffer offload_fp32_gradients offload_fp32_offsets",
    }
}

# Parts left to DeepSpeed in this process, with the reason.
_left: dict[str, str] = {}


def serves(part, owner):
    """True if a part is replaced in the methods of this class; otherwise active() reports the reason."""
    reason = version_lacks(part, _stated_version()) or _methods_lack(part, owner)
    if reason:
        _left[part] = reason
    return reason is None


def methods(part):
    """Names of the methods that a part replaces or calls in every version that it fits."""
    return tuple(_METHODS[part])


def lacking(part):
    """The reason why a part is left to DeepSpeed; None if it is replaced, or its module was not imported."""
    return _left.get(part) or version_lacks(part, _stated_version())


def left():
    """Each part that is left to DeepSpeed, with the reason, for active()."""
    return dict(_left)


def version_lacks(part, stated):
    """The reason why a part does not fit a version of DeepSpeed; None if it fits."""
    return _compat.version_lacks(f"{_NAMES[part]} are", "DeepSpeed", _FIRST[part], _LAST, stated)


def ops_lack(stated):
    """The reason why the ops do not fit a version of DeepSpeed; None if they fit, as in all later versions."""
    first = TRIED[0]
    return None if _compat.numbers(stated) >= _compat.numbers(first) else f"the ops are tested from DeepSpeed {first}, and this is {stated}"


def _stated_version():
    """DeepSpeed's version. Also works during the import of its package, which then has no __version__ yet."""
    import deepspeed

    if not hasattr(deepspeed, "__version__"):
        for name in ("git_version_info_installed", "git_version_info"):
            try:
                return str(importlib.import_module(f"deepspeed.{name}").version)
            except (ImportError, AttributeError):
                continue
    return str(getattr(deepspeed, "__version__", ""))


def _methods_lack(part, owner):
    return _compat.methods_lack(owner, _METHODS[part], "DeepSpeed") or _compat.methods_lack(owner, _SOME.get(part, {}), "DeepSpeed", True)


_installed.counted(lambda: {"left_to_deepspeed": left()} if _left else {}, *_installed.PARTS)
