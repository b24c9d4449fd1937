"""Events of a GPU for which the library itself waits: no thread of Python waits for the device, and none needs the interpreter to begin a
step. Events of other devices have a thread, see round.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import SpillwayError
from ..gpu import Event, Gpu


class After(NamedTuple):
    """A moment in the work of a GPU, after which a step begins, as Speculation.submit() takes it."""

    gpu: Gpu
    after: Event


#: The GPUs that were asked for, by torch's number. None: CUDA's driver does not serve it, as with a GPU of another vendor.
_gpus: dict[int, Gpu | None] = {}


def is_of_gpu(event: Any) -> bool:
    """True for an event of torch on a device that it calls "cuda"."""
    return getattr(getattr(event, "device", None), "type", None) == "cuda"


def after(event: Any) -> After | None:
    """The moment of a recorded event of torch; None if the library cannot wait for events of its device. The event must stay until it is
    submitted."""
    if not is_of_gpu(event):
        return None
    # The classes of torch.cuda name the handle otherwise than torch.Event.
    handle = getattr(event, "cuda_event", None) or getattr(event, "event_id", 0)
    gpu = opened(event.device.index)
    return None if gpu is None or not handle else After(gpu, Event(handle))


def opened(ordinal: int) -> Gpu | None:
    """The GPU that torch calls by this number, which is opened at the first call; None if CUDA's driver does not serve it."""
    if ordinal not in _gpus:
        try:
            found = Gpu(ordinal)
        except SpillwayError:
            found = None
        _gpus.setdefault(ordinal, found)
    return _gpus[ordinal]
