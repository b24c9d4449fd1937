"""The shards of a process, in buckets: each bucket is a subgroup of the tier.

A bucket has shards of one parameter group and one dtype of weights, in the order of their names. So its layout depends on names, sizes and
groups only, and a resumed run has the same buckets in whatever order it passes its shards."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import _safetensors
from .._holdings import Held, Holding, aligned
from ..errors import InvalidArgumentError
from ..torch.inner import CODES, link_to

#: The name of a shard that has a range of a parameter's elements.
_RANGE = re.compile(r"(.*)\[([0-9]{1,18}):([0-9]{1,18})\]", re.DOTALL)


class Shard(NamedTuple):
    """A part of a parameter whose optimizer state this process keeps.

    Attributes:
        name: Name of the shard, unique in the whole job. A checkpoint finds the shard by it. `PARAMETER[FIRST:END]` names a range of a
            parameter's elements, which may be other ones in another number of processes.
        weight: What the model computes with: a contiguous tensor of float32, bfloat16 or float16 on any device, which a step writes.
        group: The parameter group. A step reads "lr", "betas", "eps" and "weight_decay" from it.
        grad: Returns the gradient of the step, of the shard's number of elements; on any device.
        master: The float32 values to begin with; None: those of `weight`."""

    name: str
    weight: torch.Tensor
    group: dict[str, Any]
    grad: Callable[[], torch.Tensor | None]
    master: torch.Tensor | None = None


class Bucket:
    """Shards that are stepped as one subgroup.

    Args:
        alignment: Each shard begins at a multiple of this many elements. Elements between two shards are zero.

    Attributes:
        starts: Where each shard begins."""

    def __init__(self, alignment: int = 1) -> None:
        self.shards: list[Shard] = []
        self.starts: list[int] = []
        self.elements, self._alignment = 0, alignment
        self._weights: torch.Tensor | None = None
        self._grads: torch.Tensor | None = None

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group of all shards."""
        return self.shards[0].group

    def add(self, shard: Shard) -> None:
        """Adds a shard at the end."""
        self.shards.append(shard)
        self.starts.append(aligned(self.elements, self._alignment))
        self.elements = self.starts[-1] + shard.weight.numel()

    def parts(self, flat: torch.Tensor) -> Iterable[tuple[Shard, torch.Tensor]]:
        """Each shard with its part of a flat tensor."""
        return ((shard, flat[start : start + shard.weight.numel()]) for shard, start in zip(self.shards, self.starts, strict=True))

    def collect(self, source: Callable[[Shard], torch.Tensor]) -> torch.Tensor:
        """A flat float32 tensor in host memory, of a tensor of each shard."""
        flat = torch.zeros(self.elements, dtype=torch.float32, device="cpu")
        for shard, part in self.parts(flat):
            part.copy_(source(shard).detach().reshape(-1))
        return flat

    def start_grads(self) -> torch.Tensor:
        """Starts the copies of the gradients to host memory, in their own dtype. Returns the flat tensor."""
        grads = []
        for shard in self.shards:
            grad = shard.grad()
            if grad is None or grad.numel() != shard.weight.numel():
                given = "no gradient" if grad is None else f"a gradient of {grad.numel()} elements for {shard.weight.numel()}"
                raise InvalidArgumentError(
                    f"shard {shard.name!r} has {given}; every step needs a gradient of each shard, of zeros where there is none"
                )
            grads.append(grad.detach())
        dtypes = {grad.dtype for grad in grads}
        dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= set(CODES) else torch.float32
        if len(grads) == 1 and grads[0].is_cpu and grads[0].dtype is dtype and grads[0].is_contiguous():
            return grads[0].reshape(-1)
        if self._grads is None or self._grads.dtype is not dtype:
            self._grads = link_to(grads[0]).memory((self.elements,), dtype).zero_()
        for (_, part), grad in zip(self.parts(self._grads), grads, strict=True):
            part.copy_(grad.reshape(-1), non_blocking=True)
        return self._grads

    def weights(self) -> torch.Tensor | None:
        """Where a step writes the 16-bit weights; None for float32 weights."""
        weight = self.shards[0].weight
        if weight.dtype is torch.float32:
            return None
        if self._weights is None:
            self._weights = link_to(weight).memory((self.elements,), weight.dtype)
        return self._weights

    @torch.no_grad()
    def publish(self, flat: torch.Tensor) -> None:
        """Copies values of all shards to the model's weights."""
        for shard, part in self.parts(flat):
            shard.weight.copy_(part.view(shard.weight.shape), non_blocking=True)


def buckets_of(shards: Iterable[Shard], bucket_bytes: int, alignment: int = 1) -> list[Bucket]:
    """Divides shards into buckets of at most `bucket_bytes` of float32 parameters, unless one shard is larger. Each shard begins at a
    multiple of `alignment` elements."""
    given = sorted(shards, key=lambda shard: str(shard.name))
    if not given:
        raise InvalidArgumentError("OptimizerStateStore: there are no shards; a process without parameters needs no store")
    for before, shard in zip([None, *given], given):
        _check(shard, before)
    _check_memory(given)
    groups: dict[int, int] = {}
    filling: dict[tuple[int, torch.dtype], Bucket] = {}
    buckets = []
    for shard in given:
        key = (groups.setdefault(id(shard.group), len(groups)), shard.weight.dtype)
        bucket = filling.get(key)
        if bucket is None or 4 * (bucket.elements + shard.weight.numel()) > bucket_bytes:
            bucket = filling[key] = Bucket(alignment)
            buckets.append(bucket)
        bucket.add(shard)
    return buckets


def _check(shard: Shard, before: Shard | None) -> None:
    if not shard.name or not _safetensors.is_text(shard.name):
        raise InvalidArgumentError(
            f"OptimizerStateStore: a shard's name is {shard.name!r}; pass a string of valid Unicode that is unique in the job"
        )
    if before is not None and before.name == shard.name:
        raise InvalidArgumentError(f"OptimizerStateStore: two shards have the name {shard.name!r}; names are unique in the job")
    weight = shard.weight
    if weight.dtype not in CODES or not weight.is_contiguous() or not weight.numel():
        raise InvalidArgumentError(
            f"OptimizerStateStore: the weight of shard {shard.name!r} is {weight.dtype} of shape {tuple(weight.shape)}; "
            "pass a contiguous tensor of float32, bfloat16 or float16 with elements"
        )
    _check_memory_of(shard, "weight", weight)
    if shard.master is not None:
        check_master(shard, shard.master)


def check_master(shard: Shard, master: Any) -> None:
    """Raises InvalidArgumentError if `master` cannot be the float32 values of a shard. Its shape is free."""
    elements = shard.weight.numel()
    if not isinstance(master, torch.Tensor):
        raise InvalidArgumentError(
            f"OptimizerStateStore: the master of shard {shard.name!r} is a {type(master).__name__}; pass a float32 tensor of "
            f"{elements} elements"
        )
    if master.dtype is not torch.float32 or master.numel() != elements or master.layout is not torch.strided:
        raise InvalidArgumentError(
            f"OptimizerStateStore: the master of shard {shard.name!r} is {master.dtype} of {master.numel()} elements; pass "
            f"float32 of {elements}"
        )
    _check_memory_of(shard, "master", master)


def _check_memory_of(shard: Shard, name: str, tensor: torch.Tensor) -> None:
    if not tensor.data_ptr():
        raise InvalidArgumentError(
            f"OptimizerStateStore: the {name} of shard {shard.name!r} has no memory: it is a meta tensor, or its storage "
            "was freed; pass a tensor with values"
        )


def _check_memory(shards: list[Shard]) -> None:
    """Raises InvalidArgumentError if the weights of two shards share memory: each would overwrite the step of the other."""
    parts = sorted((str(shard.weight.device), shard.weight.data_ptr(), shard.weight.nbytes, shard.name) for shard in shards)
    for (device, start, nbytes, first), (other, begin, _, second) in zip(parts, parts[1:]):
        if device == other and begin < start + nbytes:
            raise InvalidArgumentError(
                f"OptimizerStateStore: the weights of shards {first!r} and {second!r} overlap in memory; "
                "pass each element of a parameter in one shard"
            )


def range_of(name: str) -> tuple[str, int, int] | None:
    """The parameter of a shard with this name, and the first and the end of the elements that it has; None for a name without a range."""
    matched = _RANGE.fullmatch(name)
    return None if matched is None else (matched[1], int(matched[2]), int(matched[3]))


def held_in(buckets: list[Bucket]) -> list[list[Any]]:
    """For each shard: parameter, dtype, first element in the parameter, number of elements, bucket, and first element in the bucket. Plain
    data, which a commit stores."""
    held = []
    for number, bucket in enumerate(buckets):
        for shard, at in zip(bucket.shards, bucket.starts, strict=True):
            count = shard.weight.numel()
            of = range_of(shard.name)
            name, start = of[:2] if of and of[2] - of[1] == count else (shard.name, 0)
            held.append([name, str(shard.weight.dtype), start, count, number, at])
    return held


def holding_of(facts: Mapping[str, Any]) -> Holding:
    """The elements that a process holds, from the facts of its commit."""
    of: dict[str, tuple[str, list[tuple[int, int]], list[tuple[int, int, int]]]] = {}
    for name, dtype, start, count, number, at in facts["held"]:
        _, runs, pieces = of.setdefault(name, (dtype, [], []))
        runs.append((start, count))
        pieces.append((number, at, count))
    held = {name: Held(name, what, partial(iter, runs), pieces, facts["steps"]) for name, (what, runs, pieces) in of.items()}
    return Holding(facts["elements"], facts["moments"], held)


def digest_of(buckets: list[Bucket]) -> str:
    """What identifies the buckets: names, sizes and dtypes of their shards."""
    layout = [[(shard.name, shard.weight.numel(), str(shard.weight.dtype)) for shard in bucket.shards] for bucket in buckets]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()
