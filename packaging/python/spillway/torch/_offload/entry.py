"""offload(): checks what it is given, and makes the optimizer."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any, Literal

import torch

from ... import _pinned
from ...errors import InvalidArgumentError
from .._states import Precision
from .optimizer import Offloaded

#: Bytes of layers that stay on the device, by what is said of the weights.
_KEPT_BYTES = {"flow": 0, "auto": None}


def offload(
    params: torch.nn.Module | Iterable[Any],
    kind: type = torch.optim.AdamW,
    *,
    optimizer_class: type | None = None,
    weights: str = "resident",
    device: Any = None,
    overlap: bool | None = None,
    verdict: str = "step",
    model: torch.nn.Module | None = None,
    bucket_bytes: int = 64 << 20,
    tail: int | str = 0,
    max_norm: float | None = None,
    process_group: Any = None,
    skip_nonfinite: bool = False,
    moment_dtype: torch.dtype | str | None = None,
    moment_rounding: str | None = None,
    rounding_seed: int = 0,
    master: str = "f32",
    host_memory: int | Literal["auto"] | None = None,
    **options: Any,
) -> Offloaded:
    """Makes an optimizer whose master weights and moments are in host memory.

    Args:
        params: A model, or its parameters or groups of parameters as torch takes them, on any device, in float32, bfloat16 or float16;
            DTensors included, as those of FSDP2.
        kind: torch.optim.AdamW or torch.optim.Adam, or the class of that name in spillway.torch.
        optimizer_class: The same by torchao's name; pass one of them.
        weights: "resident": parameters stay where they are. "flow": their home is host memory, and a layer's weights are on `device` only
            while it is used, as Flow has it. "auto": as many layers stay on the device as fit beside the first backward.
        device: Where a model with "flow" or "auto" computes; None: the accelerator, or the CPU if there is none.
        overlap: Start the step during backward; None: if a parameter is not in host memory, because a backward on the CPU
            and a step would share the processors. Each parameter then has one backward per step, or accumulates inside of
            `accumulating()`; a further backward is correct too, but its step does not overlap.
        verdict: "step": step() waits for the norm and for the new weights. "forward": the next forward of the model, or of a part of
            it, does; until then the parameters have their old values. `settle()` waits at once, for what else reads parameters.
        model: The model of `verdict="forward"` and of weights that flow, unless `params` is it.
        bucket_bytes: Bytes of gradients that are stepped together.
        tail: Number of buckets whose masters and states stay on the device of their parameters, which steps them: those that backward
            completes last. "auto": a number that the exposed seconds of the first steps correct; see `tail` of the optimizer.
        max_norm: Gradients are clipped to this global norm, exactly; `grad_norm` is the norm before.
        process_group: The processes whose gradients are one norm; None: all processes for DTensors, else this process alone.
        skip_nonfinite: A step with Inf or NaN in a gradient is skipped; `skipped` is then True.
        moment_dtype: "bf16" or torch.bfloat16: moments take 2 bytes per element each instead of 4. "int8": 1.06 bytes.
        moment_rounding: "nearest", or "stochastic": up or down at random; None: at random for "int8". Narrow moments then do not stall
            where an update is below half a unit of their last place.
        rounding_seed: Seed of these random bits, which depend on it, the parameter's number, the step and the element only.
        master: "f32": a 16-bit parameter has a float32 master in its state. "split": the master of a bfloat16 parameter is the
            parameter and 16 low bits, so that the master takes 2 bytes in place of 4. Gradients are copied and measured during backward.
            With it, and with "int8", a step starts before its verdict only with `overlap=True`, or with a `host_memory` that has room:
            its log has the size of master and moments.
        host_memory: Limit of what the optimizer takes in host memory, in bytes. "auto": what the system, and a cgroup, have left now for
            each rank of the machine. More parameters are an error before anything is allocated. What they leave is for the logs of steps
            before the verdict, with at most 13 bytes per parameter; buckets without room for a log step after the verdict. None: no limit.
        options: The arguments of `kind`, such as lr.

    Returns:
        A torch.optim.Optimizer. Its state_dict is that of `kind`, with moments of `moment_dtype`, by default float32. A 16-bit parameter
        has a float32 "master_param", or its low bits "master_low".

    Raises:
        InvalidArgumentError: An argument has a wrong value.
        UnsupportedError: The optimizer or an option is not served.

    Example:
        optimizer = spillway.torch.offload(model, torch.optim.AdamW, lr=1e-4, max_norm=1.0)
        model(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()"""
    if isinstance(params, torch.optim.Optimizer):
        raise InvalidArgumentError(
            "offload: params is an optimizer; pass the model or its parameters, and the class: "
            f"offload(model, {type(params).__name__}, lr=...)"
        )
    _check_keywords(options)
    if optimizer_class is not None:
        if kind is not torch.optim.AdamW:
            raise InvalidArgumentError("offload: kind and optimizer_class are the same argument; pass one of them")
        kind = optimizer_class
    model = params if model is None and isinstance(params, torch.nn.Module) else model
    if weights not in ("resident", *_KEPT_BYTES):
        raise InvalidArgumentError(f"offload: weights is {weights!r}; pass 'resident', 'flow' or 'auto'")
    if weights == "resident" and device is not None:
        raise InvalidArgumentError("offload: device is for weights='flow' and 'auto'; move the model, or pass weights")
    beyond = {"max_norm": max_norm, "process_group": process_group, "skip_nonfinite": skip_nonfinite}
    own: dict[str, Any] = {"overlap": overlap, "verdict": verdict, "model": model, "bucket_bytes": bucket_bytes, "tail": tail}
    own["precision"] = Precision.of("offload", True, moment_dtype, moment_rounding, rounding_seed, master)
    own["host_memory"] = _pinned.limit_of("offload", host_memory)
    if weights == "resident":
        return Offloaded(params, kind, **own, **beyond, **options)
    if model is None:
        raise InvalidArgumentError(f"offload: weights is {weights!r}, and there is no model; pass model=")
    # It imports torch's compiler, whose import takes seconds.
    from .flow import Flow

    flow = Flow(model, device, keep_bytes=_KEPT_BYTES[weights])
    if overlap is None:
        # The parameters are in host memory, and backward is on the device.
        own["overlap"] = flow.device.type != "cpu"
    try:
        made = Offloaded(params, kind, **own, **beyond, **options)
    except BaseException:
        flow.remove()
        raise
    made._flow = flow
    return made


def _check_keywords(options: Iterable[str]) -> None:
    """Raises TypeError if a keyword is neither one of offload() nor one of torch's Adam."""
    of_torch = [*inspect.signature(torch.optim.AdamW.__init__).parameters][2:] + [*inspect.signature(torch.optim.Adam.__init__).parameters]
    for name in options:
        if name in of_torch or name == "tier":
            continue
        known = [*inspect.signature(offload).parameters, *of_torch]
        close = ["max_norm"] if "clip" in name or "grad_norm" in name else difflib.get_close_matches(name, known, 1)
        raise TypeError(f"offload() got an unexpected keyword argument {name!r}{'; did you mean ' + repr(close[0]) + '?' if close else ''}")
