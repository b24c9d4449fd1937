"""Spillway in place of DeepSpeed's compiled CPU optimizers, its I/O to files and its pinned memory.

With SPILLWAY_DEEPSPEED=1 in the environment every process of the job gets them, with no change to its script. Or:

    import spillway.deepspeed
    spillway.deepspeed.install()       # before the engine is built; at module level if workers are spawned

active() proves what was served."""

import sys

from . import _hook
from ._hook import OPS, install, uninstall

__all__ = ["OPS", "active", "install", "uninstall"]


def active():
    """For each replaced op what was served to DeepSpeed in this process, the kernel that ran, the I/O backend, which is
    None while no file was read or written, and what became of SuperOffload's speculative steps, and what else was
    recorded and taken back."""
    import spillway

    from . import _engine, _ops, _undo
    report = {op: _ops.served(op) for op in OPS if op in _hook.installed()}
    if report:
        report["kernel"] = spillway.kernel_name()
        report.update({"undo": recorded} if (recorded := _undo.report()) else {})
    if "async_io" in report:
        report["io"] = _engine.describe()
    superoffload = sys.modules.get(f"{__name__}._superoffload")
    if superoffload and "superoffload" in _hook.installed() and superoffload.served():
        report["superoffload"] = superoffload.served()
    return report
