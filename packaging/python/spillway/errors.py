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


class NotFound(IoFailure, FileNotFoundError):
    """The file, directory or object does not exist."""

    status = 25


class Busy(SpillwayError):
    """The object is in use, or an update has to be rolled back first; nothing changed."""

    status = 5


class TierFailure(SpillwayError):
    """A tier is not what was asked for: another format, run, rank or size, or a path or a part of it is missing."""

    status = 32


class Corrupt(TierFailure):
    """Stored bytes do not match their checksum; the message names path, extent, block and offset."""

    status = 30


class TierLocked(TierFailure):
    """A live process holds the tier; the message names it."""

    status = 33


class NoState(TierFailure):
    """There is no committed state."""

    status = 36


class NoStep(TierFailure):
    """The step that was asked for is not one that the tier can be opened at, or was written over since."""

    status = 37


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
                                             TimedOut, Busy)}
_BY_STATUS.update(dict.fromkeys((20, 21, 22, 24, 26, 27), IoFailure))
_BY_STATUS.update(dict.fromkeys(range(30, 38), TierFailure))
_BY_STATUS.update({kind.status: kind for kind in (NotFound, Corrupt, TierLocked, NoState, NoStep)})
_BY_STATUS.update(dict.fromkeys(range(40, 46), OutOfOrder))
_BY_STATUS.update(dict.fromkeys(range(51, 58), GpuFailure))
_BY_STATUS[NoDevice.status] = NoDevice


def from_status(status, message):
    """The exception for a status of the C library."""
    return _BY_STATUS.get(status, SpillwayError)(message, status)
