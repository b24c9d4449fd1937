"""The gradients that backward has completed since the last step."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

_Bucket = TypeVar("_Bucket", bound=Hashable)
_Gradient = TypeVar("_Gradient", bound=Hashable)


class Arrivals(set[_Gradient], Generic[_Bucket, _Gradient]):
    """The set of these gradients. They leave it by `clear` and `forget` alone.

    Invariant: a gradient that is not in the set is among those that its buckets lack, also after a signal handler that raised.

    Args:
        needed: The gradients that each bucket needs. Several buckets may need one."""

    def __init__(self, needed: Mapping[_Bucket, Iterable[_Gradient]]):
        super().__init__()
        #: Of each bucket what it needs, and what of that it lacks.
        self._needed: list[tuple[frozenset[_Gradient], set[_Gradient]]] = []
        #: The buckets of each gradient, and what they lack.
        self._buckets: defaultdict[_Gradient, list[tuple[_Bucket, set[_Gradient]]]] = defaultdict(list)
        for bucket, gradients in needed.items():
            own = frozenset(gradients)
            found = bucket, {*own}
            self._needed.append((own, found[1]))
            for gradient in own:
                self._buckets[gradient].append(found)

    def note(self, gradients: Iterable[_Gradient]) -> list[_Bucket]:
        """Adds gradients. Returns the buckets that need one of them, and lack none now."""
        complete: dict[_Bucket, None] = {}
        for gradient in gradients:
            self.add(gradient)
            for bucket, lacking in self._buckets.get(gradient, ()):
                lacking.discard(gradient)
                if not lacking:
                    complete[bucket] = None
        return [*complete]

    def forget(self, gradients: Iterable[_Gradient]) -> None:
        """Removes gradients, which may come again."""
        for gradient in gradients:
            for _, lacking in self._buckets.get(gradient, ()):
                lacking.add(gradient)
            self.discard(gradient)

    def clear(self) -> None:
        """Removes all."""
        for own, lacking in self._needed if self else ():
            lacking |= own
        super().clear()


def tell(param: Any, method: Callable[[Any], object]) -> Any:
    """Has method(param) called when backward has completed the gradient of a parameter. The hook that is returned lives as long as the
    parameter, and must not keep the memory of the method's object."""
    bound: Any = method
    return param.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(bound.__self__), bound.__func__))


def _tell(owner: weakref.ref[Any], function: Callable[[Any, Any], object], param: Any) -> None:
    if (alive := owner()) is not None:
        function(alive, param)
