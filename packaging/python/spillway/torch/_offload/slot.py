"""A parameter of offload() and its memory on the host. What is done for many parameters at once is in bucket.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ... import _abi
from ..._written import facts
from ...errors import InvalidArgumentError
from .._codes import BLOCK as CODE_BLOCK
from .._codes import CODED_MOMENTS, blocks_of, check_codes, decoded, encoded, is_scales
from .._copies import link_to
from .._low_bits import BLOCK, Note, first_note
from .._norm import part_of
from .._states import LOW, MASTER, MOMENTS, Precision, check_not_split, is_count, low_of
from .._tensors import apart, has_memory, holds_values, is_partial, like, local, locals_of

#: Numbers of changes.
_changes = itertools.count(1)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory has the values of another one in this dtype, in order: that tensor itself if its memory has them."""
    own = tensor.to(dtype)
    return own if own.is_contiguous() and holds_values(own) else torch.empty(own.shape, dtype=dtype, device=own.device).copy_(own)


def grow_versions(params: Sequence[torch.Tensor]) -> None:
    """Shows autograd new values of parameters, and of the parts that a DTensor has here."""
    owns = locals_of(params)
    torch.autograd.graph.increment_version(params if owns is params else [*params, *owns])


def state_dtypes(param: torch.Tensor, precision: Precision) -> dict[str, torch.dtype]:
    """The tensors of the state of a parameter, without the step count, and their dtypes."""
    found = dict.fromkeys(MOMENTS, precision.moment_dtype or torch.float32)
    if precision.coded:
        found = {key: torch.bfloat16 if is_scales(key) else torch.uint8 for key in CODED_MOMENTS}
    return found if param.dtype is torch.float32 else {**found, **dict([precision.master_state])}


def elements_of(name: str, elements: int) -> int:
    """Elements of a tensor of the state of a parameter that has `elements`."""
    return blocks_of(elements) if is_scales(name) else elements


class Slot:
    """A parameter and its memory on the host: gradient and weights in the dtype of the parameter, moments in float32, bfloat16 or codes
    with scales, and the master in float32, or its low bits. Of a DTensor it is the part that this process holds; its state has DTensors
    that are placed alike.

    Attributes:
        precision: The dtype of the moments, and how they are rounded.
        group, maximizes: The number of its group, and whether that group maximizes.
        number: Its place among all parameters of the optimizer.
        stays: The parameter is in the tail: its state is on its device, and its gradient and weights are not copied.
        arrived: A number that rises with the moment at which backward completed the gradient.
        parts: The tensors of the state, those of DTensors by their part.
        uses: Another number after each change of memory or state: what was noted with the same number is valid.
        latest: The number of the last change in any slot.
        size: Number of elements for which there is memory.
        then: Of a parameter of the tail: its facts when its gradient was taken.
        note: The sums that tell which low bits of a split master count; None: the master is not split."""

    latest: int = 0
    then: tuple[Any, ...] | None = None
    note: Note | None = None

    def __init__(self, param: torch.Tensor, number: int, precision: Precision):
        self.param, self.group, self.maximizes, self.link = param, 0, False, link_to(param)
        self.precision, self.number = precision, number
        self.name, self.stays, self.arrived, self.uses, self.size = f"parameter {number}", False, -number, 0, 0
        self.grad = self.weights = torch.empty(0)
        # Shape, dtype and device for which there is memory; the tensors of the state.
        self._kind: tuple[Any, ...] = ()
        self._state: dict[str, torch.Tensor] = {}
        self.parts: dict[str, torch.Tensor] = {}

    def new_state(self) -> dict[str, torch.Tensor]:
        """Moments of a parameter that was never stepped, and the master of a 16-bit parameter."""
        return {name: self._first(name) for name in self._dtypes()}

    def use(self, state: dict[str, Any]) -> None:
        """Steps this state from now on; the weights are those of the parameter.

        Raises:
            InvalidArgumentError: A tensor of the state does not fit."""
        if self._kind != self._present():
            self.uses = Slot.latest = next(_changes)
            self.link, self.size = link_to(self.param), local(self.param).numel()
            if self.stays:
                self.forget()
            else:
                self.grad, self.weights = self._empty(self.param.dtype), self._empty(self.param.dtype)
            # Last: after a signal handler that raises, the next step does all of it again.
            self._kind = self._present()
        names = [*self._dtypes()]
        for name in (MASTER, LOW):
            if name not in names:
                state.pop(name, None)
            elif name not in state:
                state[name] = self._first(name)
        for name in (*names, "step"):
            self._check(name, state.get(name))
        for name in names:
            if local(state[name]).device != self._home:
                self._bring(state, name)
        if not self.holds(state):
            self.uses = Slot.latest = next(_changes)
            self.parts = {name: local(tensor) for name, tensor in state.items()}
            if LOW not in state:
                self.note = None
            elif self.note is None or not self.note.is_of(state):
                self.note = first_note(state)
            # Last, for the same reason.
            self._state = dict(state)

    def _bring(self, state: dict[str, Any], name: str) -> None:
        """Moves a tensor of the state to where it is stepped. Low bits keep the sums that tell which of them count."""
        note = self.note.present() if name == LOW and self.note is not None and self.note.is_of(state) else None
        state[name] = like(self.param, self._uninitialised(name).copy_(local(state[name])))
        if note is not None:
            self.note = Note.of(state, note.sums.to(self._home))

    def put_rounding(self, options: Any) -> None:
        """Gives the C options of a step of this parameter its rounding at random, and random bits of its own."""
        options.rounding, options.rounding_seed = _abi.ROUNDINGS["stochastic"], self.precision.seed_of(self.number, part_of(self.param))

    def holds(self, state: dict[str, Any] | None) -> bool:
        """True if the tensors of a state are those that are stepped, and the parameter is what it was."""
        if state is None or self._kind != self._present():
            return False
        return len(state) == len(self._state) and all(state.get(name) is tensor for name, tensor in self._state.items())

    def loaded(self, given: dict[str, Any]) -> dict[str, Any]:
        """A new state with the values of an entry of a state dict.

        Raises:
            InvalidArgumentError: A value does not fit."""
        state = self.new_state()
        if isinstance(given, dict) and LOW not in state:
            check_not_split(given, self.name)
        if isinstance(given, dict):
            check_codes(given, f"the state of {self.name}")
            given = (encoded if self.precision.coded else decoded)(given)
        try:
            if not is_count(given["step"]):
                raise ValueError(f"its step is {given['step']!r}; a number of steps is a whole number from 0 on")
            state["step"] = torch.tensor(float(given["step"]), dtype=torch.float32)
            # torch's class has cast the low bits that it loaded to the dtype of the parameter.
            has_low = LOW in given and given[LOW].dtype is torch.int16
            for name in self._dtypes():
                source = MASTER if name == LOW and not has_low else name
                if name not in (MASTER, LOW) or source in given:
                    value = given[source]
                    if source != LOW and value.dtype is not torch.uint8 and not value.is_floating_point():
                        raise ValueError(f"{source} is {value.dtype}, and no tensor of floating point numbers")
                    if value.shape != self._shape(name, self.param.shape):
                        raise ValueError(f"{name} has shape {tuple(value.shape)}, and the parameter {tuple(self.param.shape)}")
                    if apart(self.param, value):
                        raise ValueError(f"{name} is not placed as the parameter is; load a state dict of this mesh, or by torch's DCP")
                    local(state[name]).copy_(local(value) if source == name else low_of(local(value)))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidArgumentError(f"offload: the state of {self.name} does not fit: {reason}; nothing was loaded") from None
        return state

    def copies_bytes(self) -> int:
        """Bytes of gradient and weights for which use() takes memory; 0: it has it."""
        return 0 if self.stays or self._kind == self._present() else 2 * local(self.param).nbytes

    def state_bytes(self) -> int:
        """Bytes of the moments and the master."""
        elements = local(self.param).numel()
        return sum(dtype.itemsize * elements_of(name, elements) for name, dtype in self._dtypes().items())

    def _dtypes(self) -> dict[str, torch.dtype]:
        return state_dtypes(self.param, self.precision)

    @property
    def _home(self) -> torch.device:
        """Where the state is."""
        return local(self.param).device if self.stays else torch.device("cpu")

    def _present(self) -> tuple[Any, ...]:
        own = local(self.param)
        return (own.shape, own.dtype, own.device, getattr(self.param, "placements", None), self.stays)

    def _check(self, name: str, value: Any) -> None:
        if name == "step":
            fits = isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
            part, wanted = value, "a tensor with one floating point number"
        else:
            fits = isinstance(value, torch.Tensor) and not apart(self.param, value)
            part = local(value) if fits else value
            fits = fits and part.dtype is self._dtypes()[name] and part.is_contiguous() and has_memory(part)
            fits = fits and part.shape == self._shape(name, local(self.param).shape)
            # That of a parameter whose tail was made longer or shorter is still where it was.
            fits = fits and part.device in (torch.device("cpu"), local(self.param).device)
            dtype = str(self._dtypes()[name]).removeprefix("torch.")
            shape = tuple(self._shape(name, self.param.shape))
            wanted = f"a contiguous {dtype} tensor of shape {shape} in host memory, placed as the parameter is"
        wanted += ", made outside of torch.inference_mode"
        if not fits or part.is_inference():
            raise InvalidArgumentError(f"offload: the state {name!r} of {self.name} is no longer {wanted}; nothing was stepped")

    def forget(self) -> None:
        """Gradient and weights of a parameter of the tail are not used any more."""
        self.grad = self.weights = torch.empty(0)
        self.then = None

    def row(self) -> tuple[Any, ...]:
        """The tensor for a round."""
        parts = self.parts
        if self.stays:
            own = local(self.param)
            # A program may have written to it after a signal that interrupted the step; its values stay.
            is_written = self.then is not None and self.then != facts(own)
            self.weights = own.detach().clone() if is_written else plain(own.detach(), own.dtype)
        first, second = (parts[name] for name in (CODED_MOMENTS[:2] if self.precision.coded else MOMENTS))
        if MASTER in parts:
            return parts[MASTER], self.grad, first, second, self.weights
        return self.weights, self.grad, first, second

    def scales(self, start: int) -> tuple[torch.Tensor, ...]:
        """The scales of 8-bit moments from an element on, which begins a block; none without them."""
        names = (name for name in CODED_MOMENTS if is_scales(name))
        return tuple(self.parts[name][start // CODE_BLOCK :] for name in names) if self.precision.coded else ()

    def split(self, start: int) -> tuple[torch.Tensor, ...]:
        """The low bits of a split master from an element on, which begins a block, and the sums of their blocks; none without them."""
        if self.note is None:
            return ()
        self.note = self.note.present()
        return self.parts[LOW].view(-1)[start:], self.note.sums[start // BLOCK :]

    def refusal(self) -> str:
        """Why the gradient cannot be copied; empty if it can."""
        grad = self.param.grad
        if grad is None:
            return "is missing"
        if reason := apart(self.param, grad):
            return f"does not fit it: {reason}"
        if is_partial(grad):
            return f"is placed as {grad.placements}: its processes hold terms of a sum; redistribute it"
        if local(grad).layout is not torch.strided:
            return f"is sparse ({local(grad).layout}); offload() serves dense gradients"
        return "" if grad.shape == self.param.shape else f"has shape {tuple(grad.shape)}, and the parameter {tuple(self.param.shape)}"

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return self.link.memory(local(self.param).shape, dtype)

    def _shape(self, name: str, shape: torch.Size) -> torch.Size:
        """The shape of a tensor of the state of a parameter of this shape."""
        return torch.Size([blocks_of(shape.numel())]) if is_scales(name) else shape

    def _uninitialised(self, name: str) -> torch.Tensor:
        dtype, shape = self._dtypes()[name], self._shape(name, local(self.param).shape)
        return torch.empty(shape, dtype=dtype, device=self._home) if self.stays else self.link.memory(shape, dtype)

    def _first(self, name: str) -> torch.Tensor:
        return like(self.param, self._uninitialised(name).fill_(math.nan if name == MASTER else 0.0))
