"""Which part of a parameter a process holds, and in which process of a group a part counts.

Along a dimension of a mesh, the processes hold different parts of a DTensor unless its placement there is Replicate. A plain tensor beside
DTensors is replicated over the processes of their meshes. Without DTensors, every process has plain tensors of its own."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ._rows import DTensor, is_partial


def part_of(tensor: torch.Tensor) -> int:
    """The number of the part that this process holds; processes with the same part have the same number."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh, number = tensor.device_mesh, 0
    for size, at, split in zip(mesh.shape, mesh.get_coordinate() or (), _split(tensor.placements)):
        if split:
            number = number * size + at
    return number


class Parts:
    """The parts of an optimizer's tensors in the processes of a group. Each part counts in one process, the first of those that hold it.

    Args:
        params: All parameters of the optimizer, in this process.
        group: The process group.

    Raises:
        InvalidArgumentError: The meshes of the parameters are over different processes, or the group has none of these."""

    def __init__(self, params: Iterable[torch.Tensor], group: Any):
        meshes = {id(param.device_mesh): param.device_mesh for param in params if isinstance(param, DTensor)}
        everyone = [set(mesh.mesh.flatten().tolist()) for mesh in meshes.values()]
        if any(ranks != everyone[0] for ranks in everyone):
            raise InvalidArgumentError(
                f"parameters are on meshes of different processes, {sorted(map(sorted, everyone))}, so their gradients have no "
                "common norm; place all parameters on meshes of the same processes, or leave out max_norm and skip_nonfinite"
            )
        self._rank = torch.distributed.get_rank()
        self._within = [rank for rank in torch.distributed.get_process_group_ranks(group) if not everyone or rank in everyone[0]]
        self._distributed = bool(meshes)
        self._known: dict[Any, bool] = {}

    def count(self, tensor: torch.Tensor, name: str) -> bool:
        """True if the part of a tensor that this process holds counts here.

        Raises:
            InvalidArgumentError: The processes hold terms of a sum, or the group lacks some of the parts."""
        if not isinstance(tensor, DTensor):
            return not self._distributed or self._within[:1] == [self._rank]
        if is_partial(tensor):
            raise InvalidArgumentError(
                f"the gradient of {name} is placed as {tensor.placements}: its processes hold terms of a sum, which have no "
                "norm; redistribute the gradient"
            )
        mesh, split = tensor.device_mesh, _split(tensor.placements)
        if (id(mesh), split) not in self._known:
            holders = self._holders(mesh.mesh, split)
            lacking = [part for part in product(*(range(size) for size, apart in zip(mesh.shape, split) if apart)) if part not in holders]
            if lacking:
                raise InvalidArgumentError(
                    f"{name} is placed as {tensor.placements} on {mesh}, and process_group has {len(holders)} of the "
                    f"{len(holders) + len(lacking)} parts; pass a group with all processes of the mesh"
                )
            self._known[id(mesh), split] = self._rank in holders.values()
        return self._known[id(mesh), split]

    def _holders(self, ranks: torch.Tensor, split: tuple[bool, ...]) -> dict[tuple[int, ...], int]:
        """The first process of the group that holds a part, by the part's place on the mesh."""
        holders: dict[tuple[int, ...], int] = {}
        places = dict(zip(ranks.flatten().tolist(), product(*map(range, ranks.shape))))
        for rank in self._within:
            if rank in places:
                holders.setdefault(tuple(at for at, apart in zip(places[rank], split) if apart), rank)
        return holders


def _split(placements: Iterable[Any]) -> tuple[bool, ...]:
    """For each dimension of a mesh whether its processes hold different parts."""
    return tuple(not placement.is_replicate() for placement in placements)
