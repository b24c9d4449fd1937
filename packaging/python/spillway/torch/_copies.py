"""Copies between devices and host memory, which all optimizers start in the same way: on a stream of their own, by torch's streams and
events of any accelerator.

The library reads gradients and writes weights in contiguous host memory: where they are, or, of tensors that are elsewhere or have other
strides, as copies. A copy has the dtype of the gradient or the parameter. The memory of a copy is used again at the next step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .. import _native
from .._early.gpu_events import After, after, is_of_gpu, opened
from .._written import Sums, changed, facts, sums
from ._layout import views
from ._slabs import CudaDriver, LockedPages, Pages, Slabs
from ._staging import Fence, Staging
from ._tensors import lasting, local, properties_of, unused_bytes


class HostLink:
    """Copies between a tensor in host memory and other host memory; each copy is done when its call returns."""

    #: Host memory for copies is page-locked, and the library cannot read the tensors where they are.
    pinned = is_apart = False

    #: What host memory is cut from; None: torch's memory.
    _slabs: Slabs | None = Slabs(Pages())

    @property
    def staging_bytes(self) -> int:
        """Bytes of page-locked memory through which pageable memory is copied."""
        return 0

    @lasting
    def memory(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for copies."""
        if self._slabs is not None:
            return self._slabs.memory(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.pinned)

    def memory_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for one copy of a tensor, from torch, which keeps it for later ones."""
        return torch.empty_like(tensor, device="cpu")

    def follow(self) -> None:
        """Later copies to the host wait for the work that the caller has queued on its present stream, whatever stream they start from."""

    def out(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Starts the copy of a tensor to the host."""
        host.copy_(tensor)

    def out_all(self, hosts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """As `out` for each pair."""
        copy_all(hosts, tensors)

    def back(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Starts the copy of host memory to a tensor. Later work of the caller on that device sees it."""
        tensor.copy_(host)

    def back_all(self, tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
        """As `back` for each pair."""
        copy_all(tensors, hosts)

    def bring(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Starts the copy of host memory to a tensor. Later work of the caller that needs it waits for `fence()`."""
        tensor.copy_(host)

    def has_room(self, size: int) -> bool:
        """True if the device has room for second copies of so many bytes."""
        return False

    def second(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Memory on the device for second copies of tensors; None if there is too little."""
        return [torch.empty_like(tensor) for tensor in tensors]

    def bring_second(self, copies: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> Any:
        """Starts the copies of host memory to second copies, beside all other copies. Returns their fence."""
        copy_all(copies, hosts)

    def place_all(self, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], fence: Any) -> None:
        """Gives tensors the values of their second copies, which arrive with a fence. Later work of the caller on the device sees them."""
        copy_all(tensors, copies)

    def release(self) -> None:
        """Later work of the caller on the device may overwrite what is copied to the host."""

    def fence(self) -> Any:
        """An object with `synchronize()` and `query()` for the copies that were started before; None if they are done."""
        return None

    def wait(self, fence: Any) -> None:
        """Makes the caller's later work on the device wait for the copies of a fence."""

    def after(self, fences: Sequence[Any]) -> After | None:
        """The moment at which the copies of these fences are done; None if the library cannot wait for it."""
        return None


class DeviceLink(HostLink):
    """Copies between a device and pinned host memory, on a stream of their own. Where the system locks too little, they go through a ring
    of page-locked blocks."""

    pinned = is_apart = True

    def __init__(self, device: torch.device):
        self._stream = torch.Stream(device=device)
        self._device = device
        #: The stream of second copies, and the end of their last use. They wait for no copy to the host, and so for no backward.
        self._early, self._placed = torch.Stream(device=device), None
        #: The last event that the library was given.
        self._moment: Any = None
        #: Streams of the caller that later copies to the host follow.
        self._followed: set[Any] = set()
        # A build of torch for another vendor calls its devices so too, and its runtime alike.
        self._slabs = Slabs(LockedPages(CudaDriver(device))) if device.type == "cuda" else None
        self._stagings: dict[Any, Staging] = {}
        if device.type == "cuda":
            # Before the first backward, which would wait for it.
            opened(device.index)

    @property
    def staging_bytes(self) -> int:
        """Bytes of page-locked memory through which pageable memory is copied."""
        return 0 if self._slabs is None or self._slabs.ring is None else self._slabs.ring.nbytes

    def memory_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for one copy of a tensor, from torch, which keeps it for later ones; if torch locks no more, as of `memory`."""
        try:
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:
            return self.memory(tensor.shape, tensor.dtype)

    def follow(self) -> None:
        """Later copies to the host wait for the work that the caller has queued on its present stream, whatever stream they start from."""
        self._followed.add(torch.accelerator.current_stream(self._device))

    def out(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Starts the copy of a tensor to the host, after the caller's work on the device."""
        self.out_all([host], [tensor])

    def out_all(self, hosts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """As `out` for each pair."""
        self.follow()
        while self._followed:
            self._stream.wait_stream(self._followed.pop())
        self._copy(self._stream, hosts, tensors, outward=True)
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def back(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Starts the copy of host memory to a tensor; the caller's later work on the device waits for it."""
        self.back_all([tensor], [host])

    def back_all(self, tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
        """As `back` for each pair."""
        self._bring_all(tensors, hosts)
        self.wait(self.fence())

    def bring(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Starts the copy of host memory to a tensor, after the caller's work on the device."""
        self._bring_all([tensor], [host])

    def has_room(self, size: int) -> bool:
        """True if so many bytes fit into a quarter of the memory that the program has never used. The rest is for larger batches."""
        return 4 * size <= unused_bytes(self._device)

    def second(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Memory on the device for second copies of tensors; None if there is too little."""
        try:
            made = [torch.empty_like(tensor) for tensor in tensors]
        except torch.OutOfMemoryError:
            return None
        for tensor in made:
            tensor.record_stream(self._early)
        # The device may still use a tensor that had this memory before.
        self._early.wait_stream(torch.accelerator.current_stream(self._device))
        return made

    def bring_second(self, copies: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> Any:
        """Starts the copies of host memory to second copies, after their last use."""
        if self._placed is not None:
            self._early.wait_event(self._placed)
        self._copy(self._early, copies, hosts, outward=False)
        return self._fence(self._early)

    def place_all(self, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], fence: Any) -> None:
        """Gives tensors the values of their second copies, on the caller's stream."""
        self.wait(fence)
        copy_all(tensors, copies)
        self._placed = torch.accelerator.current_stream(self._device).record_event()

    def _bring_all(self, tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        self._copy(self._stream, tensors, hosts, outward=False)

    def release(self) -> None:
        """Makes the caller's later work on the device wait for the copies that were started before."""
        self.wait(self.fence())

    def fence(self) -> Any:
        """What the copies that were started before are awaited by."""
        return self._fence(self._stream)

    def wait(self, fence: Any) -> None:
        """Makes the caller's later work on the device wait for the copies of a fence. The caller waits until the device has those that
        are staged."""
        stream = torch.accelerator.current_stream(self._device)
        if isinstance(fence, Fence):
            fence.join(stream)
        else:
            stream.wait_event(fence)

    def _copy(self, stream: Any, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], outward: bool) -> None:
        staging = self._staging(stream)
        if staging is not None:
            staging.start(to, sources, outward)
            return
        with stream:
            copy_all(to, sources)

    def _fence(self, stream: Any) -> Any:
        staging = self._staging(stream)
        staged = None if staging is None else staging.fence()
        return stream.record_event() if staged is None else staged

    def _staging(self, stream: Any) -> Staging | None:
        """What stages the copies on one of the streams; None: nothing is pageable, or no thread can copy any more."""
        if self._slabs is None or (ring := self._slabs.ring) is None:
            return None
        if stream not in self._stagings:
            # Half of the blocks each: second copies must not wait for copies to the host, and so for backward.
            self._stagings[stream] = Staging(stream, ring.blocks[int(stream is self._early) :: 2])
        staging = self._stagings[stream]
        return staging if staging.serves else None

    def after(self, fences: Sequence[Any]) -> After | None:
        """The moment at which the copies of these fences are done; None if the library cannot wait for it."""
        if not all(map(is_of_gpu, fences)):
            return None
        for fence in fences:
            self._stream.wait_event(fence)
        # The library takes the moment when it is submitted, and the event is kept until the next one.
        self._moment = self._stream.record_event()
        return after(self._moment)


class Alike(list[torch.Tensor]):
    """Tensors of known kinds.

    Attributes:
        kinds: Lists with the same object have tensors of the same kinds, place by place."""

    def __init__(self, tensors: Iterable[torch.Tensor], kinds: object):
        super().__init__(tensors)
        self.kinds = kinds


class Placed(Alike):
    """Tensors that stay where they are while this list is used.

    Attributes:
        addresses: Where they are."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        super().__init__(tensors, object())
        self.addresses = array("Q", map(torch.Tensor.data_ptr, self))
        # They keep the memory, also if a thread of the program gives a tensor another one by `data = ...`.
        self._storages = [*map(torch.Tensor.untyped_storage, self)]


class Pieces(Placed):
    """Contiguous tensors of the optimizer's own in host memory, which stay where they are. Copies between them and tensors of their kinds
    are one call of the library, which touches none of the objects of these tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        super().__init__(tensors)
        self._bytes = array("Q", [tensor.nbytes for tensor in self])
        self._same = properties_of(self)
        #: Kinds that are those of these.
        self._fitting: object = None
        #: Addresses of memory whose pieces do not overlap.
        self._apart: array[int] | None = None

    @cached_property
    def _sums(self) -> Sums:
        return Sums(self)

    def sums_of(self, sources: Sequence[torch.Tensor]) -> list[Any]:
        """The sums of tensors that were copied to these: those of the copies, if they have the same bytes."""
        return self._sums.take() if self._fits(sources) else sums(sources)

    def _fits(self, others: Sequence[torch.Tensor]) -> bool:
        """True if others are of the kinds of these."""
        kinds = others.kinds if isinstance(others, Alike) else None
        if kinds is None or kinds is not self._fitting:
            if not self._same(*others):
                return False
            self._fitting = kinds
        return True

    def take(self, sources: Sequence[torch.Tensor]) -> bool:
        """Copies other tensors to these. False if that is not one call, and nothing was copied."""
        if not self._fits(sources):
            return False
        self._copy(self.addresses, _addresses(sources))
        return True

    def give(self, to: Sequence[torch.Tensor]) -> bool:
        """Copies these to other tensors. False if that is not one call, and nothing was copied."""
        if not self._fits(to):
            return False
        addresses = _addresses(to)
        if addresses != self._apart:
            ends = sorted(zip(addresses, self._bytes))
            if any(start + size > following for (start, size), (following, _) in zip(ends, ends[1:])):
                return False
            self._apart = addresses
        self._copy(addresses, self.addresses)
        return True

    def _copy(self, to: array[int], sources: array[int]) -> None:
        pointers = ctypes.c_void_p * len(self)
        sizes = (ctypes.c_uint64 * len(self)).from_buffer(self._bytes)
        _native.call("spw_copies", pointers.from_buffer(to), pointers.from_buffer(sources), sizes, len(self))


def _addresses(tensors: Iterable[torch.Tensor]) -> array[int]:
    return tensors.addresses if isinstance(tensors, Placed) else array("Q", map(torch.Tensor.data_ptr, tensors))


def copy_all(to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies of tensors, in one call; those between a device and page-locked memory are only begun."""
    if isinstance(to, Pieces) and to.take(sources) or isinstance(sources, Pieces) and sources.give(to):
        return
    if to:
        torch._foreach_copy_(to, sources, non_blocking=True)


def wait(fence: Any) -> None:
    """Waits for the copies of a fence; None: they are done."""
    if fence is not None:
        fence.synchronize()


_links: dict[torch.device, HostLink] = {}


def link_to(param: torch.Tensor) -> HostLink:
    """The link to the device of a parameter; one per device."""
    device = local(param).device
    if device not in _links:
        _links[device] = new_link(device)
    return _links[device]


def is_copied(tensor: torch.Tensor) -> bool:
    """True if the library uses a copy of a tensor, and not the tensor where it is."""
    return link_to(tensor).is_apart or not local(tensor).is_contiguous()


def new_link(device: torch.device) -> HostLink:
    """A link with a stream of its own."""
    # A device without memory has nothing to copy.
    return HostLink() if device.type in ("cpu", "meta") else DeviceLink(device)


class Taken(NamedTuple):
    """A gradient that was passed to the library.

    Attributes:
        grad: The tensor that the parameter had.
        memory: Where the library reads its values.
        facts: The facts of gradient and parameter at the time of the copy.
        sum: The sum of the gradient at that time; None if no caller needs it."""

    grad: torch.Tensor
    memory: torch.Tensor
    facts: tuple[Any, ...]
    sum: Any


class Gradients:
    """The gradients of a step.

    Args:
        params: All parameters of the optimizer.

    Attributes:
        taken: The gradients that were taken, by the number of their parameter."""

    def __init__(self, params: Sequence[torch.Tensor]):
        self._params = params
        self.taken: dict[int, Taken] = {}
        self._memory: dict[int, torch.Tensor] = {}

    def take(self, number: int, marked: bool) -> Taken:
        """The gradient of a parameter as it is now. A copy is started, and `fences` says when it is done. `marked`: the next call can tell
        whether the gradient has changed; otherwise it takes it again."""
        param, last = self._params[number], self.taken.get(number)
        assert param.grad is not None
        if last is not None and self._is_now(param, last):
            return last
        link, grad = link_to(param), local(param.grad).detach()
        memory = grad
        if is_copied(grad):
            memory = self._free(number, link, grad)
            link.out(memory, grad)
        self.taken[number] = taken = Taken(param.grad, memory, _facts(param), sums([grad])[0] if marked else None)
        return taken

    def _free(self, number: int, link: HostLink, grad: torch.Tensor) -> torch.Tensor:
        """Memory for a copy that the library does not use: it may have that of a gradient that was taken."""
        memory = self._memory.get(number)
        if memory is None or number in self.taken or (memory.dtype, memory.shape) != (grad.dtype, grad.shape):
            memory = self._memory[number] = link.memory(grad.shape, grad.dtype)
        return memory

    def _is_now(self, param: torch.Tensor, taken: Taken) -> bool:
        """True if a gradient that was taken is still that of the parameter, unchanged."""
        if taken.sum is None or param.grad is not taken.grad or taken.facts != _facts(param):
            return False
        return not changed([(local(param.grad), taken.sum)])

    def fences(self, numbers: Iterable[int]) -> list[Any]:
        """What has to be waited for until the copies of these gradients are done."""
        links = {link_to(self._params[number]) for number in numbers}
        return [fence for link in links if link.is_apart and (fence := link.fence()) is not None]

    def wait(self) -> None:
        """Waits until all copies are done."""
        for fence in self.fences(self.taken):
            fence.synchronize()

    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(memory.nbytes for memory in self._memory.values())

    def staging_bytes(self) -> int:
        """Bytes of the page-locked memory through which pageable copies pass."""
        return sum(link.staging_bytes for link in {link_to(param) for param in self._params})

    def forget(self) -> None:
        """The library uses no gradient any more."""
        self.taken = {}


def _facts(param: torch.Tensor) -> tuple[Any, ...]:
    """The facts of a gradient; address and dtype of its parameter, which `param.data = ...` changes."""
    own = local(param)
    return *facts(local(param.grad)), own.data_ptr(), own.dtype


class Weights:
    """New weights of parameters, in memory of the optimizer until they return to the parameters.

    Args:
        params: All parameters of the optimizer."""

    def __init__(self, params: Sequence[torch.Tensor]):
        self._params = params
        self._memory: dict[int, torch.Tensor] = {}
        #: The parameters of a step with their facts, the pieces whose weights did not return yet, and the copies that may not be done.
        self._targets: dict[int, tuple[torch.Tensor, Any]] = {}
        self._left: dict[int, list[Any]] = {}
        self._returning: list[Any] = []

    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(memory.nbytes for memory in self._memory.values())

    def of(self, number: int) -> torch.Tensor:
        """Memory for the new weights of a parameter."""
        while self._returning:
            wait(self._returning.pop())
        own, memory = local(self._params[number]), self._memory.get(number)
        if memory is None or memory.dtype is not own.dtype:
            memory = self._memory[number] = link_to(own).memory(own.shape, own.dtype)
        return memory

    def bring(self, numbers: Sequence[int], ended: bool = True) -> list[torch.Tensor]:
        """Gives the memory for new weights the present ones of these parameters; returns it. `ended`: waits for the copies."""
        memories = [self.of(number) for number in numbers]
        for number, memory in zip(numbers, memories):
            own = local(self._params[number]).detach()
            link_to(own).out(memory, own)
        if ended:
            for link in {link_to(self._params[number]) for number in numbers}:
                wait(link.fence())
        return memories

    def expect(self, numbers: Iterable[int], pieces: Sequence[Sequence[Any]]) -> None:
        """Before a step that writes the weights of these parameters. `pieces`: those of each subgroup."""
        owners = {number: local(self._params[number]) for number in numbers}
        self._targets = {number: (own, facts(own)) for number, own in owners.items()}
        self._left = {at: found for at, own in enumerate(pieces) if (found := [piece for piece in own if piece.parameter in owners])}

    def give(self, subgroup: int) -> None:
        """The weights of a subgroup are final, and return to the parameters. What the program has written since is newer."""
        for piece in self._left.get(subgroup, ()):
            own, before = self._targets[piece.parameter]
            # The caller counts the version.
            if facts(own) == before:
                weights, link = self._memory[piece.parameter].view(-1), link_to(own)
                for start, to in views(own.data, piece.start, piece.count):
                    link.back(to, weights[start : start + to.numel()].view(to.shape))
        self._left.pop(subgroup, None)

    def give_all(self) -> None:
        """As `give` for all subgroups whose weights did not return yet."""
        for subgroup in [*self._left]:
            self.give(subgroup)
        self._returning += [link.fence() for link in {link_to(own) for own, _ in self._targets.values()}]
        self._targets = {}
