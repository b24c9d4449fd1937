"""Patches DeepSpeed's op builder classes, after their module ran, to return Spillway's modules. These have DeepSpeed's function names. They
are module objects without __file__, because there is no compiled file.

Builders exist under two import roots (an installed DeepSpeed and a checkout), once per accelerator. A finder in front
of sys.meta_path sees all of them, in every version since 0.14. With SPILLWAY_DEEPSPEED=1 the .pth file installs it in
every Python process that imports DeepSpeed."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import threading
import types
from collections.abc import Iterable
from typing import Any

from .._import_hook import ImportHook, Patches
from ..errors import InvalidArgumentError, UnsupportedError
from . import _installed
from ._installed import OPS, PARTS

_BUILDER_CLASSES = {
    "CPUAdamBuilder": "cpu_adam",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPULionBuilder": "cpu_lion",
    "AsyncIOBuilder": "async_io",
    "PinMemoryBuilder": "pin_memory",
    "GDSBuilder": "gds",
}
_ROOT = r"(?:deepspeed\.ops\.)?op_builder"
_OP_MODULE = re.compile(rf"{_ROOT}(?:\.\w+)?\.({'|'.join(OPS)})")
_COMM_MODULE = re.compile(rf"{_ROOT}\.cpu\.comm")
_ACCELERATOR_MODULE = re.compile(r"(?:deepspeed\.)?accelerator\.cpu_accelerator")
_ADAM_MODULE = re.compile(r"deepspeed\.ops\.adam\.cpu_adam")
# Modules where DeepSpeed lists the ops compatible with this machine; recent versions compute the list on demand.
_REPORT_MODULE = re.compile(r"deepspeed\.(?:ops|git_version_info(?:_installed)?)")
_SUPEROFFLOAD_MODULE = re.compile(r"deepspeed\.runtime\.superoffload\.superoffload_stage3")
_STAGE3_MODULE = re.compile(r"deepspeed\.runtime\.zero\.stage3")
_PARAMETERS_MODULE = re.compile(r"deepspeed\.runtime\.swap_tensor\.partitioned_param_swapper")
_ENGINE_MODULE = re.compile(r"deepspeed\.runtime\.engine")
# Modules that import a builder class by name.
_HOLDERS = re.compile(
    rf"{_ROOT}|deepspeed\.ops\.(?:adam|adagrad|lion)\.cpu_(?:adam|adagrad|lion)"
    r"|deepspeed\.ops\.(?:aio|gds)|deepspeed\.nvme\.\w+|deepspeed\.runtime\.swap_tensor\.\w+"
    r"|deepspeed\.runtime\.model_checkpointing\.\w+"
)

# Folder of a prebuilt op in DeepSpeed, if it differs from the op's name.
_FOLDERS = {"async_io": "aio"}

_lock = threading.RLock()
_patches = Patches()
_set = _patches.set
_missing_builders: dict[tuple[type, str], type] = {}
#: The modules of the ops, one object per process.
_modules: dict[str, types.ModuleType] = {}


def install(ops: Iterable[str] | str | None = None, undo: str | None = None) -> None:
    """Replaces ops and parts in every DeepSpeed module, imported now or later. Idempotent.

    Args:
        ops: Names from OPS, "superoffload" and "swapper"; None: all.
        undo: Selects the Adam steps that are recorded, so that adam_rollback and DeepSpeedCPUAdam.rollback_subgroup
            restore them bit for bit; None reads SPILLWAY_DEEPSPEED_UNDO at the first op, or else is "auto".

    Raises:
        InvalidArgumentError: An op or `undo` is unknown.

    | undo | recorded steps |
    |---|---|
    | "auto" | those of step_subgroup, which SuperOffload calls, and those of optimizers that were rolled back before |
    | "always" | all |
    | "never" | none |

    A recording takes per parameter 1.2 bytes in steady state, 3.4 at step 2 and at most 13, and a tenth of the step's
    time."""
    if undo not in (None, *_installed.UNDO_MODES):
        raise InvalidArgumentError(f'install: undo is {undo!r}; pass "auto", "always" or "never"')
    _installed.choose_undo(undo)
    wanted = set(PARTS if ops is None else [ops] if isinstance(ops, str) else ops)
    if not wanted <= set(PARTS):
        raise InvalidArgumentError(f"install: unknown ops {sorted(wanted - set(PARTS))}; the ops and parts are {', '.join(PARTS)}")
    with _lock:
        _installed.parts.update(wanted)
        _finder.insert()
        for name, module in _finder.imported():
            _patch(module, name)
        for name, module in list(sys.modules.items()):
            if module is not None and _HOLDERS.fullmatch(name):
                _replace_missing(module)


def uninstall() -> None:
    """Restores DeepSpeed's own builders; existing optimizers keep using Spillway."""
    with _lock:
        _installed.parts.clear()
        _finder.remove()
        _patches.revert()


def _run(module):
    with _lock:
        _patch(module, module.__name__)


_finder = ImportHook(lambda name: _concerns(name), _run)


def _concerns(name):
    return any(
        pattern.fullmatch(name)
        for pattern in (
            _OP_MODULE,
            _COMM_MODULE,
            _ACCELERATOR_MODULE,
            _ADAM_MODULE,
            _REPORT_MODULE,
            _SUPEROFFLOAD_MODULE,
            _STAGE3_MODULE,
            _PARAMETERS_MODULE,
            _ENGINE_MODULE,
        )
    )


def _patch(module, name):
    op_module = _OP_MODULE.fullmatch(name)
    if op_module:
        for value in list(vars(module).values()):
            if isinstance(value, type) and vars(value).get("NAME") == op_module[1] and value.__module__ == name:
                _patch_builder(value, op_module[1])
    elif _COMM_MODULE.fullmatch(name):
        _patch_shm(getattr(module, "ShareMemCommBuilder", None))
    elif _ACCELERATOR_MODULE.fullmatch(name):
        _patch_accelerator(getattr(module, "CPU_Accelerator", None))
    elif _ADAM_MODULE.fullmatch(name):
        _patch_subgroups(getattr(module, "DeepSpeedCPUAdam", None))
    elif _SUPEROFFLOAD_MODULE.fullmatch(name):
        _patch_superoffload(module)
    elif _STAGE3_MODULE.fullmatch(name):
        _patch_swapper(getattr(module, "DeepSpeedZeroOptimizer_Stage3", None), "_stage3_methods", "states", "interleave")
    elif _PARAMETERS_MODULE.fullmatch(name):
        _patch_swapper(getattr(module, "AsyncPartitionedParameterSwapper", None), "_parameters", "parameters")
    elif _ENGINE_MODULE.fullmatch(name):
        _patch_swapper(getattr(module, "DeepSpeedEngine", None), "_engine", "engine")
    elif isinstance(getattr(module, "compatible_ops", None), dict):
        module.compatible_ops.update(dict.fromkeys(_installed.parts.intersection(OPS), True))
    elif hasattr(module, "_probe_compatible_ops"):
        _patch_report(module)


def _patch_subgroups(optimizer):
    """Patches step_subgroup, SuperOffload's step and the only one followed by rollbacks; old versions lack it."""
    inner = vars(optimizer).get("step_subgroup") if optimizer else None
    if inner is None or "_spillway_op" in vars(optimizer) or "cpu_adam" not in _installed.parts:
        return

    def step_subgroup(self, *args, **kwargs):
        from . import _optimizer_ops

        with _optimizer_ops.subgroup_step():
            return inner(self, *args, **kwargs)

    _set(optimizer, "_spillway_op", "cpu_adam")
    _set(optimizer, "step_subgroup", step_subgroup)


def _patch_builder(builder, op):
    if op not in _installed.parts or "_spillway_op" in vars(builder):
        return
    load, is_compatible = builder.load, builder.is_compatible

    # GDSBuilder inherits from AsyncIOBuilder and may not be replaced itself.
    def ours(self):
        return getattr(self, "NAME", None) == op

    _set(builder, "_spillway_op", op)
    _set(builder, "load", lambda self, verbose=True: module_of(op) if ours(self) else load(self, verbose))
    _set(builder, "is_compatible", lambda self, verbose=True: ours(self) or is_compatible(self, verbose))


def _patch_report(module):
    inner = module._probe_compatible_ops
    if not hasattr(inner, "_spillway"):

        def probe():
            return {**inner(), **dict.fromkeys(_installed.parts.intersection(OPS), True)}

        probe._spillway = True  # type: ignore[attr-defined]
        _set(module, "_probe_compatible_ops", probe)


def module_of(op):
    """Spillway's module of an op."""
    from . import _io_ops, _optimizer_ops, _zenflow

    further = _zenflow.SERVED if op == "cpu_adam" else ()
    with _lock:
        if op not in _modules:
            made: Any = types.ModuleType(f"spillway.deepspeed.{op}", f"Replacement of DeepSpeed's {op}.")
            made.__spillway__ = True
            for served in (*{**_optimizer_ops.SERVED, **_io_ops.SERVED}[op], *further):
                setattr(made, served.__name__, served)
            for name, advice in _optimizer_ops.NOT_SERVED.get(op, {}).items():
                setattr(made, name, _refusal(op, name, advice))
            _modules[op] = made
        return _modules[op]


def report():
    """The entries of active(): those of the ops, and of the parts of stage 3 that DeepSpeed has imported."""
    # What serves an op adds its entries.
    for op in OPS:
        module_of(op)
    return _installed.report()


def _refusal(op, name, advice):
    def refuse(*_args, **_kwargs):
        raise UnsupportedError(f"Spillway's {op} has no {name}: {advice}")

    refuse.__name__ = name
    return refuse


def _patch_accelerator(accelerator):
    """The CPU accelerator does not know every op, and returns a builder that cannot load: for async_io up to 0.15.2,
    for gds in all versions."""
    if accelerator is None or "_spillway_get_op_builder" in vars(accelerator):
        return
    inner = accelerator.get_op_builder

    def get_op_builder(self, class_name):
        return _present(inner(self, class_name), class_name)

    _set(accelerator, "_spillway_get_op_builder", True)
    _set(accelerator, "get_op_builder", get_op_builder)


def _present(builder, class_name):
    """Spillway's builder class if DeepSpeed has only NotImplementedBuilder, else `builder`."""
    op = _BUILDER_CLASSES.get(class_name)
    if op not in _installed.parts or getattr(builder, "NAME", None) != "deepspeed_not_implemented":
        return builder
    key = (builder, op)
    if key not in _missing_builders:
        _missing_builders[key] = type(
            class_name,
            (builder,),
            {
                "NAME": op,
                "BUILD_VAR": f"DS_BUILD_{op.upper()}",
                "_spillway_op": op,
                "absolute_name": lambda self: f"deepspeed.ops.{_FOLDERS.get(op, op.removeprefix('cpu_'))}.{op}_op",
                "load": lambda self, verbose=True: module_of(op),
                "is_compatible": lambda self, verbose=True: True,
            },
        )
    return _missing_builders[key]


def _replace_missing(module):
    for class_name in _BUILDER_CLASSES:
        builder = vars(module).get(class_name)
        if isinstance(builder, type) and _present(builder, class_name) is not builder:
            _set(module, class_name, _present(builder, class_name))


def _patch_superoffload(module):
    """Replaces optimizer and stage 3 together; a version whose stage 3 has other methods is not patched."""
    from . import _rounds, _superoffload, _versions

    stage3 = vars(module).get("SuperOffloadOptimizer_Stage3")
    if "superoffload" not in _installed.parts or stage3 is None or "_spillway_op" in vars(stage3):
        return
    if not _versions.serves("superoffload", stage3):
        return
    _set(stage3, "_spillway_op", "superoffload")
    for name, method in _superoffload.overrides(stage3).items():
        _set(stage3, name, method)
    _set(module, "SuperOffloadCPUOptimizer", _rounds.SuperOffloadCPUOptimizer)


def _patch_swapper(owner, module, *parts):
    """Applies the methods of a module, which serves these parts. A part that does not fit this version is left to DeepSpeed."""
    from . import _versions

    if "swapper" not in _installed.parts or owner is None or "_spillway_op" in vars(owner):
        return
    # Each part says why it is left to DeepSpeed.
    served = [_versions.serves(part, owner) for part in parts]
    if any(served):
        methods = importlib.import_module(f"{__package__}.{module}")
        _set(owner, "_spillway_op", "swapper")
        for name, method in methods.overrides(owner).items():
            _set(owner, name, method)


def _patch_shm(builder):
    """Declares DeepSpeed's shared-memory collectives absent if there is one rank or no compiler; DeepSpeed then uses
    torch.distributed. DeepSpeed compiles them when a process group starts on the CPU accelerator, and fails without a
    compiler. Only inference over several ranks uses them."""
    if builder is None or "_spillway_op" in vars(builder):
        return
    inner = builder.is_compatible

    def is_compatible(self, verbose=False):
        several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
        compiler = shutil.which(os.environ.get("CXX") or "c++") and shutil.which("ninja")
        return bool(several and compiler and inner(self, verbose))

    _set(builder, "_spillway_op", "deepspeed_shm_comm")
    _set(builder, "is_compatible", is_compatible)
