"""Spillway in place of DeepSpeed's compiled CPU optimizers.

With SPILLWAY_DEEPSPEED=1 in the environment every process of the job gets them, with no change to its script. Or:

    import spillway.deepspeed
    spillway.deepspeed.install()       # before the optimizer is built; at module level if workers are spawned

active() proves what was served."""

from . import _hook
from ._hook import OPS, install, uninstall

__all__ = ["OPS", "active", "install", "uninstall"]


def active():
    """For each replaced op the calls and elements served to DeepSpeed in this process, the kernel that ran, and what
    was recorded and taken back, if anything was."""
    import spillway

    from . import _ops, _undo
    report = {op: dict(zip(("calls", "elements"), _ops.served(op))) for op in OPS if op in _hook.installed()}
    if report:
        report["kernel"] = spillway.kernel_name()
        report.update({"undo": recorded} if (recorded := _undo.report()) else {})
    return report
