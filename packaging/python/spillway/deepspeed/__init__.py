"""Spillway in place of DeepSpeed's compiled CPU optimizers, its I/O to files and its pinned memory.

With SPILLWAY_DEEPSPEED=1 in the environment every process of the job gets them, with no change to its script. Or:

    import spillway.deepspeed
    spillway.deepspeed.install()       # before the engine is built; at module level if workers are spawned

active() proves what was served.

ZeRO-3's sub-groups are stepped by CPU and GPU together where the `spillway` block says so: see _interleave. Its
optimizer states with "offload_optimizer": {"device": "nvme"} are on a tier: see _tier_config for the `spillway`
block of the configuration, and commit(), client_state() and resumed_step() for runs that go on where they were killed."""

import sys

from . import _hook
from ._hook import OPS, install, uninstall

__all__ = ["OPS", "active", "client_state", "commit", "install", "resumed_step", "uninstall"]


def active():
    """For each replaced op what was served to DeepSpeed in this process, the kernel that ran, the I/O backend, which is
    None while no file was read or written, and what became of SuperOffload's speculative steps, and what else was
    recorded and taken back. "left_to_deepspeed" names the parts that this version of DeepSpeed does not have in the way that was
    tried, and why."""
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
    tiers = sys.modules.get(f"{__name__}._tier")
    if tiers and tiers.served():
        report["tier"] = tiers.served()
    parameters = sys.modules.get(f"{__name__}._parameters")
    if parameters and parameters.served():
        report["parameter_tier"] = parameters.served()
    updates = sys.modules.get(f"{__name__}._interleave")
    if updates and updates.served():
        report["interleave"] = updates.served()
    versions = sys.modules.get(f"{__name__}._versions")
    if versions and _hook.installed() and versions.left():
        report["left_to_deepspeed"] = versions.left()
    return report


def commit(engine):
    """Makes an engine's optimizer states, and what goes with them, durable on their tier as its global step.
    Every rank calls it, and none goes on before all have committed."""
    from . import _resume
    _resume.commit(engine)


def client_state(engine):
    """A dictionary of the caller's own that every commit keeps, such as the position in the data; after a killed run was
    taken up again, what the last commit kept."""
    from . import _resume
    return _resume.client_state(engine)


def resumed_step(engine):
    """The global step at which a killed run was taken up again; None if the run began."""
    from . import _resume
    return _resume.resumed_step(engine)
