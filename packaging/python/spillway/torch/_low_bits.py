"""Which low bits of split masters count.

A split master is the parameter and its low bits, so low bits are stale where the program has written to the parameter only. The library's
step keeps a sum of each block of a parameter that it has written, compares it before the next step, and takes stale low bits as zero.
These sums are in one tensor for each parameter. A table gives them to the library; `Note` keeps them beyond a table.

Sums belong to a tensor of low bits of one version. If the program has written to the low bits too, as a checkpoint that is loaded in place
does, its low bits count: the sums are forgotten, which a sum of 0 tells the library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .. import _abi, _native, _tensor_rows
from ._states import LOW, version_of_low
from ._tensors import CODES, has_memory, local

#: Elements of a block, as spw_tensor.low_sums has them.
BLOCK = 4096


class Note(NamedTuple):
    """The sums of a parameter after a step.

    Attributes:
        sums: The sums.
        state: The states of the parameter.
        low: Their low bits.
        version: The version of the low bits."""

    sums: torch.Tensor
    state: dict[str, Any]
    low: torch.Tensor
    version: int

    @staticmethod
    def of(state: dict[str, Any], sums: torch.Tensor) -> Note:
        """The note of the present low bits with these sums."""
        return Note(sums, state, state[LOW], version_of_low(state))

    def is_of(self, state: dict[str, Any] | None) -> bool:
        """True if these are the present states with their low bits: `load_state_dict` brings others."""
        return state is self.state and self.state.get(LOW) is self.low

    def present(self) -> Note:
        """The note for the present version of the low bits."""
        version = version_of_low(self.state)
        if version != self.version:
            self.sums.zero_()
        return self._replace(version=version)

    def copy(self) -> Note:
        """A note of copies of low bits and sums."""
        known = version_of_low(self.state) == self.version
        return Note.of({LOW: self.low.detach().clone()}, self.sums.clone() if known else torch.zeros_like(self.sums))


class Aside(NamedTuple):
    """Low bits of before a settling, which count again if the program restores the parameter before the next step.

    Attributes:
        note: The note of the low bits that were checked.
        before: A note of copies of them and of their sums."""

    note: Note
    before: Note

    def is_of(self, state: dict[str, Any] | None) -> bool:
        """True if these states have the low bits that were checked, and the program has neither written to them nor freed them since."""
        return self.note.is_of(state) and version_of_low(self.note.state) == self.note.version and has_memory(local(self.note.low))

    def put_back(self) -> None:
        """Takes the settling back. A step or another settling then judges by the present values."""
        # By `data`, because a version tells that the program has written to the low bits.
        local(self.note.low).data.copy_(local(self.before.low))
        self.note.sums.copy_(self.before.sums)


def first_note(state: dict[str, Any]) -> Note:
    """The note of low bits that count."""
    blocks = -(-local(state[LOW]).numel() // BLOCK)
    return Note.of(state, torch.zeros(blocks, dtype=torch.int64, device=local(state[LOW]).device))


def zero_stale(notes: Iterable[tuple[torch.Tensor, Note]]) -> None:
    """Makes low bits zero that the program has made stale by writing to these parameters, and notes the present values."""
    rows, values = list[Any](), list[torch.Tensor]()
    # Low bits and sums on a device, and their copies on the host, which the library settles.
    copies = list[tuple[torch.Tensor, torch.Tensor]]()
    for param, note in notes:
        own, low, sums = local(param).detach(), local(note.low), note.sums
        if own.shape != low.shape or own.is_meta or not (has_memory(own) and has_memory(low)):
            # The next step names what is wrong with them.
            continue
        if not low.is_cpu:
            there, (low, sums) = (low, sums), (low.cpu(), sums.cpu())
            copies += zip(there, (low, sums))
        if not own.is_cpu or own.dtype is not torch.bfloat16 or own.stride() != low.stride():
            own = torch.empty_like(low, dtype=torch.bfloat16).copy_(own)
        row = _tensor_rows.begin(_abi.Tensor(), own.numel())
        row.param_dtype, row.param, row.param_low, row.low_sums = CODES[own.dtype], own.data_ptr(), low.data_ptr(), pointer_to(sums)
        rows.append(row)
        values.append(own)
    _native.call("spw_low_bits_settle", (_abi.Tensor * len(rows))(*rows), len(rows))
    for tensor, settled in copies:
        # By `data`: the program has not written.
        tensor.data.copy_(settled)


def zero_stale_aside(notes: Iterable[tuple[torch.Tensor, Note]]) -> dict[torch.Tensor, Aside]:
    """Does what `zero_stale` does; returns the former low bits of each parameter whose low bits that has changed."""
    found = dict[torch.Tensor, Aside]()
    for param, note in notes:
        if not has_memory(local(note.low)):
            # The next step names them.
            continue
        before = note.copy()
        zero_stale([(param, note)])
        if not torch.equal(local(before.low), local(note.low)):
            found[param] = Aside(note, before)
    return found


def put_back(asides: Mapping[torch.Tensor, Aside], states: Mapping[torch.Tensor, Any]) -> None:
    """Takes back the settling of parameters whose states, in `states`, have these low bits."""
    for param, one in asides.items():
        if one.is_of(states.get(param)):
            one.put_back()


def pointer_to(sums: torch.Tensor | None) -> Any:
    """Sums as the library takes them."""
    return None if sums is None else ctypes.cast(sums.data_ptr(), ctypes.POINTER(ctypes.c_uint64))
