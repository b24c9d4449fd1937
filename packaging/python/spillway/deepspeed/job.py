"""What of a DeepSpeed configuration Spillway serves, for the doctor. Takes the configuration as DeepSpeed does, without its import."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

from .._doctor.findings import Findings, JobPart, Obstacle, an_object, shown
from ..errors import InvalidArgumentError
from . import _versions

#: The versions of DeepSpeed that were run.
RUN = _versions.TRIED
#: The op of each optimizer that DeepSpeed steps on the CPU, by the lower case of its type.
OP_OF = {"adam": "cpu_adam", "adamw": "cpu_adam", "adagrad": "cpu_adagrad", "lion": "cpu_lion"}
#: Keys that only DeepSpeed's configurations have.
_KEYS = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "spillway",
    "fp16",
    "bf16",
}
_DEVICES = ("none", "cpu", "nvme")
_IN_MEMORY, _ON_PATHS = ("host", "speculation", "interleave"), ("tier-one-path", "tier", "tier-cache", "tier-split-master")
#: The planner's option of each number of a configuration.
_NUMBERS = {"train_micro_batch_size_per_gpu": "micro_batch", "gradient_accumulation_steps": "accumulation"}


def is_deepspeeds(given: Any) -> bool:
    """True if an object looks like a DeepSpeed configuration."""
    return isinstance(given, dict) and bool(_KEYS & given.keys())


def findings(given: Any, version: str | None) -> Findings:
    """The findings about a configuration.

    Args:
        given: The configuration.
        version: The version of DeepSpeed; None: it is not installed, and the newest one that was run is assumed.

    Raises:
        InvalidArgumentError: It is no object."""
    found = Findings("a DeepSpeed configuration", frameworks=("deepspeed",))
    if not isinstance(given, dict):
        raise InvalidArgumentError(f"the configuration is {shown(given)}, not an object; DeepSpeed reads an object")
    try:
        _Job(found, given, version or _versions.TRIED[-1]).look()
    except InvalidArgumentError as error:
        text, _, cure = str(error).rpartition("; ")
        found.refuse(text or cure, cure if text else "change it")
    return found


class _Job:
    """A configuration, of which `look` notes the findings."""

    def __init__(self, found: Findings, given: dict[str, Any], version: str):
        self.found, self.given, self.version = found, given, version
        zero = self.zero = an_object(given.get("zero_optimization"), "zero_optimization")
        self.stage = _stage(zero.get("stage", 0))
        optimizer = zero.get("offload_optimizer")
        if optimizer is None and zero.get("cpu_offload") is True:
            optimizer = {"device": "cpu"}
        self.optimizer = an_object(optimizer, "zero_optimization.offload_optimizer")
        self.parameters = an_object(zero.get("offload_param"), "zero_optimization.offload_param")
        # DeepSpeed moves states from stage 1 on, and parameters in stage 3.
        self.states_on = _device(self.optimizer, "offload_optimizer") if self.stage else "none"
        self.parameters_on = _device(self.parameters, "offload_param") if self.stage == 3 else "none"
        self.block = given.get("spillway")

    def look(self) -> None:
        self._plan()
        self._step()
        self._files()
        self._methods()
        self._own_block()
        self._lines()

    def _plan(self) -> None:
        found = self.found
        found.strategy = {"none": "gpu", "cpu": "host", "nvme": "tier-one-path"}[self.states_on]
        found.choices = _ON_PATHS if self.states_on == "nvme" else _IN_MEMORY
        for name, option in _NUMBERS.items():
            if type(self.given.get(name)) is int and self.given[name] > 0:
                found.plan[option] = self.given[name]
        size = self.zero.get("sub_group_size")
        if isinstance(size, (int, float)) and 1 <= size <= 1e12:
            found.plan["sub_group_size"] = int(size)
        found.plan["zero_stage"] = 3 if self.stage == 3 else 2

    def _step(self) -> None:
        optimizer, where = an_object(self.given.get("optimizer"), "optimizer"), f"offload_optimizer on the device {self.states_on}"
        kind, options = optimizer.get("type"), an_object(optimizer.get("params"), "optimizer.params")
        if optimizer and not isinstance(kind, str):
            raise InvalidArgumentError(f"optimizer.type is {shown(kind)}; write the name of an optimizer, such as AdamW")
        name = f"optimizer {shown(kind)}" if optimizer else "optimizer of the script"
        if self.states_on == "none":
            state = f"ZeRO stage {self.stage}, states on the GPU"
            self._part(name, state, "nothing of the step is on the CPU; offload_optimizer with the device cpu moves it there")
        elif not optimizer:
            self._part("cpu_adam", f"{where}, if the script passes DeepSpeedCPUAdam or a trainer makes it", self._ops_lack())
        elif (op := OP_OF.get(str(kind).lower())) is None:
            self._part(name, where, "the steps of Adam, AdamW, Adagrad and Lion are served")
        elif options.get("torch_adam") is True:
            self._part(name, where, '"torch_adam": true takes torch\'s class; take it out')
        else:
            zenflow = " and ZenFlow" if self.zero.get("zenflow") else ""
            self._part(op, f"{kind}{zenflow}, {where}", self._ops_lack())

    def _files(self) -> None:
        users = [name for name, place in (("offload_optimizer", self.states_on), ("offload_param", self.parameters_on)) if place == "nvme"]
        if users:
            op = "gds" if an_object(self.given.get("aio"), "aio").get("use_gds") is True else "async_io"
            self._part(op, f"{' and '.join(users)} on the device nvme", self._ops_lack())

    def _methods(self) -> None:
        off = isinstance(self.block, dict) and self.block.get("enabled") is False
        for part, name, place in (
            ("states", "states on a tier", self.states_on),
            ("parameters", "parameters on a tier", self.parameters_on),
        ):
            if self.stage == 3 and place == "nvme":
                reason = '"enabled": false leaves them to DeepSpeed' if off else _versions.version_lacks(part, self.version)
                self._part(name, "ZeRO stage 3, device nvme", reason)
        if self.optimizer.get("super_offload") is True and self.stage == 3:
            self._part("SuperOffload", "super_offload", _versions.version_lacks("superoffload", self.version))
            self.found.strategy = "speculation"

    def _own_block(self) -> None:
        if self.block is None:
            return
        try:
            from . import _settings
        except ImportError:
            self.found.obstacles.append(Obstacle("the object spillway was not checked: pydantic is not installed", "pip install pydantic"))
            return
        block = _settings.read(self.block)
        optimizer = SimpleNamespace(device=self.states_on, super_offload=self.optimizer.get("super_offload") is True)
        zero = SimpleNamespace(stage=self.stage, offload_optimizer=optimizer, offload_param=SimpleNamespace(device=self.parameters_on))
        _settings.refuse_unserved(block, zero)
        for part in _settings.parts(block, zero):
            if reason := _versions.version_lacks(part, self.version):
                self.found.refuse(f"the object spillway asks for a part that is not served: {reason}", "change the version, or the object")
        if block.interleave is not None:
            self._part("interleave", "spillway.interleave", _versions.version_lacks("interleave", self.version))
            self.found.strategy = "interleave"
        self.found.directories += [path.path for path in block.paths or () if not path.path.startswith("s3://")]
        if len(block.paths or ()) > 1:
            self.found.strategy = "tier"

    def _lines(self) -> None:
        found = self.found
        for place, device in ((self.optimizer, self.states_on), (self.parameters, self.parameters_on)):
            if device != "nvme":
                continue
            path = place.get("nvme_path")
            if path is None and not found.directories:
                raise InvalidArgumentError("the device is nvme, and there is neither nvme_path nor spillway.paths; add one of them")
            if path is not None and (not isinstance(path, str) or "\0" in path):
                raise InvalidArgumentError(f"nvme_path is {shown(path)}; write the name of a directory")
            if path is not None and path not in found.directories:
                found.directories.append(path)
        if self.states_on == "none" and self.stage != 0:
            found.lines.append('in zero_optimization: "offload_optimizer": {"device": "cpu"}')
        elif self.states_on == "none":
            found.lines.append('"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}')
        if self.states_on == "cpu" and self.found.strategy == "host":
            stage = '"stage": 3, ' if self.stage < 3 else ""
            found.lines.append(
                f'in zero_optimization: {stage}"offload_optimizer": {{"device": "cpu", "super_offload": true}}   (speculation)'
            )
        if self.stage == 3 and self.states_on == "nvme" and self.block is None:
            block = {"paths": found.directories, "job": "run1", "resume": True}
            found.lines.append(f'"spillway": {json.dumps(block)}   (a killed run resumes)')
        if os.environ.get("SPILLWAY_DEEPSPEED") not in ("1", "require"):
            found.lines.append("SPILLWAY_DEEPSPEED=1 deepspeed train.py   (or: import spillway.deepspeed; spillway.deepspeed.install())")

    def _part(self, name: str, where: str, reason: str | None = None) -> None:
        self.found.parts.append(JobPart(name, where, reason))

    def _ops_lack(self) -> str | None:
        return _versions.ops_lack(self.version)


def _stage(given: Any) -> int:
    if type(given) is not int or not 0 <= given <= 3:
        raise InvalidArgumentError(f"zero_optimization.stage is {shown(given)}; write a number from 0 to 3")
    return given


def _device(offload: dict[str, Any], name: str) -> str:
    device = offload.get("device", "none")
    if device not in _DEVICES:
        raise InvalidArgumentError(f"zero_optimization.{name}.device is {shown(device)}; write one of {', '.join(_DEVICES)}")
    return str(device)
