"""Validates the `spillway` block of a DeepSpeed configuration before an engine is made. Unknown settings, wrong values,
and settings without effect in this configuration are errors that name the setting."""

import difflib
import os
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..errors import InvalidArgument
from ..interleave import PLANS
from ..tier import DURABILITIES

_Count = Annotated[int, Field(ge=0)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _as_path(given):
    return {"path": os.fspath(given)} if isinstance(given, (str, os.PathLike)) else given


def _as_list(given):
    return list(given) if isinstance(given, tuple) else given


class PathBlock(_Strict):
    """A path, and the bytes of it that the run may use."""

    path: Annotated[str, Field(min_length=1)]
    limit_bytes: _Count = 0
    reserve_bytes: _Count = 0


class RatesBlock(_Strict):
    """Parameters per second."""

    cpu: _Number
    gpu: _Number
    h2d: _Number
    d2h: _Number


class InterleaveBlock(_Strict):
    """See _interleave.Settings."""

    backend: Literal["cuda", "host"] = "cuda"
    plan: Literal[tuple(PLANS)] = "stride"
    parameter: _Count = 2
    rates: RatesBlock | None = None
    replan: bool = False
    transfers: bool = False
    slots: _Count = 0
    chunk: _Count = 0


class Block(_Strict):
    """See _tier_config.Settings."""

    paths: Annotated[list[Annotated[PathBlock, BeforeValidator(_as_path)]], Field(min_length=1),
                     BeforeValidator(_as_list)] | None = None
    ratio: Annotated[list[_Number], Field(min_length=1), BeforeValidator(_as_list)] | None = None
    cache_bytes: _Count = 0
    part_elements: Annotated[int, Field(ge=1)] = 2 << 20
    durability: Literal[tuple(DURABILITIES)] = "data"
    job: Annotated[str, Field(min_length=1)] = "deepspeed"
    host: Annotated[str, Field(min_length=1)] | None = None
    split_master: bool = False
    missing_gradients: Literal["zero", "stale"] = "zero"
    resume: bool = False
    commit_interval: _Count = 1
    turns: bool = True
    lock: bool = True
    stall_seconds: _Number = 0.0
    enabled: bool = True
    interleave: InterleaveBlock | None = None


# Description of the valid values, by the last part of the setting's name.
_NEEDED = {
    "paths": 'a list of directories, "s3://BUCKET/PREFIX" or objects with path, limit_bytes and reserve_bytes, at least one; '
             "leave it out for nvme_path alone",
    "path": 'a directory or "s3://BUCKET/PREFIX"', "ratio": "a list with a number from 0 for each path",
    "part_elements": "an integer from 1", "parameter": "an integer from 0", "slots": "an integer from 0",
    "chunk": "a number of parameters, an integer from 0", "commit_interval": "a number of steps, an integer from 0",
    "job": "a name", "host": "a name", "stall_seconds": "a number of seconds from 0", "interleave": "an object",
    "rates": "an object with cpu, gpu, h2d and d2h in parameters/s", "spillway": "an object",
    **dict.fromkeys(("cache_bytes", "limit_bytes", "reserve_bytes"), "a number of bytes, an integer from 0, such as 9663676416"),
    **dict.fromkeys(("cpu", "gpu", "h2d", "d2h"), "a number of parameters per second from 0"),
    **dict.fromkeys(("split_master", "resume", "turns", "lock", "enabled", "replan", "transfers"), "true or false"),
    "durability": " or ".join(f'"{name}"' for name in DURABILITIES), "plan": " or ".join(f'"{name}"' for name in PLANS),
    "backend": '"cuda" or "host"', "missing_gradients": '"zero" or "stale"'}


def read(given):
    """The validated block."""
    if not isinstance(given, dict):
        raise InvalidArgument(f"spillway is {given!r}, not an object; write its settings into {{}}, or take it out")
    try:
        found = Block.model_validate(given)
    except ValidationError as error:
        raise InvalidArgument("; ".join(_words(one) for one in error.errors(include_url=False))) from None
    _check_paths(found)
    if found.ratio is not None and not any(found.ratio):
        raise InvalidArgument(f"spillway.ratio is {found.ratio}; one of its numbers has to be above 0")
    if not found.resume and "commit_interval" in found.model_fields_set and found.enabled:
        raise InvalidArgument(f'spillway.commit_interval is {found.commit_interval}, but nothing is committed without '
                              '"resume": true; set that, or take commit_interval out')
    if not found.resume and "durability" in found.model_fields_set and found.enabled:
        raise InvalidArgument(f'spillway.durability is "{found.durability}", but nothing is committed without "resume": true; '
                              "set that, or take durability out")
    return found


def _words(error):
    place = [part for part in error["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    name = "spillway" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    last = next((part for part in reversed(place) if isinstance(part, str)), "spillway")
    if error["type"] == "extra_forbidden":
        known = sorted(_model_at(place[:-1]).model_fields)
        close = difflib.get_close_matches(str(place[-1]), known, 1)
        return f"{name} is unknown; " + (f"is {close[0]} meant? " if close else "") + f"known are {', '.join(known)}"
    if error["type"] == "missing":
        return f"{name} is missing; {_NEEDED[last]} is needed"
    return f"{name} is {error['input']!r}; {_NEEDED[last]} is needed"


def _model_at(place):
    models = {"paths": PathBlock, "interleave": InterleaveBlock, "rates": RatesBlock}
    return next((models[part] for part in reversed(place) if part in models), Block)


def _check_paths(block):
    seen = {}
    for index, path in enumerate(block.paths or ()):
        place = path.path.rstrip("/") if path.path.startswith("s3://") else os.path.realpath(path.path)
        if place in seen:
            raise InvalidArgument(f"spillway.paths[{index}] is {path.path!r}, the same directory as spillway.paths[{seen[place]}]; "
                                  "name each path once")
        seen[place] = index
    if block.paths and block.ratio is not None and len(block.ratio) != len(block.paths):
        raise InvalidArgument(f"spillway.ratio has {len(block.ratio)} numbers for {len(block.paths)} paths; give one for each")


def parts(block, zero):
    """The parts of Spillway that a block enables in a configuration."""
    if not block.enabled:
        return []
    asked = ["interleave"] if block.interleave is not None else []
    if block.model_fields_set - {"interleave"} and int(zero.stage) == 3:
        asked += ["states"] if _device(zero.offload_optimizer) == "nvme" else []
        asked += ["parameters"] if _device(zero.offload_param) == "nvme" else []
    return asked


# Settings that apply to a tier of 16-bit parameters; the others apply to optimizer states.
_OF_PARAMETERS = {"paths", "job", "host", "stall_seconds"}


def refuse_unserved(block, zero):
    """Raises InvalidArgument for settings that this configuration would ignore. `zero` is DeepSpeed's zero_config."""
    stage, states, parameters = int(zero.stage), _device(zero.offload_optimizer), _device(zero.offload_param)
    if block.interleave is not None and (stage, states) != (3, "cpu"):
        raise InvalidArgument(f"spillway.interleave needs zero_optimization with stage 3 and offload_optimizer on the device cpu; "
                              f"this configuration has stage {stage} and the device {states}. Change them, or take interleave out")
    tiered = {"offload_optimizer": stage == 3 and states == "nvme", "offload_param": stage == 3 and parameters == "nvme"}
    if not block.enabled or tiered["offload_optimizer"]:
        return
    asked = sorted(block.model_fields_set - {"interleave", "enabled"} - (_OF_PARAMETERS if tiered["offload_param"] else set()))
    if asked:
        raise InvalidArgument(f"spillway.{asked[0]} is for optimizer states on a tier, which need zero_optimization with stage 3 and "
                              f"offload_optimizer on the device nvme; this configuration has stage {stage} and the device {states}. "
                              f"Change them, or take {', '.join(asked)} out of the spillway block")


def _device(offload):
    device = getattr(offload, "device", None)
    return str(getattr(device, "value", device) or "none")
