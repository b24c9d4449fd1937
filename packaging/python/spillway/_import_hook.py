"""Changes classes of other packages after their modules were imported, and reverts the changes.

A finder in front of sys.meta_path sees every import, also of a second copy of a module under another name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def unheard(variable: str) -> str | None:
    """Why an environment variable that asks for a hook has no effect in this process; None if it has an effect, or asks for no hook."""
    if os.environ.get(variable) not in ("1", "require") or "_spillway_hook" in sys.modules:
        return None
    return "this Python runs no spillway.pth: install the wheel, or call install()"


class ImportHook:
    """Calls a function after each import of chosen modules.

    Args:
        concerns: concerns(name) is True for the modules.
        patch: patch(module) is called after the module ran."""

    def __init__(self, concerns: Callable[[str], bool], patch: Callable[[Any], object]):
        self._concerns, self._patch = concerns, patch

    def insert(self) -> None:
        """Sees imports from now on. Idempotent."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Sees no further imports. Idempotent."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def imported(self) -> list[tuple[str, Any]]:
        """The chosen modules that were imported before, with their names."""
        return [(name, module) for name, module in list(sys.modules.items()) if module is not None and self._concerns(name)]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Finds a module by the other finders, and has it patched after it ran."""
        if not self._concerns(name):
            return None
        for finder in list(sys.meta_path):
            spec = None if finder is self else _found(finder, name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module") or hasattr(spec.loader, "load_module"):
                    spec.loader = _Loader(spec.loader, self._patch)
                return spec
        return None


def _found(finder: Any, name: str, path: Any, target: Any) -> Any:
    """The spec of a module by another finder. Up to Python 3.11 a finder may have find_module alone."""
    if hasattr(finder, "find_spec"):
        return finder.find_spec(name, path, target)
    if sys.version_info >= (3, 12) or not hasattr(finder, "find_module"):
        return None
    from importlib.util import spec_from_loader

    loader = finder.find_module(name, path)
    return None if loader is None else spec_from_loader(name, loader)


class _Loader:
    """Runs the module by its own loader, restores that loader, and patches the module."""

    def __init__(self, loader: Any, patch: Callable[[Any], object]):
        self._loader, self._patch = loader, patch

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec) if hasattr(self._loader, "create_module") else None

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        if hasattr(self._loader, "exec_module"):
            self._loader.exec_module(module)
        else:
            # An old loader makes the module itself, and Python takes the one in sys.modules.
            self._loader.load_module(module.__name__)
            module = sys.modules[module.__name__]
        self._patch(module)


class Patches:
    """Attributes that were set, with what they replaced."""

    def __init__(self) -> None:
        self._restore: list[Callable[[], None]] = []

    def set(self, owner: Any, attribute: str, value: Any) -> None:
        """setattr that revert() undoes, unless another program has set the attribute since."""
        missing = object()
        before = vars(owner).get(attribute, missing)

        def restore() -> None:
            if vars(owner).get(attribute, missing) is not value:
                return
            if before is missing:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before)

        setattr(owner, attribute, value)
        self._restore.append(restore)

    def revert(self) -> None:
        """Reverts all changes, the last one first."""
        while self._restore:
            self._restore.pop()()
