"""What an engine opened is closed with it: by engine.destroy(), when the engine is garbage, when deepspeed.initialize fails,
and at the end of the process.

DeepSpeed itself keeps every ZeRO-3 engine alive for ever: a list in its module parameter_offload names the model, and torch
holds the hooks of gradients in C++, where Python's garbage collector does not look. Both are made weak here for an engine that
has something of Spillway's."""

import contextlib
import functools
import sys
import threading
import weakref

from ..errors import SpillwayError

_local = threading.local()


@contextlib.contextmanager
def making():
    """An engine is made on this thread. What it opens is closed if that fails, and else is in the ExitStack of this block."""
    before = getattr(_local, "opened", None)
    _local.opened = contextlib.ExitStack()
    try:
        yield _local.opened
    except BaseException:
        # The failure of the engine is the one to report.
        with contextlib.suppress(SpillwayError):
            _local.opened.close()
        raise
    finally:
        _local.opened = before


def opened(resource):
    """Has a resource closed with the engine that is being made on this thread, if there is one."""
    if getattr(_local, "opened", None) is not None:
        _local.opened.callback(resource.close)


def keep(engine, stack):
    """Gives an engine what was opened while it was made."""
    engine._spillway_opened = stack.pop_all()
    if stack_of(engine) or list(_parameter_swappers(engine)):
        _loosen(engine)


def stack_of(engine):
    """Whether something that the engine opened is still to be closed."""
    return bool(getattr(getattr(engine, "_spillway_opened", None), "_exit_callbacks", None))


def end(engine):
    """Closes what an engine opened, and the tier of its parameters, whoever opened that."""
    with contextlib.ExitStack() as stack:
        own = engine.__dict__.pop("_spillway_opened", None)
        if own is not None:
            stack.push(own)
        for swapper in list(_parameter_swappers(engine)):
            stack.callback(_end_parameters, swapper)
        _forget_module(getattr(engine, "module", None))


def _parameter_swappers(engine):
    """DeepSpeed's AsyncPartitionedParameterSwappers of an engine's parameters that are on a tier of Spillway's."""
    from ._parameters import TierHandle
    module = engine.__dict__.get("_modules", {}).get("module")
    found = {id(swapper): swapper for param in (module.parameters() if module is not None else ())
             if (swapper := getattr(param, "nvme_swapper", None)) is not None}
    return [swapper for swapper in found.values() if isinstance(getattr(swapper, "aio_read_handle", None), TierHandle)]


def _end_parameters(swapper):
    """Closes the tier and drops the buffers. A parameter that is in memory keeps its own view of them."""
    try:
        swapper.aio_read_handle.store.close()
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
        hooks = getattr(param, "_post_accumulate_grad_hooks", None)
        for key, hook in (hooks or {}).items():
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
