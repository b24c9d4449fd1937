"""Typed exceptions: one class per status of the C library, each carrying the status."""


class SpillwayError(RuntimeError):
    """A call of the library failed; `status` is the integer the C call returned."""

    status = 9

    def __init__(self, message, status=None):
        super().__init__(message)
        if status is not None:
            self.status = status

    def __str__(self):
        # KeyError would print its argument quoted.
        return str(self.args[0]) if self.args else ""


class InvalidArgument(SpillwayError, ValueError):
    """An argument broke the contract; nothing was written."""

    status = 1


class Unsupported(SpillwayError):
    """This build or machine cannot do it; nothing was written."""

    status = 2


class UnknownId(SpillwayError, KeyError):
    """No optimizer lives under this id: never created, or destroyed."""

    status = 3


class InternalError(SpillwayError):
    """A defect inside the library."""

    status = 9


class SystemFailure(SpillwayError):
    """The operating system refused a call; the message has its errno."""

    status = 11


class OutOfOrder(SpillwayError):
    """A call does not fit the state of its round of speculation; nothing changed."""

    status = 40


class IoFailure(SpillwayError, OSError):
    """Reading or writing a file failed: `filename`, `offset`, `bytes` and `errno` say where and how. errno is None if
    the system reported none, as for a file that ends before the bytes asked for."""

    status = 20
    offset = bytes = None


class TimedOut(SpillwayError, TimeoutError):
    """A wait ran out of time; what it waited for goes on."""

    status = 23


class GpuFailure(SpillwayError):
    """The GPU or its driver refused or failed: too old, a stub, out of memory, lost, or opened before a fork."""

    status = 57


class NoDevice(GpuFailure):
    """There is no GPU: no driver, or one that sees no device."""

    status = 50


class LibraryNotFound(SpillwayError, ImportError):
    """libspillway.so is missing, cannot be loaded, or has another ABI version."""

    status = 2


_BY_STATUS = {kind.status: kind for kind in (InvalidArgument, Unsupported, UnknownId, InternalError, SystemFailure,
                                             TimedOut)}
_BY_STATUS.update(dict.fromkeys((20, 21, 22, 24, 25, 26, 27), IoFailure))
_BY_STATUS.update(dict.fromkeys(range(40, 46), OutOfOrder))
_BY_STATUS.update(dict.fromkeys(range(51, 58), GpuFailure))
_BY_STATUS[NoDevice.status] = NoDevice


def from_status(status, message):
    """The exception for a status of the C library."""
    return _BY_STATUS.get(status, SpillwayError)(message, status)
