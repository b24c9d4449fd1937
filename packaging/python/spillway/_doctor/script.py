"""What of a training script Spillway serves. The script is read as a syntax tree, and never run: names are followed through its imports."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from ..deepspeed import job as deepspeed_job
from ..errors import InvalidArgumentError
from ..optim import TORCH_CLASSES
from . import files
from .findings import Findings, JobPart, Obstacle

#: torch's optimizers with a class of their own in spillway.torch, and those that no class steps in parts.
_CLASSES, _WHOLE = (
    ("Adam", "AdamW", "Adagrad"),
    {"LBFGS": "it joins all parameters to one vector", "SparseAdam": "its gradients are sparse"},
)
#: Modules of torch.optim with other classes than optimizers.
_NO_OPTIMIZERS = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.", "torch.optim.Optimizer", "torch.optim.optimizer.")
#: Optimizers of other packages that spillway.torch replaces.
_SAME = {"lion_pytorch.Lion": "Lion", "transformers.AdamW": "AdamW", "transformers.optimization.AdamW": "AdamW"}
#: What of DeepSpeed runs on one of the replaced ops.
_OPS = {
    "DeepSpeedCPUAdam": "cpu_adam",
    "CPUAdamBuilder": "cpu_adam",
    "DeepSpeedCPUAdagrad": "cpu_adagrad",
    "CPUAdagradBuilder": "cpu_adagrad",
    "DeepSpeedCPULion": "cpu_lion",
    "CPULionBuilder": "cpu_lion",
    "AsyncIOBuilder": "async_io",
    "aio_handle": "async_io",
    "GDSBuilder": "gds",
    "gds_handle": "gds",
    "PinMemoryBuilder": "pin_memory",
}
_ON_GPU = {"FusedAdam": "it steps on the GPU", "FusedLamb": "it steps on the GPU", "FusedLion": "it steps on the GPU"}
#: Keywords of calls that name a DeepSpeed configuration.
_CONFIGURES = {
    "deepspeed.initialize": ("config", "config_params"),
    "TrainingArguments": ("deepspeed",),
    "DeepSpeedPlugin": ("hf_ds_config",),
}
#: What a job uses of Spillway, beside classes.
_CALLS = ("offload", "install")
#: What `from MODULE import *` gives.
_ALL_OF = {"torch.optim": _CLASSES, "deepspeed.ops.adam": ("DeepSpeedCPUAdam",), "spillway.torch": (*TORCH_CLASSES, "Staged", "offload")}
#: How the line begins by which DeepSpeed's ops are served.
_BY_VARIABLE = "SPILLWAY_DEEPSPEED=1 "
#: The package that a module needs.
_FRAMEWORKS = {"torch": "torch", "deepspeed": "deepspeed", "megatron": "megatron-core"}
_TRAINERS = ("transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.SFTTrainer", "trl.DPOTrainer")
_OFFLOADS = ("host", "host-bf16-moments", "host-split-master", "host-int8-moments", "speculation", "tier", "tier-cache")


def findings(path: str, version: str | None) -> Findings:
    """The findings about a script, and about DeepSpeed configurations that it names by a literal.

    Args:
        path: The script.
        version: The version of DeepSpeed; None: it is not installed.

    Raises:
        InvalidArgumentError: It cannot be read, or is no Python."""
    names = _Names(_parsed(path))
    found = Findings("a training script", choices=_OFFLOADS, in_use=tuple(filter(_is_spillways, names.used)))
    steps_with_spillway = any(name.startswith("spillway.torch.") for name in found.in_use)
    for name, line in sorted(names.used.items(), key=lambda item: item[1]):
        # A class that is only passed on is an argument of Spillway's call.
        if not (steps_with_spillway and name.startswith("torch.optim.") and name not in names.called):
            _look_at(found, name, f"line {line}")
    _note_strategy(found, names)
    for kind, given, line in names.configurations:
        _configured(found, kind, given, line, path, version)
    if "deepspeed.initialize" in names.used and not names.configurations:
        config = "the doctor reads it by: python -m spillway doctor ds_config.json"
        found.obstacles.append(Obstacle(f"line {names.used['deepspeed.initialize']}: the configuration is known only when it runs", config))
        found.frameworks = (*found.frameworks, "deepspeed")
    installed = "spillway.deepspeed.install" in found.in_use
    found.lines = [line for line in dict.fromkeys(found.lines) if not (installed and line.startswith(_BY_VARIABLE))]
    return found


def _is_spillways(name: str) -> bool:
    """True for a class of Spillway, and for a call by which a job is served."""
    last = name.rpartition(".")[2]
    return name.startswith("spillway.") and (last in _CALLS or (last[:1].isupper() and not last.endswith("Error")))


def _note_strategy(found: Findings, names: _Names) -> None:
    """Notes what the first optimizer of Spillway in a script does, as the planner names it, and its directories."""
    if not names.optimizers:
        return
    keywords = names.optimizers[0]
    given = {name: _source(keywords[name]) for name in ("tier", "moment_dtype", "master", "tail") if name in keywords}
    if given.get("tier", "None") != "None":
        found.strategy = "tier-cache" if "host_memory" in keywords else "tier"
        found.directories += names.directories(keywords["tier"])
    elif "int8" in given.get("moment_dtype", ""):
        found.strategy = "host-int8-moments"
    elif "split" in given.get("master", ""):
        found.strategy = "host-split-master"
    elif given.get("moment_dtype", "None") != "None":
        found.strategy = "host-bf16-moments"
    elif given.get("tail", "0") != "0":
        found.strategy = "speculation"
    else:
        found.strategy = "host"


def _source(node: ast.expr) -> str:
    """The text of an expression; an empty one for too many levels."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return ""


def of_torch() -> Findings:
    """The findings about any job with an optimizer of torch."""
    found = Findings("a job with an optimizer of torch", choices=_OFFLOADS, frameworks=("torch",))
    found.parts = [JobPart(f"torch.optim.{name}", f"spillway.torch.{name}") for name in _CLASSES]
    found.parts.append(JobPart("another class", "spillway.torch.Staged(cls, ...)"))
    found.lines = [*_torch_lines("AdamW")]
    return found


def _torch_lines(name: str) -> Iterator[str]:
    yield f"from spillway.torch import {name}   (parameters on the CPU; the same arguments)"
    if name in ("Adam", "AdamW"):
        yield f"optimizer = spillway.torch.offload(model, torch.optim.{name}, ...)   (parameters on a GPU; import spillway.torch)"


def _parsed(path: str) -> ast.Module:
    text = files.content(path, files.MOST_SCRIPT)
    try:
        with warnings.catch_warnings():
            # Escapes of the script that Python does not know.
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        raise InvalidArgumentError(
            f"{path}, line {error.lineno or 1}: {error.msg}; name a script of Python {sys.version_info[0]}.{sys.version_info[1]}"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidArgumentError(f"{path} is no script of Python: {error or 'it has too many levels'}; name another file") from None


class _Names:
    """The names of other packages that a script uses.

    Attributes:
        used: Each, as `package.module.name`, with the line of its first use.
        called: Those that are called.
        configurations: What calls name as a DeepSpeed configuration: the call, the value and its line.
        optimizers: The keywords of the calls of spillway.torch that make an optimizer, in the order of their lines."""

    def __init__(self, tree: ast.Module):
        self.used: dict[str, int] = {}
        self.called: set[str] = set()
        self.optimizers: list[dict[str, ast.expr]] = []
        self.configurations: list[tuple[str, str | dict[Any, Any], int]] = []
        self._known: dict[str, str] = {}
        self._whole: list[str] = []
        #: What is assigned to each variable.
        self._assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            self._import(node)
        for node in ast.walk(tree):
            self._use(node)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: call.lineno):
            name = self._name(call.func)
            if name is not None and name.removeprefix("spillway.torch.") in _ALL_OF["spillway.torch"]:
                self.optimizers.append({one.arg: self._value(one.value) for one in call.keywords if one.arg is not None})

    def directories(self, given: ast.expr) -> list[str]:
        """The directories of a tier that a script names by literals: one, a list of them, or those of TierOptions."""
        given = self._value(given)
        if isinstance(given, ast.Call) and (self._name(given.func) or "").endswith(".TierOptions") and given.args:
            given = self._value(given.args[0])
        try:
            found = ast.literal_eval(given)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return []
        found = [found] if isinstance(found, str) else found
        return [one for one in found if isinstance(one, str) and "://" not in one] if isinstance(found, (list, tuple)) else []

    def _value(self, node: ast.expr) -> ast.expr:
        """What a variable was assigned, if only once; else the expression itself."""
        return self._assigned[node.id][0] if isinstance(node, ast.Name) and len(self._assigned.get(node.id, ())) == 1 else node

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._assigned.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self._known[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if alias.name == "*":
                    self._whole.append(node.module)
                else:
                    self._known[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _use(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)) and (name := self._name(node)) is not None:
            self.used[name] = min(node.lineno, self.used.get(name, node.lineno))
        if not isinstance(node, ast.Call) or (called := self._name(node.func)) is None:
            return
        self.called.add(called)
        keywords = next((keywords for kind, keywords in _CONFIGURES.items() if f".{called}".endswith(f".{kind}")), ())
        for keyword in node.keywords:
            if keyword.arg in keywords and (given := _literal(self._value(keyword.value))) is not None:
                self.configurations.append((called, given, keyword.value.lineno))

    def _name(self, node: ast.AST) -> str | None:
        """The whole name of an expression such as `optim.AdamW`; None if it does not begin with an import."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        first = self._known.get(node.id)
        if first is None:
            first = next((f"{module}.{node.id}" for module in self._whole if node.id in _ALL_OF.get(module, ())), None)
        return None if first is None else ".".join([first, *reversed(parts)])


def _literal(node: ast.expr) -> Any:
    """A string or a dictionary that the script spells out; None if it does not."""
    try:
        found = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return found if isinstance(found, (str, dict)) else None


def _look_at(found: Findings, name: str, where: str) -> None:
    """Notes a name that a script uses."""
    package, last = name.partition(".")[0], name.rpartition(".")[2]
    before = len(found.parts)
    if name.startswith("torch.optim.") and last[:1].isupper() and not name.startswith(_NO_OPTIMIZERS):
        _torchs(found, last, where)
    elif name in _SAME:
        found.parts.append(JobPart(name, where))
        found.lines += _torch_lines(_SAME[name])
    elif package == "deepspeed" and last in _OPS:
        found.parts.append(JobPart(_OPS[last], f"{last}, {where}"))
        found.lines.append(f"{_BY_VARIABLE}deepspeed SCRIPT   (or: import spillway.deepspeed; spillway.deepspeed.install())")
    elif package == "deepspeed" and last in _ON_GPU:
        found.parts.append(JobPart(f"deepspeed {last}", where, _ON_GPU[last]))
    elif name in _TRAINERS:
        found.parts.append(JobPart(name, where))
        if not any(used.startswith("spillway.torch.") for used in found.in_use):
            found.lines.append(f"{last}(..., optimizers=(spillway.torch.AdamW(model.parameters(), ...), None))")
    elif name in found.in_use:
        found.parts.append(JobPart(name, f"{where}, in use already"))
    if len(found.parts) > before:
        framework = _FRAMEWORKS.get(name.split(".")[1] if package == "spillway" else package, None if package == "spillway" else "torch")
        if framework is not None and framework not in found.frameworks:
            found.frameworks = (*found.frameworks, framework)


def _torchs(found: Findings, last: str, where: str) -> None:
    if last in _CLASSES:
        found.parts.append(JobPart(f"torch.optim.{last}", where))
        found.lines += _torch_lines(last)
    elif last in _WHOLE:
        found.parts.append(JobPart(f"torch.optim.{last}", where, _WHOLE[last]))
    else:
        found.parts.append(JobPart(f"torch.optim.{last}", f"{where}, its states elsewhere"))
        found.lines.append(f"optimizer = spillway.torch.Staged(torch.optim.{last}, model.parameters(), ...)   (import spillway.torch)")


def _configured(found: Findings, kind: str, given: Any, line: int, path: str, version: str | None) -> None:
    """Notes a DeepSpeed configuration that a call names."""
    if isinstance(given, str):
        place = next((at for at in (given, os.path.join(os.path.dirname(path), given)) if os.path.exists(at)), None)
        if place is None:
            missing = f"line {line}: {given!r} does not exist here, so the configuration of {kind} was not read"
            found.obstacles.append(Obstacle(missing, "run the doctor where the job starts, or name the file"))
            return
        given = files.configuration(place)
    found.add(deepspeed_job.findings(given, version))
