"""The settings of the `spillway` block of a DeepSpeed configuration: their names, defaults, valid values and meaning.

    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"}},
    "spillway": {"paths": ["/mnt/nvme", "/mnt/pfs"], "host_memory": 8589934592, "job": "run7", "resume": true}

Without the block, nvme_path is the only path and is scratch space, like DeepSpeed's swap files: each engine has its
own directories there, and removes those of dead engines. With "resume" every step is committed. After a crash,
training resumes from the last step that every rank committed. Only a run that resumes under the same job name changes
that state.

This module needs pydantic, which DeepSpeed installs, but not every version that the ops serve. It is therefore
imported where a block is read. An engine validates its block before it makes anything. Unknown settings, wrong
values, and settings without effect in this configuration are errors that name the setting."""

import difflib
import json
import os
import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .._tail_search import is_tail
from ..errors import InvalidArgumentError
from ..interleave import PLANS
from ..tier import DURABILITIES, TierPath
from . import _scratch

# Sums of byte counts fit 64 bits.
_MOST = (1 << 63) - 1
_Count = Annotated[int, Field(ge=0, le=_MOST)]
_Slots = Annotated[int, Field(ge=0, le=(1 << 32) - 1)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Above it, less than a millisecond would count as no timeout.
_LEAST_TIMEOUT, _MOST_TIMEOUT = 0.001, 1e9
# The names of directories have at most 255 bytes, and a suffix such as -parameters-scratch-12 is added.
_MOST_NAME = 200

_BYTES = f"a number of bytes, an integer from 0 to {_MOST}, such as 9663676416"
_RATE = "a number of parameters per second from 0"
_PER_PATH = "a list with a number from 0 for each path"
_INTEGER = f"an integer from 0 to {_MOST}"
_NAME = f'a name of at most {_MOST_NAME} bytes, without "/", control characters and a dot at its start,'
_BOOLEAN = "true or false"


def _one_of(names):
    return " or ".join(f'"{name}"' for name in names)


def _setting(default, valid, meaning, **limits):
    """A field: its default (... if it is required), the valid values as messages name them, and what it does."""
    return Field(default, description=meaning, json_schema_extra={"valid": valid}, **limits)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _as_path(given):
    return {"path": os.fspath(given)} if isinstance(given, (str, os.PathLike)) else given


def _as_list(given):
    return list(given) if isinstance(given, tuple) else given


def _as_name(given):
    # The rule of the library for the names of its directories.
    if (
        not 0 < len(given.encode(errors="replace")) <= _MOST_NAME
        or given.startswith(".")
        or any(letter == "/" or unicodedata.category(letter) in ("Cc", "Cs") for letter in given)
    ):
        raise ValueError
    return given


def _as_place(given):
    if "\0" in given:
        raise ValueError
    return given


def _as_timeout(given):
    if given and not _LEAST_TIMEOUT <= given <= _MOST_TIMEOUT:
        raise ValueError
    return given


def _as_tail(given):
    if not is_tail(given):
        raise ValueError
    return given


def _as_host_memory(given):
    if not (given is None or given == "auto" or type(given) is int and 0 < given <= _MOST):
        raise ValueError
    return given


_HostMemory = Annotated[int | Literal["auto"] | None, BeforeValidator(_as_host_memory)]
_Name = Annotated[str, AfterValidator(_as_name)]
_TailSetting = Annotated[int | Literal["auto"], BeforeValidator(_as_tail)]
_Timeout = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_as_timeout)]


_Place = Annotated[str, AfterValidator(_as_place), Field(min_length=1)]
_BeginFrom = Annotated[_Place | Annotated[list[_Place], Field(min_length=1), BeforeValidator(_as_list)] | None, Field()]
_Numbers = Annotated[list[_Number], Field(min_length=1), BeforeValidator(_as_list)]


class PathBlock(_Strict):
    """A path of the tier; a string stands for an object with `path` alone."""

    path: Annotated[str, AfterValidator(_as_place)] = _setting(
        ..., 'a directory or "s3://BUCKET/PREFIX", without NUL,', "An existing directory or an object store.", min_length=1
    )
    limit_bytes: _Count = _setting(0, _BYTES, "Most bytes of the path that the run uses; 0: no limit.")
    reserve_bytes: _Count = _setting(0, _BYTES, "Bytes that are allocated at the start.")


class RatesBlock(_Strict):
    """Measured rates of the machine, in parameters per second."""

    cpu: _Number = _setting(..., _RATE, "Optimizer step on the CPU: alone if dram is given, else beside copies.")
    gpu: _Number = _setting(..., _RATE, "Optimizer step on the GPU.")
    h2d: _Number = _setting(..., _RATE, "Copies to the GPU, in float32.")
    d2h: _Number = _setting(..., _RATE, "Copies from the GPU, in float32.")
    dram: _Count = _setting(0, _BYTES, "Bytes per second of host memory, which CPU and copies share; 0: no limit.")


class InterleaveBlock(_Strict):
    """CPU and GPU step ZeRO-3's sub-groups at the same time; their states are in host memory, or of residents on the GPU."""

    backend: Literal["cuda", "host"] = _setting("cuda", _one_of(("cuda", "host")), '"host" replaces the GPU by threads, for tests.')
    plan: Literal[tuple(PLANS)] = _setting(  # type: ignore[valid-type]
        "stride",
        _one_of(PLANS),
        'Which sub-groups the GPU steps. "stride": every plan_argument-th one; "count": plan_argument '
        'sub-groups; "model" and "eq1" compute the plan from the rates.',
    )
    plan_argument: _Count = _setting(2, _INTEGER, 'The number that the plans "stride" and "count" need.')
    residents: _TailSetting = _setting(
        0,
        'a number of sub-groups, an integer from 0, or "auto"',
        "Sub-groups whose states stay on the GPU between steps, the last ones: 12 bytes per parameter, and those of its gradient. They "
        'return to host memory before other code reads or writes states. "auto": after two steps as many as fit, with a tenth of the '
        "GPU's memory left free.",
    )
    rates: RatesBlock | None = _setting(None, "an object with cpu, gpu, h2d and d2h in parameters/s", "Measured rates of the machine.")
    replan: bool = _setting(False, _BOOLEAN, "Adapt the plan to the measured times after every step; needs rates.")
    gradient_transfers: bool = _setting(
        False, _BOOLEAN, "Spillway copies gradients to the host: widened on the GPU, in chunks, on separate streams."
    )
    slots: _Slots = _setting(
        0,
        "an integer from 0 to 4294967295",
        "Number of state buffers on the GPU; 0: 3. Each takes 12 bytes per parameter of a sub-group, and those of its gradient.",
    )
    chunk: _Count = _setting(0, f"a number of parameters, an integer from 0 to {_MOST}", "Parameters per copy; 0: 16 Mi.")


class SuperOffloadBlock(_Strict):
    """DeepSpeed's SuperOffload, `"super_offload": true` in offload_optimizer."""

    verdict: Literal["step", "forward"] = _setting(
        "step",
        _one_of(("step", "forward")),
        'What step() waits for. "step": the new weights. "forward": the norm alone; the next forward, or what else gathers weights or '
        "reads states, waits for the rest. See speculation.md.",
    )
    tail: _TailSetting = _setting(
        0,
        'a number of sub-groups, an integer from 0, or "auto"',
        "Sub-groups whose states are on the device, which steps them: those that backward completes last, at most all but one. "
        '"auto": the exposed seconds of the first steps give the number.',
    )


class Block(_Strict):
    """Storage of ZeRO-3's optimizer states, and of its 16-bit parameters, on a tier."""

    paths: Annotated[list[Annotated[PathBlock, BeforeValidator(_as_path)]], Field(min_length=1), BeforeValidator(_as_list)] | None = (
        _setting(
            None,
            'a list of directories, "s3://BUCKET/PREFIX" or objects with path, limit_bytes and reserve_bytes '
            "(leave it out for nvme_path alone)",
            "The paths of the tier; without it nvme_path alone.",
        )
    )
    ratio: _Numbers | None = _setting(
        None, _PER_PATH, "Share of each path in the state; without it in proportion to the measured bandwidths."
    )
    speeds: _Numbers | None = _setting(
        None, _PER_PATH, "First estimates of the paths' bandwidths, in bytes per second; without them the first writes measure the paths."
    )
    host_memory: _HostMemory = _setting(
        None,
        f'a number of bytes, an integer from 1 to {_MOST}, or "auto"',
        "Limit of the host memory for states of a rank; without it the least that keeps every path busy. "
        '"auto": half of what the machine, and a cgroup, have left for each rank. What exceeds the least caches parts between steps.',
    )
    part_elements: int = _setting(
        2 << 20,
        f"an integer from 1 to {_MOST}",
        "Most elements of a part, the unit that is fetched, stepped and cached: 12 bytes per element, "
        "less with split_master and with moment_dtype. Several parts are in flight.",
        ge=1,
        le=_MOST,
    )
    durability: Literal[tuple(DURABILITIES)] = _setting(  # type: ignore[valid-type]
        "data",
        _one_of(DURABILITIES),
        'What a commit survives. "data": a power failure; "process": only the end of the process; '
        '"full": like "data", and also syncs directories.',
    )
    job: _Name = _setting(
        "deepspeed",
        _NAME,
        "Name of the run, and of a directory below each path. Concurrent runs that resume need different "
        'names. Without "resume" the directories are <job>-scratch-1 and so on, which runs that resume do not use.',
    )
    host: _Name | None = _setting(
        None,
        _NAME,
        "Name of this machine, and of a directory below that; without it the host name. A run that resumes needs "
        "its previous name, which in a container may change with every start.",
    )
    split_master: bool = _setting(
        False,
        _BOOLEAN,
        "Store master weights without their upper halves, which the model's weights (bfloat16, in host memory) "
        "imply: 2 bytes per parameter fewer. A change of those weights between steps, other than by DeepSpeed, ends the "
        'run with an error. With "resume" commits store the weights too: 2 bytes per parameter.',
    )
    moment_dtype: Literal["f32", "bf16", "int8"] = _setting(
        "f32",
        _one_of(("f32", "bf16", "int8")),
        'How both moments are stored. "bf16": 4 bytes per parameter fewer than "f32", for weights of bfloat16 or float32. "int8": 8 bits '
        "with a scale for 32 elements, 5.87 bytes fewer, rounded at random. A step computes in float32 and rounds bfloat16 to nearest, so "
        "the bits are not those of float32 moments.",
    )
    overlap: bool = _setting(
        False,
        _BOOLEAN,
        "Start a step during backward, and write during the next forward. It needs host memory for the new weights, 2 bytes per parameter, "
        "or 4 if the model's are not in host memory, and space on the paths for a third version of what was not committed.",
    )
    missing_gradients: Literal["zero", "stale"] = _setting(
        "zero",
        _one_of(("zero", "stale")),
        "Gradient of a parameter that had none since the last step, if another of its "
        'sub-group had one: "zero", or "stale", the scaled gradient of its last step, as DeepSpeed uses in host memory.',
    )
    resume: bool = _setting(
        False, _BOOLEAN, "Resume at the last commit that all ranks have, if any, and commit every commit_interval steps."
    )
    begin_from: _BeginFrom = _setting(
        None,
        "the directory of a job, PATH/JOB, a list of it on each path, or the directory of a snapshot,",
        "With what a run begins that has no commit: the last commit of another job with any number of ranks and any sub-groups. All ranks "
        "read the directories of all its ranks.",
    )
    commit_interval: _Count = _setting(
        1, f"a number of steps, an integer from 0 to {_MOST}", "Steps between commits; 0: only spillway.deepspeed.commit(engine) commits."
    )
    background_commits: bool = _setting(
        False,
        _BOOLEAN,
        "The commit of every commit_interval-th step continues beside the next steps. spillway.deepspeed.commit(engine) waits.",
    )
    snapshot_checkpoints: bool = _setting(
        False,
        _BOOLEAN,
        "save_checkpoint() commits, and the checkpoint's optimizer states are a snapshot of that commit, which is written while training "
        "continues. It loads with the same sub-groups, part_elements and number of ranks.",
    )
    snapshot_bytes_per_second: _Count = _setting(0, _BYTES, "Most bytes per second that a snapshot of a rank writes; 0: no limit.")
    turns: _Slots = _setting(
        1,
        "a number of processes, an integer from 0 to 4294967295",
        "Processes of a user that transfer states or parameters to a device at a time; 0: any number. See tier.md.",
    )
    pin_memory: bool = _setting(True, _BOOLEAN, "Page-locked buffers in 2 MiB pages.")
    io_timeout_seconds: _Timeout = _setting(
        0.0,
        f"0, or a number of seconds from {_LEAST_TIMEOUT} to {_MOST_TIMEOUT:.0f},",
        "Time without progress after which a path counts as failed; 0: 60.",
    )
    enabled: bool = _setting(
        True,
        _BOOLEAN,
        "false leaves states and parameters to DeepSpeed's own swappers. It excludes all other settings but interleave and superoffload.",
    )
    interleave: InterleaveBlock | None = _setting(None, "an object", "CPU and GPU step sub-groups at the same time.")
    superoffload: SuperOffloadBlock | None = _setting(None, "an object", "Settings of DeepSpeed's SuperOffload.")


_MODELS = {"paths": PathBlock, "interleave": InterleaveBlock, "rates": RatesBlock, "superoffload": SuperOffloadBlock}
# Settings of other parts than a tier.
_OBJECTS = {"interleave", "superoffload"}


def read(given):
    """The validated block."""
    if not isinstance(given, dict):
        raise InvalidArgumentError(f"spillway is {given!r}, not an object; write its settings into {{}}, or take it out")
    try:
        found = Block.model_validate(given)
    except ValidationError as error:
        raise InvalidArgumentError("; ".join(_message(one) for one in error.errors(include_url=False))) from None
    _check_paths(found)
    _check_interleave(found.interleave)
    others = sorted(found.model_fields_set - _OBJECTS - {"enabled"})
    if not found.enabled and others:
        raise InvalidArgumentError(f'spillway.{others[0]} has no effect with "enabled": false; take {", ".join(others)} out, or enabled')
    for name in ("commit_interval", "durability", "background_commits", "begin_from"):
        if not found.resume and name in found.model_fields_set:
            value = json.dumps(getattr(found, name))
            raise InvalidArgumentError(
                f'spillway.{name} is {value}, but nothing is committed without "resume": true; set that, or take {name} out'
            )
    if "snapshot_bytes_per_second" in found.model_fields_set and not found.snapshot_checkpoints:
        raise InvalidArgumentError(
            'spillway.snapshot_bytes_per_second has no effect without "snapshot_checkpoints": true; set that, or take it out'
        )
    return found


def _message(error):
    place = [part for part in error["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    name = "spillway" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    if error["type"] == "extra_forbidden":
        known = sorted(_model_at(place[:-1]).model_fields)
        close = difflib.get_close_matches(str(place[-1]), known, 1)
        return f"{name} is unknown; " + (f"did you mean {close[0]}? " if close else "") + f"The settings are {', '.join(known)}"
    names = [part for part in place if isinstance(part, str)]
    if not names:
        # The block itself: JSON can write a key that is no text.
        return f"{name} has a key that is not valid Unicode; the settings are {', '.join(sorted(Block.model_fields))}"
    valid = _model_at(names[:-1]).model_fields[names[-1]].json_schema_extra["valid"]
    if error["type"] == "missing":
        return f"{name} is missing; {valid} is needed"
    return f"{name} is {error['input']!r}; {valid} is needed"


def _model_at(place):
    return next((_MODELS[part] for part in reversed(place) if part in _MODELS), Block)


def _check_paths(block):
    seen: dict[str, int] = {}
    for index, path in enumerate(block.paths or ()):
        place = path.path.rstrip("/") if path.path.startswith("s3://") else os.path.realpath(path.path)
        if place in seen:
            raise InvalidArgumentError(
                f"spillway.paths[{index}] is {path.path!r}, the same directory as spillway.paths[{seen[place]}]; name each path once"
            )
        seen[place] = index
    # Without paths, nvme_path is the only one.
    paths = len(block.paths or (None,))
    for name, numbers in (("ratio", block.ratio), ("speeds", block.speeds)):
        if numbers is None:
            continue
        if not any(numbers):
            raise InvalidArgumentError(f"spillway.{name} is {numbers}; one of its numbers has to be above 0")
        if len(numbers) != paths:
            raise InvalidArgumentError(f"spillway.{name} has {len(numbers)} numbers for {paths} paths; give one for each")


def _check_interleave(block):
    if block is None:
        return
    if block.rates is None and (block.replan or block.plan not in ("stride", "count")):
        reason = "replan" if block.replan else f'the plan "{block.plan}"'
        raise InvalidArgumentError(
            f"spillway.interleave.rates is missing, which {reason} needs; give cpu, gpu, h2d and d2h in parameters/s"
        )
    if block.gradient_transfers and block.backend != "cuda":
        raise InvalidArgumentError(
            f'spillway.interleave.gradient_transfers needs the backend "cuda", and backend is "{block.backend}"; change one of them'
        )


def of_tier(block, nvme_path):
    """The settings of a block, the defaults if it is None; `paths` is a tuple of TierPath, nvme_path alone if it names none."""
    found = read(block if block is not None else {})
    if _scratch.is_scratch(found.job):
        raise InvalidArgumentError(
            f"spillway.job is {found.job!r}; names that end in -scratch-N are those of scratch directories, use another"
        )
    paths = tuple(TierPath(_fixed(path.path), path.limit_bytes, path.reserve_bytes) for path in found.paths or ())
    return found.model_copy(update={"paths": paths or (_directory(nvme_path),)})


def of_interleave(block):
    """The interleave object of a `spillway` block; None if it has none."""
    return None if not block or block.get("interleave") is None else read(block).interleave


def of_superoffload(block):
    """The superoffload object of a `spillway` block; the defaults if it has none."""
    given = (block or {}).get("superoffload")
    return SuperOffloadBlock() if given is None else read(block).superoffload


def _directory(nvme_path):
    if nvme_path is None:
        raise InvalidArgumentError(
            "offload_optimizer has the device nvme, but there is neither nvme_path nor spillway.paths; add one of them"
        )
    # DeepSpeed converts it to a path, which reduces two slashes to one.
    if os.fspath(nvme_path).startswith("s3:/"):
        raise InvalidArgumentError(
            f"nvme_path is {os.fspath(nvme_path)!r}, which DeepSpeed takes for a directory; an object store goes into spillway.paths"
        )
    if "\0" in os.fspath(nvme_path):
        raise InvalidArgumentError(f"nvme_path is {os.fspath(nvme_path)!r}; a path without NUL is needed")
    # As DeepSpeed does for its own files.
    os.makedirs(nvme_path, exist_ok=True)
    return TierPath(_fixed(os.fspath(nvme_path)))


def _fixed(path):
    """A directory that stays the same if the program changes its working directory."""
    return path if path.startswith("s3://") else os.path.abspath(path)


def parts(block, zero):
    """The parts of Spillway that a block enables in a configuration."""
    if not block.enabled:
        return []
    asked = [name for name in sorted(_OBJECTS) if getattr(block, name) is not None]
    if block.model_fields_set - _OBJECTS and int(zero.stage) == 3:
        asked += ["states"] if _device(zero.offload_optimizer) == "nvme" else []
        asked += ["parameters"] if _device(zero.offload_param) == "nvme" else []
    return asked


# Settings that apply to a tier of 16-bit parameters; the others apply to optimizer states.
_OF_PARAMETERS = {"paths", "job", "host", "io_timeout_seconds"}


def refuse_unserved(block, zero):
    """Raises InvalidArgumentError for settings that this configuration would ignore. `zero` is DeepSpeed's zero_config."""
    stage, states, parameters = int(zero.stage), _device(zero.offload_optimizer), _device(zero.offload_param)
    if block.interleave is not None and (stage, states) != (3, "cpu"):
        raise InvalidArgumentError(
            "spillway.interleave needs zero_optimization with stage 3 and offload_optimizer on the device "
            f"cpu; this configuration has stage {stage} and the device {states}. Change them, or take "
            "interleave out"
        )
    if block.superoffload is not None and not (stage == 3 and getattr(zero.offload_optimizer, "super_offload", False)):
        raise InvalidArgumentError(
            "spillway.superoffload needs zero_optimization with stage 3 and offload_optimizer with super_offload; set "
            '"super_offload": true there, or take superoffload out'
        )
    tiered = {"offload_optimizer": stage == 3 and states == "nvme", "offload_param": stage == 3 and parameters == "nvme"}
    if tiered["offload_optimizer"]:
        return
    asked = sorted(block.model_fields_set - _OBJECTS - {"enabled"} - (_OF_PARAMETERS if tiered["offload_param"] else set()))
    if asked:
        raise InvalidArgumentError(
            f"spillway.{asked[0]} is for optimizer states on a tier, which need zero_optimization with "
            "stage 3 and offload_optimizer on the device nvme; this configuration has stage "
            f"{stage} and the device {states}. Change them, or take {', '.join(asked)} out of the "
            "spillway block"
        )


def _device(offload):
    device = getattr(offload, "device", None)
    return str(getattr(device, "value", device) or "none")


def describe():
    """All settings as Markdown: a table per object of the block."""
    tables = []
    for place, model in (
        ("spillway", Block),
        ("spillway.paths[]", PathBlock),
        ("spillway.interleave", InterleaveBlock),
        ("spillway.interleave.rates", RatesBlock),
        ("spillway.superoffload", SuperOffloadBlock),
    ):
        rows = [f"## {place}", "", str(model.__doc__), "", "| setting | valid values | default | meaning |", "|---|---|---|---|"]
        rows += [
            f"| `{name}` | {field.json_schema_extra['valid']} | {_default(field)} | {field.description} |"
            for name, field in model.model_fields.items()
        ]
        tables.append("\n".join(rows))
    return "\n\n".join(tables) + "\n"


def _default(field):
    if field.is_required():
        return "required"
    return "none" if field.default is None else json.dumps(field.default)
