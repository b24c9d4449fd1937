"""Installs the hook of a framework when the program imports that framework.

A line of spillway.pth runs this module at the start of every Python process of a job. It therefore imports nothing but
modules that Python has loaded by then. A process that never imports the framework does not import Spillway."""

import os
import sys

# The top-level packages whose import installs the hook. A checkout of DeepSpeed has packages of its own.
_ROOTS = {"deepspeed": ("deepspeed", "op_builder", "accelerator"), "megatron": ("megatron",)}


def arm(framework):
    """Waits for the import of "deepspeed" or "megatron"."""
    sys.meta_path.insert(0, _Waiting(framework))


class _Waiting:
    """A finder of modules that finds none. It stays in sys.meta_path: removing it during an import would hide another
    finder from that import."""

    def __init__(self, framework):
        self._framework, self._roots = framework, _ROOTS[framework]

    def find_spec(self, name, path=None, target=None):
        """Installs the hook once, and lets it see the import that was under way."""
        if name.partition(".")[0] not in self._roots:
            return None
        self._roots = ()
        _install(self._framework)
        first = sys.meta_path[0]
        return None if first is self else first.find_spec(name, path, target)


def _install(framework):
    variable = f"SPILLWAY_{framework.upper()}"
    required, failed = os.environ.get(variable) == "require", "the hook cannot be installed"
    try:
        __import__(f"spillway.{framework}._hook")
        sys.modules[f"spillway.{framework}._hook"].install()
        if required:
            failed = "the library cannot be loaded"
            __import__("spillway._native")
            sys.modules["spillway._native"].library()
    except Exception as error:
        import traceback

        traceback.print_exc()
        if required:
            print(f"spillway: {variable}=require, and {failed}: {error}; the process ends", file=sys.stderr, flush=True)
            os._exit(1)
