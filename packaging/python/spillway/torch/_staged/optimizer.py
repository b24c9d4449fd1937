"""The optimizer of `Staged`.

It has the groups, the hooks and what a program sees. The class's object has the rules of a step, of a state dict and of a load; it sees the
parameters of one chunk at a time. `state` has an entry for each state, which says where the state is."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar, cast, overload

import torch

from ..._commit import Commit
from ..._live.publisher import Figures
from ..._snapshot import Snapshot
from ...errors import InvalidArgumentError, UnsupportedError
from ...tiered import mapped
from .._given import Given
from .._tensors import lasting, name_of, without_gradients
from .chunk import Chunk, Entry
from .flow import Flow
from .home import Home
from .inner import Inner
from .leaves import Collected, Leaf
from .on_tier import OnTier
from .weights import Trained

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_Method = TypeVar("_Method", bound=Callable[..., Any])
#: Bytes from which a value of a state dict is a map of a file, if the states are on a tier.
_MAPPED = 64 << 10


class StagedMemory(NamedTuple):
    """Memory for the states of a Staged, in bytes except for the number.

    Attributes:
        states: All states, wherever they are.
        host: Host memory for chunks: all of them, or the buffers of a tier.
        device: Most bytes of states that were on the device at once.
        largest: The largest chunk.
        chunks: Number of chunks."""

    states: int
    host: int
    device: int
    largest: int
    chunks: int


class Elsewhere(Mapping[Any, Any]):
    """The entry of a parameter in `optimizer.state`: the names of its states, whose values are in a chunk."""

    def __init__(self, flow: Flow, names: tuple[Any, ...], param: torch.Tensor):
        self.flow, self.param, self._names = flow, param, names

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse(key)

    def __setitem__(self, key: Any, _: Any) -> NoReturn:
        self._refuse(key)

    def __delitem__(self, key: Any) -> NoReturn:
        self._refuse(key)

    def _refuse(self, key: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"optimizer.state[...][{key!r}]: the states of Staged are in host memory or on a tier; read optimizer.state_dict(), write with "
            "load_state_dict(), or set optimizer.state[param] to a dict with all states of the parameter"
        )

    def __contains__(self, key: Any) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError("the states of Staged are not in optimizer.state, which cannot be copied or pickled; use optimizer.state_dict()")

    def __repr__(self) -> str:
        return f"<{', '.join(map(repr, self._names))} of Staged; optimizer.state_dict() reads them>"


def _alone(method: _Method) -> _Method:
    """A method during which no other thread uses the states of its object."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        with self._turn:
            return method(self, *arguments, **options)

    return cast(_Method, call)


class Staged(torch.optim.Optimizer):
    """A torch optimizer of any class, whose states are in host memory or on a tier, and on the parameters' device for their step only.

    The class itself steps the parameters, a chunk of them at a time: its states come to the device, the class steps, and they leave while
    the next ones come. The bits are those of the class. It must step each parameter by what that parameter has: its value, gradient, state
    and options. A class that computes something over all parameters, such as a norm, would compute it over those of a chunk; where
    this shows in its options or attributes, the step is refused. docs/torch.md says more.

    Args:
        cls: The class, such as torch.optim.Muon.
        params: Parameters, or groups of parameters.
        chunk_bytes: Bytes of the states that move together, or of their parameters if those are more. The device holds two chunks. A
            state that is larger is a chunk of its own.
        tier: A directory, a list of directories or TierOptions: states are there, and commits have them and the parameters. None: host
            memory, page-locked for parameters on a device.
        options: Further arguments of the class.

    Raises:
        InvalidArgumentError: `cls` is no optimizer's class, or a tier holds the states of other parameters or of another class.
        UnsupportedError: The class needs all parameters in one step, as LBFGS does.

    Example:
        optimizer = spillway.torch.Staged(torch.optim.NAdam, model.parameters(), lr=1e-3, weight_decay=0.1)"""

    _resumed_step: int | None = None
    _payload: bytes = b""
    state: Any
    param_groups: list[dict[str, Any]]

    @lasting
    def __init__(
        self, cls: type[torch.optim.Optimizer], params: ParamsT, *, chunk_bytes: int = 64 << 20, tier: Any = None, **options: Any
    ) -> None:
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise InvalidArgumentError(f"Staged: chunk_bytes is {chunk_bytes!r}; pass a whole number of bytes from 1 on")
        inner = Inner(cls, params, options)
        #: Held by the thread that uses the states.
        self._turn = threading.RLock()
        super().__init__(inner.optimizer.param_groups, inner.optimizer.defaults)
        self.state, inner.optimizer.state = inner.optimizer.state, type(inner.optimizer.state)(dict)
        inner.optimizer.param_groups = self.param_groups
        self._inner, self._chunk_bytes = inner, chunk_bytes
        self._given = Given() if tier is not None else Given("", "")
        #: The names of parameters in messages, by their ids.
        self._names: dict[int, str] = {}
        self._check_groups()
        self._home = Home() if tier is None else OnTier(tier, f"{cls.__module__}.{cls.__qualname__}", self._trained, chunk_bytes)
        self._flow = Flow(self._home, chunk_bytes, self._name_of)
        # A tier publishes its own.
        self._figures = Figures(f"Staged, {cls.__name__}", self, Staged._told) if tier is None else None
        try:
            if isinstance(self._home, OnTier):
                self._begin(self._home)
            self._adopt()
        except BaseException:
            self._home.close()
            raise

    @property
    def resumed_step(self) -> int | None:
        """With `tier`, the number of the commit that the optimizer has resumed; None if it began anew."""
        return self._resumed_step

    @property
    def payload(self) -> bytes:
        """With `tier`, the bytes that were given to this commit."""
        return self._payload

    def _begin(self, home: OnTier) -> None:
        """Takes what was committed to the tier."""
        self._resumed_step = home.tiered.resumed_step
        self._payload = b"" if home.tiered.committed is None else home.tiered.committed.payload
        home.resume(self._take)

    def _take(self, chunks: list[Chunk], learned: dict[str, Any]) -> None:
        """Has the chunks of a commit, and what the class had changed then."""
        self._flow.chunks = chunks
        self._inner.relearn(self.param_groups, learned)
        self.state.clear()
        self._note_states()

    # What torch asks for.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if the class unscales gradients itself, as with fused=True."""
        return bool(getattr(self._inner.optimizer, "_step_supports_amp_scaling", False))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient, by the class's own step. Other parameters are not shown to the class.

        If the class raises, the parameters of the chunks before are stepped, with their states. The chunk in which it has raised keeps its
        states of before, and its parameters are as the class has left them.

        Args:
            closure: Computes the loss again, once, before the step.

        Returns:
            The closure's result; None without a closure.

        Raises:
            UnsupportedError: The class needs all parameters in one step, or has states that cannot be copied.
            OutOfOrderError: A transfer of the tier, or a load, has failed before; call rollback() or load_state_dict().
            IoError: A transfer of the tier failed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begun = time.perf_counter()
        self._home.together(self._step_once)
        if self._figures is not None:
            self._figures.stepped(begun)
        return loss

    def _told(self) -> dict[str, Any]:
        """The figures that are published."""
        memory = {"host": {"chunks": self._home.host_bytes(self._flow.chunks)}, "device": {"chunks": self._flow.most}}
        return {"where": "states in host memory", "memory": memory}

    @_alone
    def _step_once(self) -> None:
        self._given.check()
        self._check_groups()
        self._adopt()
        scaler: dict[str, Any] = {name: self.__dict__[name] for name in ("grad_scale", "found_inf") if name in self.__dict__}
        turn = self._inner.turn(self.param_groups, scaler)
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]

        def step(some: list[torch.Tensor], states: dict[torch.Tensor, Any]) -> dict[Any, Any]:
            try:
                return turn.step(some, states)
            except BaseException as error:
                self._home.of_class = error
                raise

        try:
            self._flow.run(params, step)
            turn.rest()
        finally:
            turn.end()
            self._note_states()

    def _check_groups(self) -> None:
        for group in self.param_groups:
            if group.get("differentiable"):
                raise UnsupportedError("Staged: differentiable=True keeps the states in autograd's graph, from which they cannot be moved")

    @lasting
    def _adopt(self) -> None:
        """Takes over what the program has changed in `state`: a state that is gone, or one that it has given."""
        given = {param: state for param, state in self.state.items() if not self._is_here(param, state)}
        known = {param for group in self.param_groups for param in group["params"]} if given else set()
        for param, state in given.items():
            if param not in known or not isinstance(state, dict):
                what = "a key that is no parameter of the groups" if param not in known else f"{state!r} for {self._name_of(param)}"
                raise InvalidArgumentError(f"Staged: optimizer.state has {what}; set a dict with the states of a parameter, or delete it")
        entries = [Entry.of(param, self._name_of(param), given) for param in given]
        for entry in entries:
            entry.check_apart()
        for param, chunk in self._flow.chunk_of().items():
            held = self.state.get(param)
            if not isinstance(held, Elsewhere) if chunk.entries[param].stated else held is not None:
                self._flow.forget(param, chunk)
        if entries:
            self._flow.place(iter(entries))
            self._note_states()

    def _is_here(self, param: Any, state: Any) -> bool:
        return isinstance(state, Elsewhere) and state.flow is self._flow and state.param is param

    def _note_states(self) -> None:
        """Has an entry in `state` for each state."""
        for chunk in self._flow.chunks:
            for param, entry in chunk.entries.items():
                names = tuple(entry.tree.keys) if isinstance(entry.tree, Collected) and entry.tree.keys is not None else ()
                held = self.state.get(param)
                if not entry.stated:
                    self.state.pop(param, None)
                elif not (self._is_here(param, held) and tuple(held) == names):
                    self.state[param] = Elsewhere(self._flow, names, param)

    def _name_of(self, param: torch.Tensor) -> str:
        if id(param) not in self._names:
            params, names, _ = self._trained()
            self._names = dict(zip(map(id, params), names))
        return self._names.get(id(param), "a parameter that is in no group")

    def _trained(self) -> Trained:
        places = [(group, number, place) for number, group in enumerate(self.param_groups) for place in range(len(group["params"]))]
        return Trained(
            [group["params"][place] for group, _, place in places],
            [name_of(*each) for each in places],
            [group["param_names"][place] if group.get("param_names") else None for group, _, place in places],
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as the class does. A commit of a tier has them too, and an optimizer that resumes it gets them with
        its constructor."""
        if "_inner" not in self.__dict__:
            # torch's constructor adds the groups of the class's object.
            super().add_param_group(param_group)
            return
        self._add(param_group)

    @_alone
    def _add(self, param_group: dict[str, Any]) -> None:
        self.state.update(self._inner.add(self.param_groups, param_group))
        self._home.watched(self._adopt)

    @_alone
    def state_dict(self) -> dict[str, Any]:
        """The class's own state dict. Its values are copies in host memory; those of a tier of 64 KiB or more are maps of unnamed files in
        its first directory. A write to them is not a write to the optimizer, and the next step refuses it: call load_state_dict().

        Raises:
            OutOfOrderError: A transfer of the tier, or a load, has failed before."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._home.check()
        self._home.watched(self._adopt)
        found = without_gradients(lambda: self._inner.save(self.param_groups, self._home.watched(self._whole)))
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, found)
            found = found if replaced is None else replaced
        return found

    @lasting
    def _whole(self) -> dict[torch.Tensor, Any]:
        """Copies of all states, in the order of the parameters."""
        whole: dict[torch.Tensor, Any] = {}
        for chunk in self._flow.chunks:

            def take(views: dict[torch.Tensor, list[torch.Tensor]], chunk: Chunk = chunk) -> None:
                for param, entry in chunk.entries.items():
                    if entry.stated:
                        tensors = [self._copy(leaf, view) for leaf, view in zip(entry.leaves, views[param])]
                        whole[param] = entry.state(tensors)
                        self._given.note((f"a state of {entry.name}", tensor) for tensor in tensors)

            self._flow.read(chunk, take)
        ordered = [param for group in self.param_groups for param in group["params"] if param in whole]
        return {param: whole[param] for param in [*ordered, *whole]}

    def _copy(self, leaf: Leaf, view: torch.Tensor) -> torch.Tensor:
        directory = self._home.directory
        if directory is None or leaf.size < _MAPPED:
            return leaf.empty(torch.device("cpu")).copy_(view)
        flat = mapped(view.numel(), directory, leaf.dtype)
        return flat.as_strided(leaf.shape, leaf.stride).copy_(view)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of the class, as the class does, parameter by parameter, so that the device holds one chunk.

        The class loads every state twice: once to see that it can, before anything is changed, and then to keep it. So after an error of
        the class nothing is changed.

        Raises:
            InvalidArgumentError: The dict has a state for a parameter that it does not name; nothing was loaded."""
        loaded = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, loaded)
            loaded = loaded if replaced is None else replaced
        self._load(loaded)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @_alone
    @lasting
    def _load(self, loaded: dict[str, Any]) -> None:
        groups, _ = self._inner.load(self.param_groups, {**loaded, "state": {}})
        places = {
            saved: (number, place) for number, group in enumerate(loaded["param_groups"]) for place, saved in enumerate(group["params"])
        }
        unknown = [key for key in loaded["state"] if key not in places]
        if unknown:
            raise InvalidArgumentError(
                f"Staged.load_state_dict: the dict has a state of {unknown[0]!r}, which none of its groups names; pass a state dict of the "
                "class; nothing was loaded"
            )
        wanted = [saved for saved in places if saved in loaded["state"]]

        def entries() -> Iterator[Entry]:
            for saved in wanted:
                number, place = places[saved]
                group, param = groups[number], groups[number]["params"][place]
                part = {**loaded["param_groups"][number], "params": [saved]}
                own = {**group, "params": [param]}
                for each in (part, own):
                    if each.get("param_names"):
                        each["param_names"] = [each["param_names"][place]]
                found = self._inner.load([own], {**loaded, "state": {saved: loaded["state"][saved]}, "param_groups": [part]})[1]
                entry = Entry.of(param, self._name_of(param), found)
                entry.check_apart()
                yield entry

        for _ in entries():
            pass

        def replace() -> None:
            chunks, self._flow.chunks = self._flow.chunks, []
            self._home.clear(chunks)
            self.state.clear()
            self.param_groups = groups
            self._flow.place(entries())

        self._home.whole(replace)
        self._given.forget()
        self._note_states()

    # Commits.

    @overload
    def commit(self, step: int | None = ..., payload: bytes = ..., wait: Literal[True] = ...) -> None: ...

    @overload
    def commit(self, step: int | None = ..., payload: bytes = ..., *, wait: Literal[False]) -> Commit: ...

    @_alone
    def commit(self, step: int | None = None, payload: bytes = b"", wait: bool = True) -> Commit | None:
        """Makes the states on the tier durable, and the parameters. A Staged that is constructed on the same tier later begins with them.

        Args:
            step: Number of the commit; None: the number of steps that were done.
            payload: Bytes that `payload` of the resumed optimizer has. With what is known of each state, they may have 1 MiB.
            wait: False: return after the parameters are written. Threads of the library commit, beside the next steps. The next commit,
                rollback or close waits for the end. Every process of a run calls it.

        Returns:
            None, or with `wait=False` the Commit that is in flight.

        Raises:
            InvalidArgumentError: The optimizer has no tier, or a state has a value that a commit cannot store.
            IoError: A path failed; the last commit is intact.
            TierError: Another process failed."""
        return self._on_tier("commit").commit(self._present, step, payload, wait)

    def _present(self) -> tuple[list[Chunk], dict[str, Any]]:
        """What a commit has: the chunks, and what the class has changed in its options and attributes."""
        self._given.check()
        self._adopt()
        return self._flow.chunks, self._inner.learned(self.param_groups)

    @_alone
    def rollback(self) -> None:
        """Returns states and parameters to the last commit, also after a step that failed. Learning rates and other options stay, except
        those that the class itself changes. Every process of a run calls it.

        Raises:
            InvalidArgumentError: The optimizer has no tier, or nothing was committed."""
        home = self._on_tier("rollback")
        home.rollback(self._flow.chunks, self._take)
        self._given.forget()

    def snapshot(self, directory: str | os.PathLike[str], *, bytes_per_second: int = 0, keep: int | None = None) -> Snapshot:
        """Starts to write the last commit of the tier to a new directory, to which `restore` returns.

        Args:
            directory: The directory; in a run of several processes each one writes `rank-N` in it.
            bytes_per_second: Limit of the speed of this process; 0: no limit.
            keep: As for SpillwayOptimizer.snapshot.

        Returns:
            A snapshot; its wait() returns when the directory is complete."""
        return self._on_tier("snapshot").snapshot(directory, bytes_per_second, keep)

    @_alone
    def restore(self, directory: str | os.PathLike[str]) -> int:
        """Returns states and parameters to a finished snapshot, and commits them. `payload` is that of the snapshot. Options are as after
        `rollback`. Every process of a run calls it. Steps since the last commit are committed first, with an empty payload.

        Args:
            directory: As it was given to snapshot().

        Returns:
            The step of the snapshot.

        Raises:
            NoStateError: The snapshot is not finished; nothing was changed.
            InvalidArgumentError: It is one of other parameters or of another class; nothing was changed.
            CorruptError: A file is missing or truncated; nothing was changed. Or its content is damaged; states and parameters are those of
                the last commit."""
        found = self._on_tier("restore").restore(directory, lambda: self._flow.chunks, self._present, self._take)
        self._given.forget()
        self._payload = found.record.payload
        return found.step

    @_alone
    def close(self) -> None:
        """Closes the tier, whose lock and memory are then free; states since the last commit are lost. Does nothing without a tier."""
        self._home.close()

    def _on_tier(self, call: str) -> OnTier:
        if not isinstance(self._home, OnTier):
            raise InvalidArgumentError(f"Staged.{call}: the states are in host memory; construct the optimizer with tier")
        return self._home

    # What a program asks.

    def memory(self) -> StagedMemory:
        """The memory for states."""
        chunks = self._flow.chunks
        sizes = [chunk.size for chunk in chunks]
        states = sum(leaf.size for chunk in chunks for entry in chunk.entries.values() for leaf in entry.leaves)
        return StagedMemory(states, self._home.host_bytes(chunks), self._flow.most, max(sizes, default=0), len(chunks))

    def __repr__(self) -> str:
        try:
            head, rest = super().__repr__().split("\n", 1)
            told = {"cls": self._inner.name, "chunk_bytes": self._chunk_bytes, **self._home.facts()}
        except Exception:
            # Half constructed.
            return f"<{type(self).__name__} not constructed>"
        return "\n".join([head, *(f"    {name}: {value}" for name, value in told.items()), rest])

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "a Staged cannot be copied or pickled, because its states are not in it; save its state_dict(), and load it to another"
        )
