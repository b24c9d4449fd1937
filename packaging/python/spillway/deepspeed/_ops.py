"""The op modules that DeepSpeed's builders return, with DeepSpeed's function names.

They are module objects without __file__, because there is no compiled file."""

from __future__ import annotations

import threading
import types

from . import _adagrad, _adam, _aio, _call, _engine, _gds, _lion, _pin, _zenflow

_lock = threading.Lock()
_modules: dict[str, types.ModuleType] = {}
_SOURCES = {
    "cpu_adam": (_adam, _zenflow),
    "cpu_adagrad": (_adagrad,),
    "cpu_lion": (_lion,),
    "async_io": (_aio,),
    "gds": (_gds,),
    "pin_memory": (_pin,),
}


def module(op):
    """The module of an op, one object per process."""
    with _lock:
        if op not in _modules:
            made = types.ModuleType(f"spillway.deepspeed.{op}", _SOURCES[op][0].__doc__)
            made.__spillway__ = True
            for source in _SOURCES[op]:
                for name in source.SERVED:
                    setattr(made, name, getattr(source, name))
                for name, advice in source.NOT_SERVED.items():
                    setattr(made, name, _refusal(op, name, advice))
            _modules[op] = made
        return _modules[op]


def served(op):
    """Counters of an op in this process."""
    if op == "pin_memory":
        return _pin.served()
    if op in ("async_io", "gds"):
        return _engine.served(op)
    return dict(zip(("calls", "elements"), _call.counted(op)))


def _refusal(op, name, advice):
    def refuse(*_args, **_kwargs):
        raise NotImplementedError(f"Spillway's {op} has no {name}: {advice}")

    refuse.__name__ = name
    return refuse
