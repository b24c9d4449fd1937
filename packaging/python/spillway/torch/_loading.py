"""A hook for one call of `load_state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


@contextmanager
def before_loading(optimizer: Any, function: Callable[[dict[str, Any], Any], Any]) -> Iterator[None]:
    """Within it `load_state_dict` of a torch optimizer calls `function` with the dict, as the hooks of the program have made it, and with
    the optimizer's groups. A result that is not None takes the place of the dict."""
    # A signal handler that raised may have left one.
    _remove(optimizer)
    try:
        optimizer.register_load_state_dict_pre_hook(_Hook(function))
        yield
    finally:
        _remove(optimizer)


class _Hook(NamedTuple):
    """A hook of one call, distinct from the hooks of the program."""

    function: Callable[[dict[str, Any], Any], Any]

    def __call__(self, optimizer: Any, loaded: dict[str, Any]) -> Any:
        return self.function(loaded, optimizer.param_groups)


def _remove(optimizer: Any) -> None:
    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    for number in [number for number, hook in hooks.items() if isinstance(hook, _Hook)]:
        del hooks[number]
