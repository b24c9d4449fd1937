"""The calls of an optimizer whose states are on a tier: it opens, commits, rolls back and closes; its state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import InvalidArgumentError, UnsupportedError
from ._arguments import check_steps
from ._notes import Notes, of_itself
from ._tier_dict import check_loaded, whole_state, write_through
from ._tier_states import TierStates

_Result = TypeVar("_Result")


class OnTier(Notes):
    """Base of the optimizers of this package; not for direct use.

    Attributes:
        resumed_step: With `tier`, the number of the commit that the optimizer has resumed; None if it began anew.
        payload: With `tier`, the bytes that were given to this commit."""

    #: The name in the C ABI.
    c_name: str
    resumed_step: int | None
    payload: bytes
    _tier: TierStates | None
    state: Any

    def _open_tier(self, tier: Any, memory_budget: int | None) -> None:
        name, precision = type(self).__name__, self._precision
        refused = {"undo": self.undo, "moment_dtype": precision.moment_dtype is not None, 'master="split"': precision.master == "split"}
        for group in self.param_groups:
            refused.update({flag: True for flag in ("amsgrad", "capturable", "differentiable") if group.get(flag)})
        if self.c_name != "adam":
            raise UnsupportedError(f"{name}: states on a tier are for Adam and AdamW; leave out tier")
        for keyword, given in refused.items():
            if given:
                raise UnsupportedError(
                    f"{name}: {keyword} cannot be combined with tier, which keeps f32 masters and moments; leave out one of them"
                )
        self._tier = TierStates(self, tier, memory_budget)
        self.resumed_step = self._tier.resumed_step
        self.payload = self._tier.committed.payload if self._tier.committed is not None else b""

    @of_itself
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch does; with `tier`, all groups must be passed at construction."""
        if self._tier is not None:
            raise UnsupportedError(
                f"{type(self).__name__}.add_param_group: the layout of states on a tier is fixed at construction; pass all groups "
                "to the constructor"
            )
        super().add_param_group(param_group)

    @of_itself
    def commit(self, step: int | None = None, payload: bytes = b"") -> None:
        """Makes the states on the tier durable. An optimizer that is constructed on the same tier later begins with them.

        Args:
            step: Number of the commit; None: the number of steps that were done.
            payload: Bytes that `payload` of the resumed optimizer has, up to about 1 MB.

        Raises:
            InvalidArgumentError: The optimizer has no tier.
            IoError: A path failed; the last commit is intact."""
        tier = self._of_tier("commit")
        self._alone(tier, lambda: tier.commit(self, step, payload))

    @of_itself
    def close(self) -> None:
        """Closes the tier, whose lock and memory are then free; states since the last commit are lost. Does nothing without a tier."""
        if self._tier is not None:
            self._tier.close()

    def _of_tier(self, call: str) -> TierStates:
        if self._tier is None:
            raise InvalidArgumentError(f"{type(self).__name__}.{call}: the states are in host memory; construct the optimizer with tier")
        return self._tier

    @of_itself
    def state_dict(self) -> dict[str, Any]:
        """torch's state dict. With `tier`, all states are read, subgroup by subgroup, between two steps of other threads; see docs/torch.md
        for the memory."""
        tier = self._tier
        if tier is None:
            self._settle()
            self._forget_low_bits()
            return super().state_dict()
        return self._alone(tier, lambda: self._whole_dict(tier, super(OnTier, self).state_dict))

    def _whole_dict(self, tier: TierStates, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of torch's `state_dict`, with the values on the tier."""
        own, self.state = self.state, whole_state(self, tier)
        try:
            return state_dict()
        finally:
            self.state = own

    def _alone(self, tier: TierStates, work: Callable[[], _Result]) -> _Result:
        """Returns work(), during which no other thread uses the states. The last call of the library is noted before."""

        def settled() -> _Result:
            self._settle()
            return work()

        return tier.alone(settled)

    def _load_to_tier(self, state_dict: dict[str, Any], tier: TierStates) -> None:
        found: dict[int, dict[str, Any]] = {}

        def take(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            """Takes the states, so that torch loads the groups only."""
            check_steps(loaded, True)
            found.update(check_loaded(self, tier, loaded))
            return {**loaded, "state": {}}

        own = self.state
        try:
            with self._before_loading(take):
                super().load_state_dict(state_dict)
        finally:
            self.state = own
        write_through(self, tier, found)
