"""Typed exceptions: each carries the C library's status as `status`."""


class SpillwayError(RuntimeError):
    """A call of the library failed. `status` is the integer that the C call returned."""

    status = 9

    def __init__(self, message, status=None):
        super().__init__(message)
        if status is not None:
            self.status = status

    def __str__(self):
        # KeyError, a base of UnknownId, would print its argument in quotes.
        return str(self.args[0]) if self.args else ""


class InvalidArgument(SpillwayError, ValueError):
    """An argument violates the function's contract; nothing was written."""

    status = 1


class Unsupported(SpillwayError):
    """This build or machine does not support the operation; nothing was written."""

    status = 2


class UnknownId(SpillwayError, KeyError):
    """No optimizer has this id: it was never created, or was destroyed."""

    status = 3


class InternalError(SpillwayError):
    """A bug inside the library."""

    status = 9


class SystemFailure(SpillwayError):
    """A system call failed; the message contains its errno."""

    status = 11


class OutOfOrder(SpillwayError):
    """The present state of the speculation round does not allow the call; nothing changed."""

    status = 40


class IoFailure(SpillwayError, OSError):
    """Reading or writing a file failed. `filename`, `offset` and `bytes` locate the failed part. `errno` is None if the
    system reported none, for example when the file ends before the requested range."""

    status = 20
    offset = bytes = None


class NotFound(IoFailure, FileNotFoundError):
    """The file, directory or object does not exist."""

    status = 25


class Busy(SpillwayError):
    """The object is in use, or an update must be rolled back first; nothing changed."""

    status = 5


class TierFailure(SpillwayError):
    """The tier is not the requested one: its format, run, rank or size differs, or a path or a part of it is
    missing."""

    status = 32


class Corrupt(TierFailure):
    """Stored bytes do not match their checksum; the message names the path, extent, block and offset."""

    status = 30


class TierLocked(TierFailure):
    """A live process holds the tier; the message names the process."""

    status = 33


class NoState(TierFailure):
    """The tier has no committed state."""

    status = 36


class NoStep(TierFailure):
    """The tier cannot be opened at the requested step: the step was never committed, or has been overwritten."""

    status = 37


class TimedOut(SpillwayError, TimeoutError):
    """A wait timed out; the operation is still in flight."""

    status = 23


class GpuFailure(SpillwayError):
    """A GPU or driver failure: driver too old, stub library, out of memory, context lost, or CUDA used before a
    fork."""

    status = 57


class NoDevice(GpuFailure):
    """No GPU is available: there is no driver, or the driver reports no device."""

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
    """The exception for a status of the C library; SpillwayError for an unknown status."""
    return _BY_STATUS.get(status, SpillwayError)(message, status)
