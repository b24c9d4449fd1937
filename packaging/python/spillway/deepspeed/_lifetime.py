"""Closes the objects that an engine opened: in engine.destroy(), when the engine is garbage collected, when
deepspeed.initialize fails, and at the end of the process.

DeepSpeed itself keeps every ZeRO-3 engine alive for ever: a list in its module parameter_offload refers to the model,
and torch holds the gradient hooks in C++, invisible to Python's garbage collector. For an engine with objects of
Spillway both references are made weak here."""

import contextlib
import functools
import sys
import threading
import weakref

from ..errors import SpillwayError

_local = threading.local()


@contextlib.contextmanager
def making():
    """Collects the objects opened while this thread makes an engine, in the returned ExitStack; closes them if that
    fails."""
    before = getattr(_local, "opened", None)
    _local.opened = contextlib.ExitStack()
    try:
        yield _local.opened
    except BaseException:
        # Report the engine's failure, not one of the close.
        with contextlib.suppress(SpillwayError):
            _local.opened.close()
        raise
    finally:
        _local.opened = before


@contextlib.contextmanager
def configuring(engine):
    """Makes the `spillway` block available while an engine makes its optimizer, because stage 3 receives only a part of
    the configuration."""
    before = getattr(_local, "block", None)
    _local.block = getattr(engine._config, "_param_dict", {}).get("spillway")
    try:
        yield
    finally:
        _local.block = before


def block():
    """The block of the engine that this thread is making; None if it has none."""
    return getattr(_local, "block", None)


def opened(resource):
    """Has a resource closed with the engine that this thread is making, if any."""
    if getattr(_local, "opened", None) is not None:
        _local.opened.callback(resource.close)


def keep(engine, stack):
    """Transfers ownership of the objects opened during the engine's creation to the engine."""
    engine._spillway_opened = stack.pop_all()
    if stack_of(engine) or list(_parameter_swappers(engine)):
        _loosen(engine)


def stack_of(engine):
    """True if the engine has objects that are not closed yet."""
    return bool(getattr(getattr(engine, "_spillway_opened", None), "_exit_callbacks", None))


def end(engine):
    """Closes what an engine opened, and the tier of its parameters even if other code opened it."""
    with contextlib.ExitStack() as stack:
        own = engine.__dict__.pop("_spillway_opened", None)
        if own is not None:
            stack.push(own)
        for swapper in list(_parameter_swappers(engine)):
            stack.callback(_end_parameters, swapper)
        _forget_module(getattr(engine, "module", None))


def _parameter_swappers(engine):
    """The engine's AsyncPartitionedParameterSwappers whose parameters are on a tier."""
    module = engine.__dict__.get("_modules", {}).get("module")
    found = {
        id(swapper): swapper
        for param in (module.parameters() if module is not None else ())
        if (swapper := getattr(param, "nvme_swapper", None)) is not None
    }
    return [swapper for swapper in found.values() if getattr(swapper, "_spillway_store", None) is not None]


def _end_parameters(swapper):
    """Closes the tier and drops the buffers. A parameter in memory keeps its own view of them."""
    try:
        swapper._spillway_store.close()
    finally:
        swapper.buffers = swapper.partitioned_swap_buffer = swapper.partitioned_swap_pool = None
        for name in ("param_id_to_swap_buffer", "inflight_swap_in_buffers"):
            getattr(swapper, name, []).clear()


def _module_stack():
    module = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    return getattr(module, "FWD_MODULE_STACK", [])


def _loosen(engine):
    stack, module = _module_stack(), engine.module
    for place, entry in enumerate(stack):
        if entry is module:
            stack[place] = weakref.proxy(module, _forget_proxy)
    if not hasattr(engine.optimizer, "__dict__"):
        return
    strong = engine.optimizer._spillway_hooks = []
    for param in module.parameters():
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        for key, hook in hooks.items():
            strong.append(hook)
            hooks[key] = functools.partial(_call, weakref.ref(hook))


def _call(hook, *arguments):
    function = hook()
    return None if function is None else function(*arguments)


def _forget_proxy(proxy):
    stack = _module_stack()
    stack[:] = [entry for entry in stack if entry is not proxy]


def _forget_module(module):
    stack = _module_stack()
    proxies = {id(proxy) for proxy in weakref.getweakrefs(module)} if module is not None else set()
    stack[:] = [entry for entry in stack if entry is not module and id(entry) not in proxies]
