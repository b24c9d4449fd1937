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
    """The set of these gradients.

    Args:
        needed: The gradients that each bucket needs. Several buckets may need one."""

    def __init__(self, needed: Mapping[_Bucket, Iterable[_Gradient]]):
        super().__init__()
        self._needed = {bucket: {*gradients} for bucket, gradients in needed.items()}
        self._buckets: defaultdict[_Gradient, list[_Bucket]] = defaultdict(list)
        for bucket, own in self._needed.items():
            for gradient in own:
                self._buckets[gradient].append(bucket)

    def note(self, gradients: Iterable[_Gradient]) -> list[_Bucket]:
        """Adds gradients. Returns the buckets that need one of them, and lack none now."""
        touched: dict[_Bucket, None] = {}
        for gradient in gradients:
            self.add(gradient)
            touched.update(dict.fromkeys(self._buckets.get(gradient, ())))
        return [bucket for bucket in touched if self._needed[bucket] <= self]


def tell(param: Any, method: Callable[[Any], object]) -> Any:
    """Has method(param) called when backward has completed the gradient of a parameter. The hook that is returned lives as long as the
    parameter, and must not keep the memory of the method's object."""
    return param.register_post_accumulate_grad_hook(partial(_tell, weakref.WeakMethod(method)))


def _tell(method: weakref.WeakMethod[Callable[[Any], object]], param: Any) -> None:
    if (alive := method()) is not None:
        alive(param)
